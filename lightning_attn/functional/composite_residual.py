"""How far hidden states are from being all the same.

Shape suffixes: N tokens, L width of a state, after any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.functional.dense import broadcast, checked
from lightning_attn.statistics.statistic import wide


def rank_residual_composite(states: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""What is left of hidden states without their mean, in the norm of the theorem on rank collapse.

    .. math:: \frac{\|X - 1 \bar x^\top\|_{1,\infty}}{\|X\|_{1,\infty}}, \qquad
              \|R\|_{1,\infty} = \sqrt{\|R\|_1 \|R\|_\infty}:

    the root of the largest column sum of magnitudes times the largest row sum. A part of the published code
    lacks the root, and has the square of this. The theorem subtracts the row that makes the norm smallest; with the
    mean, which makes the Frobenius norm smallest, it is at most twice as large.

    Args:
        states: (…, N, L), the states of N tokens, of any floating type.
        mask: (…, N), false where a token is padding; broadcasts. ``None`` where every token is one.

    Returns:
        (…), from 0 to 2: 0 where all tokens are equal. NaN where fewer than two are no padding, where all of them are
        zero, and where a state is not finite. In float64 if the states are, in float32 otherwise.

    Raises:
        ValueError: if the states are no matrices of floating-point numbers, or the mask is no boolean tensor that
            broadcasts to their tokens.

    Source: Dong et al. 2021, arXiv:2103.03404.

    Example:
        >>> rank_residual_composite(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        tensor(0.8165)
    """
    states = checked("states", states, "(…, N, L)", may_be_empty=False)
    if mask is None:
        mask = torch.ones((), dtype=torch.bool)
    real_N1 = broadcast("mask", mask, states.shape[:-1]).to(states.device)[..., None]
    states_NL = torch.where(real_N1, states, 0.0).to(wide(states.device))
    count = real_N1.sum((-2, -1))
    # Less a token to begin with: of equal ones, and of nearly equal ones, that leaves what is exact.
    first_11 = real_N1.int().argmax(-2, keepdim=True)
    first_1L = states_NL.gather(-2, first_11.expand(*states.shape[:-2], 1, states.shape[-1]))
    residual_NL = torch.where(real_N1, states_NL - first_1L, 0.0)
    mean_1L = residual_NL.sum(-2, keepdim=True) / count.clamp(min=1)[..., None, None]
    residual_NL = torch.where(real_N1, residual_NL - mean_1L, 0.0)
    composite = _composite_norm(residual_NL) / _composite_norm(states_NL)
    rounded = composite.to(states.dtype)
    return torch.where(count >= 2, rounded, torch.nan)


def _composite_norm(matrix_NL: Tensor) -> Tensor:
    magnitudes_NL = matrix_NL.abs()
    return (magnitudes_NL.sum(-2).amax(-1) * magnitudes_NL.sum(-1).amax(-1)).sqrt()
