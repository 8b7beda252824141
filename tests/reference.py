"""Every statistic once more: dense, in float64, one row after the other, from the formulas alone.

A statistic is a function of one head of one sequence that gives a list of numbers: one for each row that counts, or one
for the whole matrix, or none. The value of a head is their mean over all sequences (`max_logit`: the largest). Those
that pool sequences in another way are functions of a head's sequences that give its value, or NaN.

Nothing of `lightning_attn` but the fields of a call is used here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.special import entr, log_softmax, logsumexp, softmax

from lightning_attn import AttentionCall


@dataclass(frozen=True)
class Head:
    """One head of one sequence: its logits and which of them are visible, both (queries, keys)."""

    logits: np.ndarray
    visible: np.ndarray
    self_attention: bool
    sink_logit: float | None
    #: (keys, width), if known.
    values: np.ndarray | None = None
    #: (queries,), true where a query is no token, if that is known beside what is visible.
    padding: np.ndarray | None = None

    @cached_property
    def seen_keys(self) -> np.ndarray:
        return np.flatnonzero(self.visible.any(axis=0))

    @cached_property
    def tokens(self) -> list[int]:
        """The rows that are no padding. In self-attention a token that nobody may see as a key is padding."""
        rows = range(len(self.logits))
        if self.padding is not None:
            return [i for i in rows if not self.padding[i]]
        return [i for i in rows if not self.self_attention or i in self.seen_keys]

    @cached_property
    def rows(self) -> list[int]:
        """The rows that have weights."""
        return [i for i in self.tokens if self.visible[i].any() and np.isfinite(self.visible_logits(i)).all()]

    @cached_property
    def rows_with_a_choice(self) -> list[int]:
        return [i for i in self.rows if self.visible[i].sum() >= 2]

    @cached_property
    def is_square(self) -> bool:
        return self.self_attention and self.visible.shape[0] == self.visible.shape[1]

    def visible_logits(self, i: int) -> np.ndarray:
        return self.logits[i, self.visible[i]]

    @cached_property
    def weights(self) -> np.ndarray:
        """The weights as the model uses them: with a sink logit, rows sum to less than one."""
        weights = np.zeros(self.visible.shape)
        for i in self.rows:
            logits = self.visible_logits(i)
            if self.sink_logit is None:
                weights[i, self.visible[i]] = softmax(logits)
            else:
                weights[i, self.visible[i]] = softmax(np.append(logits, self.sink_logit))[:-1]
        return weights

    @cached_property
    def uniform(self) -> np.ndarray:
        """Uniform weights over the visible keys."""
        uniform = np.zeros(self.visible.shape)
        for i in self.rows:
            uniform[i, self.visible[i]] = 1 / self.visible[i].sum()
        return uniform

    @cached_property
    def without_first_key(self) -> "Head":
        """The same head without the first key that is seen, and without the rows that give (nearly) all to it."""
        visible = self.visible.copy()
        visible[:, self.seen_keys[:1]] = False
        gap = [logsumexp(self.logits[i, visible[i]]) - self.visible_logits(i).max() for i in self.rows]
        present = [i for i, rest in zip(self.rows, gap, strict=True) if rest > np.log(1e-30)]
        counts = np.isin(np.arange(len(visible)), present)
        return Head(self.logits, visible & counts[:, None], False, None)

    @cached_property
    def received(self) -> np.ndarray:
        """What each key receives from all queries."""
        return self.weights.sum(axis=0)


def entropy_of(logits: np.ndarray) -> float:
    # In the largest term, -p log p with p = 1 - rest, a small rest would be lost in float64 if it were not written so.
    weights = np.sort(softmax(logits))
    rest = weights[:-1].sum()
    return float(entr(weights[:-1]).sum() - (1 - rest) * np.log1p(-rest))


def entropy(head: Head) -> list[float]:
    return [entropy_of(head.visible_logits(i)) / np.log(head.visible[i].sum()) for i in head.rows_with_a_choice]


def entropy_without_sink(head: Head) -> list[float]:
    if not head.rows:
        return []
    keeps = np.arange(head.visible.shape[1]) != head.received.argmax()
    remaining = [head.logits[i, head.visible[i] & keeps] for i in head.rows]
    return [entropy_of(logits) / np.log(len(logits)) for logits in remaining if len(logits) >= 2]


def kl_to_uniform(head: Head) -> list[float]:
    # As a sum over keys, so that nothing cancels where the weights are nearly uniform.
    divergences = []
    for i in head.rows_with_a_choice:
        log_weights = log_softmax(head.visible_logits(i))
        divergences.append(float((np.exp(log_weights) * (log_weights + np.log(len(log_weights)))).sum()))
    return divergences


def max_logit(head: Head) -> list[float]:
    return [head.visible_logits(i).max() for i in head.rows]


def logit_std(head: Head) -> list[float]:
    return [head.visible_logits(i).std() for i in head.rows_with_a_choice]


def max_weight(head: Head) -> list[float]:
    return [head.weights[i].max() for i in head.rows_with_a_choice]


def sink_strength(head: Head) -> list[float]:
    if not len(head.seen_keys):
        return []
    sink = head.seen_keys[0]
    return [
        head.weights[i, sink] for i in head.rows if head.visible[i, sink] and not (head.self_attention and i == sink)
    ]


def sink_rate(head: Head) -> list[float]:
    if len(head.seen_keys) < 10:
        return []
    sink = head.seen_keys[0]
    received = [head.weights[i, sink] for i in head.rows if head.visible[i, sink]]
    return [float(np.mean(received) > 0.3)] if received else []


def stable_rank(head: Head) -> list[float]:
    if not head.rows:
        return []
    singular_values = np.linalg.svd(head.weights, compute_uv=False)
    return [(singular_values**2).sum() / singular_values[0] ** 2]


def spectral_gap(head: Head) -> list[float]:
    if not head.rows or min(head.weights.shape) < 2:
        return []
    singular_values = np.linalg.svd(head.weights, compute_uv=False)
    return [1 - singular_values[1] / singular_values[0]]


def consensus_rate(head: Head) -> list[float]:
    """1 - |second eigenvalue|; the eigenvalues of a triangular matrix are its diagonal, the first token's the first."""
    others = [i for i in head.rows if i != head.seen_keys[0]]
    if not head.is_square or not others:
        return []
    if any(head.visible[i, i + 1 :].any() for i in head.tokens):
        return [1 - second_eigenvalue(head.weights)]
    return [1 - max(head.weights[i, i] for i in others)]


