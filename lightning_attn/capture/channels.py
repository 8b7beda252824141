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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightning_attn.capture.axes import MIXED, Axes, Contraction, meaning_of_stride, overlaps_itself
from lightning_attn.capture.composition import (
    CHANNEL,
    PLACE,
    REPEATED,
    Composition,
    Cut,
    Division,
    Part,
    compositions_of_view,
    cuts_of_view,
    division_of,
    heads_first_known,
    in_order,
    joined,
    meaning_of,
    single,
    size_of,
)
from lightning_attn.capture.isolation import without_function_modes

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
#: These put elements that stay in their order into another shape, and copy them where they must.
_RESHAPE = {
    *(torch.reshape, Tensor.reshape, Tensor.reshape_as, torch.flatten, Tensor.flatten),
    *(torch.unflatten, Tensor.unflatten, Tensor.view, Tensor.view_as),
}
#: These put tensors beside each other along an axis that is there, or along a new one.
_JOINS = {torch.cat, torch.concat, torch.concatenate, torch.stack}
#: These take windows of places that may overlap.
_UNFOLD = {functional.unfold, Tensor.unfold}
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
        self._known: dict[int, tuple[weakref.ref[Tensor], _Made]] = {}

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
        sources: list[_Made] = []
        if layer is None:
            for operand in operands:
                known = self._known.get(id(operand))
                if known is not None and known[0]() is operand:
                    sources.append(known[1])
            if not sources:
                return
        origin = (
            None
            if layer is None or len(operands) < 2
            else _Origin.of(*(operands[-2:] if function in _ADDED_TO else operands[:2]))
        )
        with without_function_modes():
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.is_nested:
                    if layer is not None:
                        made: _Made = _OfLayer(layer, origin)
                    elif function in _JOINS and len(sources) == len(operands):
                        axis = args[1] if len(args) > 1 else (kwargs or {}).get("dim", (kwargs or {}).get("axis", 0))
                        made = _OfSeveral(sources, function, axis)
                    else:
                        made = _Made(sources, function)
                    if function in _REORDERS or (function is Tensor.__getitem__ and len(operands) > 1):
                        made.is_reordered = True
                    self._set(tensor, made)

    def follow_product(self, product: Contraction, result: Tensor, constant: Tensor | None) -> None:
        """Note what a product made: of two activations, or of one and a constant, which is then a layer."""
        operands = (product.left, product.right)
        sources = [None if operand is constant else self._get(operand) for operand in operands]
        with without_function_modes():
            are_constant = [operand is constant for operand in operands]
            data = product.left if constant is product.right else product.right
            origin = None if constant is None else _Origin.of(data, constant)
            self._set(result, _OfProduct(product, sources, are_constant, origin))

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
        made = [self._get(tensor) for tensor in (query, key)]
        return len({one is not None and one.is_reordered for one in made}) > 1

    def overlap(self, tensor: Tensor) -> bool:
        """Whether a tensor is known to hold windows of tokens that overlap."""
        made = self._get(tensor)
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
        made = self._get(tensor)
        known = None if made is None else made.settle()
        return known is not None and all(len(known.axes) >= -axis and known.axes[axis] == PLACE for axis in axes)

    def _is_single(self, tensor: Tensor, axes: Sequence[int]) -> bool:
        made = self._get(tensor)
        return made is not None and made.settle() is not None and any(made.shape[axis] == 1 for axis in axes)

    def _meaning(self, tensor: Tensor, axis: int) -> str:
        made = self._get(tensor)
        known = None if made is None else made.settle()
        return PLACE if known is None or len(known.axes) < -axis else known.axes[axis]

    def _composition(self, tensors: Sequence[Tensor], axis: int) -> Composition | None:
        composition: Composition | None = None
        for tensor in tensors:
            made = self._get(tensor)
            known = None if made is None else made.settle()
            if known is not None and len(known.axes) >= -axis:
                composition = heads_first_known(composition, known.compositions[axis])
        return None if composition and any(part.meaning == REPEATED for part in composition) else composition

    def _compares_channels(self, operand: Tensor, summed: Sequence[int], compared: Sequence[int]) -> bool:
        made = self._get(operand)
        known = None if made is None else made.settle()
        axes = () if known is None else known.axes
        if known is None or any(axes[axis] in (CHANNEL, MIXED) for axis in summed):
            return False
        return any(axes[axis] == CHANNEL for axis in compared)

    def _get(self, tensor: Tensor) -> _Made | None:
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _set(self, tensor: Tensor, made: _Made) -> None:
        try:
            made.shape, made.strides, made.offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
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


class _Origin(NamedTuple):
    """The layer that made channels, by what it was given and its weight; two are the same where both are."""

    data: weakref.ref[Tensor]
    weight: weakref.ref[Tensor]

    @classmethod
    def of(cls, data: Tensor, weight: Tensor) -> _Origin:
        return cls(weakref.ref(data), weakref.ref(weight))


