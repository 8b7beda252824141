"""Following what has the layout of what it was made of: whatever the operation, if shapes and strides allow it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightning_attn.capture.axes import KEY, axes_after, is_view
from lightning_attn.capture.isolation import viewed
from lightning_attn.capture.refusals import changed_after_shift
from lightning_attn.capture.softmax.by_numbers import is_part
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.rearranged import follow_rearranged
from lightning_attn.capture.softmax.trail import (
    Exponentials,
    Logits,
    LogWeights,
    Mask,
    RowLogSum,
    RowMaximum,
    RowSum,
    Weights,
)
from lightning_attn.capture.softmax.walk import Walk

_CASTS = (
    "to",
    "type",
    "type_as",
    "float",
    "half",
    "bfloat16",
    "double",
    "contiguous",
    "clone",
    "detach",
    "cuda",
    "cpu",
)
#: Operations that change no difference between two logits of a row, hidden keys aside.
_KEEPS_DIFFERENCES = (*_CASTS, "masked_fill", "where", "add", "sub", "cat", "reshape")
#: Operations that change no weight.
_KEEPS_WEIGHTS = (*_CASTS, "nan_to_num", "reshape", "cat", "stack")


def keep(walk: Walk, call: Operation) -> None:
    """Go on following what has the layout of what it was made of."""
    weights = [(o, k) for o, k in zip(call.operands, call.known, strict=True) if isinstance(k, Weights)]
    logits, history = call.logits()
    if weights:
        _keep_weights(walk, call, weights)
    elif history is not None:
        keep_logits(walk, call, logits, history)
    else:
        _keep_rows(walk, call)


def keep_logits(walk: Walk, call: Operation, logits: Tensor, history: Logits, mask: Tensor | None = None) -> None:
    """Go on following logits that an operation was given.

    Args:
        walk: the forward pass.
        call: the operation.
        logits: the logits among its operands.
        history: what is known of them, and of what the operation does to them.
        mask: what it adds to them, or true where it hides keys.
    """
    for result in call.results:
        if not result.is_floating_point():
            continue
        axes = axes_after(result, logits, history.axes)
        if axes is None:
            follow_rearranged(walk, call)
            return
        kept = history
        if axes != history.axes:
            kept = replace(history, axes=axes, masks=(), has_unseen_mask=history.has_unseen_mask or bool(history.masks))
        if history.shift is not None and (
            axes != history.axes or not (is_view(result, logits) or call.plain_name in _KEEPS_DIFFERENCES)
        ):
            kept = replace(kept, refusal=changed_after_shift(call.name))
        if mask is not None and mask.dim() > 0:
            kept = replace(kept, masks=(*kept.masks, Mask(mask.detach(), result.shape)))
        walk.trail.set(result, kept)
        if result is logits:
            write_view_of_logits(walk, result)


def write_view_of_logits(walk: Walk, tensor: Tensor) -> None:
    """What was written into a view of logits may have been a mask for all of them."""
    whole = viewed(tensor)
    history = walk.trail.get(whole)
    if whole is not None and isinstance(history, Logits):
        walk.trail.set(whole, replace(history, has_unseen_mask=True))


def _keep_weights(walk: Walk, call: Operation, weights: list[tuple[Tensor, Weights]]) -> None:
    tensor, followed = weights[0]
    softmaxes = tuple(dict.fromkeys(softmax for _, other in weights for softmax in other.softmaxes))
    for result in call.results:
        if not result.is_floating_point():
            continue
        axes = axes_after(result, tensor, followed.axes)
        if axes is None:
            follow_rearranged(walk, call)
            return
        kept = replace(followed, softmaxes=softmaxes, axes=axes)
        if is_view(result, tensor) and result is not tensor:
            kept = replace(kept, first_column=followed.first_column + _skipped_columns(result, tensor, followed))
        elif not all(softmax.changed_by for softmax in softmaxes) and not (
            call.name.endswith("dropout") or call.plain_name in _KEEPS_WEIGHTS or is_part(result, tensor)
        ):
            kept.change(call.name)
        walk.trail.set(result, kept)


def _skipped_columns(result: Tensor, tensor: Tensor, weights: Weights) -> int:
    """How many columns were cut off in front in a view."""
    axis = weights.axes.index(KEY)
    stride = tensor.stride(axis)
    if result.numel() == tensor.numel() or stride == 0:
        return 0
    return (result.storage_offset() - tensor.storage_offset()) % max(1, stride * tensor.shape[axis]) // stride


def _keep_rows(walk: Walk, call: Operation) -> None:
    """Go on following what a softmax is written with: a number for each row, exponentials, logarithms."""
    for operand, followed in zip(call.operands, call.known, strict=True):
        if isinstance(followed, (RowMaximum, RowLogSum, RowSum, LogWeights, Exponentials)):
            for result in call.results:
                if result.numel() == operand.numel():
                    walk.trail.set(result, followed)