def second_eigenvalue(matrix: np.ndarray) -> float:
    return float(np.sort(np.abs(np.linalg.eigvals(matrix)))[-2])


def marginal_gap(head: Head) -> list[float]:
    if not head.rows:
        return []
    return [float(np.abs(head.weights.sum(axis=0) - head.uniform.sum(axis=0)).sum() / (2 * len(head.rows)))]


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


def self_weight(head: Head) -> list[float]:
    return [head.weights[i, i] for i in head.rows] if head.is_square else []


def non_finite_share(head: Head) -> list[float]:
    return [float(i not in head.rows) for i in head.tokens if head.visible[i].any()]


def hidden_row_share(head: Head) -> list[float]:
    return [float(not head.visible[i].any()) for i in head.tokens]


def ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator > 0 else float("nan")


def first_five(head: Head) -> np.ndarray:
    return head.seen_keys[:5]


def position_concentration(sequences: list[Head]) -> float:
    of_first = sum(head.weights[:, first_five(head)].sum() for head in sequences)
    return ratio(of_first, sum(head.weights.sum() for head in sequences))


def uniform_position_concentration(sequences: list[Head]) -> float:
    of_first = sum(head.uniform[:, first_five(head)].sum() for head in sequences)
    return ratio(of_first, sum(head.uniform.sum() for head in sequences))


def attention_distance(sequences: list[Head]) -> float:
    squares = [head for head in sequences if head.is_square]
    distances = [np.abs(np.subtract.outer(*[np.arange(len(head.visible))] * 2)) for head in squares]
    of_weights = sum((head.weights * distance).sum() for head, distance in zip(squares, distances, strict=True))
    of_uniform = sum((head.uniform * distance).sum() for head, distance in zip(squares, distances, strict=True))
    return ratio(of_weights, of_uniform)


def deviations(head: Head) -> np.ndarray:
    """Weights minus uniform ones; nothing where that is below what single precision can tell."""
    deviation = head.weights - head.uniform
    is_uniform = (deviation**2).sum(axis=1) <= 1e-12 * (head.uniform**2).sum(axis=1)
    return np.where(is_uniform[:, None], 0, deviation)


