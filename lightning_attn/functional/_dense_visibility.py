"""Which keys each query may see, of weights that are given as a dense tensor.

Shape suffixes: N queries, M keys; "..." sequences, heads, or anything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def in_working_precision(name: str, weights: Tensor) -> Tensor:
    """Weights in the precision they are computed with: float64 stays, all others are taken to float32.

    Raises:
        ValueError: if they are not a floating-point matrix, or several.
    """
    if not weights.is_floating_point() or weights.dim() < 2:
        raise ValueError(
            f"`{name}` must be floating-point, of shape (..., N, M), got {weights.dtype} of {tuple(weights.shape)}."
        )
    return weights if weights.dtype == torch.float64 else weights.float()


def visible_keys(shape: Sequence[int], mask: Tensor | None, is_causal: bool, device: torch.device) -> Tensor:
    """Where a key may be seen.

    Args:
        shape: the shape (..., N, M) of the weights.
        mask: boolean, true where a key may be seen, and of a shape that broadcasts to it; ``None`` for every key.
        is_causal: whether, besides, query ``i`` sees the keys ``j <= i`` alone.
        device: where.

    Returns:
        A boolean tensor of that shape.

    Raises:
        ValueError: if the mask is not boolean or does not broadcast.
    """
    visible = torch.ones(shape[-2:], dtype=torch.bool, device=device)
    if is_causal:
        visible = visible.tril()
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"`mask` must be boolean, true where a key may be seen, got {mask.dtype}.")
        try:
            visible = visible & mask.to(device).expand(shape)
        except RuntimeError as error:
            raise ValueError(f"`mask` must broadcast to {tuple(shape)}, got {tuple(mask.shape)}.") from error
    return visible.expand(shape)


def present_rows(weights: Tensor, visible: Tensor, is_self_attention: bool) -> Tensor:
    """The rows that have a distribution, (..., N): a visible key, finite weights on those, no padding.

    In self-attention a token that nobody may see as a key is padding.
    """
    is_finite = (weights.isfinite() | ~visible).all(-1)
    present = visible.any(-1) & is_finite
    return present & visible.any(-2) if is_self_attention else present
