"""Telling of attentions that were seen in part: whose softmax, or whose way to or from it, could not be followed."""

from __future__ import annotations

from torch import Tensor

from lightning_attn.capture.axes import KEY, SHARED, Contraction
from lightning_attn.capture.isolation import in_backward, written_to
from lightning_attn.capture.refusals import (
    EXPONENTIALS_OF_VALUES,
    LOST_LOGITS,
    LOST_WEIGHTS,
    Refusal,
    softmax_inside,
)
from lightning_attn.capture.softmax.by_numbers import may_be_weights
from lightning_attn.capture.softmax.factors import Factor
from lightning_attn.capture.softmax.found import tell, tell_of_rearranged
from lightning_attn.capture.softmax.normalisation import begin_weights
from lightning_attn.capture.softmax.open_trails import place_of
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.roles import softmax_along
from lightning_attn.capture.softmax.trail import Exponentials, Logits, Rearranged, Softmax, Weights
from lightning_attn.capture.softmax.walk import Walk


def refuse(walk: Walk, logits: Tensor, history: Logits, axis: int, refusal: Refusal) -> None:
    """Tell of an attention whose softmax over an axis cannot be seen."""
    softmax = softmax_along(walk, logits, history, axis)
    if softmax is not None:
        softmax.refuse(refusal)
        tell(walk, Weights((softmax,), softmax.axes), logits, None)


def refuse_rearranged(walk: Walk, left: Factor, right: Factor) -> None:
    """Weights that multiply values in a layout that could not be followed."""
    weights, value = (left, right) if isinstance(left.followed, Rearranged) else (right, left)
    if isinstance(weights.followed, Rearranged) and value.followed is None and not in_backward():
        tell_of_rearranged(walk, weights.followed.softmaxes)


def refuse_exponentials(walk: Walk, product: Contraction, left: Factor, right: Factor) -> None:
    """Exponentials that multiply values before they are divided by their sum."""
    factor, value = (left, right) if isinstance(left.followed, Exponentials) else (right, left)
    exponentials = factor.followed
    assert isinstance(exponentials, Exponentials)
    for axis, label in enumerate(factor.labels):
        if label in product.summed and value.followed is None:
            refuse(walk, exponentials.logits, exponentials.history, axis, EXPONENTIALS_OF_VALUES)


def refuse_what_multiplies_values(walk: Walk, product: Contraction, left: Factor, right: Factor) -> None:
    """Tell of values that are multiplied with what was made of logits, or of weights, where it was not seen."""
    for factor, value in ((left, right), (right, left)):
        if value.followed is not None:
            continue
        if isinstance(factor.followed, Logits):
            _refuse_softmax_inside(walk, product, factor.tensor, factor.followed, factor.labels)
        elif factor.followed is None and walk.open.has_weights:
            _refuse_lost_weights(walk, product, factor)


def _refuse_softmax_inside(
    walk: Walk, product: Contraction, tensor: Tensor, history: Logits, labels: tuple[str, ...]
) -> None:
    """Logits that a function into which nothing can see may have made weights of."""
    if history.opaque and may_be_weights(tensor):
        for axis, label in enumerate(labels):
            if label in product.summed and history.axes[axis] != SHARED:
                refuse(walk, tensor, history, axis, softmax_inside(history.opaque))


def _refuse_lost_weights(walk: Walk, product: Contraction, factor: Factor) -> None:
    """What is unknown, and has the shape of a softmax in this module that has multiplied nothing."""
    modules = walk.modules()
    place = place_of(modules, factor.tensor.shape)
    axes = walk.open.weights(place)
    if axes is not None and factor.labels[axes.index(KEY)] in product.summed:
        softmax = Softmax(
            factor.tensor.detach(),
            axes,
            Logits(axes, place=place),
            modules,
            written_to(factor.tensor),
            refusal=LOST_WEIGHTS,
        )
        tell(walk, Weights((softmax,), axes), factor.tensor, None)


def follow_softmax_of_unknown(walk: Walk, call: Operation) -> None:
    """Logits that went through something unseen on their way to the softmax, if they have the shape of some."""
    tensor, axis = call.operands[0], call.axis()
    place = walk.place(tensor.shape)
    axes = walk.open.logits(place)
    if axes is not None and axis is not None:
        history = Logits(axes, refusal=LOST_LOGITS, place=place)
        begin_weights(walk, softmax_along(walk, tensor, history, axis % tensor.dim()), call.results[0])