class _Known(NamedTuple):
    """What is known of the axes of a tensor.

    Args:
        axes: what each of them means.
        compositions: what each of them is composed of; ``None`` where that cannot be told.
        origin: the layer that made the channels, where it is a single one.
        cuts: which part it is of what the layer gave.
    """

    axes: Axes
    compositions: tuple[Composition | None, ...]
    origin: _Origin | None = None
    cuts: tuple[Cut, ...] = ()

    @classmethod
    def of_shape(cls, shape: Sequence[int], axes: Axes, origin: _Origin | None = None) -> _Known:
        """Axes that are all of one kind each."""
        return cls(axes, tuple(map(_of_one_kind, axes, shape)), origin)

    def with_sizes(self, shape: Sequence[int]) -> _Known:
        """The same axes after something that may have changed their sizes, and what cannot be told of those then."""
        compositions = [
            composition if composition is None or size_of(composition) == size else _of_one_kind(axis, size)
            for axis, composition, size in zip(self.axes, self.compositions, shape, strict=True)
        ]
        return self._replace(compositions=tuple(compositions))

    def differs(self, other: _Known) -> str | None:
        """Whether the other one holds other channels, or other places; ``None`` where that cannot be told."""
        mine, theirs = self.origin, other.origin
        if mine is None or theirs is None:
            return None
        cuts = {meaning for meaning, _, _ in set(self.cuts) ^ set(other.cuts)}
        is_same_data, is_same_weight = mine.data is theirs.data, mine.weight is theirs.weight
        if is_same_data and is_same_weight:
            return cuts.pop() if cuts in ({CHANNEL}, {PLACE}) else None
        if is_same_data and not cuts:
            return CHANNEL
        return PLACE if is_same_weight and not cuts else None


class _Made:
    """How a tensor was made of others, and what its axes mean once that was worked out.

    Slots rather than a dataclass: one of these is made for almost every torch function of a watched forward pass.
    """

    __slots__ = (
        *("_function", "_is_settled", "_known", "_sources"),
        *("is_reordered", "offset", "overlaps", "shape", "storage", "strides", "way"),
    )

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    storage: int
    way: int
    is_reordered: bool

    def __init__(self, sources: Sequence[_Made | None], function: Callable[..., Any] | None = None) -> None:
        self._sources = sources
        self._function = function
        self._is_settled = False
        self._known: _Known | None = None
        #: Whether it holds windows of places that overlap, once that was worked out.
        self.overlaps = False
        known = [source for source in sources if source is not None]
        #: Whether its tokens were put into another order, or chosen. What is added to tokens in their order is not.
        self.is_reordered = bool(known) and all(source.is_reordered for source in known)
        #: How many operations it would take to work out what the axes mean.
        self.way = 1
        for source in sources:
            if source is not None and source.way >= self.way:
                self.way = source.way + 1

    def settle(self) -> _Known | None:
        """Work out what the axes mean; ``None`` where that cannot be told."""
        if not self._is_settled:
            self._known = self._work_out()
            self.overlaps = self._hold_overlapping_windows()
            self.way, self._sources, self._is_settled = 0, (), True
        return self._known

    def _hold_overlapping_windows(self) -> bool:
        for source in self._sources:
            if source is not None:
                source.settle()
                if source.overlaps or (self._function in _UNFOLD and self.shape.numel() > source.shape.numel() > 0):
                    return True
        return False

    def _work_out(self) -> _Known | None:
        found = (self._known_from(source) for source in self._sources if source is not None)
        return next((known for known in found if known is not None), None)

    def _known_from(self, source: _Made) -> _Known | None:
        known = source.settle()
        if known is None:
            return None
        if self.storage == source.storage:
            return self._known_by_strides(source, known, self.strides, source.strides, self.offset - source.offset)
        if self.shape == source.shape:
            return known
        if self._function in _RESHAPE:
            return self._known_by_strides(source, known, in_order(self.shape), in_order(source.shape), 0)
        added = len(self.shape) - len(known.axes)
        if added == 0:  # padded, pooled, put beside something
            return known.with_sizes(self.shape)
        if added < 0 or self._function is torch.stack:
            return None
        if not all(old in (1, new) for new, old in zip(self.shape[added:], source.shape, strict=True)):
            return None
        before = _Known.of_shape(self.shape[:added], (PLACE,) * added)
        behind = known.with_sizes(self.shape[added:])
        return _Known(before.axes + behind.axes, before.compositions + behind.compositions)

    def _known_by_strides(
        self, source: _Made, known: _Known, strides: Sequence[int], of_strides: Sequence[int], displacement: int
    ) -> _Known:
        if self.shape == source.shape and strides == of_strides and not displacement:
            return known
        axes = _axes_by_strides(self.shape, strides, source.shape, of_strides, known.axes)
        compositions = compositions_of_view(self.shape, strides, source.shape, of_strides, known.compositions)
        axes = tuple(
            axis if composition is None else meaning_of(composition)
            for axis, composition in zip(axes, compositions, strict=True)
        )
        cuts = cuts_of_view(displacement, source.shape, of_strides, known.compositions)
        return _Known(axes, tuple(compositions), known.origin, known.cuts + cuts)


