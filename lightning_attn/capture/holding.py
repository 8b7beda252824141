"""What is known of a tensor of which ranks may hold parts, and what becomes of that in an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_attn.capture.head_share import HeadShare
from lightning_attn.capture.refusals import HEADS_OF_OTHER_RANKS, KEYS_OF_OTHER_RANKS, Refusal
from lightning_attn.capture.spread import Part, held, is_spread, part_of, sharded_axes

#: These exchange two axes, and these may put any axis to another place.
_TRANSPOSES = {
    *(torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes, torch.swapdims, Tensor.swapdims),
    *(torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
}
_PERMUTES = {
    *(torch.permute, Tensor.permute, torch.movedim, Tensor.movedim, torch.moveaxis, Tensor.moveaxis),
    torch.tensordot,
}


@dataclass(frozen=True)
class Holding:
    """What is known of a tensor; with nothing in it, that the tensor is whole.

    Args:
        share: the share of the heads that went into it.
        width: how many channels that was, where they were in one axis.
        layout: the parts of axes that this rank holds, by their places from the first.
        refusal: why an attention of it cannot be read.
    """

    share: HeadShare | None = None
    width: int | None = None
    layout: Mapping[int, Part] = field(default_factory=dict)
    refusal: Refusal | None = None

    @classmethod
    def of_channels(cls, part: Part) -> Holding:
        """A tensor whose last axis has a part of the channels."""
        return cls(HeadShare.of(part), part.held)

    @classmethod
    def of_spread(cls, tensor: Any, inherited: Holding | None) -> Holding:
        """A tensor that is spread over ranks, of which the layout tells; an axis in front is one of sequences.

        Args:
            tensor: the tensor, or one with its placements.
            inherited: what is known of what it was made of.
        """
        axes = sharded_axes(tensor)
        is_weight = isinstance(tensor, torch.nn.Parameter)
        first = 0 if is_weight or tensor.dim() < 3 else 1
        layout = {axis: part_of(tensor, axis) for axis in axes if axis >= first}
        if tensor.dim() - 1 in axes and tensor.dim() < 4 and not is_weight:
            part = layout[tensor.dim() - 1]
            return cls(HeadShare.of(part), part.held, layout)
        if axes and inherited is not None and not is_weight:
            return cls(inherited.share, inherited.width, layout)
        return cls(layout=layout)

    def heads_of(self, tensor: Tensor) -> HeadShare | None:
        """The share of the heads in queries, keys, values (…, H, N, D) or weights (…, H, N, M).

        Raises:
            UnreadableError: if this rank holds a part of the tokens.
        """
        places = {axis - tensor.dim(): part for axis, part in self.layout.items()}
        if {-1, -2} & places.keys():
            raise KEYS_OF_OTHER_RANKS.error()
        return HeadShare.of(places[-3]) if -3 in places and tensor.dim() > 3 else self.share

    def after(self, function: Callable[..., Any], args: Sequence[Any], operand: Tensor, result: Tensor) -> Holding:
        """What is known of what a function made of a tensor of which this is known."""
        if self.share is not None or not self.layout:
            return Holding(self.share, self.width, refusal=self.refusal)
        shape = held(operand).shape if is_spread(operand) else operand.shape
        layout: dict[int, Part] = {}
        for axis, part in self.layout.items():
            if function is torch.einsum:
                place = _in_einsum(axis, args, operand)
            elif function in _TRANSPOSES:
                place = _exchanged(axis, args, operand.dim())
            else:
                is_kept = function not in _PERMUTES and shape[: axis + 1] == result.shape[: axis + 1]
                place = axis if is_kept else None
            if place is None:
                return Holding(refusal=HEADS_OF_OTHER_RANKS)
            if place >= 0:
                layout[place] = part
        return Holding(layout=layout)


#: A tensor of which every rank has all.
WHOLE = Holding()


def _exchanged(axis: int, args: Sequence[Any], dimensions: int) -> int:
    """Where an axis is after two were exchanged: those that the arguments name, or the last two."""
    named = [place % dimensions for place in args[1:3] if isinstance(place, int)]
    first, second = named if len(named) == 2 else (dimensions - 2, dimensions - 1)
    return {first: second, second: first}.get(axis, axis)


def _in_einsum(axis: int, args: Sequence[Any], operand: Tensor) -> int | None:
    """Where an axis of an operand is in the result of an einsum: -1 where it is summed over, ``None`` if not known."""
    equation, *operands = args
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    given, result = equation.replace(" ", "").split("->")
    letters = next((part for part, other in zip(given.split(","), operands, strict=False) if other is operand), "")
    return result.find(letters[axis]) if axis < len(letters) else None
