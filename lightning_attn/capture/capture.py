"""Seeing every attention call of a model while a `with` block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_attn.capture.call import AttentionCall
from lightning_attn.capture.isolation import (
    after_every_module,
    compiling_nothing,
    device_of,
    eager,
    in_backward,
    in_function_transform,
    isolated,
)
from lightning_attn.capture.reader import Sampling, UnreadableError, interceptors, readers
from lightning_attn.capture.report import SiteFaults
from lightning_attn.capture.sites import SiteNames, SitePatterns
from lightning_attn.capture.softmax import SoftmaxFollower
from lightning_attn.capture.states import Attended, HiddenStates
from lightning_attn.capture.written import WrittenAttention

#: What becomes of compiled modules while something watches.
Compiled = Literal["eager", "skip"]


class Capture:
    """Hands every attention call of a model to a receiver while the block runs; the model notices nothing.

    The receiver runs in the middle of the forward pass, isolated from it. A call that cannot be read is left out; after
    a fault in the receiver its site is left alone. Both are said once per site with the cause, and the forward pass
    goes on.

    Args:
        model: the model to be watched.
        receive: called with each call, its tensors detached.
        sites: which sites to watch.
        max_sequences: read the first so many sequences of each call; ``None`` for all.
        with_values: whether the calls hold their values.
        receive_states: called with the hidden states around each module that computed attention, once it returns;
            ``None`` where nobody asks for them.
        compiled: ``"eager"`` runs compiled modules eagerly; ``"skip"`` leaves them alone, and sees nothing of them.
        strict: raise a fault instead of reporting it.
        faults: what went wrong in earlier captures; sites that failed are left alone.
    """

    def __init__(
        self,
        model: nn.Module,
        receive: Callable[[AttentionCall], None],
        *,
        sites: SitePatterns,
        max_sequences: int | None = None,
        with_values: bool = False,
        receive_states: Callable[[HiddenStates], None] | None = None,
        compiled: Compiled = "eager",
        strict: bool = False,
        faults: SiteFaults | None = None,
    ) -> None:
        self._model = model
        self._receive = receive
        self._sites = sites
        self._max_sequences = max_sequences
        self._with_values = with_values
        self._receive_states = receive_states
        self._compiled = compiled
        self._strict = strict
        self._faults = SiteFaults() if faults is None else faults
        self._running = ExitStack()
        self._is_running = False
        self._readers = readers()
        #: How many attention calls of the model were seen so far.
        self.count = 0
        self._follower: SoftmaxFollower | None = None

    def __enter__(self) -> Capture:
        if self._is_running:
            raise RuntimeError("This capture is already running.")
        self._names = SiteNames(self._model)
        self._follower = SoftmaxFollower(self._model, self._names.computing, self._found)
        self._attended: dict[nn.Module, Attended] = {}
        self._running.enter_context(eager() if self._compiled == "eager" else compiling_nothing())
        for intercept in interceptors():
            self._running.enter_context(intercept(self))
        if self._receive_states is not None:
            self._running.enter_context(after_every_module(self._see_states))
        self._running.enter_context(_SeeingMode(self._see))
        self._is_running = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_running = False
        self._attended = {}
        self._running.close()
        self._follower = None

    def _see(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Look at one call of a torch function, which may be an attention or a part of one."""
        reader = self._readers.get(function)
        if reader is None:
            self._follow(function, args, kwargs, result)
            return

        def read(sampling: Sampling) -> AttentionCall:
            return reader(args, kwargs, sampling)

        self._take(self._names.computing(), read, lambda: device_of((*args, *kwargs.values())))

    def take(self, read: Callable[[Sampling], AttentionCall], device: torch.device) -> None:
        """Take a call that no torch function showed.

        Args:
            read: reads it.
            device: where it is computed.
        """
        self._take(self._names.computing(), read, lambda: device)

    def _follow(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        if self._follower is None:
            return
        try:
            self._follower.see(function, args, kwargs, result)
        except Exception as error:
            if self._strict:
                raise
            self._follower = None  # for this capture: what is followed may be half known now
            self._faults.report_following(error)

    def _found(self, attention: WrittenAttention) -> None:
        """Take an attention that was written out with a softmax."""
        module, changed_by = self._names.site_of(attention.modules), attention.softmax.changed_by
        if module is not None and self._names[module] in self._faults.in_pieces:
            return
        self._take(attention.modules, attention.read, lambda: attention.device)
        if module is not None and changed_by is not None and self._sites.match(self._names[module]):
            self._faults.report_changed_weights(self._names[module], changed_by)

    def _take(
        self,
        modules: tuple[nn.Module, ...],
        read: Callable[[Sampling], AttentionCall],
        device: Callable[[], torch.device],
    ) -> None:
        if in_backward():  # activation checkpointing computes again what was seen in the forward pass
            return
        module = self._names.site_of(modules)
        if module is None:
            return
        self.count += 1
        site = self._names[module]
        if site in self._faults.quiet or not self._sites.match(site):
            return
        with self._reporting(site):
            self._read(module, read, device())

    def _read(self, module: nn.Module, read: Callable[[Sampling], AttentionCall], device: torch.device) -> None:
        if in_function_transform():
            raise UnreadableError(
                "it runs inside a torch.func transform (vmap, grad, …), where single calls cannot be told apart"
            )
        if device.type == "meta":
            return
        autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
        sampling = Sampling(
            site=self._names[module],
            max_sequences=self._max_sequences,
            with_values=self._with_values,
            autocast_dtype=torch.get_autocast_dtype(device.type) if autocast else None,
            heads_in_batch=partial(self._names.heads_in_batch, module),
        )
        with isolated(device):
            # A view made without a graph still holds the graph of what it is a view of.
            call = read(sampling).map_tensors(Tensor.detach)
            if call.self_attention and self._names.attends_to_others(module, call.keys):
                call = replace(call, self_attention=False)
            if call.heads == 1:
                call = replace(call, forward=self._names.forward_number(module))
            self._receive(call)
            if self._receive_states is not None and module not in self._attended:
                self._attended[module] = Attended.by(call, module)

    def _see_states(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Look at a module that returns: whether it computed attention, and what entered and left it."""
        attended = self._attended.pop(module, None)
        if attended is None or self._receive_states is None or in_backward() or attended.site in self._faults.quiet:
            return
        with self._reporting(attended.site), isolated(attended.device):
            states = attended.states(args, kwargs, output, self._max_sequences)
            if states is not None:
                self._receive_states(states)

    @contextmanager
    def _reporting(self, site: str) -> Iterator[None]:
        """Report a fault at a site, so that the model goes on."""
        try:
            yield
        except Exception as error:
            if self._strict:
                raise
            self._faults.report(site, error)


class _SeeingMode(TorchFunctionMode):
    """Lets every torch function run as it would, and shows what was called."""

    def __init__(self, see: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], object], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        result = func(*args, **kwargs)
        self._see(func, args, kwargs, result)
        return result
