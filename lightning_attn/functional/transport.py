r"""Attention as entropic optimal transport of which one side is fixed: the plan, and what it costs.

The cost of a key is minus its score, and :math:`\epsilon` weighs the entropy. Each query gives away one and keys
receive what comes; the plan is the softmax of the scores. Where both sides are fixed, see
`lightning_attn.functional.balanced_transport`.

Shape suffixes: N queries, M keys; any dimensions may lead, written B. Scores in half precision are computed with in
float32. A score of minus infinity hides its key like a mask; other scores that are not finite spoil their row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.functional.dense import checked, described, visible_keys
from lightning_attn.functional.numbers import is_number
from lightning_attn.statistics.algebra.sinkhorn_potentials import LOG_ZERO


def transport_plan(scores: Tensor, epsilon: float = 1.0, mask: Tensor | None = None) -> Tensor:
    r"""The semi-relaxed plan: what each query gives is one, and keys receive what comes.

    :math:`\mathrm{softmax}(z_i / \epsilon)`, which is the exact solution of
    :math:`\arg\min_p \langle p, -z_i \rangle - \epsilon H(p)` over the distributions on the keys that query :math:`i`
    sees.

    Args:
        scores: (…, N, M), of any floating type.
        epsilon: the weight of the entropy, above zero.
        mask: boolean, true where a query sees a key; broadcasts to the scores.

    Returns:
        (…, N, M), in the type of the scores, but at least float32; rows that see no key are zero.

    Raises:
        ValueError: if an argument has the wrong type, shape or value.

    Source: Transformers as Optimal Transport 2025, OpenReview 2A2vRGHW16 (not reviewed).

    Example:
        >>> transport_plan(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).log()).sum(0)
        tensor([0.7619, 1.2381])
    """
    scores_BNM, visible_BNM = checked_scores(scores, epsilon, mask)
    hidden_BNM = ~visible_BNM
    return (scores_BNM / epsilon).masked_fill(hidden_BNM, LOG_ZERO).softmax(-1).masked_fill(hidden_BNM, 0.0)


def transport_cost(scores: Tensor, epsilon: float = 1.0, mask: Tensor | None = None) -> Tensor:
    r"""What each row of the semi-relaxed plan costs, :math:`\langle p_i, -z_i \rangle`.

    Args:
        scores: (…, N, M), of any floating type.
        epsilon: the weight of the entropy, above zero.
        mask: boolean, true where a query sees a key; broadcasts to the scores.

    Returns:
        (…, N), in the unit of the scores; NaN for rows that see no key.

    Raises:
        ValueError: if an argument has the wrong type, shape or value.

    Source: Transformers as Optimal Transport 2025, OpenReview 2A2vRGHW16 (not reviewed).

    Example:
        >>> transport_cost(torch.tensor([[0.0, 0.0], [0.0, 20.0]]))
        tensor([  0., -20.])
    """
    scores_BNM, visible_BNM = checked_scores(scores, epsilon, mask)
    plan_BNM = transport_plan(scores_BNM, epsilon, visible_BNM)
    largest_BN1 = scores_BNM.masked_fill(~visible_BNM, -torch.inf).amax(-1, keepdim=True)
    # Beside the largest score, whose size would take digits from what the others add.
    loss_BN = (plan_BNM * (largest_BN1 - scores_BNM).masked_fill(~visible_BNM, 0.0)).sum(-1)
    return (loss_BN - largest_BN1[..., 0]).masked_fill(~visible_BNM.any(-1), torch.nan)


def free_energy(scores: Tensor, epsilon: float = 1.0, mask: Tensor | None = None) -> Tensor:
    r"""The least that :math:`\langle p, -z_i \rangle - \epsilon H(p)` can be, for each row.

    :math:`-\epsilon \log \sum_j e^{z_{ij} / \epsilon}`, which is the cost of the plan less :math:`\epsilon` times its
    entropy.

    Args:
        scores: (…, N, M), of any floating type.
        epsilon: the weight of the entropy, above zero.
        mask: boolean, true where a query sees a key; broadcasts to the scores.

    Returns:
        (…, N), in the unit of the scores; NaN for rows that see no key.

    Raises:
        ValueError: if an argument has the wrong type, shape or value.

    Source: Transformers as Optimal Transport 2025, OpenReview 2A2vRGHW16 (not reviewed).

    Example:
        >>> free_energy(torch.tensor([[0.0, 0.0], [0.0, 20.0]]))
        tensor([ -0.6931, -20.0000])
    """
    scores_BNM, visible_BNM = checked_scores(scores, epsilon, mask)
    log_sum_BN = (scores_BNM / epsilon).masked_fill(~visible_BNM, -torch.inf).logsumexp(-1)
    return (-epsilon * log_sum_BN).masked_fill(~visible_BNM.any(-1), torch.nan)


def checked_scores(scores: Tensor, epsilon: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scores in their working precision, and where a key is visible."""
    scores_BNM = checked("scores", scores, may_be_empty=False)
    if not is_number(epsilon) or not 0 < epsilon < float("inf"):
        raise ValueError(f"`epsilon` must be finite and above zero, got {described(epsilon)}.")
    return scores_BNM, visible_keys(scores_BNM, mask) & ~scores_BNM.isneginf()
