"""Logits and weights that have lost their layout: followed only to say what becomes of them."""

from __future__ import annotations

from lightning_attn.capture.axes import KEY, LEFT, QUERY, RIGHT, is_view
from lightning_attn.capture.isolation import viewed
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.trail import Logits, Rearranged, Softmax, Weights
from lightning_attn.capture.softmax.walk import Walk


def loses_layout(call: Operation) -> bool:
    """Whether the layout of what comes out cannot be followed."""
    return _is_rearranged(call) or _puts_pieces_together(call)


def _is_rearranged(call: Operation) -> bool:
    """Whether it was lost before. Beside logits whose layout is known, what has none is a bias."""
    has_layout = any(isinstance(followed, (Logits, Weights)) for followed in call.known)
    return call.first(Rearranged) is not None and (not has_layout or call.plain_name == "cat")


def _puts_pieces_together(call: Operation) -> bool:
    """Whether logits or weights are written into memory that held none."""
    return (
        call.name in ("setitem", "copy")
        and not isinstance(call.known[0], (Logits, Weights))
        and any(isinstance(followed, (Logits, Weights)) for followed in call.known[1:])
    )


def follow_rearranged(walk: Walk, call: Operation) -> None:
    """Go on following what has lost its layout."""
    softmaxes: tuple[Softmax, ...] = ()
    size = 0
    for operand, followed in zip(call.operands, call.known, strict=True):
        if isinstance(followed, (Rearranged, Weights)):
            softmaxes += followed.softmaxes
        if isinstance(followed, (Rearranged, Weights, Logits)):
            size = max(size, operand.numel())
    if call.plain_name == "softmax" and not softmaxes:
        nothing = call.operands[0].new_empty(0)
        softmaxes = (Softmax(nothing, (QUERY, KEY), Logits((LEFT, RIGHT)), walk.modules(), version=0),)
    kept = Rearranged(tuple(dict.fromkeys(softmaxes)))
    for result in call.results:
        # What is smaller by far is a sum or a maximum, unless it is a part.
        is_part = any(is_view(result, operand) for operand in call.operands)
        if result.is_floating_point() and (is_part or 2 * result.numel() >= size):
            walk.trail.set(result, kept)
            whole = viewed(result) if result is call.operands[0] else None
            if whole is not None:
                walk.trail.set(whole, kept)
