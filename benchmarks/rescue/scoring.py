"""How much of what q/k norm would have saved a treatment saves, seed by seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from rescued_runs import Run
from treatments import QK_NORM, UNTREATED, Case

#: So many times the seeds are drawn anew for an interval.
_DRAWS = 10_000


@dataclass(frozen=True)
class Interval:
    """A value over seeds, and the interval that holds 95 % of what other draws of these seeds would give."""

    value: float
    low: float
    high: float


class Losses:
    """The final losses of one case, by treatment and seed."""

    def __init__(self, case: Case, runs: Iterable[Run]) -> None:
        self.case = case
        self.runs = {
            (run.treatment, run.seed): run for run in runs if (run.family, run.setting) == (case.family, case.setting)
        }

    def seeds(self, *treatments: str) -> list[int]:
        """The seeds that were trained with all of these."""
        of_each = [{seed for name, seed in self.runs if name == treatment} for treatment in treatments]
        return sorted(set.intersection(*of_each)) if of_each else []

    def of(self, treatment: str, seeds: Sequence[int]) -> list[float]:
        """The final losses."""
        return [self.runs[treatment, seed].final_loss for seed in seeds]

    def recovered(self, treatment: str) -> Interval | None:
        """Which share of the gap between untreated and q/k norm is closed: the mean gain over the mean gap."""
        seeds = self.seeds(UNTREATED, QK_NORM, treatment)
        if len(seeds) < 2:
            return None
        untreated, best, treated = (np.array(self.of(name, seeds)) for name in (UNTREATED, QK_NORM, treatment))
        return _interval(lambda draw: (untreated - treated)[draw].mean() / (untreated - best)[draw].mean(), len(seeds))

    def recovered_of_seed(self, treatment: str, seed: int) -> float:
        """The same of one seed; not a number where a run of it is missing."""
        if not all((name, seed) in self.runs for name in (UNTREATED, QK_NORM, treatment)):
            return float("nan")
        untreated, best, treated = (self.runs[name, seed].final_loss for name in (UNTREATED, QK_NORM, treatment))
        return (untreated - treated) / (untreated - best)

    def above_untreated(self, treatment: str) -> Interval | None:
        """By how much the final loss is above that of the untreated run of the same seed, on average."""
        seeds = self.seeds(UNTREATED, treatment)
        if len(seeds) < 2:
            return None
        difference = np.array(self.of(treatment, seeds)) - np.array(self.of(UNTREATED, seeds))
        return _interval(lambda draw: difference[draw].mean(), len(seeds))

    def mean_of(self, treatment: str) -> float:
        """The mean final loss."""
        return mean(self.of(treatment, self.seeds(treatment)))


def _interval(statistic: object, count: int) -> Interval:
    assert callable(statistic)
    random = np.random.default_rng(0)
    drawn = [statistic(random.integers(count, size=count)) for _ in range(_DRAWS)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(float(statistic(np.arange(count))), float(low), float(high))
