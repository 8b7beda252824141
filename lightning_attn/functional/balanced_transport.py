r"""Attention as entropic optimal transport of which both sides are fixed: what queries give, and what keys receive.

Shape suffixes: N queries, M keys; any dimensions may lead, written B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.functional.dense import broadcast
from lightning_attn.functional.doubt import warn
from lightning_attn.functional.transport import checked_scores
from lightning_attn.statistics.algebra.sinkhorn_potentials import (
    LOG_ZERO,
    KernelRows,
    least_tolerance,
    sinkhorn_scaling,
)
from lightning_attn.statistics.statistic import wide


def sinkhorn(
    scores: Tensor,
    epsilon: float = 1.0,
    mask: Tensor | None = None,
    *,
    row_marginal: Tensor | None = None,
    column_marginal: Tensor | None = None,
    max_iterations: int = 1000,
    tolerance: float = 1e-6,
) -> Tensor:
    r"""The balanced plan of the scores: rows and columns have given sums.

    .. math:: P = \arg\min_P \sum_{ij} P_{ij} (-z_{ij}) - \epsilon H(P)
        \quad\text{with}\quad P 1 = a, \; P^\top 1 = b

    :math:`P_{ij} = e^{(f_i + z_{ij} + g_j) / \epsilon}`, computed in the log domain and, where the device has it, in
    double precision, by columns and rows in turn and by rows last: these are exact, and columns up to ``tolerance``.

    Args:
        scores: (…, N, M), logits of attention, of any floating type. Minus infinity hides a key like the mask.
        epsilon: the weight of the entropy, above zero; 1 is that of attention. The smaller, the slower.
        mask: boolean, true where a query sees a key; broadcasts to the scores.
        row_marginal: (…, N), what each query gives, not negative; broadcasts. By default all that see a key give the
            same: one, or their part of ``column_marginal``.
        column_marginal: (…, M), what each key receives, with the same sum; by default all that are seen the same.
        max_iterations: how many times columns are scaled at most.
        tolerance: the total variation distance of what keys receive, as a distribution, from what they should.

    Returns:
        (…, N, M), in the type of the scores, but at least float32; zero where a key is hidden.

    Raises:
        ValueError: if an argument has the wrong type, shape or value, or if the plan would be causal: where as many
            queries as keys are each kept from all later keys, the identity is the only plan with equal marginals, and
            the iteration comes to it too slowly to be of use. `attention_marginal_gap` compares causal attention with
            what its mask would give to each key.

    Warns:
        RuntimeWarning: if columns are not within ``tolerance`` at the end. Either the scores are so far apart that more
            iterations, or a larger ``epsilon``, are needed; or no plan has weight on all visible keys, as under many
            masks that are nearly causal, and no number of iterations will do.

    Source: Cuturi 2013, arXiv:1306.0895; Sander et al. 2022 (Sinkformers), arXiv:2110.11773.

    Example:
        >>> sinkhorn(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).log())
        tensor([[0.4495, 0.5505],
                [0.5505, 0.4495]])
    """
    scores_BNM, visible_BNM = checked_scores(scores, epsilon, mask)
    if max_iterations < 0:
        raise ValueError(f"`max_iterations` must be zero or more, got {max_iterations}.")
    if not tolerance >= 0:
        raise ValueError(f"`tolerance` must be zero or more, got {tolerance}.")
    if bool((visible_BNM & ~scores_BNM.isfinite()).any()):
        raise ValueError("`scores` must be finite where a key is visible, got NaN or infinity; −inf hides a key.")
    has_one_side = row_marginal is not None or column_marginal is not None
    if not has_one_side and bool(_is_causal(visible_BNM).any()):
        raise ValueError(
            "`mask` must let some query see a later key: under a causal mask the identity is the only plan whose rows "
            "and columns sum to one. Compare what keys receive with what the mask gives them: "
            "`attention_marginal_gap`."
        )
    dtype = wide(scores.device)
    log_kernel_BNM = torch.where(visible_BNM, scores_BNM.to(dtype) / epsilon, LOG_ZERO)
    row_mass_BN, key_mass_BM = _marginals(visible_BNM, row_marginal, column_marginal, dtype)
    rows = KernelRows(0, log_kernel_BNM)
    reached = max(tolerance, least_tolerance(dtype))
    potential_BM, gap_B = sinkhorn_scaling(lambda: [rows], row_mass_BN, key_mass_BM, max_iterations, reached)
    if bool((gap_B > reached).any()):
        warn(
            f"Columns are within {float(gap_B.max()):.2g} of their marginal after {max_iterations} iterations, not "
            f"within {tolerance:.2g}, for {int((gap_B > reached).sum())} of {gap_B.numel()} matrices. More iterations "
            "or a larger `epsilon` help, unless the mask leaves no plan with weight on all visible keys.",
            RuntimeWarning,
        )
    return rows.plan(row_mass_BN, potential_BM).to(scores_BNM.dtype)


def _is_causal(visible_BNM: Tensor) -> Tensor:
    """Whether there are several queries, as many keys, and a query sees no later key."""
    queries, keys = visible_BNM.shape[-2:]
    if queries != keys or keys == 1:
        return visible_BNM.new_zeros(visible_BNM.shape[:-2])
    return visible_BNM.any((-2, -1)) & ~visible_BNM.triu(1).any((-2, -1))


def _marginals(
    visible_BNM: Tensor, row_marginal: Tensor | None, column_marginal: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What each query gives and each key receives, the sums of both alike."""
    sees_BN, seen_BM = visible_BNM.any(-1), visible_BNM.any(-2)
    if row_marginal is not None:
        row_BN = _marginal(row_marginal, sees_BN, "row_marginal", "query sees no key", dtype)
    if column_marginal is not None:
        column_BM = _marginal(column_marginal, seen_BM, "column_marginal", "key is seen by no query", dtype)
    if row_marginal is None:
        row_BN = sees_BN.to(dtype)
        if column_marginal is not None:
            row_BN = row_BN * _part(column_BM, sees_BN)
    if column_marginal is None:
        column_BM = seen_BM.to(dtype) * _part(row_BN, seen_BM)
    difference_B = (row_BN.sum(-1) - column_BM.sum(-1)).abs()
    if bool((difference_B > 1e-5 * row_BN.sum(-1)).any()):
        raise ValueError(
            f"`row_marginal` and `column_marginal` must have the same sum, got {row_BN.sum(-1).tolist()} "
            f"and {column_BM.sum(-1).tolist()}."
        )
    # Sums of single precision are alike up to their last digits only.
    scale_B = row_BN.sum(-1) / column_BM.sum(-1).clamp(min=torch.finfo(dtype).tiny)
    return row_BN, column_BM * scale_B[..., None]


def _marginal(marginal: Tensor, has_keys: Tensor, name: str, lack: str, dtype: torch.dtype) -> Tensor:
    mass = broadcast(name, marginal, has_keys.shape, "floating-point").to(dtype)
    if not bool((mass.isfinite() & (mass >= 0)).all()) or not bool((mass.sum(-1) > 0).all()):
        raise ValueError(f"`{name}` must be finite and not negative, with a sum above zero, got {marginal.tolist()}.")
    if bool(((mass > 0) & ~has_keys).any()):
        raise ValueError(f"`{name}` must be zero where a {lack}, got {marginal.tolist()}.")
    return mass


def _part(mass: Tensor, takes_part: Tensor) -> Tensor:
    """The same part of a mass for each that takes part."""
    return (mass.sum(-1) / takes_part.sum(-1).clamp(min=1))[..., None]
