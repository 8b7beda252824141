"""Naming the module that computes attention, without a hook on it."""

from __future__ import annotations

import difflib
import fnmatch
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from types import FrameType

import torch
from torch import Tensor, nn

from lightning_attn.capture.isolation import without_function_modes
from lightning_attn.capture.module_tree import modules_of, parameters_of
from lightning_attn.capture.wrappers import canonical_names

#: Numbers of forward passes, never twice the same: what was found in two captures may be added up.
_NUMBERS = count(1)

#: The file whose functions call the ``forward`` of modules.
_CALLS_MODULES = nn.modules.module.__file__

#: What may be held beyond a call.
_PLAIN_VALUES = (bool, int, float, str, type(None))


class SiteNames:
    """The canonical name of every module of a model, and which of them is computing right now.

    The modules that are computing are read off the call stack. A hook would have to be put on every module and taken
    off again whatever happens, would switch off the fast path of `torch.nn.TransformerEncoder`, and would miss modules
    whose `forward` is called by name.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"`model` must be a torch.nn.Module, got {model!r}.")
        self._names = canonical_names(model)
        #: The modules whose parameters are parts of one flat parameter, as `FullyShardedDataParallel` may have it.
        self._flattened = {
            part.module
            for parameter in parameters_of(model)
            for parts in ("_param_infos", "_shared_param_infos")
            for part in getattr(parameter, parts, ())
        }
        self._running: dict[nn.Module, tuple[int, _Running]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.values())

    def computing(self) -> tuple[nn.Module, ...]:
        """The modules of the model that are computing for the caller, from the innermost outwards."""
        return tuple(dict.fromkeys(module for module in _computing_modules(sys._getframe(1)) if module in self._names))

    def owner_of(self, parameter: object) -> tuple[nn.Module, ...]:
        """The module of the model that a parameter belongs to; none, where there is none."""
        return tuple(
            module for module in self._names if any(own is parameter for own in module.parameters(recurse=False))
        )[:1]

    def __getitem__(self, module: nn.Module) -> str:
        return self._names[module]

    def site_of(self, modules: Sequence[nn.Module]) -> nn.Module | None:
        """The site that an attention belongs to.

        It is the innermost module that computes it; one without parameters of its own or below, which only wraps the
        attention function, stands for the module that called it.

        Args:
            modules: the modules that compute it, from the innermost outwards.

        Returns:
            The module, or ``None`` where no module of the model is computing.
        """
        for module in modules:
            if any(part in self._flattened or _has_parameters(part) for part in modules_of(module)):
                return module
        return modules[0] if modules else None

    def running(self, module: nn.Module) -> RunningForward | None:
        """The forward pass of a module that is running for the caller; ``None`` where another runs in its place.

        Its number goes by what torch made for this call alone, where it left something: see `_Running`.
        """
        frames = deque((frame for frame in _frames(sys._getframe(1)) if _owner(frame) is module), maxlen=1)
        if not frames:
            return None
        outermost = frames.pop()
        arguments = _argument_tensors(outermost)
        running = _Running(id(outermost), [weakref.ref(tensor) for tensor in arguments], _mark_of_call(outermost))
        known = self._running.get(module)
        if known is None or not known[1].is_same(running):
            known = self._running[module] = (next(_NUMBERS), running)
        return RunningForward(known[0], _states_among(arguments))

    def given(self) -> list[torch.Size]:
        """The shapes of the hidden states that the innermost module was given that was given any."""
        for frame in _frames(sys._getframe(1)):
            if _owner(frame) in self._names:
                states = _states_among(_argument_tensors(frame))
                if states:
                    return states
        return []

    def heads_in_batch(self, module: nn.Module, sequences: int, queries: int, keys: int) -> int:
        """How many heads a module has put into the batch beside each other, (B, N, L) having become (B H, N, D).

        It is told by the tokens that the module was called with: as many as there are queries, or keys, so that what
        the batch has more of than sequences are heads, and not windows of a sequence.

        Args:
            module: a module that is running.
            sequences: the size of the batch.
            queries: their number.
            keys: their number.
        """
        frame = _innermost_forward(module)
        given = [] if frame is None else [t for t in _argument_tensors(frame) if t.is_floating_point()]
        for tokens in (queries, keys):
            for batch in (batch for tensor in given for batch in _sequences_of(tensor, tokens)):
                return sequences // batch if sequences % batch == 0 else 1
        return 1

    def attends_to_others(self, module: nn.Module, keys: int) -> bool:
        """Whether a module was called with tokens for its keys that are not those of its queries.

        Args:
            module: a module that is running.
            keys: their number.
        """
        frame = _innermost_forward(module)
        if frame is None:
            return False
        others = (frame.f_locals.get(name) for name in _OTHER_TOKENS)
        own = next(iter(_argument_tensors(frame)), None)
        return any(
            isinstance(other, Tensor) and other is not own and other.dim() == 3 and keys in other.shape[:2]
            for other in others
        )


@dataclass(frozen=True)
class RunningForward:
    """A forward pass of a module that has not returned.

    Args:
        number: tells it from the other passes of the module.
        given: the shapes of the hidden states that the module was given: (B, N, L) or (N, B, L), as far as that can be
            told.
    """

    number: int
    given: list[torch.Size]


def _states_among(arguments: Iterable[Tensor]) -> list[torch.Size]:
    """The shapes of hidden states; none where the first tensor of numbers is something else: queries, an image."""
    with without_function_modes():
        shapes = [argument.shape for argument in arguments if argument.is_floating_point() and not argument.is_nested]
    return [shape for shape in shapes if len(shape) == 3] if shapes and len(shapes[0]) == 3 else []


def _innermost_forward(module: nn.Module) -> FrameType | None:
    """The innermost frame in which a module's ``forward`` runs, or what stands for it."""
    frames = [frame for frame in _frames(sys._getframe(1)) if _owner(frame) is module]
    forwards = [frame for frame in frames if frame.f_code.co_name == "forward"]
    return next(iter(forwards + frames[-1:]), None)


