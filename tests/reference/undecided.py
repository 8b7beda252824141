"""Where rounding decides the value of a statistic, so that no other one can be expected to equal it."""

from __future__ import annotations

import numpy as np
import scipy.linalg

from reference.core import TOLERANCES, Head
from reference.lenses import deviations, second_eigenvalue, shared_diagonals

#: What sequences have in common; all but the first are without the first key.
SHARES = ("positional_share", "positional_share_without_sink", "toeplitz_share")


def contrast(name: str, sequences: list[Head]) -> float:
    """How much the weights that are compared differ from uniform ones, relative to these."""
    if name == "toeplitz_share":
        entries = [np.square(of_sequence).mean(axis=0) for d in shared_diagonals(sequences) for of_sequence in d]
        squares, uniform = np.sum(entries, axis=0) if entries else (0.0, 0.0)
        return float(np.sqrt(squares / max(1e-30, uniform)))
    if name != "positional_share":
        sequences = [head.without_first_key for head in sequences]
    squares = uniform = 0.0
    for row in range(len(sequences[0].visible) if sequences else 0):
        present = [head for head in sequences if row in head.rows]
        if len(present) >= 2:
            squares += sum((deviations(head)[row] ** 2).sum() for head in present)
            uniform += sum((head.even[row] ** 2).sum() for head in present)
    return float(np.sqrt(squares / max(1e-30, uniform)))


def _condition(matrix: np.ndarray) -> float:
    """By how much the second eigenvalue moves at most, relative to a change of the matrix."""
    values, left, right = scipy.linalg.eig(matrix, left=True)
    second = np.argsort(-np.abs(values))[1]
    return float(1 / max(1e-300, abs(left[:, second].conj() @ right[:, second])))


def is_undecided(name: str, sequences: list[Head]) -> bool:
    """Whether rounding decides: two keys that receive as much, a sink of exactly the threshold, eigenvalues that a
    change of the sixth digit moves."""
    if name == "entropy_without_sink":
        received = [sorted(head.received) for head in sequences]
        return any(len(r) > 1 and (r[-2] > r[-1] * (1 - 1e-4) or r[-1] < 1e-30) for r in received)
    if name == "consensus_rate":
        if any(head.is_square and len(head.weights) > 1 and _condition(head.weights) > 1e3 for head in sequences):
            return True
        noise = 1 + 1e-6 * np.random.default_rng(0).standard_normal(sequences[0].weights.shape) if sequences else 1
        return any(
            head.is_square
            and len(head.weights) > 1
            and abs(second_eigenvalue(head.weights) - second_eigenvalue(head.weights * noise)) > 1e-4
            for head in sequences
        )
    if name in TOLERANCES:
        return TOLERANCES[name].is_undecided(sequences)
    # Beside a sink logit there may be weights, or squares of weights, that single precision does not hold.
    if name in ("position_concentration", "attention_distance"):
        return sum(head.weights.sum() for head in sequences) < 1e-30
    if name in ("stable_rank", "spectral_gap"):
        return any(0 < head.weights.max(initial=0) < 1e-17 for head in sequences)
    if name in SHARES:  # a pattern that is hardly more than rounding
        return 0 < contrast(name, sequences) < 1e-5
    if name == "sink_rate":
        first_key = [
            head.weights[head.visible[:, head.seen_keys[0]], head.seen_keys[0]] for head in sequences if head.rows
        ]
        return any(abs(weights.mean() - 0.3) < 1e-5 for weights in first_key)
    return False
