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

import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_attn.capture.axes import MIXED, Axes, Contraction, meaning_of_stride
from lightning_attn.capture.isolation import without_function_modes

CHANNEL = "channel"
#: What is not known to be channels: tokens, places in an image, sequences.
PLACE = "place"

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
#: These put elements that stay in their order into another shape, and copy them where they must.
_RESHAPE = {
    *(torch.reshape, Tensor.reshape, Tensor.reshape_as, torch.flatten, Tensor.flatten),
    *(torch.unflatten, Tensor.unflatten, Tensor.view, Tensor.view_as),
}
#: After so many operations what follows from them is worked out, so that no more than these are kept.
_LONGEST_WAY = 32


class ChannelTrail:
    """What is known of the channels of tensors, for as long as they live."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], _Made]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def follow(self, function: Callable[..., Any], operands: list[Tensor], result: object) -> None:
        """Note what a torch function made: channels, if it is a layer, or something of what has some."""
        layer = _LAYERS.get(function)
        sources: list[_Made] = []
        if layer is None:
            for operand in operands:
                known = self._known.get(id(operand))
                if known is not None and known[0]() is operand:
                    sources.append(known[1])
            if not sources:
                return
        with without_function_modes():
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.is_nested:
                    self._set(tensor, _Made(sources, function) if layer is None else _OfLayer(layer))

    def follow_product(self, product: Contraction, result: Tensor, constant: Tensor | None) -> None:
        """Note what a product made: of two activations, or of one and a constant, which is then a layer."""
        operands = (product.left, product.right)
        sources = [None if operand is constant else self._get(operand) for operand in operands]
        with without_function_modes():
            self._set(result, _OfProduct(product, sources, [operand is constant for operand in operands]))

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

    def heads_among(self, tensors: Sequence[Tensor], axes: Sequence[int]) -> tuple[int, ...] | None:
        """Which of some axes are heads.

        Args:
            tensors: queries and keys, or their product; they share the axes.
            axes: the axes that may be sequences or heads, counted from the last, in their order.

        Returns:
            The heads among the axes; ``None`` where that is not known, so that the last is as good a guess as any.
        """
        if len(axes) < 2:
            return None
        found: list[str] = []
        for axis in axes:
            meanings = {self._meaning(tensor, axis) for tensor in tensors}
            found.append(CHANNEL if CHANNEL in meanings else MIXED if MIXED in meanings else PLACE)
        if CHANNEL in found:
            return tuple(axis for axis, meaning in zip(axes, found, strict=True) if meaning == CHANNEL)
        # Heads may be in one axis with the sequences, so that what comes after it holds none; or there is a single one.
        is_merged = found[-1] == PLACE and MIXED in found
        is_single = len(axes) > 2 and any(self._is_single(tensor, axes[1:]) for tensor in tensors)
        return () if is_merged or is_single else None

    def are_places(self, tensor: Tensor, axes: Sequence[int]) -> bool:
        """Whether some axes of a tensor, counted from the last, are known to hold no channels and no heads."""
        made = self._get(tensor)
        known = None if made is None else made.settle()
        return known is not None and all(len(known) >= -axis and known[axis] == PLACE for axis in axes)

    def _is_single(self, tensor: Tensor, axes: Sequence[int]) -> bool:
        made = self._get(tensor)
        return made is not None and made.settle() is not None and any(made.shape[axis] == 1 for axis in axes)

    def _meaning(self, tensor: Tensor, axis: int) -> str:
        made = self._get(tensor)
        axes = None if made is None else made.settle()
        return PLACE if axes is None or len(axes) < -axis else axes[axis]

    def _compares_channels(self, operand: Tensor, summed: Sequence[int], compared: Sequence[int]) -> bool:
        made = self._get(operand)
        axes = None if made is None else made.settle()
        if axes is None or any(axes[axis] in (CHANNEL, MIXED) for axis in summed):
            return False
        return any(axes[axis] == CHANNEL for axis in compared)

    def _get(self, tensor: Tensor) -> _Made | None:
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _set(self, tensor: Tensor, made: _Made) -> None:
        try:
            made.shape, made.strides = tensor.shape, tensor.stride()
            made.storage = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse tensors and those of a `torch.func` transform
            return
        if made.way > _LONGEST_WAY:
            made.settle()
        key = id(tensor)

        def forget(reference: weakref.ref[Tensor]) -> None:
            known = self._known.get(key)
            if known is not None and known[0] is reference:
                del self._known[key]

        self._known[key] = (weakref.ref(tensor, forget), made)


class _Made:
    """How a tensor was made of others, and what its axes mean once that was worked out.

    Slots rather than a dataclass: one of these is made for almost every torch function of a watched forward pass.
    """

    __slots__ = ("_axes", "_function", "_is_settled", "_sources", "shape", "storage", "strides", "way")

    shape: torch.Size
    strides: tuple[int, ...]
    storage: int
    way: int

    def __init__(self, sources: Sequence[_Made | None], function: Callable[..., Any] | None = None) -> None:
        self._sources = sources
        self._function = function
        self._is_settled = False
        self._axes: Axes | None = None
        #: How many operations it would take to work out what the axes mean.
        self.way = 1
        for source in sources:
            if source is not None and source.way >= self.way:
                self.way = source.way + 1

    def settle(self) -> Axes | None:
        """Work out what the axes mean; ``None`` where that cannot be told."""
        if not self._is_settled:
            self._axes = self._work_out()
            self.way, self._sources, self._is_settled = 0, (), True
        return self._axes

    def _work_out(self) -> Axes | None:
        found = (self._axes_from(source) for source in self._sources if source is not None)
        return next((axes for axes in found if axes is not None), None)

    def _axes_from(self, source: _Made) -> Axes | None:
        axes = source.settle()
        if axes is None:
            return None
        if self.storage == source.storage:
            return _axes_by_strides(self.shape, self.strides, source.shape, source.strides, axes)
        if self.shape == source.shape:
            return axes
        if self._function in _RESHAPE:
            return _axes_by_strides(self.shape, _in_order(self.shape), source.shape, _in_order(source.shape), axes)
        added = len(self.shape) - len(axes)
        if added == 0:  # padded, pooled, put beside something
            return axes
        if added < 0 or self._function is torch.stack:
            return None
        is_trailing = all(old in (1, new) for new, old in zip(self.shape[added:], source.shape, strict=True))
        return (*(PLACE,) * added, *axes) if is_trailing else None


class _OfLayer(_Made):
    """Made by a layer, which writes channels in some axis, counted from the last."""

    __slots__ = ("_channels_from_last",)

    def __init__(self, channels_from_last: int) -> None:
        super().__init__(())
        self._channels_from_last = channels_from_last

    def _work_out(self) -> Axes | None:
        before = len(self.shape) - self._channels_from_last
        return (*(PLACE,) * before, CHANNEL, *(PLACE,) * (self._channels_from_last - 1)) if before >= 0 else None


class _OfProduct(_Made):
    """Made by a product of two activations, or of one with a constant."""

    __slots__ = ("_are_constant", "_labels")

    def __init__(self, product: Contraction, sources: Sequence[_Made | None], are_constant: Sequence[bool]) -> None:
        super().__init__(sources)
        self._labels = (product.left_axes, product.right_axes, product.axes)
        self._are_constant = are_constant

    def _work_out(self) -> Axes | None:
        *of_operands, of_result = self._labels
        known: dict[str, str] = {}
        for labels, source in zip(of_operands, self._sources, strict=True):
            axes = None if source is None else source.settle()
            if axes is not None:
                known |= {label: axis for label, axis in zip(labels, axes, strict=True) if known.get(label) != CHANNEL}
        if not any(self._are_constant):
            return tuple(known.get(label, PLACE) for label in of_result) if known else None
        # A weight makes channels, unless it sums over places, as pooling that is written out does.
        left, right = of_operands
        summed = [known.get(label, CHANNEL) for label in left if label in right and label not in of_result]
        new = PLACE if summed and set(summed) == {PLACE} else CHANNEL
        of_activation = right if self._are_constant[0] else left
        return tuple(known.get(label, PLACE) if label in of_activation else new for label in of_result)


def _axes_by_strides(
    shape: torch.Size, strides: Sequence[int], of_shape: torch.Size, of_strides: Sequence[int], axes: Axes
) -> Axes:
    if shape == of_shape and strides == of_strides:
        return axes
    # An axis of one element has a stride that means nothing.
    known = [place for place in zip(of_strides, of_shape, axes, strict=True) if place[1] > 1]
    same = {(stride, size): axis for stride, size, axis in known}  # most axes are only put elsewhere
    return tuple(
        PLACE
        if size == 1
        else same[stride, size]
        if (stride, size) in same
        else meaning_of_stride(stride, size, known, PLACE)
        for stride, size in zip(strides, shape, strict=True)
    )


def _in_order(shape: torch.Size) -> tuple[int, ...]:
    """The strides of elements that lie in their order."""
    return tuple(accumulate(reversed(shape[1:]), lambda stride, size: stride * size, initial=1))[::-1]
