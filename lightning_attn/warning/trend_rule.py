"""Rules that say which statistic is going to cross a limit, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import numpy as np
import numpy.typing as npt

from lightning_attn.warning.early_warning import Severity
from lightning_attn.warning.forecast import MIN_POINTS, Forecast, forecasts, least_squares_slopes, may_cross
from lightning_attn.warning.limit_rule import LEAST_START
from lightning_attn.warning.rule import Rule, Sign, check_count, check_number
from lightning_attn.warning.series import Array, Record, Scope

#: Of the series that may cross, so many are looked at closely, which bounds what thousands of heads cost.
_MOST_FORECASTS = 32


class TrendRule(Rule):
    """A statistic will cross a limit soon if it goes on like this.

    Args:
        name: what the rule is called.
        statistic: name of the statistic.
        above: the limit that is going to be crossed from below.
        below: the limit that is going to be crossed from above. Either ``above`` or ``below`` is given.
        beyond: only what has come so far is looked at: most of what grows from next to nothing levels off. ``None`` for
            all.
        without_start: take off twice what the statistic was in the first snapshot; see `LimitRule`.
        horizon: within so many steps; ``None`` for a quarter of what the window spans, at whatever cadence.
        window: the newest snapshots that the trend is taken of.
        scope: each head by itself, or the mean of each site or of the model.
        severity: how bad it is.
        warmup_steps: nothing is said before that step.
        patience: so many snapshots in a row must predict it.
        meaning: what follows if nothing is done.
        remedy: what to try.

    Raises:
        ValueError: if an argument is not allowed, or the statistic is unknown.

    Example:
        >>> TrendRule("narrowing", "entropy_without_sink", below=0.05, horizon=200, scope="site").limit
        0.05
    """

    statistic: str
    limit: float
    is_above: bool
    beyond: float | None
    without_start: bool
    horizon: int | None
    scope: Scope

    def __init__(
        self,
        name: str,
        statistic: str,
        above: float | None = None,
        below: float | None = None,
        beyond: float | None = None,
        without_start: bool = False,
        horizon: int | None = None,
        window: int = 10,
        scope: Scope = "head",
        severity: Severity = "warning",
        warmup_steps: int = 0,
        patience: int = 2,
        meaning: str = "",
        remedy: str = "",
    ) -> None:
        if (above is None) == (below is None):
            raise ValueError(
                f"The limit, either `above` or `below`, must be given, got above={above!r} and below={below!r}."
            )
        (limit,) = (given for given in (above, below) if given is not None)
        check_number(limit, "limit")
        if beyond is not None:
            check_number(beyond, "beyond")
            if beyond >= limit if below is None else beyond <= limit:
                raise ValueError(f"`beyond` must lie before the limit, {limit!r}, got {beyond!r}.")
        if horizon is not None:
            check_count(horizon, "horizon", least=1)
        check_count(window, "window", least=MIN_POINTS)
        if scope not in get_args(Scope):
            raise ValueError(f"`scope` must be 'head', 'site' or 'model', got {scope!r}.")
        super().__init__(name, [statistic], severity, warmup_steps, patience, snapshots=window)
        self._keep(
            statistic=statistic,
            limit=float(limit),
            is_above=below is None,
            beyond=None if beyond is None else float(beyond),
            without_start=without_start,
            horizon=horizon,
            scope=scope,
            meaning=meaning or type(self).meaning,
            remedy=remedy or type(self).remedy,
        )

    def signs(self, record: Record) -> Iterator[Sign]:
        """Every place whose trend crosses the limit within the horizon.

        What was warned of is not warned of anew while it is beyond the limit, or may still cross it: noise hides a
        trend now and then.
        """
        if not record.has(self.statistic):
            return
        series = record.series(self.statistic).last(self.snapshots)
        if self.without_start:
            series = series.without(record.at_first(self.statistic), least=LEAST_START * self.limit)
        series = series.averaged(self.scope)
        steps_T, values_TP = series.steps_T, series.values_TP
        if len(steps_T) < MIN_POINTS:
            return
        horizon = self._horizon(steps_T)
        sense = 1 if self.is_above else -1
        beyond_P = sense * series.last_P >= sense * self.limit
        worth = np.flatnonzero(beyond_P | may_cross(steps_T, values_TP, self.limit, 2 * horizon))
        nearest = worth[self._order(steps_T, values_TP[:, worth])]
        places, values = [series.places[place] for place in nearest.tolist()], series.last_P[nearest].tolist()
        told = record.series(self.statistic).averaged(self.scope).last_P[nearest].tolist()
        closely, others = nearest[:_MOST_FORECASTS], nearest[_MOST_FORECASTS:]
        found = forecasts(steps_T, values_TP[:, closely], self.limit) + self._straight(steps_T, values_TP[:, others])
        for place, value, seen, known in zip(places, values, told, found, strict=True):
            is_far = self.beyond is None or sense * value > sense * self.beyond
            if is_far and known and sense * known.slope > 0 and known.step - record.step <= horizon:
                crossing = int(np.ceil(known.step))
                yield Sign(place, self.statistic, seen, self.limit, slope=known.slope, predicted_step=crossing)
            else:
                yield Sign(place, self.statistic, seen, self.limit, grade=0)

    def _horizon(self, steps_T: Array) -> float:
        """So many steps ahead: by default a quarter of what the window spans when it is full."""
        if self.horizon is not None:
            return self.horizon
        return float(np.mean(np.diff(steps_T))) * (self.snapshots - 1) / 4

    def _straight(self, steps_T: Array, values_TP: Array) -> list[Forecast | None]:
        """Forecasts by least squares alone, which serve where so many heads go the same way."""
        slopes_P = least_squares_slopes(steps_T, values_TP)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            wait_P = (self.limit - values_TP[-1]) / slopes_P
        return [
            Forecast(slope, steps_T[-1] + wait, is_exponential=False) if wait > 0 else None
            for slope, wait in zip(slopes_P.tolist(), wait_P.tolist(), strict=True)
        ]

    def _order(self, steps_T: Array, values_TP: Array) -> npt.NDArray[np.intp]:
        """Series by when least squares crosses the limit; then by distance; those that are beyond it at last."""
        distance_P = self.limit - values_TP[-1]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            wait_P = distance_P / least_squares_slopes(steps_T, values_TP)
        is_beyond_P = distance_P <= 0 if self.is_above else distance_P >= 0
        return np.lexsort((np.abs(distance_P), np.where(wait_P > 0, wait_P, np.inf), is_beyond_P))
