"""The lenses that every monitor has by default."""

from __future__ import annotations

import numpy as np
from scipy.special import entr, log_softmax, softmax

from reference.core import MAXIMA, Head, of_head, of_sequences

MAXIMA.add("max_logit")


def entropy_of(logits: np.ndarray) -> float:
    # In the largest term, -p log p with p = 1 - rest, a small rest would be lost in float64 if it were not written so.
    weights = np.sort(softmax(logits))
    rest = weights[:-1].sum()
    return float(entr(weights[:-1]).sum() - (1 - rest) * np.log1p(-rest))


@of_head
def entropy(head: Head) -> list[float]:
    return [entropy_of(head.visible_logits(i)) / np.log(head.visible[i].sum()) for i in head.rows_with_a_choice]


@of_head
def entropy_without_sink(head: Head) -> list[float]:
    if not head.rows:
        return []
    keeps = np.arange(head.visible.shape[1]) != head.received.argmax()
    remaining = [head.logits[i, head.visible[i] & keeps] for i in head.rows]
    return [entropy_of(logits) / np.log(len(logits)) for logits in remaining if len(logits) >= 2]


@of_head
def kl_to_uniform(head: Head) -> list[float]:
    # As a sum over keys, so that nothing cancels where the weights are nearly uniform.
    divergences = []
    for i in head.rows_with_a_choice:
        log_weights = log_softmax(head.visible_logits(i))
        divergences.append(float((np.exp(log_weights) * (log_weights + np.log(len(log_weights)))).sum()))
    return divergences


@of_head
def max_logit(head: Head) -> list[float]:
    return [head.visible_logits(i).max() for i in head.rows]


@of_head
def logit_std(head: Head) -> list[float]:
    return [head.visible_logits(i).std() for i in head.rows_with_a_choice]


@of_head
def max_weight(head: Head) -> list[float]:
    return [head.weights[i].max() for i in head.rows_with_a_choice]


@of_head
def sink_strength(head: Head) -> list[float]:
    if not len(head.seen_keys):
        return []
    sink = head.seen_keys[0]
    return [
        head.weights[i, sink] for i in head.rows if head.visible[i, sink] and not (head.self_attention and i == sink)
    ]


@of_head
def sink_rate(head: Head) -> list[float]:
    if len(head.seen_keys) < 10:
        return []
    sink = head.seen_keys[0]
    received = [head.weights[i, sink] for i in head.rows if head.visible[i, sink]]
    return [float(np.mean(received) > 0.3)] if received else []


@of_head
def stable_rank(head: Head) -> list[float]:
    if not head.rows:
        return []
    singular_values = np.linalg.svd(head.weights, compute_uv=False)
    return [(singular_values**2).sum() / singular_values[0] ** 2]


@of_head
def spectral_gap(head: Head) -> list[float]:
    if not head.rows or min(head.weights.shape) < 2:
        return []
    singular_values = np.linalg.svd(head.weights, compute_uv=False)
    return [1 - singular_values[1] / singular_values[0]]


@of_head
def consensus_rate(head: Head) -> list[float]:
    """1 - |second eigenvalue|; the eigenvalues of a triangular matrix are its diagonal."""
    others = [i for i in head.rows if i != head.seen_keys[0]]
    if not head.is_square or not others:
        return []
    if any(head.visible[i, i + 1 :].any() for i in head.tokens):
        return [1 - second_eigenvalue(head.weights)]
    return [1 - np.sort(head.weights.diagonal())[-2]]


def second_eigenvalue(matrix: np.ndarray) -> float:
    return float(np.sort(np.abs(np.linalg.eigvals(matrix)))[-2])


@of_head
def marginal_gap(head: Head) -> list[float]:
    if not head.weights.sum() > 1e-30:
        return []
    return [float(np.abs(head.weights.sum(axis=0) - head.even.sum(axis=0)).sum() / (2 * head.weights.sum()))]


@of_head
def value_contraction(head: Head) -> list[float]:
    if head.values is None or not head.rows or not np.isfinite(head.values[head.seen_keys]).all():
        return []
    values = np.where(head.visible.any(axis=0)[:, None], head.values, 0)
    seen = values[head.seen_keys]
    spread = np.linalg.norm(seen - seen.mean(axis=0))
    if not np.ptp(seen, axis=0).any():
        return []
    outputs = (head.weights @ values)[head.rows]
    return [float(np.linalg.norm(outputs - outputs.mean(axis=0)) / spread)]


