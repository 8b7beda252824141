"""Products: of queries and keys, where a way begins, and of weights and values, where it ends."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn import functional

from lightning_attn.capture.axes import LEFT, RIGHT, SHARED, Contraction
from lightning_attn.capture.isolation import in_backward
from lightning_attn.capture.refusals import OVER_CHANNELS, OVERLAPPING_WINDOWS, Refusal
from lightning_attn.capture.softmax.constants import may_be_learned_queries
from lightning_attn.capture.softmax.factors import Factor, factors_of
from lightning_attn.capture.softmax.logits import times
from lightning_attn.capture.softmax.lost import refuse_exponentials, refuse_rearranged, refuse_what_multiplies_values
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.trail import CONSTANT, Constant, Exponentials, Logits, Mask, Rearranged, Weights
from lightning_attn.capture.softmax.values import multiply
from lightning_attn.capture.softmax.walk import Walk


def follow_product(walk: Walk, product: Contraction, call: Operation) -> bool:
    """Whether the product ends here what was followed, or begins it."""
    left, right = factors_of(walk, product)
    if isinstance(left.followed, Rearranged) or isinstance(right.followed, Rearranged):
        refuse_rearranged(walk, left, right)
        return True
    if call.function is functional.linear and isinstance(right.followed, (Constant, Logits, type(None))):
        right = replace(right, followed=CONSTANT)  # the weights of a layer, whatever they were computed of
        walk.trail.set(right.tensor, CONSTANT)
    if isinstance(left.followed, Weights) or isinstance(right.followed, Weights):
        return multiply(walk, product, left, right)
    if isinstance(left.followed, Exponentials) or isinstance(right.followed, Exponentials):
        refuse_exponentials(walk, product, left, right)
        return True
    are_constants = isinstance(left.followed, Constant) and isinstance(right.followed, Constant)
    if are_constants and not (may_be_learned_queries(left) and may_be_learned_queries(right)):
        return False
    if left.followed is CONSTANT or right.followed is CONSTANT:
        return not _mixes_heads(product, left, right)
    refuse_what_multiplies_values(walk, product, left, right)
    axes = product.meaning()
    if (LEFT in axes or RIGHT in axes) and not in_backward():
        begin_logits(walk, product, call, left, right)
    return True


def _mixes_heads(product: Contraction, left: Factor, right: Factor) -> bool:
    """Whether weights of the model mix heads of logits. A layer on tokens or channels makes something else of them."""
    logits = left if isinstance(left.followed, Logits) else right
    return isinstance(logits.followed, Logits) and all(
        label not in product.summed or axis == SHARED
        for label, axis in zip(logits.labels, logits.followed.axes, strict=True)
    )


def begin_logits(walk: Walk, product: Contraction, call: Operation, left: Factor, right: Factor) -> None:
    """Begin to follow a product of two activations, which may be queries and keys."""
    axes, result = product.meaning(), call.results[0]
    place = walk.place(result.shape)
    walk.open.begin_logits(place, axes)
    # With a factor of 0, what is added may be memory that nobody has written.
    factor = call.kwargs.get("beta", 1) if call.name in ("addmm", "baddbmm") else 0
    without_data = frozenset(
        side for side, operand in ((LEFT, left), (RIGHT, right)) if isinstance(operand.followed, Constant)
    )
    walk.trail.set(
        result,
        Logits(
            axes,
            masks=(Mask(times(call.operands[0], factor), result.shape),) if factor else (),
            without_data=without_data,
            doubts=_doubts(walk, product),
            refusal=OVER_CHANNELS if walk.channels.sums_over_tokens(product) else None,
            place=place,
            is_reordered=walk.channels.are_reordered(product.left, product.right),
            dtype=result.dtype,
        ),
    )


def _doubts(walk: Walk, product: Contraction) -> dict[str, Refusal]:
    """Of the sides, `LEFT` or `RIGHT`, why their axes cannot be what they would be taken for."""
    doubts = product.doubts()
    for side, operand in ((LEFT, product.left), (RIGHT, product.right)):
        if walk.channels.overlap(operand):
            doubts[side] = OVERLAPPING_WINDOWS
    return doubts


def follow_channels(walk: Walk, product: Contraction | None, result: Tensor) -> None:
    """Follow the channels of a product's operands; one with a weight is a layer that is written out."""
    if product is None or result.is_nested:
        return
    operands = (product.left, product.right)
    constant = next((operand for operand in operands if isinstance(walk.trail.get(operand), Constant)), None)
    walk.channels.follow_product(product, result, constant)
