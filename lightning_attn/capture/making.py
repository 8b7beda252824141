"""How a tensor was made, by a layer or of other tensors, and what its axes mean by that.

Of each way there is a class. Nothing is worked out until it is asked for: most operations of a model lie between some
layer and no product at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn.capture.axes import MIXED, Axes, Contraction, meaning_of_stride
from lightning_attn.capture.composition import (
    CHANNEL,
    PLACE,
    Composition,
    Cut,
    Part,
    compositions_of_view,
    cuts_of_view,
    heads_first_known,
    in_order,
    joined,
    meaning_of,
    single,
    size_of,
)
from lightning_attn.capture.isolation import viewed

#: These put elements that stay in their order into another shape, and copy them where they must.
_RESHAPE = {
    *(torch.reshape, Tensor.reshape, Tensor.reshape_as, torch.flatten, Tensor.flatten),
    *(torch.unflatten, Tensor.unflatten, Tensor.view, Tensor.view_as),
}
#: These take windows of places that may overlap.
_UNFOLD = {functional.unfold, Tensor.unfold}


class Origin(NamedTuple):
    """The layer that made channels, by what it was given and its weight; two are the same where both are."""

    data: weakref.ref[Tensor]
    weight: weakref.ref[Tensor]

    @classmethod
    def of(cls, data: Tensor, weight: Tensor) -> Origin:
        """The layer that multiplies data with a weight."""
        return cls(weakref.ref(data), weakref.ref(weight))

    @property
    def is_of_model(self) -> bool:
        """Whether its weight is a parameter, and not computed anew for each call."""
        return isinstance(self.weight(), nn.Parameter)


class KnownAxes(NamedTuple):
    """What is known of the axes of a tensor.

    Args:
        axes: what each of them means.
        compositions: what each of them is composed of; ``None`` where that cannot be told.
        origin: the layer that made the channels, where it is a single one.
        cuts: which part it is of what the layer gave.
    """

    axes: Axes
    compositions: tuple[Composition | None, ...]
    origin: Origin | None = None
    cuts: tuple[Cut, ...] = ()

    @classmethod
    def of_shape(cls, shape: Sequence[int], axes: Axes, origin: Origin | None = None) -> KnownAxes:
        """Axes that are all of one kind each."""
        return cls(axes, tuple(map(_of_one_kind, axes, shape)), origin)

    def with_sizes(self, shape: Sequence[int]) -> KnownAxes:
        """The same axes after something that may have changed their sizes, and what cannot be told of those then."""
        compositions = [
            composition if composition is None or size_of(composition) == size else _of_one_kind(axis, size)
            for axis, composition, size in zip(self.axes, self.compositions, shape, strict=True)
        ]
        return self._replace(compositions=tuple(compositions))

    def differs(self, other: KnownAxes, *, is_stacked: bool) -> str | None:
        """Whether the other one holds other channels, or other places; ``None`` where that cannot be told.

        Layers of the same tensor make other channels. Those of several tensors make heads where they are stacked, since
        each has weights of its own, but may be those of other tokens where they are beside each other.
        """
        mine, theirs = self.origin, other.origin
        if mine is None or theirs is None:
            return None
        cuts = {meaning for meaning, _, _ in set(self.cuts) ^ set(other.cuts)}
        is_same_data, is_same_weight = mine.data is theirs.data, mine.weight is theirs.weight
        if is_same_data and is_same_weight:
            return cuts.pop() if cuts in ({CHANNEL}, {PLACE}) else None
        if (
            not is_same_weight
            and not cuts
            and (is_same_data or (is_stacked and mine.is_of_model and theirs.is_of_model))
        ):
            return CHANNEL
        return PLACE if is_same_weight and not cuts else None


class Made:
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

    def __init__(self, sources: Sequence[Made | None], function: Callable[..., Any] | None = None) -> None:
        self._sources = sources
        self._function = function
        self._is_settled = False
        self._known: KnownAxes | None = None
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

    def settle(self) -> KnownAxes | None:
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

    def _work_out(self) -> KnownAxes | None:
        found = (self._known_from(source) for source in self._sources if source is not None)
        return next((known for known in found if known is not None), None)

    def _known_from(self, source: Made) -> KnownAxes | None:
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
        before = KnownAxes.of_shape(self.shape[:added], (PLACE,) * added)
        behind = known.with_sizes(self.shape[added:])
        return KnownAxes(before.axes + behind.axes, before.compositions + behind.compositions)

    def _known_by_strides(
        self, source: Made, known: KnownAxes, strides: Sequence[int], of_strides: Sequence[int], displacement: int
    ) -> KnownAxes:
        if self.shape == source.shape and strides == of_strides and not displacement:
            return known
        compositions = compositions_of_view(self.shape, strides, source.shape, of_strides, known.compositions)
        axes = [PLACE if composition is None else meaning_of(composition) for composition in compositions]
        if None in compositions:
            by_strides = _axes_by_strides(self.shape, strides, source.shape, of_strides, known.axes)
            for place, composition in enumerate(compositions):
                axes[place] = by_strides[place] if composition is None else axes[place]
        cuts = cuts_of_view(displacement, source.shape, of_strides, known.compositions)
        return KnownAxes(tuple(axes), tuple(compositions), known.origin, known.cuts + cuts)


class MadeByLayer(Made):
    """Made by a layer, which writes channels in some axis, counted from the last."""

    __slots__ = ("_channels_from_last", "_origin")

    def __init__(self, channels_from_last: int, origin: Origin | None) -> None:
        super().__init__(())
        self._channels_from_last = channels_from_last
        self._origin = origin

    def _work_out(self) -> KnownAxes | None:
        before = len(self.shape) - self._channels_from_last
        if before < 0:
            return None
        axes = (*(PLACE,) * before, CHANNEL, *(PLACE,) * (self._channels_from_last - 1))
        return KnownAxes.of_shape(self.shape, axes, self._origin)


class MadeOfSeveral(Made):
    """Several tensors beside each other, along an axis that they had or along a new one."""

    __slots__ = ("_axis",)

    def __init__(self, sources: Sequence[Made], function: Callable[..., Any], axis: object) -> None:
        super().__init__(sources, function)
        self._axis = axis

    def _work_out(self) -> KnownAxes | None:
        known = [source.settle() for source in self._sources if source is not None]
        first = known[0]
        shapes = {source.shape for source in self._sources if source is not None}
        if first is None or len(shapes) > 1 or not isinstance(self._axis, int):
            return super()._work_out()
        is_stacked = self._function is torch.stack
        told = {None if other is None else first.differs(other, is_stacked=is_stacked) for other in known[1:]}
        difference = told.pop() if len(told) == 1 else None
        axis, number = self._axis % len(self.shape), len(known)
        if is_stacked:
            if difference is None:
                return None
            new = KnownAxes.of_shape((number,), (difference,))
            return KnownAxes(
                first.axes[:axis] + new.axes + first.axes[axis:],
                first.compositions[:axis] + new.compositions + first.compositions[axis:],
            )
        old = first.compositions[axis]
        if old is None or difference is None:
            whole = _of_one_kind(first.axes[axis], self.shape[axis])
        else:
            whole = joined((Part(difference, number), *old))
        meaning = first.axes[axis] if whole is None else meaning_of(whole)
        return KnownAxes(
            (*first.axes[:axis], meaning, *first.axes[axis + 1 :]),
            (*first.compositions[:axis], whole, *first.compositions[axis + 1 :]),
            first.origin,
            first.cuts,
        )


class MadeByProduct(Made):
    """Made by a product of two activations, or of one with a constant."""

    __slots__ = ("_are_constant", "_labels", "_of_many_weights", "_origin")

    def __init__(
        self,
        product: Contraction,
        sources: Sequence[Made | None],
        are_constant: Sequence[bool],
        origin: Origin | None,
    ) -> None:
        super().__init__(sources)
        self._labels = (product.left_axes, product.right_axes, product.axes)
        self._are_constant = are_constant
        self._origin = origin
        #: The axes along which there is a weight of its own for each element: heads that are projected apart.
        self._of_many_weights: set[str] = set()
        for is_constant, operand, labels, others in (
            (are_constant[0], product.left, product.left_axes, product.right_axes),
            (are_constant[1], product.right, product.right_axes, product.left_axes),
        ):
            # Learned queries that are the same for all sequences are constants too, but repeated, or made by a layer.
            if is_constant and (isinstance(operand, nn.Parameter) or isinstance(viewed(operand), nn.Parameter)):
                places = zip(labels, operand.shape, operand.stride(), strict=True)
                self._of_many_weights |= {
                    label for label, size, step in places if label in others and size > 1 and step
                }

    def _hold_overlapping_windows(self) -> bool:
        return False

    def _work_out(self) -> KnownAxes | None:
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
        for label in self._of_many_weights.intersection(of_result):
            meanings[label] = CHANNEL
            compositions.pop(label, None)
        return self._with_labels(meanings, compositions)

    def _with_labels(self, meanings: dict[str, str], compositions: dict[str, Composition | None]) -> KnownAxes:
        whole: list[Composition | None] = []
        axes: list[str] = []
        for label, size in zip(self._labels[2], self.shape, strict=True):
            composition = compositions.get(label)
            if composition is None or size_of(composition) != size:
                composition = _of_one_kind(meanings[label], size)
            whole.append(composition)
            axes.append(meanings[label] if composition is None else meaning_of(composition))
        return KnownAxes(tuple(axes), tuple(whole), self._origin)


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
