r"""What keys receive from all queries, and what the mask alone would give them.

Shape suffixes: N queries, M keys; any dimensions may lead, written B. Half precision is computed with in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.functional.dense import check_visibility, checked, present_rows, refuse_negative, visible_keys


def key_marginal(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Mean weight that each key receives, :math:`c_j / n` with :math:`c_j = \sum_i A_{ij}`.

    Args:
        weights: attention weights (…, N, M), of any floating type; taken as they are, whatever the sum of a row.
        mask: boolean, true where a query sees a key; broadcasts to the weights. What a hidden key holds does not count,
            and rows without a visible key, or with a weight that is not finite, are no queries; nor, where there are
            as many queries as keys, are those of tokens that no query sees: they are padding.

    Returns:
        (…, M), in the type of the weights, but at least float32. It sums to one where rows do; NaN where no query sees
        a key.

    Raises:
        ValueError: if an argument has the wrong type or shape.

    Source: Sander et al. 2022 (Sinkformers), arXiv:2110.11773.

    Example:
        >>> key_marginal(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
        tensor([0.7500, 0.2500])
    """
    weights_BNM = checked("weights", weights)
    refuse_negative("weights", weights_BNM)
    visible_BNM = visible_keys(weights_BNM, mask)
    queries, keys = weights_BNM.shape[-2:]
    present_BN = present_rows(weights_BNM, visible_BNM, is_self_attention=queries == keys)
    counted_BNM = visible_BNM & present_BN[..., None]
    return torch.where(counted_BNM, weights_BNM, 0.0).sum(-2) / present_BN.sum(-1, keepdim=True)


def reference_key_marginal(visible: Tensor | tuple[int, int], *, is_causal: bool = False) -> Tensor:
    r"""Mean weight that each key receives from uniform attention: what the mask alone gives it.

    :math:`r_j = \frac1n \sum_i 1 / m_i` over the queries that see key :math:`j`, each of which sees :math:`m_i` keys,
    and with :math:`n` queries that see any. Without a mask it is :math:`1 / m`; for :math:`n` queries and keys under a
    causal mask :math:`(H_n - H_{j-1}) / n`, with the harmonic numbers: compared with :math:`1 / n` instead, uniform
    causal attention of 64 tokens would be off by 0.36. `attention_marginal_gap` compares both, for each head: it is the
    mean over sequences of :math:`\frac12 \sum_j |c_j / n - r_j|`, with `key_marginal` as :math:`c_j / n`.

    Args:
        visible: boolean (…, N, M), true where a query sees a key; or (N, M), numbers of queries and keys that all see
            and are seen.
        is_causal: whether query ``i`` sees the keys ``j <= i`` alone, beside what ``visible`` says.

    Returns:
        (…, M) in float32, of a shape on the CPU. It sums to one; NaN where no query sees a key.

    Raises:
        ValueError: if ``visible`` is neither.

    Source: the reference of `attention_marginal_gap`; that of Sander et al. 2022, arXiv:2110.11773, is 1/m.

    Example:
        >>> reference_key_marginal((4, 4), is_causal=True)
        tensor([0.5208, 0.2708, 0.1458, 0.0625])
    """
    check_visibility("visible", visible)
    if not isinstance(visible, Tensor):
        queries, keys = visible
        count_N = torch.full((queries,), keys)
        if is_causal:
            count_N = torch.arange(1, queries + 1).clamp(max=keys)
        # Query i gives 1 / m_i to its first m_i keys; the sums are over those that come late enough to see the key.
        given_M = torch.zeros(keys, dtype=torch.float64).index_add_(0, count_N - 1, 1 / count_N.double())
        return (given_M.flip(0).cumsum(0).flip(0) / queries).float()
    visible_BNM = visible.tril() if is_causal else visible
    return key_marginal(visible_BNM.float() / visible_BNM.sum(-1, keepdim=True).clamp(min=1), visible_BNM)
