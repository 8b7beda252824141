"""Functions into which nothing can see: scripts, functions with a gradient of their own, operators of a library.

What went in comes out in some way, where it has the shape; what that did to it, numbers have to tell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_attn.capture.axes import KEY, LEFT, RIGHT, SHARED
from lightning_attn.capture.isolation import in_backward
from lightning_attn.capture.refusals import values_inside
from lightning_attn.capture.softmax.by_numbers import is_product
from lightning_attn.capture.softmax.found import tell
from lightning_attn.capture.softmax.layout import keep
from lightning_attn.capture.softmax.lost import refuse
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.trail import COMPUTED_CONSTANT, CONSTANT, Constant, Logits, Weights
from lightning_attn.capture.softmax.walk import Walk


def nothing_is_known(*_: Any) -> None:
    """Stands for a function that torch does not tell."""


def follow_unseen(walk: Walk, call: Operation) -> None:
    """Follow what such a function was given into what it gave."""
    if any(tensor.is_nested for tensor in (*call.operands, *call.results)):
        return
    if all(isinstance(followed, Constant) for followed in call.known):
        for tensor in call.results:
            if walk.trail.get(tensor) is None:
                walk.trail.set(tensor, COMPUTED_CONSTANT if len(call.known) > 1 else CONSTANT)
        return
    logits, weights = call.first(Logits), call.first(Weights)
    if not logits and not weights:
        keep(walk, call)
        begin_unseen_product(walk, call)
    elif not _refuse_values_inside(walk, call, logits, weights):
        _keep_unseen(walk, call)


def begin_unseen_product(walk: Walk, call: Operation) -> None:
    """Begin to follow what turns out to be a product of two activations, as of a kernel of low precision."""
    factors = [o for o, k in zip(call.operands, call.known, strict=True) if k is None and o.is_floating_point()]
    if len(factors) != 2 or len(call.results) != 1 or walk.trail.get(call.results[0]) is not None or in_backward():
        return
    result, (left, right) = call.results[0], factors
    axes = (SHARED,) * (result.dim() - 2) + (LEFT, RIGHT)
    if any(is_product(result, left, other) for other in (right, right.mT if right.dim() > 1 else right)):
        place = walk.place(result.shape)
        walk.open.begin_logits(place, axes)
        walk.trail.set(result, Logits(axes, has_unseen_mask=True, place=place, opaque=call.name))


def _keep_unseen(walk: Walk, call: Operation) -> None:
    """Go on following logits and weights, of which something may have been hidden inside."""
    # What was seen inside is known already. Memory that was only made there is known too, for a constant.
    unknown = [r for r in call.results if isinstance(walk.trail.get(r), (Constant, type(None)))]
    for tensor in unknown:
        walk.trail.set(tensor, None)
    if len(unknown) == len(call.results):
        keep(walk, call)
    for result in call.results:
        followed = walk.trail.get(result)
        if isinstance(followed, Logits):
            walk.trail.set(result, replace(followed, has_unseen_mask=True, opaque=call.name))


def _refuse_values_inside(
    walk: Walk, call: Operation, logits: tuple[Tensor, Logits] | None, weights: tuple[Tensor, Weights] | None
) -> bool:
    """Tell of weights, or logits, that a function has multiplied with values that it was also given, if it has."""
    for value, followed in zip(call.operands, call.known, strict=True):
        if followed is not None or value.dim() < 2 or not value.is_floating_point():
            continue
        entered = [known[0].shape for known in (logits, weights) if known]
        outputs = [result.shape for result in call.results if result.dim() > 1 and walk.trail.get(result) is None]
        if any(shape in entered for shape in outputs) or not any(shape[-1] == value.shape[-1] for shape in outputs):
            continue
        if weights and value.shape[-2] == weights[0].shape[weights[1].axes.index(KEY)]:
            for softmax in weights[1].softmaxes:
                softmax.refuse(values_inside("weights", call.name))
            tell(walk, weights[1], weights[0], None)
            return True
        if logits and value.shape[-2] == logits[0].shape[-1]:
            refuse(walk, logits[0], logits[1], logits[0].dim() - 1, values_inside("logits", call.name))
            return True
    return False
