"""Sinks, wherever they are, and what they bring."""

from __future__ import annotations

import numpy as np

from reference.core import Head, of_head, of_sequences, within
from reference.lenses import shared_by_pairs


def importance(head: Head, with_self: bool, weights: np.ndarray | None = None) -> dict[int, float]:
    """The mean weight on each key of the queries that see it, by the key; those alone that are widely seen."""
    weights = head.weights if weights is None else weights
    seeing = [
        [i for i in head.rows if head.visible[i, k] and (with_self or not head.self_attention or i != k)]
        for k in range(head.visible.shape[1])
    ]
    most = max(map(len, seeing))
    return {k: float(weights[rows, k].mean()) for k, rows in enumerate(seeing) if rows and len(rows) >= most / 2}


def is_near_the_threshold(sequences: list[Head]) -> bool:
    """Whether a key has an importance that rounding lifts above the threshold, of these weights or of uniform ones."""
    return any(
        abs(alpha - 0.3) < 1e-5
        for head in sequences
        for weights in (head.weights, head.uniform)
        for alpha in importance(head, True, weights).values()
    )


@of_head
@within(0, 0, is_near_the_threshold)
def any_sink_rate(head: Head) -> list[float]:
    of_keys = importance(head, True)
    if len(head.seen_keys) < 10 or not of_keys or max(importance(head, True, head.uniform).values()) > 0.3:
        return []
    return [float(max(of_keys.values()) > 0.3)]


def is_nearly_as_important(sequences: list[Head]) -> bool:
    """Whether rounding decides if a key is as important as the first of them, or if anything is received at all."""
    for head in sequences:
        of_keys = np.array([*importance(head, False).values()])
        largest = of_keys.max(initial=0)
        if (np.abs(of_keys - (1 - 1e-5) * largest) < 9e-6 * largest).any() or 1e-31 < largest < 1e-29:
            return True
    return False


@of_head
@within(1e-6, 0, is_nearly_as_important)
def sink_position(head: Head) -> list[float]:
    of_keys = importance(head, False)
    largest = max(of_keys.values(), default=0)
    if len(head.seen_keys) < 10 or largest < 1e-30:
        return []
    first = min(k for k, alpha in of_keys.items() if alpha >= (1 - 1e-5) * largest)
    return [float((head.seen_keys < first).sum())]


@of_head
def value_weighted_sink(head: Head) -> list[float]:
    if head.values is None or not head.rows or not np.isfinite(head.values[head.seen_keys]).all():
        return []
    lengths = {k: np.linalg.norm(head.values[k]) for k in head.seen_keys}
    brought = sum(head.weights[i, k] * lengths[k] for i in head.rows for k in head.seen_keys)
    if brought <= 1e-30 * max(lengths.values()):
        return []
    first = head.seen_keys[0]
    return [sum(head.weights[i, first] for i in head.rows) * lengths[first] / brought]


@of_sequences
def positional_share_without_sink(sequences: list[Head]) -> float:
    return shared_by_pairs([head.without_first_key for head in sequences])
