"""The ways to write a softmax: by its function, by its logarithm, or as exponentials over their sum."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lightning_attn.capture.axes import KEY, is_view
from lightning_attn.capture.refusals import DRAWN_WEIGHTS, NOT_THEIR_SOFTMAX, OVERWRITTEN_BY_SOFTMAX
from lightning_attn.capture.softmax.by_numbers import are_softmax_of
from lightning_attn.capture.softmax.layout import keep
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.roles import softmax_along, softmax_of
from lightning_attn.capture.softmax.trail import (
    Exponentials,
    Logits,
    LogWeights,
    RowLogSum,
    RowMaximum,
    RowSum,
    Softmax,
    Weights,
)
from lightning_attn.capture.softmax.walk import Step, Walk

#: The functions that compute a softmax.
SOFTMAXES = {functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}


def begin_weights(walk: Walk, softmax: Softmax | None, weights: Tensor) -> None:
    """Go on with the result of a softmax, if it is one."""
    if softmax is not None:
        walk.trail.set(weights, Weights((softmax,), softmax.axes))


def begin_log_weights(walk: Walk, softmax: Softmax | None, logarithms: Tensor) -> None:
    """Go on with the logarithm of a softmax, if it is one."""
    walk.trail.set(logarithms, None if softmax is None else LogWeights(softmax))


def _begin_computed_weights(walk: Walk, softmax: Softmax | None, weights: Tensor) -> None:
    """Go on with weights that no softmax function computed, if they are the softmax that they should be."""
    if softmax is not None and not are_softmax_of(softmax.logits, weights, softmax.axes.index(KEY)):
        softmax.refuse(NOT_THEIR_SOFTMAX)
    begin_weights(walk, softmax, weights)


def _softmax(walk: Walk, call: Operation) -> None:
    softmax = softmax_of(walk, call)
    if softmax is not None and is_view(call.results[0], softmax.logits):
        softmax.refuse(OVERWRITTEN_BY_SOFTMAX)
    begin_weights(walk, softmax, call.results[0])


def _gumbel_softmax(walk: Walk, call: Operation) -> None:
    """Weights that are drawn."""
    logits, history = call.logits()
    axis = call.argument(4, "dim", -1)
    softmax = None if history is None else softmax_along(walk, logits, history, axis % logits.dim())
    if softmax is not None:
        softmax.refuse(DRAWN_WEIGHTS)
    begin_weights(walk, softmax, call.results[0])


def _log_softmax(walk: Walk, call: Operation) -> None:
    begin_log_weights(walk, softmax_of(walk, call), call.results[0])


def _max(walk: Walk, call: Operation) -> None:
    if len(call.operands) > 1:  # the larger of two: as masked logits are kept finite
        keep(walk, call)
    elif call.first(Logits):
        walk.trail.set(call.results[0], RowMaximum())


def _logsumexp(walk: Walk, call: Operation) -> None:
    logits, history = call.logits()
    axis = call.axis()
    if history is not None and axis is not None:
        walk.trail.set(call.results[0], RowLogSum(axis % logits.dim()))


def _exp(walk: Walk, call: Operation) -> None:
    tensor, followed = call.operands[0], call.known[0]
    if isinstance(followed, Logits):
        # In place, what entered is gone; nothing can be told of it then.
        if call.results[0] is not tensor:
            walk.trail.set(call.results[0], Exponentials(tensor.detach(), followed))
    elif isinstance(followed, LogWeights):
        _begin_computed_weights(walk, followed.softmax, call.results[0])


def sum_exponentials(walk: Walk, call: Operation) -> None:
    """A sum along an axis, which may be the one that exponentials are divided by."""
    axis = call.axis()
    if isinstance(call.known[0], Exponentials) and axis is not None:
        walk.trail.set(call.results[0], RowSum(axis % call.operands[0].dim()))


def divide_by_row_sum(walk: Walk, call: Operation) -> None:
    """A quotient, which is a softmax if it is one of exponentials and their sum; or a product with one over it."""
    exponentials = call.first(Exponentials)
    total = call.first(RowSum)
    if exponentials and total:
        followed = exponentials[1]
        softmax = softmax_along(walk, followed.logits, followed.history, total[1].axis)
        _begin_computed_weights(walk, softmax, call.results[0])
    else:
        keep(walk, call)


#: By the plain names of the operations.
STEPS: dict[str, Step] = {
    "softmax": _softmax,
    "gumbel_softmax": _gumbel_softmax,
    "log_softmax": _log_softmax,
    "max": _max,
    "logsumexp": _logsumexp,
    "exp": _exp,
    "div": divide_by_row_sum,
}
