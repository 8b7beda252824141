"""Row sums, contraction in one step, and what repeated attention leaves."""

from __future__ import annotations

import mpmath
import numpy as np
from scipy.sparse.csgraph import connected_components
from scipy.special import expit, logsumexp, softmax

from reference.core import Head, of_head, within


@of_head
def row_stochasticity_error(head: Head) -> list[float]:
    return sink_logit_mass(head)  # rows of a softmax lack what a sink took, and nothing else


@of_head
def sink_logit_mass(head: Head) -> list[float]:
    if head.sink_logit is None:
        return [0.0] * len(head.rows)
    return [float(expit(head.sink_logit - logsumexp(head.visible_logits(i)))) for i in head.rows]


@of_head
def dobrushin(head: Head) -> list[float]:
    weights = head.weights[head.rows]
    if len(weights) < 2:
        return []
    return [max(float(np.abs(one - other).sum()) / 2 for one in weights for other in weights)]


@of_head
def dobrushin_bound(head: Head) -> list[float]:
    weights = head.weights[head.rows]
    if len(weights) < 2:
        return []
    smallest = weights.min(axis=0)
    return [max(float((row - smallest).sum()) for row in weights)]


def transitions(head: Head) -> np.ndarray | None:
    """The rows that have weights, each over its sum, of the tokens that have such a row; ``None`` if one leads out."""
    matrix = np.zeros(head.visible.shape)
    for i in head.rows:
        matrix[i, head.visible[i]] = softmax(head.visible_logits(i))
    matrix[matrix < 1e-30] = 0
    others = np.setdiff1d(np.arange(matrix.shape[1]), head.rows)
    return None if matrix[:, others].any() else matrix[np.ix_(head.rows, head.rows)]


def stationary(chain: np.ndarray) -> np.ndarray | None:
    """The stationary distribution, if there is only one: on the only class of states that none leaves."""
    count, of_class = connected_components(chain > 0, connection="strong")
    closed = [c for c in range(count) if not chain[np.ix_(of_class == c, of_class != c)].any()]
    if len(closed) != 1:
        return None
    members = np.flatnonzero(of_class == closed[0])
    distribution = np.zeros(len(chain))
    distribution[members] = _of_class(chain[np.ix_(members, members)])
    return distribution


def _of_class(chain: np.ndarray) -> np.ndarray:
    """Solves ``pi (I - P) = 0`` with ``sum(pi) = 1``; with many digits where rounding would decide."""
    n = len(chain)
    # Each state is left with the probability of all other states, of which rows that nearly stay tell more digits.
    generator = np.diag((chain - np.diag(np.diag(chain))).sum(axis=1)) - (chain - np.diag(np.diag(chain)))
    system, right = np.vstack([generator.T[:-1], np.ones(n)]), np.eye(n)[-1]
    if np.linalg.cond(system) < 1e6:
        return np.linalg.solve(system, right)
    with mpmath.workdps(60 + 30 * n):  # transitions of 1e-30 are multiplied
        exact = mpmath.matrix(chain.tolist())
        for i in range(n):
            exact[i, i] = -mpmath.fsum(exact[i, j] for j in range(n) if j != i)
        system = exact.T
        for j in range(n):
            system[n - 1, j] = 1
        solution = mpmath.lu_solve(system, mpmath.matrix(right.tolist()))
        return np.array([float(value) for value in solution])


def distribution_of_tokens(head: Head) -> np.ndarray | None:
    if not head.is_square or len(head.rows) < 2:
        return None
    chain = transitions(head)
    return None if chain is None else stationary(chain)


def _hangs_on_rounding(sequences: list[Head]) -> bool:
    """Whether a transition is just about what counts as none, or two leaders are a thousandth apart."""
    for head in sequences:
        if not head.is_square:
            continue
        for i in head.rows:
            weights = softmax(head.visible_logits(i))
            if (np.abs(np.log(weights[weights > 1e-40]) - np.log(1e-30)) < 1e-2).any():
                return True
        distribution = distribution_of_tokens(head)
        if distribution is not None:
            below = 1 - distribution / distribution.max()
            if ((below > 5e-4) & (below < 2e-3)).any():
                return True
    return False


@of_head
@within(1e-3, 1e-6, _hangs_on_rounding)
def leader_mass(head: Head) -> list[float]:
    distribution = distribution_of_tokens(head)
    return [] if distribution is None else [float(distribution.max())]


@of_head
@within(0, 1e-6, _hangs_on_rounding)  # a mean of whole numbers
def leader_position(head: Head) -> list[float]:
    distribution = distribution_of_tokens(head)
    if distribution is None:
        return []
    return [float(np.flatnonzero(distribution >= (1 - 1e-3) * distribution.max())[0])]
