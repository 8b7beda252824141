"""What no data went into: weights of the model, numbers, and what is computed of these alone. It is no activation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lightning_attn.capture.axes import is_view
from lightning_attn.capture.module_tree import parameters_of
from lightning_attn.capture.softmax.factors import Factor
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.trail import COMPUTED_CONSTANT, CONSTANT, Constant, Logits
from lightning_attn.capture.softmax.walk import Walk

#: Of their operand these take nothing but the shape.
TAKE_THE_SHAPE = {
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor),
}
#: Data that are drawn, of nothing.
_DRAWS = {"rand", "randn", "randint", "normal", "bernoulli"}
#: These compute something of two weights of the model, as products do.
_COMPUTES = ("conv", "bilinear")


def follow_constants(walk: Walk, call: Operation, is_product: bool) -> bool:
    """Follow what no data went into; whether this was such an operation, or one of which nothing is known any more."""
    if call.function in TAKE_THE_SHAPE:
        for tensor in call.results:
            walk.trail.set(tensor, CONSTANT)
        return True
    if call.name.endswith("_like"):  # data that are drawn
        return True
    if not all(isinstance(followed, Constant) for followed in call.known):
        return False
    if call.name not in _DRAWS:
        is_computed = is_product or COMPUTED_CONSTANT in call.known or call.name.startswith(_COMPUTES)
        for tensor in call.results:
            walk.trail.set(tensor, COMPUTED_CONSTANT if is_computed else CONSTANT)
    return True


def may_be_learned_queries(factor: Factor) -> bool:
    """Whether a constant may be learned queries of several heads, or their keys. Matrices are weights of a layer."""
    return factor.followed == COMPUTED_CONSTANT and factor.tensor.dim() > 2


def meet_replaced_parameters(walk: Walk, call: Operation) -> bool:
    """Meet what stands in the place of parameters, as under `functional_call`, if an operand is of that kind."""
    may_be = [o for o, k in zip(call.operands, call.known, strict=True) if k is None or isinstance(k, Logits)]
    if call.function is functional.linear:
        may_be = [operand for operand in may_be if operand is call.argument(1, "weight")]
    if not may_be:
        return False
    of_module = next(filter(None, (list(parameters_of(module)) for module in walk.modules())), [])
    met = [operand for operand in may_be if any(is_view(operand, parameter) for parameter in of_module)]
    if met:
        for tensor in (*parameters_of(walk.model), *met):
            if not isinstance(walk.trail.get(tensor), Constant):
                walk.trail.set(tensor, CONSTANT)
    return bool(met)
