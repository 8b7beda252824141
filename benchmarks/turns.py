"""Timing things in turn with their baseline, so that a machine that becomes faster or slower cancels out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median, quantiles

from table import Row, judged


@dataclass(frozen=True)
class Effort:
    """How often everything is repeated.

    Args:
        rounds: turns of everything that is compared.
        steps: training steps of one turn.
        calls: attention calls of one turn.
    """

    rounds: int
    steps: int
    calls: int

    @property
    def rounds_of_short_steps(self) -> int:
        """Rounds of what is as small as the noise of short steps, of which many rounds are cheap."""
        return max(self.rounds, 7)


THOROUGH = Effort(rounds=7, steps=12, calls=2)
QUICK = Effort(rounds=2, steps=4, calls=1)


@dataclass(frozen=True)
class Ratio:
    """How much longer something takes than its baseline: the median over rounds, and the quartiles."""

    value: float
    low: float
    high: float
    baseline_seconds: float

    @classmethod
    def of(cls, values: list[float], baseline_seconds: float) -> Ratio:
        """The ratio whose value in each round is given."""
        low, middle, high = quartiles(values)
        return cls(middle, low, high, baseline_seconds)

    def row(self, measured: str, setting: str, baseline: str, *limits: tuple[str, float]) -> Row:
        digits = 3 if self.value < 2 else 2
        return Row(
            measured,
            setting,
            f"{baseline}, {1000 * self.baseline_seconds:.3g} ms",
            f"× {self.value:.{digits}f}",
            f"{self.low:.{digits}f} – {self.high:.{digits}f}",
            judged(self.value, *limits),
        )


def ratios(baseline: Callable[[], float], others: dict[str, Callable[[], float]], rounds: int) -> dict[str, Ratio]:
    """Time things in turn with their baseline.

    Args:
        baseline: runs one block of measurements and returns its seconds.
        others: what is compared with it, in the same way.
        rounds: how often everything has its turn.
    """
    found: dict[str, list[float]] = {name: [] for name in others}
    before = baseline()
    baselines = [before]
    for number in range(rounds):
        for name, other in others.items():
            seconds, after = other(), baseline()
            found[name].append(seconds / mean([before, after]))
            baselines.append(after)
            before = after
        latest = ", ".join(f"{name} {values[-1]:.3f}" for name, values in found.items())
        progress(f"  round {number + 1} of {rounds}: {1000 * before:.1f} ms; {latest}")
    return {name: Ratio.of(values, median(baselines)) for name, values in found.items()}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """What bounds the middle half of the rounds, and their median between."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def seconds_of(function: Callable[[], object], calls: int) -> float:
    """The median time of a call, after one that warms up."""
    function()
    times = [time.perf_counter()]
    for _ in range(calls):
        function()
        times.append(time.perf_counter())
    return median(end - start for start, end in pairwise(times))


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