class _OfLayer(_Made):
    """Made by a layer, which writes channels in some axis, counted from the last."""

    __slots__ = ("_channels_from_last", "_origin")

    def __init__(self, channels_from_last: int, origin: _Origin | None) -> None:
        super().__init__(())
        self._channels_from_last = channels_from_last
        self._origin = origin

    def _work_out(self) -> _Known | None:
        before = len(self.shape) - self._channels_from_last
        if before < 0:
            return None
        axes = (*(PLACE,) * before, CHANNEL, *(PLACE,) * (self._channels_from_last - 1))
        return _Known.of_shape(self.shape, axes, self._origin)


class _OfSeveral(_Made):
    """Several tensors beside each other, along an axis that they had or along a new one."""

    __slots__ = ("_axis",)

    def __init__(self, sources: Sequence[_Made], function: Callable[..., Any], axis: object) -> None:
        super().__init__(sources, function)
        self._axis = axis

    def _work_out(self) -> _Known | None:
        known = [source.settle() for source in self._sources if source is not None]
        first = known[0]
        shapes = {source.shape for source in self._sources if source is not None}
        if first is None or len(shapes) > 1 or not isinstance(self._axis, int):
            return super()._work_out()
        told = {None if other is None else first.differs(other) for other in known[1:]}
        difference = told.pop() if len(told) == 1 else None
        axis, number = self._axis % len(self.shape), len(known)
        if self._function is torch.stack:
            if difference is None:
                return None
            new = _Known.of_shape((number,), (difference,))
            return _Known(
                first.axes[:axis] + new.axes + first.axes[axis:],
                first.compositions[:axis] + new.compositions + first.compositions[axis:],
            )
        old = first.compositions[axis]
        if old is None or difference is None:
            whole = _of_one_kind(first.axes[axis], self.shape[axis])
        else:
            whole = joined((Part(difference, number), *old))
        meaning = first.axes[axis] if whole is None else meaning_of(whole)
        return _Known(
            (*first.axes[:axis], meaning, *first.axes[axis + 1 :]),
            (*first.compositions[:axis], whole, *first.compositions[axis + 1 :]),
            first.origin,
            first.cuts,
        )


class _OfProduct(_Made):
    """Made by a product of two activations, or of one with a constant."""

    __slots__ = ("_are_constant", "_labels", "_origin")

    def __init__(
        self,
        product: Contraction,
        sources: Sequence[_Made | None],
        are_constant: Sequence[bool],
        origin: _Origin | None,
    ) -> None:
        super().__init__(sources)
        self._labels = (product.left_axes, product.right_axes, product.axes)
        self._are_constant = are_constant
        self._origin = origin

    def _hold_overlapping_windows(self) -> bool:
        return False

    def _work_out(self) -> _Known | None:
        *of_operands, of_result = self._labels
        axes: dict[str, str] = {}
        compositions: dict[str, Composition | None] = {}
        for labels, source in zip(of_operands, self._sources, strict=True):
            known = None if source is None else source.settle()
            if known is not None:
                for label, axis, composition in zip(labels, known.axes, known.compositions, strict=True):
                    axes[label] = axis if axes.get(label) != CHANNEL else CHANNEL
                    compositions[label] = heads_first_known(compositions.get(label), composition)
        if not any(self._are_constant):
            return (
                self._with_labels({label: axes.get(label, PLACE) for label in of_result}, compositions)
                if axes
                else None
            )
        # A weight makes channels, unless it sums over places, as pooling that is written out does.
        left, right = of_operands
        summed = [axes.get(label, CHANNEL) for label in left if label in right and label not in of_result]
        new = PLACE if summed and set(summed) == {PLACE} else CHANNEL
        of_activation = right if self._are_constant[0] else left
        meanings = {label: axes.get(label, PLACE) if label in of_activation else new for label in of_result}
        return self._with_labels(meanings, compositions)

    def _with_labels(self, meanings: dict[str, str], compositions: dict[str, Composition | None]) -> _Known:
        whole: list[Composition | None] = []
        axes: list[str] = []
        for label, size in zip(self._labels[2], self.shape, strict=True):
            composition = compositions.get(label)
            if composition is None or size_of(composition) != size:
                composition = _of_one_kind(meanings[label], size)
            whole.append(composition)
            axes.append(meanings[label] if composition is None else meaning_of(composition))
        return _Known(tuple(axes), tuple(whole), self._origin)


def _of_one_kind(meaning: str, size: int) -> Composition | None:
    return None if meaning == MIXED else single(meaning, size)


def _axes_by_strides(
    shape: torch.Size, strides: Sequence[int], of_shape: torch.Size, of_strides: Sequence[int], axes: Axes
) -> Axes:
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