@of_head
def self_weight(head: Head) -> list[float]:
    return [head.weights[i, i] for i in head.rows] if head.is_square else []


@of_head
def non_finite_share(head: Head) -> list[float]:
    return [float(i not in head.rows) for i in head.tokens if head.visible[i].any()]


@of_head
def hidden_row_share(head: Head) -> list[float]:
    return [float(not head.visible[i].any()) for i in head.tokens]


def ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator > 0 else float("nan")


def first_five(head: Head) -> np.ndarray:
    return head.seen_keys[:5]


@of_sequences
def position_concentration(sequences: list[Head]) -> float:
    of_first = sum(head.weights[:, first_five(head)].sum() for head in sequences)
    return ratio(of_first, sum(head.weights.sum() for head in sequences))


@of_sequences
def uniform_position_concentration(sequences: list[Head]) -> float:
    of_first = sum(head.uniform[:, first_five(head)].sum() for head in sequences)
    return ratio(of_first, sum(head.uniform.sum() for head in sequences))


@of_sequences
def attention_distance(sequences: list[Head]) -> float:
    squares = [head for head in sequences if head.is_square]
    distances = [np.abs(np.subtract.outer(*[np.arange(len(head.visible))] * 2)) for head in squares]
    of_weights = sum((head.weights * distance).sum() for head, distance in zip(squares, distances, strict=True))
    of_uniform = sum((head.even * distance).sum() for head, distance in zip(squares, distances, strict=True))
    return ratio(of_weights, of_uniform)


def deviations(head: Head) -> np.ndarray:
    """Weights minus uniform ones; nothing where that is below what single precision can tell."""
    deviation = head.weights - head.even
    is_uniform = (deviation**2).sum(axis=1) <= 1e-12 * (head.even**2).sum(axis=1)
    return np.where(is_uniform[:, None], 0, deviation)


@of_sequences
def positional_share(sequences: list[Head]) -> float:
    return shared_by_pairs(sequences)


def shared_by_pairs(sequences: list[Head]) -> float:
    common = total = 0.0
    for row in range(len(sequences[0].visible)):
        patterns = [deviations(head)[row] for head in sequences if row in head.rows]
        if len(patterns) >= 2:
            total += sum(pattern @ pattern for pattern in patterns)
            pairs = [p @ q for i, p in enumerate(patterns) for j, q in enumerate(patterns) if i != j]
            common += sum(pairs) / (len(patterns) - 1)
    return ratio(common, total)


def shared_diagonals(sequences: list[Head]) -> list[list[list[tuple[float, float]]]]:
    """Of each diagonal that two sequences have, without the first key: its entries in each of these sequences, as what
    they deviate from uniform weights by, and the uniform weight. Rows without a choice have none."""
    rest = [head.without_first_key for head in sequences]
    entries: list[dict[int, list[tuple[float, float]]]] = [{} for _ in rest]
    for head, of_distance in zip(rest, entries, strict=True):
        deviation = deviations(head)
        for i in head.rows_with_a_choice:
            for j in np.flatnonzero(head.visible[i]):
                of_distance.setdefault(i - j, []).append((deviation[i, j], head.even[i, j]))
    distances = sorted({k for of_distance in entries for k in of_distance})
    diagonals = [[of_distance[k] for of_distance in entries if k in of_distance] for k in distances]
    return [diagonal for diagonal in diagonals if len(diagonal) >= 2]


@of_sequences
def toeplitz_share(sequences: list[Head]) -> float:
    if not sequences[0].is_square:
        return float("nan")
    common = total = 0.0
    for diagonal in shared_diagonals(sequences):
        weight = np.mean([len(of_sequence) for of_sequence in diagonal])
        means = [np.mean([deviation for deviation, _ in of_sequence]) for of_sequence in diagonal]
        pairs = [p * q for i, p in enumerate(means) for j, q in enumerate(means) if i != j]
        common += weight * sum(pairs) / (len(diagonal) - 1)
        total += weight * sum(np.mean([deviation**2 for deviation, _ in of_sequence]) for of_sequence in diagonal)
    return ratio(common, total)
