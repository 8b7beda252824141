"""Ranks of attention matrices, by their singular values."""

from __future__ import annotations

import numpy as np
from scipy.special import entr

from reference.core import Head, of_head, within


def singular_values(head: Head) -> np.ndarray:
    return np.linalg.svd(head.weights, compute_uv=False)


def is_nearly_nothing(sequences: list[Head]) -> bool:
    """Whether a learned sink takes so much that single precision does not hold what is left."""
    return any(0 < head.weights.max(initial=0) < 2e-36 for head in sequences)


@of_head
@within(1e-3, 0, is_nearly_nothing)
def effective_rank(head: Head) -> list[float]:
    if not head.rows:
        return []
    values = singular_values(head)
    return [float(np.exp(entr(values / values.sum()).sum()))]


# Tighter than what iterations get: single precision knows a logit of 500 to 3e-5, and its weight to as much.
@of_head
@within(1e-4, 0, is_nearly_nothing)
def participation_ratio(head: Head) -> list[float]:
    if not head.rows:
        return []
    squares = singular_values(head) ** 2
    return [float(squares.sum() ** 2 / (squares**2).sum())]


def centred(head: Head) -> np.ndarray:
    """Weights minus those that are spread evenly and sum to the same."""
    return head.weights - head.weights.sum(axis=1, keepdims=True) * head.uniform


def contrast(head: Head) -> float:
    """How far the weights are from uniform ones, as a part of these."""
    even = head.weights.sum(axis=1, keepdims=True) * head.uniform
    return float(np.linalg.norm(centred(head)) / max(1e-300, np.linalg.norm(even)))


def is_nearly_uniform(sequences: list[Head]) -> bool:
    """Whether rounding decides what sets a head apart from uniform attention: what single precision makes of logits
    moves them by as much as a hundredth of it, or it is next to the limit below which there is no value."""
    for head in sequences:
        if 0 < head.weights.sum() < 1e-10:  # beside a learned sink
            return True
        largest = max((np.abs(head.visible_logits(i)).max() for i in head.rows), default=0)
        if 1e-6 < contrast(head) < max(1e-4, 1e-5 * largest):
            return True
    return False


@of_head
@within(1e-3, 0, is_nearly_uniform)
def centred_stable_rank(head: Head) -> list[float]:
    if contrast(head) <= 1e-5:
        return []
    values = np.linalg.svd(centred(head), compute_uv=False)
    return [float((values**2).sum() / values[0] ** 2)]
