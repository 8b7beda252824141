"""What the axes of a tensor mean, followed from operation to operation.

A product of queries and keys has axes of three kinds: the one that came from the left operand alone, the one that came
from the right operand alone, and those that both share (sequences, heads). Which of the first two holds the keys is
known once the softmax has been taken over it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from lightning_attn.capture.isolation import viewed
from lightning_attn.capture.refusals import HEADS_AS_QUERIES, KEYS_OF_WINDOWS, TOKENS_AS_HEADS, Refusal

#: One label per axis of a tensor.
Axes = tuple[str, ...]

SHARED = "shared"
LEFT = "left"
RIGHT = "right"
#: What left and right turn out to be, once a softmax was taken over one of them.
QUERY = "query"
KEY = "key"


@dataclass(frozen=True)
class Contraction:
    """A product of two tensors that sums over axes which both have.

    Args:
        left, right: the operands.
        left_axes, right_axes, axes: a label for each axis of the operands and of the product; equal labels are the
            same axis.
    """

    left: Tensor
    right: Tensor
    left_axes: Axes
    right_axes: Axes
    axes: Axes

    def meaning(self) -> Axes:
        """What each axis of the product is."""
        return tuple(
            SHARED
            if label in self.left_axes and label in self.right_axes
            else LEFT
            if label in self.left_axes
            else RIGHT
            for label in self.axes
        )

    def doubts(self) -> dict[str, Refusal]:
        """Of the sides, `LEFT` or `RIGHT`, why their axes cannot be what they would be taken for."""
        sides = (LEFT, self.left, self.left_axes, self.right_axes), (RIGHT, self.right, self.right_axes, self.left_axes)
        shared = [label for label in self.axes if label in self.left_axes and label in self.right_axes]
        found: dict[str, Refusal] = {}
        for side, operand, labels, others in sides:
            rows = [axis for axis, label in enumerate(labels) if label not in others]
            widths = [axis for axis, label in enumerate(labels) if label in self.summed]
            if len(widths) != 1:
                continue
            if len(rows) == 1 and lies_within_tokens(operand, rows[0], widths[0]):
                found[side] = HEADS_AS_QUERIES
            elif len(shared) == 2 and steps_over_tokens(operand, labels.index(shared[-1]), widths[0]):
                found[side] = TOKENS_AS_HEADS
            elif len(shared) > 2 and _is_put_together(operand):
                found[side] = KEYS_OF_WINDOWS
        return found

    @property
    def summed(self) -> set[str]:
        """The labels of the axes that are summed over."""
        return (set(self.left_axes) & set(self.right_axes)) - set(self.axes)


def lies_within_tokens(tensor: Tensor, rows: int, width: int) -> bool:
    """Whether the rows of queries or keys lie beside each other within one row of what they are a view of.

    Tokens are as far apart as the width of what a layer gave; heads are nearer.

    Args:
        tensor: queries or keys.
        rows: the axis of the rows.
        width: the axis that products sum over.
    """
    whole = _tokens_behind(tensor, width)
    return whole is not None and tensor.shape[rows] > 1 and 0 < tensor.stride(rows) < whole.shape[-1]


def _is_put_together(tensor: Tensor) -> bool:
    """Whether windows of tokens were made by copying, rather than by looking differently at what a layer gave."""
    whole = viewed(tensor)
    return whole is None or whole.dim() >= tensor.dim() or overlaps_itself(tensor)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether windows of a view share elements, as those of `unfold` with a step that is less than their size.

    What is expanded has no windows.
    """
    places = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride > 0]
    return prod(size for size, _ in places) > 1 + sum((size - 1) * stride for size, stride in places)


def steps_over_tokens(tensor: Tensor, axis: int, width: int) -> bool:
    """Whether an axis of queries or keys that should be the heads goes from token to token (windows, sequences).

    Args:
        tensor: queries or keys.
        axis: the axis.
        width: the axis that products sum over.
    """
    whole = _tokens_behind(tensor, width)
    if whole is None or whole.dim() > 3 or tensor.shape[axis] == 1:
        return False
    # What is as wide as a head may be heads already, and so may be what comes before the tokens.
    last = whole.stride(0) if whole.dim() == 3 else whole.numel()
    return whole.shape[-1] > tensor.shape[width] and whole.shape[-1] <= tensor.stride(axis) < last


def _tokens_behind(tensor: Tensor, width: int) -> Tensor | None:
    """What a tensor is a view of, where that has tokens in its rows."""
    whole = viewed(tensor)
    has_rows = whole is not None and whole.dim() > 1 and whole.stride(-1) == tensor.stride(width) == 1
    return whole if has_rows else None


