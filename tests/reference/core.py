"""The heads of a call in float64, and the formulas by their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.special import logsumexp, softmax

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
    #: That of the queries.
    dtype: torch.dtype = torch.float32

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
    def even(self) -> np.ndarray:
        """What each row gives, spread evenly over the visible keys."""
        return self.weights.sum(axis=1, keepdims=True) * self.uniform

    @cached_property
    def without_first_key(self) -> Head:
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


@dataclass(frozen=True)
class Tolerance:
    """How exactly a statistic must equal its reference, where that is not what all others must."""

    relative: float
    #: A number, or what gives it for the sequences of a head.
    absolute: float | Callable[[list[Head]], float]
    #: Whether rounding decides.
    is_undecided: Callable[[list[Head]], bool] = lambda sequences: False


STATISTICS: dict[str, Callable[[Head], list[float]]] = {}
OF_SEQUENCES: dict[str, Callable[[list[Head]], float]] = {}
TOLERANCES: dict[str, Tolerance] = {}
#: Those of which the largest is taken rather than the mean.
MAXIMA: set[str] = set()
#: Those that are of logits, which are sums of products that may cancel: they are as exact as the largest of them.
AS_EXACT_AS_LOGITS: set[str] = {"max_logit", "logit_std"}

_Function = TypeVar("_Function", bound=Callable[..., Any])


def of_head(function: Callable[[Head], list[float]]) -> Callable[[Head], list[float]]:
    """Make a reference known that gives numbers of one head of one sequence, of which the mean is taken."""
    STATISTICS[function.__name__] = function
    return function


def of_sequences(function: Callable[[list[Head]], float]) -> Callable[[list[Head]], float]:
    """Make a reference known that gives the value of a head, or NaN, from all sequences together."""
    OF_SEQUENCES[function.__name__] = function
    return function


def within(
    relative: float,
    absolute: float | Callable[[list[Head]], float],
    is_undecided: Callable[[list[Head]], bool] = lambda sequences: False,
) -> Callable[[_Function], _Function]:
    """Say how exactly a statistic must equal its reference."""

    def decorate(function: _Function) -> _Function:
        TOLERANCES[function.__name__] = Tolerance(relative, absolute, is_undecided)
        return function

    return decorate


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
                call.query.dtype,
            )
            for b in range(sequences)
        ]
        for h in range(count)
    ]


def head_values(statistic: str, heads: list[list[Head]]) -> list[float]:
    """The value of every head, NaN where it is absent."""
    if statistic in OF_SEQUENCES:
        return [OF_SEQUENCES[statistic](sequences) if sequences else float("nan") for sequences in heads]
    pooled = np.max if statistic in MAXIMA else np.mean
    values = [[value for head in sequences for value in STATISTICS[statistic](head)] for sequences in heads]
    return [float(pooled(value)) if value else float("nan") for value in values]


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()