#: What libraries call the tokens that cross-attention reads its keys from, as an argument beside those of the queries.
_OTHER_TOKENS = ("key_value_states", "encoder_hidden_states", "context", "memory")


def _sequences_of(states: Tensor, tokens: int) -> Iterator[int]:
    """How many sequences hidden states hold, if each is of so many tokens; pictures have theirs in several axes."""
    if states.dim() == 3 and states.shape[1] == tokens:
        yield states.shape[0]
    elif states.dim() == 3 and states.shape[0] == tokens and states.shape[1] > 1:  # tokens come first, if not of one
        yield states.shape[1]
    elif states.dim() > 3 and tokens in (prod(states.shape[1:-1]), prod(states.shape[2:])):
        yield states.shape[0]


@dataclass(frozen=True)
class _Running:
    """A call of a module that has not returned.

    Args:
        frame: where in memory its frame is. Frames alone are made anew at the same place.
        arguments: the tensors it was called with, which are there as long as the call lasts.
        mark: an object that torch made for this call, and that may be held; ``None`` where there is none, so that frame
            and arguments must tell. They do not where a module is given the same tensors again.
    """

    frame: int
    arguments: list[weakref.ref[Tensor]]
    mark: dict[str, object] | None

    def is_same(self, other: _Running) -> bool:
        if self.mark is not None or other.mark is not None:
            return self.mark is other.mark
        if self.frame != other.frame or len(self.arguments) != len(other.arguments):
            return False
        pairs = [(mine(), theirs()) for mine, theirs in zip(self.arguments, other.arguments, strict=True)]
        return all(mine is not None and mine is theirs for mine, theirs in pairs)


def _mark_of_call(frame: FrameType) -> dict[str, object] | None:
    """The keyword arguments of the call of a module, which torch collects anew each time, where they hold no tensor."""
    if frame.f_code.co_filename != _CALLS_MODULES:
        return None
    collected = frame.f_locals.get("kwargs")
    is_held = isinstance(collected, dict) and all(isinstance(value, _PLAIN_VALUES) for value in collected.values())
    return collected if is_held else None


def _argument_tensors(frame: FrameType) -> list[Tensor]:
    code = frame.f_code
    number = code.co_argcount + code.co_kwonlyargcount + 2  # and what *args and **kwargs are called
    found: list[Tensor] = []
    for name in code.co_varnames[:number]:
        argument = frame.f_locals.get(name)
        parts = (
            argument.values()
            if isinstance(argument, dict)
            else argument
            if isinstance(argument, tuple)
            else (argument,)
        )
        found += [part for part in parts if isinstance(part, Tensor)]
    return found


def _computing_modules(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose methods are on the call stack, from the innermost outwards."""
    owners = (_owner(frame) for frame in _frames(frame))
    return (owner for owner in owners if owner is not None)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _owner(frame: FrameType) -> nn.Module | None:
    """The module whose method runs in a frame."""
    code = frame.f_code
    if code.co_argcount and code.co_varnames[0] == "self":
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
    return None


def _has_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters of its own."""
    return any(parameter is not None for parameter in module._parameters.values())


class SitePatterns:
    """Glob patterns that choose sites by their canonical names.

    Args:
        patterns: one pattern or several, such as ``"blocks.*.attention"``; ``None`` chooses every site.

    Raises:
        ValueError: if there is no pattern, or one that is not a non-empty string.
    """

    def __init__(self, patterns: str | Sequence[str] | None) -> None:
        self.patterns: tuple[str, ...] = ("*",) if patterns is None else _as_patterns(patterns)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.patterns)!r})"

    def match(self, site: str) -> bool:
        """Whether a site is chosen."""
        return any(fnmatch.fnmatchcase(site, pattern) for pattern in self.patterns)

    def check(self, names: Iterable[str]) -> None:
        """Refuse patterns that can choose nothing.

        Args:
            names: canonical names of the model's modules.

        Raises:
            ValueError: if a pattern matches none of them, with the nearest names.
        """
        names = list(dict.fromkeys(names))  # wrappers share theirs with what they wrap
        for pattern in self.patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
                hint = f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
                raise ValueError(
                    f"`sites` holds the pattern {pattern!r}, which matches none of the model's {len(names)} modules."
                    f"{hint} Patterns are globs over the names of `model.named_modules()`."
                )


def _as_patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns) if isinstance(patterns, Iterable) else ()
    if not given or not all(isinstance(pattern, str) and pattern for pattern in given):
        raise ValueError(f"`sites` must be a glob pattern or a non-empty list of them, got {patterns!r}.")
    return given
