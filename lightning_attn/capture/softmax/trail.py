"""What is known of tensors between the product of queries and keys and the product with the values.

A trail leads from logits to a softmax to weights; each kind of thing on it is a class here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_attn.capture.axes import Axes, is_view
from lightning_attn.capture.call import HIDING_PENALTY
from lightning_attn.capture.composition import Division
from lightning_attn.capture.notes import Notes
from lightning_attn.capture.refusals import Refusal
from lightning_attn.capture.softmax.open_trails import Place


@dataclass(frozen=True)
class Mask:
    """What hides keys: booleans that are true where it does, or a penalty that was added to logits of some shape."""

    tensor: Tensor
    shape: torch.Size

    def hidden(self) -> Tensor:
        """Where keys are hidden, in the shape of the logits."""
        hidden = self.tensor if self.tensor.dtype == torch.bool else self.tensor <= HIDING_PENALTY
        return hidden.expand(self.shape)


@dataclass(frozen=True)
class Logits:
    """Descends from a product of two activations.

    Args:
        axes: what its axes mean; `LEFT` and `RIGHT` are the tokens that are compared.
        masks: what hides keys in it.
        has_unseen_mask: whether something was written into it that may have been a mask.
        shift: what was subtracted from each row.
        without_data: the axes, `LEFT` or `RIGHT`, of an operand that no data went into.
        doubts: of the axes, `LEFT` or `RIGHT`, why they cannot hold queries; see `Contraction.doubts`.
        refusal: why it cannot be read.
        place: where the product was computed, and in what shape.
        opaque: the name of a function into which nothing can see, and through which it went.
        is_reordered: whether queries are known to be in another order than keys.
        dtype: what the product was rounded to; ``None`` where that is not known.
    """

    axes: Axes
    masks: tuple[Mask, ...] = ()
    has_unseen_mask: bool = False
    shift: Tensor | None = None
    without_data: frozenset[str] = frozenset()
    doubts: Mapping[str, Refusal] = field(default_factory=dict)
    refusal: Refusal | None = None
    place: Place | None = None
    opaque: str | None = None
    is_reordered: bool = False
    dtype: torch.dtype | None = None


@dataclass(eq=False)
class Softmax:
    """A softmax that may be an attention's, from when it is taken until its result multiplies values.

    Args:
        logits: what entered it.
        axes: what their axes mean; `KEY` is the one it is taken over.
        history: how they were made.
        modules: the modules that were computing, from the innermost outwards.
        version: how often the logits had been written to.
        heads: the shared axes divided into sequences and heads; ``None`` where that is not known.
        changed_by: the operation that made something else of its result.
        refusal: why it cannot be read.
        is_done: whether its result has multiplied values.
    """

    logits: Tensor
    axes: Axes
    history: Logits
    modules: tuple[nn.Module, ...]
    version: int
    heads: Division | None = None
    changed_by: str | None = None
    refusal: Refusal | None = None
    is_done: bool = False

    def refuse(self, refusal: Refusal) -> None:
        """It cannot be read, for another reason than any before; what was a piece of an attention stays one."""
        was_piece = self.refusal is not None and self.refusal.is_piece
        self.refusal = replace(refusal, is_piece=refusal.is_piece or was_piece)

    def let_go(self) -> None:
        """Hold nothing any more: others may still hold the weights, and by them this object."""
        self.logits = self.logits.new_empty(0)
        self.history = replace(self.history, masks=(), shift=None)


@dataclass(frozen=True)
class RowMaximum:
    """The largest logit of each row, or of all."""


@dataclass(frozen=True)
class RowLogSum:
    """The logarithm of the sum of the exponentials along an axis."""

    axis: int


@dataclass(frozen=True)
class LogWeights:
    """The logarithm of a softmax."""

    softmax: Softmax


@dataclass(frozen=True)
class Exponentials:
    """The exponentials of logits, not yet divided by their sum."""

    logits: Tensor
    history: Logits


@dataclass(frozen=True)
class RowSum:
    """The sum of exponentials along an axis."""

    axis: int


@dataclass(frozen=True)
class Weights:
    """The result of one softmax, or what was made of several, on the way to the values.

    Args:
        softmaxes: where it came from.
        axes: what its axes mean.
        first_column: which of the softmax's keys its first column belongs to.
    """

    softmaxes: tuple[Softmax, ...]
    axes: Axes
    first_column: int = 0

    def change(self, operation: str) -> None:
        """An operation has made something else of them than their softmaxes gave."""
        for softmax in self.softmaxes:
            softmax.changed_by = softmax.changed_by or operation


@dataclass(frozen=True)
class Rearranged:
    """Logits or weights in a layout that cannot be followed: pieces that were put together, diagonals made columns.

    Args:
        softmaxes: whose weights are in it; none as long as it is logits.
    """

    softmaxes: tuple[Softmax, ...] = ()


@dataclass(frozen=True)
class WeightedValues:
    """Every value times its weight, not yet summed over the keys."""

    weights: Weights
    tensor: Tensor
    key_axis: int
    value: Tensor | None


@dataclass(frozen=True)
class Constant:
    """A weight of the model or a number that no data went into; or made of one such tensor alone.

    Args:
        is_computed: whether it is a product of two such, as a learned query that a layer projects. Such queries are
            compared with keys; as keys or values they hold no data, and what compares with them is a codebook.
    """

    is_computed: bool = False


@dataclass(frozen=True)
class Ragged:
    """Descends from a product of two nested tensors, whose axes have no meaning that could be followed.

    Args:
        modules: the modules that took a softmax of it; ``None`` where none was taken yet.
    """

    modules: tuple[nn.Module, ...] | None = None


Followed = (
    Constant
    | Ragged
    | Logits
    | RowMaximum
    | RowLogSum
    | LogWeights
    | Exponentials
    | RowSum
    | Weights
    | WeightedValues
    | Rearranged
)


CONSTANT = Constant()
COMPUTED_CONSTANT = Constant(is_computed=True)
SomeFollowed = TypeVar("SomeFollowed", bound=Followed)


class Trail:
    """What is known of tensors, for as long as they live.

    Args:
        constants: tensors that live as long as this does, and that no data went into.
    """

    def __init__(self, constants: Iterable[Tensor] = ()) -> None:
        self._constants = {id(tensor): tensor for tensor in constants}
        self._known: Notes[Followed] = Notes()

    def get(self, thing: object) -> Followed | None:
        """What is known of a tensor."""
        known = self._known.get(thing)
        if known is None and (self._constants.get(id(thing)) is thing or type(thing) is nn.Parameter):
            return CONSTANT
        return known

    def set(self, tensor: Tensor, followed: Followed | None) -> None:
        """Know something of a tensor from now on, or nothing any more."""
        if followed is None:
            self._known.drop(tensor)
            self._constants.pop(id(tensor), None)
        else:
            self._known.set(tensor, followed)

    def write_data(self, tensor: Tensor) -> None:
        """Data were written into a tensor: what shares its memory is no constant any more."""
        self.set(tensor, None)
        for other, followed in self._known.items():
            if isinstance(followed, Constant) and is_view(other, tensor):
                self.set(other, None)
        for other in list(self._constants.values()):
            if is_view(other, tensor):
                self.set(other, None)