def positional_share(sequences: list[Head]) -> float:
    common = total = 0.0
    for row in range(len(sequences[0].visible)):
        patterns = [deviations(head)[row] for head in sequences if row in head.rows]
        if len(patterns) >= 2:
            total += sum(pattern @ pattern for pattern in patterns)
            pairs = [p @ q for i, p in enumerate(patterns) for j, q in enumerate(patterns) if i != j]
            common += sum(pairs) / (len(patterns) - 1)
    return ratio(common, total)


def toeplitz_share(sequences: list[Head]) -> float:
    if not sequences[0].is_square:
        return float("nan")
    rest = [head.without_first_key for head in sequences]
    rest = [head for head in rest if head.rows]
    if len(rest) < 2:
        return float("nan")
    n = len(rest[0].visible)
    common = 0.0
    for k in range(-n + 1, n):
        means = []  # along the diagonal, by the root of how many there are
        for head in rest:
            count = np.diagonal(head.visible[:], k)[[i - min(0, k) in head.rows for i in range(n - abs(k))]].sum()
            means.append(np.diagonal(deviations(head), k).sum() / np.sqrt(max(count, 1)))
        common += sum(a * b for i, a in enumerate(means) for j, b in enumerate(means) if i != j) / (len(rest) - 1)
    return ratio(common, sum((deviations(head) ** 2).sum() for head in rest))


OF_SEQUENCES: dict[str, Callable[[list[Head]], float]] = {
    statistic.__name__: statistic
    for statistic in (
        position_concentration,
        uniform_position_concentration,
        attention_distance,
        positional_share,
        toeplitz_share,
    )
}

STATISTICS: dict[str, Callable[[Head], list[float]]] = {
    statistic.__name__: statistic
    for statistic in (
        entropy,
        entropy_without_sink,
        kl_to_uniform,
        max_logit,
        logit_std,
        max_weight,
        sink_strength,
        sink_rate,
        stable_rank,
        spectral_gap,
        consensus_rate,
        marginal_gap,
        value_contraction,
        self_weight,
        non_finite_share,
        hidden_row_share,
    )
}


def heads(call: AttentionCall) -> list[list[Head]]:
    """Every head of every sequence, by head and then by sequence."""
    query, key = _array(call.query), _array(call.key)
    sequences, count, queries, _ = query.shape
    shape = (sequences, count, queries, key.shape[2])
    key = key.repeat(count // key.shape[1], axis=1)
    with np.errstate(invalid="ignore"):  # what is not finite is tested too
        logits = np.einsum("bhnd,bhmd->bhnm", query, key) * call.scale
    if call.soft_cap is not None:
        logits = call.soft_cap * np.tanh(logits / call.soft_cap)
    visible = np.ones(shape, dtype=bool)
    if call.visibility.causal_offset is not None:
        visible &= np.tri(*shape[2:], k=call.visibility.causal_offset, dtype=bool)
    if call.visibility.mask is not None:
        visible &= call.visibility.mask.numpy()
    if call.visibility.padding is not None:
        visible &= ~call.visibility.padding.numpy()[:, None, :, None]
    if call.visibility.bias is not None:
        bias = _array(call.visibility.bias)
        visible &= ~(bias <= -1e4)
        logits = logits + bias
    value = None if call.value is None else _array(call.value)
    of_head = None if value is None else value.repeat(count // value.shape[1], axis=1)
    sinks = [None] * count if call.sink_logits is None else _array(call.sink_logits).tolist()
    return [
        [
            Head(
                logits[b, h],
                visible[b, h],
                call.self_attention,
                sinks[h],
                None if of_head is None else of_head[b, h],
                None if call.visibility.padding is None else call.visibility.padding[b].numpy(),
            )
            for b in range(sequences)
        ]
        for h in range(count)
    ]


def head_values(statistic: str, heads: list[list[Head]]) -> list[float]:
    """The value of every head, NaN where it is absent."""
    if statistic in OF_SEQUENCES:
        return [OF_SEQUENCES[statistic](sequences) if sequences else float("nan") for sequences in heads]
    pooled = np.max if statistic == "max_logit" else np.mean
    values = [[value for head in sequences for value in STATISTICS[statistic](head)] for sequences in heads]
    return [float(pooled(value)) if value else float("nan") for value in values]


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()
