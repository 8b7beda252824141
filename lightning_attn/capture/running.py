"""The forward passes of modules that have not returned: telling them apart, and what the modules were given."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from math import prod
from types import FrameType

import torch
from torch import Tensor, nn

from lightning_attn.capture.call_stack import argument_tensors, frames_of, innermost_forward
from lightning_attn.capture.isolation import without_function_modes

#: Numbers of forward passes, never twice the same: what was found in two captures may be added up.
_NUMBERS = count(1)

#: The file whose functions call the ``forward`` of modules.
_CALLS_MODULES = nn.modules.module.__file__

#: What may be held beyond a call.
_PLAIN_VALUES = (bool, int, float, str, type(None))

#: What libraries call the tokens that cross-attention reads its keys from, as an argument beside those of the queries.
_OTHER_TOKENS = ("key_value_states", "encoder_hidden_states", "context", "memory")


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


class RunningForwards:
    """Numbers the forward passes of modules, the same for as long as one runs."""

    def __init__(self) -> None:
        self._running: dict[nn.Module, tuple[int, _Running]] = {}

    def of(self, module: nn.Module) -> RunningForward | None:
        """The forward pass of a module that is running for the caller; ``None`` where another runs in its place.

        Its number goes by what torch made for this call alone, where it left something: see `_Running`.
        """
        frames = frames_of(module)
        if not frames:
            return None
        outermost = frames[-1]
        arguments = argument_tensors(outermost)
        running = _Running(id(outermost), [weakref.ref(tensor) for tensor in arguments], _mark_of_call(outermost))
        known = self._running.get(module)
        if known is None or not known[1].is_same(running):
            known = self._running[module] = (next(_NUMBERS), running)
        return RunningForward(known[0], states_among(arguments))


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


def heads_in_batch(module: nn.Module, sequences: int, queries: int, keys: int) -> int:
    """How many heads a module has put into the batch beside each other, (B, N, L) having become (B H, N, D).

    It is told by the tokens that the module was called with: as many as there are queries, or keys, so that what
    the batch has more of than sequences are heads, and not windows of a sequence.

    Args:
        module: a module that is running.
        sequences: the size of the batch.
        queries: their number.
        keys: their number.
    """
    frame = innermost_forward(module)
    given = [] if frame is None else [t for t in argument_tensors(frame) if t.is_floating_point()]
    for tokens in (queries, keys):
        for batch in (batch for tensor in given for batch in _sequences_of(tensor, tokens)):
            return sequences // batch if sequences % batch == 0 else 1
    return 1


def attends_to_others(module: nn.Module, keys: int) -> bool:
    """Whether a module was called with tokens for its keys that are not those of its queries.

    Args:
        module: a module that is running.
        keys: their number.
    """
    frame = innermost_forward(module)
    if frame is None:
        return False
    code = frame.f_code
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]  # and no variable of that name
    others = (frame.f_locals.get(name) for name in _OTHER_TOKENS if name in parameters)
    own = next(iter(argument_tensors(frame)), None)
    return any(
        isinstance(other, Tensor) and other is not own and other.dim() == 3 and keys in other.shape[:2]
        for other in others
    )


def states_among(arguments: Iterable[Tensor]) -> list[torch.Size]:
    """The shapes of hidden states; none where the first tensor of numbers is something else: queries, an image."""
    with without_function_modes():
        shapes = [argument.shape for argument in arguments if argument.is_floating_point() and not argument.is_nested]
    return [shape for shape in shapes if len(shape) == 3] if shapes and len(shapes[0]) == 3 else []


def _sequences_of(states: Tensor, tokens: int) -> Iterator[int]:
    """How many sequences hidden states hold, if each is of so many tokens; pictures have theirs in several axes."""
    if states.dim() == 3 and states.shape[1] == tokens:
        yield states.shape[0]
    elif states.dim() == 3 and states.shape[0] == tokens and states.shape[1] > 1:  # tokens come first, if not of one
        yield states.shape[1]
    elif states.dim() > 3 and tokens in (prod(states.shape[1:-1]), prod(states.shape[2:])):
        yield states.shape[0]
