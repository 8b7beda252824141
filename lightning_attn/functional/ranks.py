"""How many directions a matrix uses: numbers that stand for its rank.

Shape suffixes: N rows, M columns, S singular values, after any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.functional.dense import checked, working_type
from lightning_attn.statistics.statistic import wide


def stable_rank(matrix: Tensor) -> Tensor:
    r"""Stable rank :math:`\|A\|_F^2 / \|A\|_2^2`, which small singular values hardly move.

    Args:
        matrix: (…, N, M), of any floating type.

    Returns:
        (…), from 1 to min(N, M); 0 for a matrix of zeros, and NaN where an entry is not finite. In float64 if the
        matrix is, in float32 otherwise.

    Raises:
        ValueError: if it is no matrix of floating-point numbers, or an empty one.

    Source: Rudelson & Vershynin 2007, arXiv:math/0503442.

    Example:
        >>> stable_rank(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        tensor(1.1111)
    """
    values_S = _relative_singular_values(matrix)
    return _or_nan(values_S.square().sum(-1), matrix)


def participation_ratio(matrix: Tensor) -> Tensor:
    r"""Participation ratio :math:`(\sum_k \sigma_k^2)^2 / \sum_k \sigma_k^4` of the singular values.

    Args:
        matrix: (…, N, M), of any floating type.

    Returns:
        (…), from 1 to min(N, M); 0 for a matrix of zeros, and NaN where an entry is not finite. In float64 if the
        matrix is, in float32 otherwise.

    Raises:
        ValueError: if it is no matrix of floating-point numbers, or an empty one.

    Source: Gao et al. 2017, bioRxiv 214262.

    Example:
        >>> participation_ratio(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        tensor(1.2195)
    """
    squares_S = _relative_singular_values(matrix).square()
    # The largest is 1, unless all of them are 0.
    return _or_nan(squares_S.sum(-1).square() / squares_S.square().sum(-1).clamp(min=1), matrix)


def effective_rank(matrix: Tensor) -> Tensor:
    r"""Effective rank :math:`\exp(-\sum_k p_k \log p_k)` with :math:`p_k = \sigma_k / \sum_l \sigma_l`.

    :math:`\sigma_k` are the singular values themselves; with their squares it is another number of the same name.

    Args:
        matrix: (…, N, M), of any floating type.

    Returns:
        (…), from 1 to min(N, M); 0 for a matrix of zeros, and NaN where an entry is not finite. In float64 if the
        matrix is, in float32 otherwise.

    Raises:
        ValueError: if it is no matrix of floating-point numbers, or an empty one.

    Source: Roy & Vetterli 2007 (EUSIPCO).

    Example:
        >>> effective_rank(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        tensor(1.7548)
    """
    values_S = _relative_singular_values(matrix)
    entropy = torch.special.entr(values_S / values_S.sum(-1, keepdim=True).clamp(min=1)).sum(-1)
    return _or_nan(torch.where(values_S[..., 0] > 0, entropy.exp(), 0.0), matrix)


def _relative_singular_values(matrix: Tensor) -> Tensor:
    """Singular values from the largest to the smallest, relative to the largest; zero where it is 0 or not finite.

    In double precision: in single precision the small ones of a large matrix would add up to something.
    """
    matrix = checked("matrix", matrix, may_be_empty=False)
    matrix_NM = matrix.double() if wide(matrix.device) is torch.float64 else matrix.cpu().double()
    is_finite_11 = matrix_NM.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    matrix_NM = torch.where(is_finite_11, matrix_NM, 0.0)
    values_S = torch.linalg.svdvals(matrix_NM)
    largest_1 = values_S[..., :1]
    return torch.where(largest_1 > 0, values_S / largest_1, 0.0)


def _or_nan(rank: Tensor, matrix: Tensor) -> Tensor:
    """The ranks of matrices, NaN where these are not finite, in the precision of what was given."""
    is_finite = matrix.isfinite().all(-1).all(-1)
    rounded = rank.to(matrix.device, working_type(matrix))
    return torch.where(is_finite, rounded, torch.nan)