def is_view(result: Tensor, tensor: Tensor) -> bool:
    """Whether two tensors are the same memory, looked at differently."""
    try:
        return bool(result.untyped_storage()._cdata == tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and those of a `torch.func` transform have no memory
        return result is tensor


def axes_after(result: Tensor, tensor: Tensor, axes: Axes) -> Axes | None:
    """What the axes of a result mean, if those of the tensor it was made of are known.

    Views are told by their strides: axes that were exchanged, merged, sliced or added. Other operations keep axes where
    they keep the shape, or change it in one place, or add axes in front.

    Returns:
        The meanings; ``None`` where the result is no longer laid out like the tensor.
    """
    if is_view(result, tensor) and result is not tensor:
        return _axes_of_view(result, tensor, axes)
    if result.shape == tensor.shape:
        return axes
    difference = result.dim() - tensor.dim()
    if difference < 0 or result.shape[result.dim() - 1] == 1 != tensor.shape[-1]:
        return _trailing(result, tensor, axes)
    changed = sum(new != old for new, old in zip(result.shape[difference:], tensor.shape, strict=True))
    if changed > 1 or (changed == 1 and difference and result.shape[-2:] != tensor.shape[-2:]):
        return _trailing(result, tensor, axes)
    return (SHARED,) * difference + axes


def _axes_of_view(result: Tensor, tensor: Tensor, axes: Axes) -> Axes | None:
    if result.shape == tensor.shape and result.stride() == tensor.stride():
        return axes
    # An axis of one element has a stride that means nothing; such axes fill what is left, in order.
    known = [place for place in zip(tensor.stride(), tensor.shape, axes, strict=True) if place[1] > 1]
    meanings = [
        meaning_of_stride(stride, size, known) if size > 1 else ""
        for stride, size in zip(result.stride(), result.shape, strict=True)
    ]
    if MIXED in meanings:
        return None
    single = [axis for axis, size in zip(axes, tensor.shape, strict=True) if size == 1 and axis != SHARED]
    missing = [axis for axis in axes if axis != SHARED and axis not in meanings and axis not in single]
    if missing and result.dim() < tensor.dim() + meanings.count(""):  # one element of it was taken
        single += missing
    elif missing:
        return None
    for place in reversed([place for place, axis in enumerate(meanings) if axis == ""]):
        meanings[place] = single.pop() if single else SHARED
    if KEY in single or not {LEFT, RIGHT, KEY}.intersection(meanings):
        return None
    return tuple(meanings)  # without what is left in `single`: the axis of an only query


#: Queries and keys, or channels and what is none, in one axis.
MIXED = "mixed"


def meaning_of_stride(stride: int, size: int, known: Sequence[tuple[int, int, str]], otherwise: str = SHARED) -> str:
    """What an axis of a view means: what the axis means that it is, or is a part of, or one that was merged into it.

    Args:
        stride: how far apart the elements of the view's axis are.
        size: how many there are.
        known: stride, size and meaning of the axes of what it is a view of.
        otherwise: what it means where none of these tells.
    """
    exact = [axis for other, _, axis in known if other == stride]
    parts = [axis for other, length, axis in known if 0 < other <= stride < other * length]
    merged = [axis for other, _, axis in known if stride <= other < stride * size]
    told = {axis for axis in (*(exact or parts), *merged) if axis != SHARED}
    return MIXED if len(told) > 1 else told.pop() if told else otherwise


def _trailing(result: Tensor, tensor: Tensor, axes: Axes) -> Axes | None:
    """The meanings where the last two axes are what they were, and the others were merged or divided by a copy."""
    if min(result.dim(), tensor.dim()) >= 2 and result.shape[-2:] == tensor.shape[-2:] and SHARED not in axes[-2:]:
        return (SHARED,) * (result.dim() - 2) + axes[-2:]
    return None


def arranged(tensor: Tensor, axes: Axes, heads: Collection[int], max_sequences: int | None) -> Tensor:
    """A tensor that is laid out like some logits, as (B, H, N, M or 1); a view where that is possible.

    Args:
        tensor: the tensor.
        axes: what its axes mean; one of them is `KEY`.
        heads: which of the shared axes are heads; the others are sequences.
        max_sequences: the first so many sequences; ``None`` for all.
    """
    in_order = [i for i, axis in enumerate(axes) if axis == SHARED]
    shared = [axis for place, axis in enumerate(in_order) if place not in heads]
    sequence_axes = len(shared)
    shared += [axis for place, axis in enumerate(in_order) if place in heads]
    queries = [i for i, axis in enumerate(axes) if axis == QUERY]
    tensor = tensor.permute(*shared, *queries, axes.index(KEY))
    if sequence_axes:
        tensor = tensor[:max_sequences]  # before anything is copied
    shape = tensor.shape
    tensor = tensor.reshape(
        prod(shape[:sequence_axes]),
        prod(shape[sequence_axes : len(shared)]),
        prod(shape[len(shared) : -1]),
        shape[-1],
    )
    return tensor[:max_sequences]
