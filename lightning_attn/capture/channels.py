"""Which axes of a tensor hold channels, told from the layer that made it.

Attention over tokens multiplies queries and keys along their channels. Some models attend over channels instead
(cross-covariance attention, transposed attention): they multiply along the tokens, and what is compared are channels.
Sizes do not tell the two apart where there are as many tokens as channels in a head, but layers do: a linear layer
writes channels last, a convolution ahead of the places. From there channels are followed through whatever comes before
the product. Heads are parts of the channels too, which tells them from windows and chunks.

Most operations of a model lie between some layer and no product at all. So what is noted of each is only its shape and
layout in memory, and what follows from them is worked out at a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_attn.capture.axes import MIXED, Contraction, overlaps_itself
from lightning_attn.capture.composition import (
    CHANNEL,
    PLACE,
    REPEATED,
    Composition,
    Division,
    division_of,
    heads_first_known,
    meaning_of,
)
from lightning_attn.capture.isolation import without_function_modes
from lightning_attn.capture.making import Made, MadeByLayer, MadeByProduct, MadeOfSeveral, Origin
from lightning_attn.capture.notes import Notes
from lightning_attn.capture.opaque import is_opaque

#: Layers by the axis, counted from the last, in which they write channels.
_LAYERS: dict[Callable[..., Any], int] = {
    functional.linear: 1,
    torch.addmm: 1,  # a linear layer that is written out
    Tensor.addmm: 1,
    functional.embedding: 1,
    functional.bilinear: 1,
    torch.conv1d: 2,
    torch.conv2d: 3,
    torch.conv3d: 4,
    torch.conv_transpose1d: 2,
    torch.conv_transpose2d: 3,
    torch.conv_transpose3d: 4,
}
#: Layers of which the first operand is what they are added to.
_ADDED_TO = {torch.addmm, Tensor.addmm}
#: These put tensors beside each other along an axis that is there, or along a new one.
_JOINS = {torch.cat, torch.concat, torch.concatenate, torch.stack}
#: These put tokens into another order, or choose some; and so does an index that is a tensor.
_REORDERS = {
    *(torch.gather, Tensor.gather, torch.index_select, Tensor.index_select),
    *(torch.take_along_dim, Tensor.take_along_dim, torch.flip, Tensor.flip, torch.roll, Tensor.roll),
}
#: After so many operations what follows from them is worked out, so that no more than these are kept.
_LONGEST_WAY = 32


class ChannelTrail:
    """What is known of the channels of tensors, for as long as they live."""

    def __init__(self) -> None:
        self._known: Notes[Made] = Notes()

    def __len__(self) -> int:
        return len(self._known)

    def follow(
        self,
        function: Callable[..., Any],
        operands: list[Tensor],
        result: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Note what a torch function made: channels, if it is a layer, or something of what has some."""
        layer = _LAYERS.get(function)
        sources: list[Made] = []
        if layer is None:
            sources += filter(None, map(self._known.get, operands))
            if not sources:
                return
        origin = (
            None
            if layer is None or len(operands) < 2
            else Origin.of(*(operands[-2:] if function in _ADDED_TO else operands[:2]))
        )
        with without_function_modes():
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.is_nested:
                    if is_opaque(function) and all(tensor.shape != operand.shape for operand in operands):
                        continue  # as of a collective, which puts what ranks hold beside each other
                    if layer is not None:
                        made: Made = MadeByLayer(layer, origin)
                    elif function in _JOINS and len(sources) == len(operands):
                        axis = args[1] if len(args) > 1 else (kwargs or {}).get("dim", (kwargs or {}).get("axis", 0))
                        made = MadeOfSeveral(sources, function, axis)
                    else:
                        made = Made(sources, function)
                    if function in _REORDERS or (function is Tensor.__getitem__ and len(operands) > 1):
                        made.is_reordered = True
                    self._set(tensor, made)

    def follow_product(self, product: Contraction, result: Tensor, constant: Tensor | None) -> None:
        """Note what a product made: of two activations, or of one and a constant, which is then a layer."""
        operands = (product.left, product.right)
        sources = [None if operand is constant else self._known.get(operand) for operand in operands]
        with without_function_modes():
            are_constant = [operand is constant for operand in operands]
            data = product.left if constant is product.right else product.right
            origin = None if constant is None else Origin.of(data, constant)
            self._set(result, MadeByProduct(product, sources, are_constant, origin))

    def sums_over_tokens(self, product: Contraction) -> bool:
        """Whether a product of queries and keys is known to sum over tokens and to compare channels."""
        return all(
            self._compares_channels(
                operand,
                [axis for axis, label in enumerate(labels) if label in product.summed],
                [axis for axis, label in enumerate(labels) if label not in others],
            )
            for operand, labels, others in (
                (product.left, product.left_axes, product.right_axes),
                (product.right, product.right_axes, product.left_axes),
            )
        )

    def are_compared(self, query: Tensor, key: Tensor) -> bool:
        """Whether queries and keys (…, N, D) of a fused kernel are known to be channels, and not tokens."""
        return all(self._compares_channels(operand, [-1], [-2]) for operand in (query, key))

    def are_reordered(self, query: Tensor, key: Tensor) -> bool:
        """Whether queries are known to be in another order than keys, or the other way round, or some of them only."""
        made = [self._known.get(tensor) for tensor in (query, key)]
        return len({one is not None and one.is_reordered for one in made}) > 1

    def overlap(self, tensor: Tensor) -> bool:
        """Whether a tensor is known to hold windows of tokens that overlap."""
        made = self._known.get(tensor)
        if made is None:
            return overlaps_itself(tensor)
        made.settle()
        return made.overlaps

    def heads_among_rows(self, tensor: Tensor, axis: int) -> bool:
        """Whether an axis is known to hold tokens and heads, which were put into one axis."""
        composition = self._composition([tensor], axis)
        return composition is not None and {part.meaning for part in composition} == {CHANNEL, PLACE}

    def heads_among(self, tensors: Sequence[Tensor], axes: Sequence[int]) -> Division | None:
        """Where heads are among some axes.

        Args:
            tensors: queries and keys, or their product; they share the axes.
            axes: the axes that may be sequences or heads, counted from the last, in their order.

        Returns:
            The axes divided into sequences and heads; ``None`` where that is not known, so that the last axis is as
            good a guess as any, or what the module was called with.
        """
        meanings: list[str] = []
        compositions = [self._composition(tensors, axis) for axis in axes]
        for axis, composition in zip(axes, compositions, strict=True):
            of_tensors = {self._meaning(tensor, axis) for tensor in tensors}
            told = CHANNEL if CHANNEL in of_tensors else MIXED if MIXED in of_tensors else PLACE
            meanings.append(told if composition is None else meaning_of(composition))
        division = division_of(tuple(meanings), compositions)
        if division.heads:
            return division
        if len(axes) < 2:
            return None
        # Heads may be in one axis with the sequences, so that what comes after it holds none; or there is a single one.
        is_merged = meanings[-1] == PLACE and MIXED in meanings
        is_single = len(axes) > 2 and any(self._is_single(tensor, axes[1:]) for tensor in tensors)
        return division if is_merged or is_single else None

    def are_places(self, tensor: Tensor, axes: Sequence[int]) -> bool:
        """Whether some axes of a tensor, counted from the last, are known to hold no channels and no heads."""
        made = self._known.get(tensor)
        known = None if made is None else made.settle()
        return known is not None and all(len(known.axes) >= -axis and known.axes[axis] == PLACE for axis in axes)

    def _is_single(self, tensor: Tensor, axes: Sequence[int]) -> bool:
        made = self._known.get(tensor)
        return made is not None and made.settle() is not None and any(made.shape[axis] == 1 for axis in axes)

    def _meaning(self, tensor: Tensor, axis: int) -> str:
        made = self._known.get(tensor)
        known = None if made is None else made.settle()
        return PLACE if known is None or len(known.axes) < -axis else known.axes[axis]

    def _composition(self, tensors: Sequence[Tensor], axis: int) -> Composition | None:
        composition: Composition | None = None
        for tensor in tensors:
            made = self._known.get(tensor)
            known = None if made is None else made.settle()
            if known is not None and len(known.axes) >= -axis:
                composition = heads_first_known(composition, known.compositions[axis])
        return None if composition and any(part.meaning == REPEATED for part in composition) else composition

    def _compares_channels(self, operand: Tensor, summed: Sequence[int], compared: Sequence[int]) -> bool:
        made = self._known.get(operand)
        known = None if made is None else made.settle()
        axes = () if known is None else known.axes
        if known is None or any(axes[axis] in (CHANNEL, MIXED) for axis in summed):
            return False
        return any(axes[axis] == CHANNEL for axis in compared)

    def _set(self, tensor: Tensor, made: Made) -> None:
        try:
            made.shape, made.strides, made.offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            made.storage = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse tensors and those of a `torch.func` transform
            return
        if made.way > _LONGEST_WAY:
            made.settle()
        self._known.set(tensor, made)
