"""Seeing every attention call of a model while a `with` block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_attn.capture.axes import lies_within_tokens
from lightning_attn.capture.call import AttentionCall
from lightning_attn.capture.call_stack import innermost_module
from lightning_attn.capture.channels import ChannelTrail
from lightning_attn.capture.folded import unfolded
from lightning_attn.capture.head_trail import HeadTrail, is_attention_of_travelling_keys
from lightning_attn.capture.isolation import (
    SeeingMode,
    after_every_module,
    compiling_nothing,
    device_of,
    eager,
    in_backward,
    in_function_transform,
    is_written_down,
    isolated,
    unheard,
    unnoticed_by_fast_paths,
)
from lightning_attn.capture.met import Met
from lightning_attn.capture.opaque import Scripts, name_of_opaque, opaque_calls
from lightning_attn.capture.reader import Sampling, interceptors, readers
from lightning_attn.capture.refusals import (
    HEADS_AS_QUERIES,
    KEYS_OF_OTHER_RANKS,
    Refusal,
    UnreadableError,
    products_inside,
)
from lightning_attn.capture.report import SiteFaults
from lightning_attn.capture.running import RunningForward, RunningForwards, attends_to_others, heads_in_batch
from lightning_attn.capture.sites import SiteNames, SitePatterns
from lightning_attn.capture.softmax import SOFTMAXES, SoftmaxFollower, WrittenAttention
from lightning_attn.capture.softmax.operation import tensors_among
from lightning_attn.capture.softmax.walk import Walk
from lightning_attn.capture.spread import held_by_rank, ranks_may_share
from lightning_attn.capture.states import Attended, HiddenStates
from lightning_attn.capture.told import ToldAttention

#: What becomes of compiled modules while something watches.
Compiled = Literal["eager", "skip"]


@dataclass(frozen=True)
class Sighting:
    """An attention call that was seen and not yet read.

    Args:
        modules: the modules that compute it, from the innermost outwards.
        read: reads it.
        device: asks where it is computed.
        states: tells the hidden states around it, where it tells them itself.
        operands: its queries, keys and values, or its weights and values, as the model computes with them.
        rows: how many rows its softmax has, where nothing else of it may be known.
        is_told: whether the model tells of it, so that it may be seen in another way as well.
    """

    modules: tuple[nn.Module, ...]
    read: Callable[[Sampling], AttentionCall]
    device: Callable[[], torch.device]
    states: Callable[[Sampling], HiddenStates] | None = None
    operands: Sequence[Tensor] = ()
    rows: int | None = None
    is_told: bool = False


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
        receive_module: called with each module that computed attention, once it returns; ``None`` where nobody asks.
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
        receive_module: Callable[[Met], None] | None = None,
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
        self._receive_module = receive_module
        self._compiled = compiled
        self._strict = strict
        self._faults = SiteFaults() if faults is None else faults
        self._running = ExitStack()
        self._is_running = False
        self._readers = readers()
        #: How many attention calls of the model were seen so far.
        self.count = 0
        self._follower: SoftmaxFollower | None = None
        #: ``None`` where no rank shares anything with another.
        self._heads: HeadTrail | None = None
        #: What the model computes with in the call that is seen now, where ranks may share it.
        self._operands: Sequence[Tensor] = ()
        #: The query of the calls that are made now, as the model laid it out, where that is known.
        self._query: Tensor | None = None

    def __enter__(self) -> Capture:
        if self._is_running:
            raise RuntimeError("This capture is already running.")
        self._names = SiteNames(self._model)
        self._forwards = RunningForwards()
        self._channels = ChannelTrail()
        self._heads = HeadTrail(self._model) if ranks_may_share() else None
        self._follower = SoftmaxFollower(Walk(self._model, self._names, self._found, self._channels))
        self._attended: dict[nn.Module, Attended] = {}
        self._attending: dict[nn.Module, str] = {}
        self._told = ToldAttention()
        self._scripts = Scripts()
        self._running.enter_context(eager() if self._compiled == "eager" else compiling_nothing())
        for intercept in interceptors():
            self._running.enter_context(intercept(self))
        if self._receive_states is not None or self._receive_module is not None:
            self._running.enter_context(after_every_module(self._see_return))
        self._running.enter_context(opaque_calls(self._hear))
        self._running.enter_context(unnoticed_by_fast_paths())
        self._running.enter_context(SeeingMode(self._see))
        self._is_running = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_running = False
        self._attended, self._attending = {}, {}
        self._running.close()
        self._follower, self._channels = None, ChannelTrail()
        self._heads, self._operands = None, ()

    def _see(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Look at one call of a torch function, which may be an attention or a part of one."""
        declared = self._readers.get(function)
        if is_written_down(result):
            if declared is not None or function in SOFTMAXES:
                self._leave_to_tracing()
            return
        if self._heads is not None:
            self._operands = tensors_among(args, kwargs)
            self._heads.see(function, args, self._operands, result)
            args, kwargs, result = held_by_rank(args, kwargs, result)
        if declared is None:
            if self._follower is not None:
                self._following(self._follower.see, function, args, kwargs, result)
            return
        modules = self._names.computing()
        if declared.weight is not None:
            modules = (*self._names.owner_of(args[declared.weight]), *modules)
        self._take(
            Sighting(
                modules,
                read=partial(declared.read, args, kwargs),
                device=partial(device_of, (*args, *kwargs.values())),
                states=None if declared.states is None else partial(declared.states, args, kwargs),
                operands=self._operands,
            )
        )

    def _hear(self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Hear of one call into which nothing can see."""
        if is_written_down(result):
            return
        name = name_of_opaque(called)
        if self._heads is not None:
            self._operands = tensors_among(args, kwargs)
            self._heads.see(called, args, self._operands, result)
            args, kwargs, result = held_by_rank(args, kwargs, result)
            if is_attention_of_travelling_keys(called):
                self.take(_refusing(KEYS_OF_OTHER_RANKS), torch.device("cpu"))
        if self._follower is not None:
            self._following(self._follower.see_opaque, name, args, kwargs, result)
        if self._scripts.attends(called):
            self.take(_refusing(products_inside(name)), torch.device("cpu"))

    def _following(self, see: Callable[..., None], *seen: Any) -> None:
        """Let the follower see something; where that fails, do without it."""
        try:
            see(*seen)
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
        taken = self._take(
            Sighting(
                attention.modules,
                attention.read,
                device=lambda: attention.device,
                operands=self._operands[:1],  # it is found where its weights multiply values
                rows=attention.rows,
            )
        )
        if taken and module is not None and changed_by is not None:
            self._faults.report_changed_weights(self._names[module], changed_by)

    def take(
        self, read: Callable[[Sampling], AttentionCall], device: torch.device, operands: Sequence[Tensor] = ()
    ) -> None:
        """Take a call that no torch function showed.

        Args:
            read: reads it.
            device: where it is computed.
            operands: its queries, keys and values, as the model computes with them.
        """
        self._take(Sighting(self._names.computing(), read, lambda: device, operands=operands))

    def tell(
        self, read: Callable[[Sampling], AttentionCall], device: torch.device, operands: Sequence[Tensor] = ()
    ) -> None:
        """Take a call that the model tells of, and that may be seen in another way as well.

        Args:
            read: reads it.
            device: where it is computed.
            operands: its queries, keys and values, as the model computes with them.
        """
        self._take(Sighting(self._names.computing(), read, lambda: device, operands=operands, is_told=True))

    def _leave_to_tracing(self) -> None:
        """Say that a site is not watched while a graph is made of what it computes, if it is the model's."""
        innermost = innermost_module()
        if innermost is None or not self._names.is_of_model(innermost):  # another model
            return
        module = self._names.site_of(self._names.computing())
        if module is not None and self._sites.match(self._names[module]):
            self._faults.report_tracing(self._names[module])

    @contextmanager
    def laid_out_as(self, query: Tensor) -> Iterator[None]:
        """Tell how the model laid out the queries of the calls that are made inside the block.

        Args:
            query: (B, H, N, D), before a function may have folded heads into queries.
        """
        outer, self._query = self._query, query
        try:
            yield
        finally:
            self._query = outer

    def _take(self, sighting: Sighting) -> bool:
        """Read a call and hand it on, if it is of a site that is watched; whether it was."""
        if in_backward():  # activation checkpointing computes again what was seen in the forward pass
            return False
        if is_written_down():
            self._leave_to_tracing()
            return False
        module = self._names.site_of(sighting.modules)
        if module is None:
            return False
        self.count += 1
        site = self._names[module]
        if site in self._faults.quiet or not self._sites.match(site):
            return False
        taken = False
        with self._reporting(site):
            try:
                taken = self._hand_on(module, sighting)
            except UnreadableError:
                if sighting.is_told or not self._told.covers(module, sighting.rows):
                    raise
        return taken

    def _hand_on(self, module: nn.Module, sighting: Sighting) -> bool:
        """Read a call of a site and hand it on, unless the model told of it before; whether it was."""
        device, site = sighting.device(), self._names[module]
        if in_function_transform():
            raise UnreadableError(
                "it runs inside a torch.func transform (vmap, grad, …), where single calls cannot be told apart; "
                "call the model without the transform on the steps to be watched, or choose `sites` without it"
            )
        if device.type == "meta":
            return False
        sampling = self._sampling(module, device)
        with isolated(device):
            call = self._read(module, sighting, sampling)
            if not call.heads:  # where ranks divide fewer heads than there are ranks
                return False
            call = self._with_share(call, module, sighting.operands)
            if sighting.is_told:
                self._told.tell(module, call)
            elif self._told.is_known(sighting.modules, call):
                return False
            self._receive(call)
            if self._receive_module is not None:
                self._attending[module] = site
            if self._receive_states is not None and sighting.states is not None:
                self._receive_states(sighting.states(sampling))
            elif self._receive_states is not None and module not in self._attended:
                self._attended[module] = Attended.by(call, module)
        return True

    def _sampling(self, module: nn.Module, device: torch.device) -> Sampling:
        """How much is wanted of a call that a site makes now."""
        autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
        return Sampling(
            site=self._names[module],
            max_sequences=self._max_sequences,
            with_values=self._with_values,
            autocast_dtype=torch.get_autocast_dtype(device.type) if autocast else None,
            channels=self._channels,
            heads_in_batch=partial(heads_in_batch, module),
        )

    def _read(self, module: nn.Module, sighting: Sighting, sampling: Sampling) -> AttentionCall:
        """The call, with what the forward pass of its site tells of it: its layout, whom it attends to, its number."""
        call = sighting.read(sampling)
        if self._query is not None:
            call = unfolded(call, self._query)
        if call.logit_matrix is None and lies_within_tokens(call.query, -2, -1):
            raise UnreadableError(HEADS_AS_QUERIES.reason)
        # A view made without a graph still holds the graph of what it is a view of.
        call = call.map_tensors(Tensor.detach)
        if call.self_attention and attends_to_others(module, call.keys):
            call = replace(call, self_attention=False)
        forward = self._forwards.of(module)
        return call if forward is None else _placed(call, forward, self._max_sequences)

    def _with_share(self, call: AttentionCall, module: nn.Module, operands: Sequence[Tensor]) -> AttentionCall:
        """The call with which heads of its site it has, where ranks divide them and it does not tell itself.

        Raises:
            UnreadableError: if that cannot be told, or a rank holds a part of the tokens.
        """
        share = call.share
        if self._heads is not None and share is None:
            share = self._heads.of(operands, module)
        if share is None:
            return call
        # With sequence parallelism the module is given a part of the tokens that it attends to.
        forward = self._forwards.of(module)
        given = [] if forward is None else [shape[1] for shape in forward.given]
        is_of_all_tokens = call.is_of_all_tokens or any(tokens and call.queries % tokens == 0 for tokens in given)
        return replace(call, share=share, is_of_all_tokens=is_of_all_tokens)

    def _see_return(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Look at a module that returns: whether it computed attention, and what entered and left it."""
        if is_written_down(output):
            return
        site = self._attending.pop(module, None)
        if site is not None and self._receive_module is not None and not in_backward():
            with self._reporting(site), unheard():
                self._receive_module(Met.of(site, module, args, kwargs))
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


def _refusing(refusal: Refusal) -> Callable[[Sampling], AttentionCall]:
    """Stands for what would read a call that cannot be read."""

    def read(sampling: Sampling) -> AttentionCall:
        raise refusal.error()

    return read


def _placed(call: AttentionCall, running: RunningForward, max_sequences: int | None) -> AttentionCall:
    """A call with what is known of the forward pass that made it.

    Raises:
        UnreadableError: if heads may have been taken for queries.
    """
    given = [(sequences, tokens) for sequences, tokens, _ in running.given]
    wanted = [(sequences if max_sequences is None else min(sequences, max_sequences), n) for sequences, n in given]
    wanted += [(sequences if max_sequences is None else min(sequences, max_sequences), n) for n, sequences in given]
    is_of_all_tokens = not given or (call.sequences, call.queries) in wanted
    if not is_of_all_tokens and given[0][1] == 1 < call.queries and call.sequences % max(1, wanted[0][0]) == 0:
        raise UnreadableError(
            f"its module was given one token of each sequence, so that its {call.queries} queries may be heads; give "
            "queries an axis of their own beside the heads, (B, H, 1, D)"
        )
    return replace(call, forward=running.number, is_of_all_tokens=is_of_all_tokens)
