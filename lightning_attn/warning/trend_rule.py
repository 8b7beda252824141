"""Rules that say which statistic is going to cross a limit, and when."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_attn.statistics.registry import resolve
from lightning_attn.warning.early_warning import Severity
from lightning_attn.warning.forecast import MIN_POINTS, forecast, may_cross
from lightning_attn.warning.rule import Rule, Sign, check_count
from lightning_attn.warning.series import Record, Scope

#: Of the series that least squares finds, so many are looked at closely, which bounds what thousands of heads cost.
_MOST_FORECASTS = 16


class TrendRule(Rule):
    """A statistic will cross a limit soon if it goes on like this.

    Args:
        name: what the rule is called.
        statistic: name of the statistic.
        limit: what will be crossed, from below or from above.
        horizon: within so many steps.
        window: the newest snapshots that the trend is taken of.
        scope: each head by itself, or the mean of each site or of the model.
        severity: how bad it is.
        warmup_steps: nothing is said before that step.
        patience: so many snapshots in a row must predict it.
        meaning: what follows if nothing is done.
        remedy: what to try.

    Raises:
        ValueError: if an argument is not allowed, or the statistic is unknown.
    """

    statistic: str
    limit: float
    horizon: int
    scope: Scope

    def __init__(
        self,
        name: str,
        statistic: str,
        limit: float,
        horizon: int = 100,
        window: int = 10,
        scope: Scope = "head",
        severity: Severity = "warning",
        warmup_steps: int = 0,
        patience: int = 2,
        meaning: str = "",
        remedy: str = "",
    ) -> None:
        (registered,) = resolve(statistic)
        check_count(horizon, "horizon", least=1)
        check_count(window, "window", least=MIN_POINTS)
        super().__init__(name, [registered.name], severity, warmup_steps, patience, snapshots=window)
        self._keep(
            statistic=registered.name,
            limit=float(limit),
            horizon=horizon,
            scope=scope,
            meaning=meaning or type(self).meaning,
            remedy=remedy or type(self).remedy,
        )

    def signs(self, record: Record) -> Iterator[Sign]:
        """Every place whose trend crosses the limit within the horizon."""
        if not record.has(self.statistic):
            return
        series = record.series(self.statistic).last(self.snapshots).averaged(self.scope)
        steps_T, values_TP = series.steps_T, series.values_TP
        if len(steps_T) < MIN_POINTS:
            return
        candidates = np.flatnonzero(may_cross(steps_T, values_TP, self.limit, 2 * self.horizon))
        distance_P = np.abs(values_TP[-1] - self.limit)
        nearest = candidates[np.argsort(distance_P[candidates], kind="stable")]
        for rank, place in enumerate(nearest.tolist()):
            value = float(values_TP[-1, place])
            found = forecast(steps_T, values_TP[:, place], self.limit) if rank < _MOST_FORECASTS else None
            if found is not None and found.step - record.step <= self.horizon:
                yield Sign(
                    series.places[place],
                    self.statistic,
                    value,
                    self.limit,
                    slope=found.slope,
                    predicted_step=int(np.ceil(found.step)),
                )
            else:  # not sure any more, or one of too many
                yield Sign(series.places[place], self.statistic, value, self.limit, grade=0)
