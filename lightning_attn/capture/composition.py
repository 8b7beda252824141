"""What an axis is composed of, from the outside inwards: heads and sequences in one axis, in which order.

(B, N, H D) becomes (B H, N, D) in one model and (H B, N, D) in another, and no size tells the two apart. Strides do,
from the layer on that wrote the channels; and where parts of a tensor are put beside each other, what they are of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from torch import Tensor

from lightning_attn.capture.axes import MIXED, Axes

CHANNEL = "channel"
#: What is not known to be channels: tokens, places in an image, sequences.
PLACE = "place"
#: The same again, as of an axis that was expanded.
REPEATED = "repeated"


class Part(NamedTuple):
    """A part of an axis, and how many elements it has."""

    meaning: str
    size: int


#: The parts of an axis from the outside inwards, none of one element, and no two alike beside each other.
Composition = tuple[Part, ...]

#: A displacement of a view in what it is a view of: along what, how far apart the elements are there, and by how many.
Cut = tuple[str, int, int]


class _Step(NamedTuple):
    """A part with how far apart its elements are in memory."""

    stride: int
    size: int
    meaning: str


def single(meaning: str, size: int) -> Composition:
    """An axis that is all of one kind."""
    return (Part(meaning, size),) if size > 1 else ()


def joined(parts: Iterable[Part]) -> Composition:
    """Parts beside each other, where those that are alike are one."""
    composition: list[Part] = []
    for part in parts:
        if composition and composition[-1].meaning == part.meaning:
            part = Part(part.meaning, composition.pop().size * part.size)
        if part.size > 1:
            composition.append(part)
    return tuple(composition)


def size_of(composition: Composition) -> int:
    """How many elements an axis has."""
    return prod(part.size for part in composition)


def meaning_of(composition: Composition) -> str:
    """What an axis means as a whole."""
    meanings = {part.meaning for part in composition if part.meaning != REPEATED}
    return MIXED if len(meanings) > 1 else meanings.pop() if meanings else PLACE


def heads_first_known(first: Composition | None, second: Composition | None) -> Composition | None:
    """What queries and keys tell together of an axis that they share: the one that tells more."""

    def tells(composition: Composition | None) -> tuple[bool, bool, int]:
        meanings = {part.meaning for part in composition or ()}
        return CHANNEL in meanings, REPEATED not in meanings, size_of(composition or ())

    return max(first, second, key=tells)


def compositions_of_view(
    shape: Sequence[int],
    strides: Sequence[int],
    of_shape: Sequence[int],
    of_strides: Sequence[int],
    compositions: Sequence[Composition | None],
) -> list[Composition | None]:
    """What the axes of a view are composed of, told by strides from those of what it is a view of.

    An axis of a view takes what lies between its stride and the end of it, of each part that does.
    """
    steps = _steps(of_shape, of_strides, compositions)
    return [_between(stride, size, steps) for stride, size in zip(strides, shape, strict=True)]


def _between(stride: int, size: int, steps: list[_Step] | None) -> Composition | None:
    if size == 1:
        return ()
    if stride == 0:
        return single(REPEATED, size)
    if steps is None:
        return None
    parts: list[Part] = []
    for step in steps:
        low, high = max(step.stride, stride), min(step.stride * step.size, stride * size)
        if low < high:
            if high % low or low % step.stride:
                return None
            parts.append(Part(step.meaning, high // low))
    composition = joined(parts)
    return composition if size_of(composition) == size else None


def _steps(
    shape: Sequence[int], strides: Sequence[int], compositions: Sequence[Composition | None]
) -> list[_Step] | None:
    """All parts of all axes, from those farthest apart inwards; ``None`` where those of an axis are unknown."""
    steps: list[_Step] = []
    for size, stride, composition in zip(shape, strides, compositions, strict=True):
        if composition is None:
            return None
        inner = stride * size
        for part in composition:
            inner //= part.size
            steps.append(_Step(inner, part.size, part.meaning))
    return sorted((step for step in steps if step.stride > 0), reverse=True)


def cuts_of_view(
    displacement: int, of_shape: Sequence[int], of_strides: Sequence[int], compositions: Sequence[Composition | None]
) -> tuple[Cut, ...]:
    """Along what a view begins later than what it is a view of."""
    steps = _steps(of_shape, of_strides, compositions) if displacement else []
    if steps is None or displacement < 0:
        return ((MIXED, 1, displacement),)
    cuts: list[Cut] = []
    for step in steps:
        count, displacement = divmod(displacement, step.stride)
        if count:
            cuts.append((step.meaning, step.stride, count))
    return tuple(cuts)


def in_order(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of elements that lie in their order."""
    return tuple(accumulate(reversed(shape[1:]), lambda stride, size: stride * size, initial=1))[::-1]


class Division(NamedTuple):
    """Axes that hold sequences and heads, divided into those.

    Args:
        sizes: of each axis, the sizes of its parts from the outside inwards.
        heads: which are heads, of all parts in their order.
    """

    sizes: tuple[tuple[int, ...], ...]
    heads: tuple[int, ...]

    @property
    def axes_of_sequences(self) -> int:
        """How many of the axes hold sequences, whatever else they hold."""
        first, count = 0, 0
        for sizes in self.sizes:
            count += any(first + place not in self.heads for place in range(len(sizes)))
            first += len(sizes)
        return count

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return sum(len(sizes) for sizes in self.sizes)


def division_of(meanings: Axes, compositions: Sequence[Composition | None]) -> Division:
    """Divide axes into sequences and heads, which are what is known to be channels.

    Args:
        meanings: of the axes, as far as they are known.
        compositions: what the axes are composed of; ``None`` where that is not known.
    """
    sizes: list[tuple[int, ...]] = []
    heads: list[int] = []
    first = 0
    for meaning, composition in zip(meanings, compositions, strict=True):
        parts = composition if composition and meaning == MIXED else (Part(meaning, -1),)
        heads += [first + place for place, part in enumerate(parts) if part.meaning == CHANNEL]
        sizes.append(tuple(part.size for part in parts))
        first += len(parts)
    return Division(tuple(sizes), tuple(heads))


def divided(tensor: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
    """A tensor with an axis of its own for each part of one; an axis that is the same for all stays so."""
    if len(sizes) == 1:
        return tensor
    parts: Tensor = tensor.unflatten(axis, sizes if tensor.shape[axis] > 1 else (1,) * len(sizes))
    return parts
