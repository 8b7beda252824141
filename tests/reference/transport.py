"""Attention as entropic optimal transport."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import log_softmax, logsumexp, softmax

from reference.core import AS_EXACT_AS_LOGITS, Head, of_head, within

AS_EXACT_AS_LOGITS |= {"transport_cost", "free_energy"}


@of_head
def transport_cost(head: Head) -> list[float]:
    return [-float(softmax(z) @ z) for z in (head.visible_logits(i) for i in head.rows_with_a_choice)]


@of_head
def free_energy(head: Head) -> list[float]:
    return [-float(logsumexp(head.visible_logits(i))) for i in head.rows_with_a_choice]


SWEEPS, TOLERANCE = 200, 1e-7


class Balanced(NamedTuple):
    """Where the scaling of rows and columns ends."""

    distance: float
    #: How far columns are from balanced, as a distribution.
    gap: float
    sweeps: int


def _balanced(head: Head) -> Balanced | None:
    """Rows and columns scaled in turn, rows last; None where there is nothing to balance."""
    looks_ahead = any(head.visible[i, i + 1 :].any() for i in head.tokens)
    if not head.rows or (head.visible.shape[0] == head.visible.shape[1] and not looks_ahead):
        return None
    keys = np.flatnonzero(head.visible[head.rows].any(axis=0))
    log_weights = np.full(head.visible.shape, -np.inf)
    for i in head.rows:
        log_weights[i, head.visible[i]] = log_softmax(head.visible_logits(i))
    log_weights = log_weights[np.ix_(head.rows, keys)]
    n, m = log_weights.shape
    of_rows, of_columns = np.zeros((n, 1)), np.zeros((1, m))
    sweeps, gap = -1, np.inf
    while gap > TOLERANCE and sweeps < SWEEPS:
        if sweeps >= 0:
            of_columns = np.log(n / m) - _log_sum(log_weights + of_rows, axis=0)
        sweeps += 1
        of_rows = -_log_sum(log_weights + of_columns, axis=1)
        plan = np.exp(log_weights + of_rows + of_columns)
        gap = np.abs(plan.sum(axis=0) - n / m).sum() / (2 * n)
    return Balanced(float(np.abs(np.exp(log_weights) - plan).sum() / (2 * n)), float(gap), sweeps)


def _log_sum(exponents: np.ndarray, axis: int) -> np.ndarray:
    largest = exponents.max(axis=axis, keepdims=True)
    return largest + np.log(np.exp(exponents - largest).sum(axis=axis, keepdims=True))


def _is_undecided(sequences: list[Head]) -> bool:
    """Whether it is done, or not quite, in the last of the sweeps that it may take."""
    found = [_balanced(head) for head in sequences]
    return any(end is not None and end.sweeps >= SWEEPS - 5 and end.gap < 2 * TOLERANCE for end in found)


# The rest of a slow iteration is up to so many times the gap that ends it: absolutely as exact as that.
@within(1e-4, 1e-6, _is_undecided)
@of_head
def sinkhorn_distance(head: Head) -> list[float]:
    end = _balanced(head)
    return [end.distance] if end is not None and end.gap <= TOLERANCE else []
