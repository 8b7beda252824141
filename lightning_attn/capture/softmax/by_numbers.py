"""What only the numbers in tensors can tell: of some rows, as many as make chance unlikely."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lightning_attn.capture.isolation import isolated

#: How far from the softmax of their logits weights may be that no softmax function computed.
_TOLERANCE = 1e-2
#: How alike two products are of which one is of low precision.
_SIMILARITY_OF_PRODUCTS = 0.99
#: So many rows are looked at to tell whether they are.
_CHECKED_ROWS = 8


def is_product(result: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether numbers are those of a product times a factor, nearly: quantised ones are some per cent off."""
    if min(left.dim(), right.dim(), result.dim()) < 2 or left.shape[:-2] != right.shape[:-2]:
        return False
    if result.shape != (*left.shape[:-1], right.shape[-1]) or left.shape[-1] != right.shape[-2] or 0 in result.shape:
        return False
    with isolated(result.device):
        last = (-1,) * (result.dim() - 2)
        left_RD, right_DM, found_RM = left[last][-_CHECKED_ROWS:], right[last], result[last][-_CHECKED_ROWS:]
        expected, found = (left_RD.float() @ right_DM.float()).flatten(), found_RM.float().flatten()
        return bool(functional.cosine_similarity(expected, found, dim=0) > _SIMILARITY_OF_PRODUCTS)


def may_be_weights(tensor: Tensor) -> bool:
    """Whether no number in a tensor is negative."""
    with isolated(tensor.device):
        return not bool((tensor.detach() < 0).any())


def are_softmax_of(logits: Tensor, weights: Tensor, axis: int) -> bool:
    """Whether weights are the softmax of logits along an axis."""
    with isolated(weights.device):
        given, computed = (
            tensor.detach().movedim(axis, -1).flatten(0, -2)[-_CHECKED_ROWS:].float() for tensor in (logits, weights)
        )
        expected = given.softmax(-1)
        # Held against the largest weight: a row of many keys has small ones only.
        is_close = (expected - computed).abs() <= _TOLERANCE * expected.amax(-1, keepdim=True)
        return bool((is_close | (expected.isnan() & computed.isnan())).all())


def is_part(result: Tensor, tensor: Tensor) -> bool:
    """Whether an operation has set weights to zero and left the others, or raised them all alike as dropout does."""
    if result is tensor or result.shape != tensor.shape:
        return False
    with isolated(tensor.device):
        result, tensor = (t.detach().flatten(0, -2)[-_CHECKED_ROWS:].float() for t in (result, tensor))
        kept = result != 0
        factor = result[kept].nansum() / tensor[kept].nansum()
        is_alike = torch.isclose(result, factor * tensor, rtol=_TOLERANCE, atol=0, equal_nan=True)
        return not bool(factor < 1 - _TOLERANCE) and bool(is_alike[kept].all())
