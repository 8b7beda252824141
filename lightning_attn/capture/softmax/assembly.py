"""Logits and weights that are put together of several, or written into."""

from __future__ import annotations

from dataclasses import replace

from lightning_attn.capture.axes import SHARED
from lightning_attn.capture.refusals import SHIFTS_OF_SEVERAL
from lightning_attn.capture.softmax.layout import keep, write_view_of_logits
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.trail import Logits, Weights
from lightning_attn.capture.softmax.walk import Step, Walk


def _setitem(walk: Walk, call: Operation) -> None:
    """Something is written into a part of them."""
    for tensor, followed in zip(call.operands[:1], call.known[:1], strict=True):
        if isinstance(followed, Logits):
            walk.trail.set(tensor, replace(followed, has_unseen_mask=True))
            write_view_of_logits(walk, tensor)
        elif isinstance(followed, Weights):
            followed.change("an assignment")
            walk.trail.set(tensor, followed)


def _cat(walk: Walk, call: Operation) -> None:
    """Something may be put beside the logits, as learned sinks are."""
    logits, history = call.logits()
    if history is None:
        keep(walk, call)
        return
    axis = call.argument(1, "dim", 0) % logits.dim()
    parts = [followed for followed in call.known if isinstance(followed, Logits)]
    if len(parts) > 1 or history.axes[axis] == SHARED:
        # Learned keys beside keys of data, as of tokens that are the same in all sequences, make no codebook.
        without_data = frozenset.intersection(*(part.without_data for part in parts))
        history = replace(history, masks=(), has_unseen_mask=True, without_data=without_data)
    walk.trail.set(call.results[0], history)


def _stack(walk: Walk, call: Operation) -> None:
    """A new axis at a place that is known, as where heads are computed one by one."""
    _, followed = call.first(Weights) or call.logits()
    if followed is None:
        keep(walk, call)
        return
    result, axis = call.results[0], call.argument(1, "dim", 0)
    axis %= result.dim()
    axes = (*followed.axes[:axis], SHARED, *followed.axes[axis:])
    if isinstance(followed, Weights):
        each = [known.softmaxes for known in call.known if isinstance(known, Weights)]
        walk.trail.set(result, replace(followed, softmaxes=tuple(dict.fromkeys(sum(each, ()))), axes=axes))
        return
    refusal = followed.refusal if followed.shift is None else SHIFTS_OF_SEVERAL
    walk.trail.set(result, replace(followed, axes=axes, masks=(), has_unseen_mask=True, shift=None, refusal=refusal))


#: By the plain names of the operations.
STEPS: dict[str, Step] = {"setitem": _setitem, "cat": _cat, "stack": _stack}
