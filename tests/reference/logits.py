"""What logits and their spread tell, and how attention keeps up with length."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import logsumexp, softmax

from reference.core import AS_EXACT_AS_LOGITS, MAXIMA, Head, of_head, of_sequences, within
from reference.lenses import entropy_of, ratio

#: Least entropies in nats, by the number of keys and how far logits are from their mean.
KNOWN_FLOORS = [
    (64, 1, 4.143699),
    (64, 2, 4.041087),
    (64, 5, 1.802616),
    (64, 10, 0.029206),
    (1024, 5, 6.431134),
    (1024, 10, 0.487158),
    (4, 2, 0.790945),
]

AS_EXACT_AS_LOGITS |= {"selectivity", "critical_scaling"}

#: The resolution that tests ask of numbers of single precision near 1.
RESOLUTION = 2 * float(np.finfo(np.float32).eps)


def largest_logit(sequences: list[Head]) -> float:
    return max((float(np.abs(head.visible_logits(i)).max()) for head in sequences for i in head.rows), default=0)


def as_exponentials_of_gaps(sequences: list[Head], values: Callable[[Head], list[float]]) -> float:
    """What numbers are exact to that sharp rows make small as e^-gap, of a gap between two logits.

    The gap is as exact as two logits, which are as exact as the largest: its error is the relative one of the number.
    """
    found = [value for head in sequences for value in values(head)]
    mean = float(np.mean(found)) if found else 0.0
    return RESOLUTION * (1 + 2 * largest_logit(sequences) * mean)


@within(relative=1e-5, absolute=lambda sequences: as_exponentials_of_gaps(sequences, entropy_floor))
@of_head
def entropy_floor(head: Head) -> list[float]:
    floors = []
    for i in head.rows_with_a_choice:
        logits = head.visible_logits(i)
        m = len(logits)
        sigma = np.linalg.norm(logits - logits.mean())
        beta = np.exp(-sigma * np.sqrt(m / (m - 1)))
        peak = 1 + (m - 1) * beta
        floors.append(float((np.log(peak) + sigma * np.sqrt(m * (m - 1)) * beta / peak) / np.log(m)))
    return floors


@of_head
def selectivity(head: Head) -> list[float]:
    rows = [head.visible_logits(i) for i in head.rows_with_a_choice]
    return [float(logits.std() / np.sqrt(2 * np.log(len(logits)))) for logits in rows]


def has_a_logit_at_the_limit(sequences: list[Head]) -> bool:
    logits = [head.visible_logits(i) for head in sequences for i in head.rows]
    return any((np.abs(row - 100) < 1e-6 * np.abs(row).max()).any() for row in logits)


@within(relative=1e-6, absolute=0, is_undecided=has_a_logit_at_the_limit)
@of_sequences
def large_logit_ratio(sequences: list[Head]) -> float:
    logits = [head.visible_logits(i) for head in sequences for i in head.rows]
    return ratio(sum((row > 100).sum() for row in logits), sum(len(row) for row in logits))


MAXIMA.add("logit_spacing")


def spacing(size: float, dtype: torch.dtype) -> float:
    """The distance from the number of a type that is nearest to one that is not negative to the next larger one."""
    kind = torch.finfo(dtype)

    def step(number: float) -> float:
        return kind.eps * 2.0 ** np.floor(np.log2(max(number, kind.tiny)))

    nearest = round(size / step(size)) * step(size)  # ties to even, as numbers are rounded
    if nearest > kind.max:
        return float("inf")
    return float(step(nearest)) if nearest > 0 else 0.0


def spacings(head: Head, shift: float) -> list[float]:
    sizes = [abs(float(head.visible_logits(i).max())) for i in head.rows]
    return [spacing(max(0.0, size + shift), head.dtype) for size in sizes]


def is_next_to_another_spacing(sequences: list[Head]) -> bool:
    def found(shift: float) -> float:
        return max((value for head in sequences for value in spacings(head, shift)), default=0.0)

    error = 1e-6 * largest_logit(sequences)
    return len({found(shift) for shift in (-error, 0.0, error)}) > 1


@within(relative=0, absolute=0, is_undecided=is_next_to_another_spacing)
@of_head
def logit_spacing(head: Head) -> list[float]:
    return spacings(head, shift=0.0)


@within(relative=1e-5, absolute=lambda sequences: as_exponentials_of_gaps(sequences, softmax_sensitivity))
@of_head
def softmax_sensitivity(head: Head) -> list[float]:
    """1 - sum of squares = sum of the products of different weights, so that nothing cancels."""
    traces = []
    for i in head.rows_with_a_choice:
        weights = softmax(head.visible_logits(i))
        products = np.outer(weights, weights)
        np.fill_diagonal(products, 0)
        traces.append(float(products.sum()))
    return traces


@of_head
def critical_scaling(head: Head) -> list[float]:
    """log(m - 1) + log(A / (1 - A)), over log m; odds as a difference of logarithms, since A may be next to 1."""
    if not head.is_square:
        return []
    scalings = []
    for i in head.rows_with_a_choice:
        if head.visible[i, i]:
            others = head.visible[i] & (np.arange(len(head.visible)) != i)
            log_odds = head.logits[i, i] - logsumexp(head.logits[i, others])
            scalings.append(float((np.log(others.sum()) + log_odds) / np.log(others.sum() + 1)))
    return scalings


class Growth(NamedTuple):
    """The rows with a choice of some sequences: log-counts without their mean, entropies, and their largest logit."""

    log_counts: np.ndarray
    entropies: np.ndarray
    largest: float


def growths(sequences: list[Head]) -> list[Growth]:
    found = []
    for head in sequences:
        rows = [head.visible_logits(i) for i in head.rows_with_a_choice]
        counts = [len(row) for row in rows]
        if len(set(counts)) >= 2:
            log_counts, entropies = np.log(counts), np.array([entropy_of(row) for row in rows])
            largest = max(float(np.abs(row).max()) for row in rows)
            found.append(Growth(log_counts - log_counts.mean(), entropies, largest))
    return found


def resolution_of_entropy_growth(sequences: list[Head]) -> float:
    """What the slope is exact to where entropies are as exact as they are tested to be: their signs do not cancel."""
    errors = [(np.abs(x) * (max(1e-5, 1e-7 * largest) * h + RESOLUTION)).sum() for x, h, largest in growths(sequences)]
    return float(sum(errors) / max(1e-300, sum((x**2).sum() for x, _, _ in growths(sequences))))


@within(relative=0, absolute=resolution_of_entropy_growth)
@of_sequences
def entropy_growth(sequences: list[Head]) -> float:
    found = growths(sequences)
    return ratio(sum((x * (h - h.mean())).sum() for x, h, _ in found), sum((x**2).sum() for x, _, _ in found))
