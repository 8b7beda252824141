"""How much each key receives: the importance by which sinks are told.

Shape suffixes: N queries, M keys; "…" sequences, heads, or anything else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.functional.dense import check_visibility, checked, present_rows, refuse_negative, visible_keys


def sink_importance(
    weights: Tensor, mask: Tensor | None = None, *, is_causal: bool = False, include_self: bool = True
) -> Tensor:
    r"""Importance of each key: the mean weight that it receives from the queries that can see it.

    .. math:: \alpha_k = \frac{1}{|S_k|} \sum_{i \in S_k} A_{ik}, \qquad S_k = \{i : k \text{ is visible to } i\}

    The queries that see a key are those the mask lets see it, whatever weight they give. Rows without a visible key or
    with an infinite or NaN weight are in no mean; nor, where there are as many queries as keys, is the row of a token
    that nobody may see as a key: it is padding. A sink is a key of :math:`\alpha_k > 0.3` at 64 tokens, one sequence
    and head at a time.

    Args:
        weights: attention weights before dropout, (…, N, M), such as (B, H, N, M). Rows need not sum to one.
        mask: boolean, true where a key may be seen; broadcasts to the weights. ``None``: every key may be.
        is_causal: whether, besides, query ``i`` sees the keys ``j <= i`` alone.
        include_self: whether the weight that a token gives to itself counts, as it does in the source.

    Returns:
        :math:`\alpha`, (…, M): 0 … 1 if rows sum to one at most. NaN for a key that no row sees, as without
        self-queries the last one of a causal mask. float64 of float64, else float32.

    Raises:
        ValueError: if weights or mask have another type or shape, or self-queries are left out of weights that are not
            square.

    Source: Gu et al. 2025, arXiv:2410.10781.

    Example:
        >>> weights = torch.tensor([[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.5, 0.3, 0.2, 0], [0.7, 0.1, 0.1, 0.1]])
        >>> sink_importance(weights, is_causal=True)
        tensor([0.7000, 0.2667, 0.1500, 0.1000])
        >>> sink_importance(weights, is_causal=True, include_self=False)
        tensor([0.6000, 0.2000, 0.1000,    nan])
    """
    weights = checked("weights", weights)
    refuse_negative("weights", weights)
    queries, keys = weights.shape[-2:]
    visible = visible_keys(weights, mask, is_causal=is_causal)
    counted = visible & present_rows(weights, visible, is_self_attention=queries == keys)[..., None]
    if not include_self:
        if queries != keys:
            raise ValueError(f"`include_self` must be True of weights that are not square, got {queries} × {keys}.")
        counted = counted & ~torch.eye(queries, dtype=torch.bool, device=weights.device)
    received: Tensor = torch.where(counted, weights, 0.0).sum(-2)
    return received / counted.sum(-2)


def uniform_sink_importance(
    mask: Tensor | tuple[int, int], *, is_causal: bool = False, include_self: bool = True
) -> Tensor:
    """What `sink_importance` is of uniform attention: the part of it that the mask alone makes.

    Under a causal mask alone that of the first key is ``H_n / n``, with the harmonic number ``H_n``, and above the
    usual threshold of 0.3 up to nine tokens.

    Args:
        mask: boolean, true where a key may be seen, (…, N, M), or the numbers of queries and keys (N, M).
        is_causal: whether, besides, query ``i`` sees the keys ``j <= i`` alone.
        include_self: whether the weight that a token gives to itself counts.

    Returns:
        Importance of each key, (…, M), in float32; NaN for a key that no row sees.

    Raises:
        ValueError: if the mask is neither, or self-queries are left out of one that is not square.

    Source: Gu et al. 2025, arXiv:2410.10781.

    Example:
        >>> uniform_sink_importance((64, 64), is_causal=True)[0]
        tensor(0.0741)
        >>> uniform_sink_importance((8, 8), is_causal=True, include_self=False)[0]
        tensor(0.2454)
    """
    check_visibility("mask", mask)
    visible = mask if isinstance(mask, Tensor) else torch.ones(mask, dtype=torch.bool)
    visible = visible.tril() if is_causal else visible
    uniform = visible.float() / visible.sum(-1, keepdim=True).clamp(min=1)
    return sink_importance(uniform, visible, include_self=include_self)
