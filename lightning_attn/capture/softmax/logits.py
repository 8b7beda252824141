"""From the product to the softmax: what is added to logits, subtracted from them or put in their place.

What hides keys among it is noted as a mask; a subtracted row maximum changes no softmax, and is added back later.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_attn.capture.call import HIDING_PENALTY
from lightning_attn.capture.isolation import isolated
from lightning_attn.capture.softmax.layout import keep, keep_logits
from lightning_attn.capture.softmax.normalisation import begin_log_weights
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.roles import softmax_along
from lightning_attn.capture.softmax.trail import Logits, RowLogSum, RowMaximum, Weights
from lightning_attn.capture.softmax.walk import Step, Walk


def times(mask: Tensor, factor: float) -> Tensor:
    """What was added to logits: a tensor times a number."""
    with isolated(mask.device):
        return mask.detach() if factor == 1 else mask.detach() * factor


def _hides(value: Any) -> bool:
    """Whether a key is hidden by having its logit replaced by this."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and float(value.detach()) <= HIDING_PENALTY
    return isinstance(value, (int, float)) and value <= HIDING_PENALTY


def _add(walk: Walk, call: Operation) -> None:
    if call.first(Weights):
        keep(walk, call)
        return
    logits, history = call.logits()
    others = [o for o in call.operands if o is not logits]
    if not history or not others:
        keep(walk, call)
        return
    other = walk.trail.get(others[0])
    if isinstance(other, Logits):
        keep_logits(walk, call, logits, replace(history, masks=history.masks + other.masks))
    else:
        keep_logits(walk, call, logits, history, mask=times(others[0], call.kwargs.get("alpha", 1)))


def _sub(walk: Walk, call: Operation) -> None:
    logits, history = call.logits()
    if history is None or call.first(Weights) or len(call.operands) < 2 or call.operands[0] is not logits:
        keep(walk, call)
        return
    other, followed = call.operands[1], call.known[1]
    if isinstance(followed, RowLogSum):
        begin_log_weights(walk, softmax_along(walk, logits, history, followed.axis), call.results[0])
    elif isinstance(followed, RowMaximum):
        shift = other.detach()[(None,) * (logits.dim() - other.dim())]
        shift = shift if history.shift is None else history.shift + shift
        keep_logits(walk, call, logits, replace(history, shift=shift))
    else:
        keep_logits(walk, call, logits, history, mask=times(other, -call.kwargs.get("alpha", 1)))


def _masked_fill(walk: Walk, call: Operation) -> None:
    logits, history = call.logits()
    if history is None or call.operands[0] is not logits:
        keep(walk, call)
        return
    value = call.argument(2, "value")
    keep_logits(walk, call, logits, history, mask=call.argument(1, "mask") if _hides(value) else None)


def _where(walk: Walk, call: Operation) -> None:
    logits, history = call.logits()
    first = call.argument(0, "condition")
    is_method = isinstance(first, Tensor) and first.dtype != torch.bool
    names = ("input", "condition", "other") if is_method else ("condition", "input", "other")
    given = {name: call.argument(place, name) for place, name in enumerate(names)}
    condition = given["condition"]
    if history is None or not isinstance(condition, Tensor) or condition.dtype != torch.bool:
        keep(walk, call)
        return
    keeps = given["input"] is logits
    replacement = given["other"] if keeps else given["input"]
    if isinstance(replacement, Tensor) and replacement.numel() > 1:
        history = replace(history, has_unseen_mask=True)
    hidden = ~condition if keeps else condition
    keep_logits(walk, call, logits, history, mask=hidden if _hides(replacement) else None)


#: By the plain names of the operations.
STEPS: dict[str, Step] = {"add": _add, "sub": _sub, "masked_fill": _masked_fill, "where": _where}
