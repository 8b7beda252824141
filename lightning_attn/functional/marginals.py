r"""What keys receive from all queries, and what the mask alone would give them.

Shape suffixes: N queries, M keys; any dimensions may lead, written B. Half precision is computed with in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def key_marginal(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Mean weight that each key receives, :math:`c_j / n` with :math:`c_j = \sum_i A_{ij}`.

    Args:
        weights: attention weights (…, N, M), of any floating type; taken as they are, whatever the sum of a row.
        mask: boolean, true where a query sees a key; broadcasts to the weights. Rows that see no key are no queries,
            and what a hidden key holds does not count.

    Returns:
        (…, M), in the type of the weights, but at least float32. It sums to one where rows do; NaN where no query sees
        a key.

    Raises:
        ValueError: if an argument has the wrong type or shape.

    Example:
        >>> key_marginal(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
        tensor([0.7500, 0.2500])
    """
    weights_BNM, visible_BNM = _checked(weights, mask)
    rows_B1 = visible_BNM.any(-1).sum(-1, keepdim=True)
    return torch.where(visible_BNM, weights_BNM, 0.0).sum(-2) / rows_B1


def reference_key_marginal(visible: Tensor | tuple[int, int], *, is_causal: bool = False) -> Tensor:
    r"""Mean weight that each key receives from uniform attention: what the mask alone gives it.

    :math:`r_j = \frac1n \sum_i 1 / m_i` over the queries that see key :math:`j`, each of which sees :math:`m_i` keys,
    and with :math:`n` queries that see any. Without a mask it is :math:`1 / m`; for :math:`n` queries and keys under a
    causal mask :math:`(H_n - H_{j-1}) / n`, with the harmonic numbers: compared with :math:`1 / n` instead, uniform
    causal attention of 64 tokens would be off by 0.36.

    Args:
        visible: boolean (…, N, M), true where a query sees a key; or (N, M), numbers of queries and keys that all see
            and are seen.
        is_causal: whether query ``i`` sees the keys ``j <= i`` alone, beside what ``visible`` says.

    Returns:
        (…, M) in float32, of a shape on the CPU. It sums to one; NaN where no query sees a key.

    Raises:
        ValueError: if ``visible`` is neither.

    Example:
        >>> reference_key_marginal((4, 4), is_causal=True)
        tensor([0.5208, 0.2708, 0.1458, 0.0625])
    """
    if not isinstance(visible, Tensor):
        queries, keys = _checked_shape(visible)
        count_N = torch.full((queries,), keys)
        if is_causal:
            count_N = torch.arange(1, queries + 1).clamp(max=keys)
        # Query i gives 1 / m_i to its first m_i keys; the sums are over those that come late enough to see the key.
        given_M = torch.zeros(keys, dtype=torch.float64).index_add_(0, count_N - 1, 1 / count_N.double())
        return (given_M.flip(0).cumsum(0).flip(0) / queries).float()
    if visible.dtype != torch.bool or visible.dim() < 2:
        raise ValueError(f"`visible` must be boolean, (…, N, M), got {visible.dtype} of shape {tuple(visible.shape)}.")
    return _of_uniform(visible.tril() if is_causal else visible, torch.float32)


def marginal_gap(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Total variation distance of what keys receive from what the mask alone would give them.

    .. math:: \tfrac12 \sum_j |c_j / n - r_j|

    Args:
        weights: attention weights (…, N, M), of any floating type.
        mask: boolean, true where a query sees a key; broadcasts to the weights.

    Returns:
        (…), between 0 and 1 where rows sum to one; NaN where no query sees a key.

    Raises:
        ValueError: if an argument has the wrong type or shape.

    References:
        Sander et al. 2022 (Sinkformers), arXiv:2110.11773, which compares with 1/n, as is right without a mask.

    Example:
        >>> marginal_gap(torch.tensor([[1 / 3, 2 / 3], [3 / 7, 4 / 7]]))
        tensor(0.1190)
    """
    weights_BNM, visible_BNM = _checked(weights, mask)
    received_BM = key_marginal(weights_BNM, visible_BNM)
    return (received_BM - _of_uniform(visible_BNM, weights_BNM.dtype)).abs().sum(-1) / 2


def _of_uniform(visible_BNM: Tensor, dtype: torch.dtype) -> Tensor:
    """What keys receive from uniform attention."""
    count_BN1 = visible_BNM.sum(-1, keepdim=True, dtype=dtype)
    return key_marginal(visible_BNM.to(dtype) / count_BN1.clamp(min=1), visible_BNM)


def _checked(weights: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights in at least float32, and where a key is visible."""
    if not weights.is_floating_point() or weights.dim() < 2:
        raise ValueError(f"`weights` must be floating, (…, N, M), got {weights.dtype} of {tuple(weights.shape)}.")
    weights_BNM = weights.to(torch.promote_types(weights.dtype, torch.float32))
    if mask is None:
        return weights_BNM, torch.ones_like(weights_BNM, dtype=torch.bool)
    if mask.dtype != torch.bool:
        raise ValueError(f"`mask` must be torch.bool, got {mask.dtype}.")
    try:
        return weights_BNM, mask.expand(weights.shape)
    except RuntimeError:
        raise ValueError(f"`mask` must broadcast to {tuple(weights.shape)}, got {tuple(mask.shape)}.") from None


def _checked_shape(shape: object) -> tuple[int, int]:
    if isinstance(shape, tuple) and len(shape) == 2 and all(isinstance(size, int) and size > 0 for size in shape):
        return shape
    raise ValueError(f"`visible` must be a boolean tensor or the numbers of queries and keys, got {shape!r}.")
