"""Nested tensors, followed only to say of which module the attention cannot be read."""

from __future__ import annotations

from lightning_attn.capture.contraction import is_contraction
from lightning_attn.capture.isolation import in_backward
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.trail import Constant, Ragged
from lightning_attn.capture.softmax.walk import Walk
from lightning_attn.capture.softmax.written import WrittenAttention


def is_ragged(call: Operation) -> bool:
    """Whether an operation is one on nested tensors, or on what was made of them."""
    return any(operand.is_nested for operand in call.operands) or call.first(Ragged) is not None


def follow_ragged(walk: Walk, call: Operation) -> None:
    """Follow nested tensors from a product through a softmax to another product."""
    found = call.first(Ragged)
    ragged = None if found is None else found[1]
    if is_contraction(call.function):
        if ragged is not None and ragged.modules is not None:
            both = tuple(module for module in ragged.modules if module in walk.modules())
            walk.found(WrittenAttention.of_nested_tensors(call.operands[0].device, both))
            return
        is_product_of_data = not any(isinstance(followed, Constant) for followed in call.known)
        ragged = Ragged() if ragged is None and is_product_of_data and not in_backward() else None
    elif ragged is not None and call.plain_name == "softmax":
        ragged = Ragged(walk.modules())
    for tensor in call.results:
        walk.trail.set(tensor, ragged)
