r"""Where a series is going: which ones grow, and when they will cross a limit.

Least squares over all series at once says which are worth a closer look. Those get the slope of Theil ("A
rank-invariant method of linear and polynomial regression analysis", 1950) and Sen ("Estimates of the regression
coefficient based on Kendall's tau", JASA 1968), the median over all pairs of points, which three outliers in ten do not
move.

Shape suffixes: T snapshots, P places, K pairs of snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_attn.warning.series import Array

#: A trend needs so many points: of fewer, a pair in six decides.
MIN_POINTS = 5
#: So large a share of pairs of points must rise (or all but so many fall) for a series to have a direction. Of five
#: random points one series in 42 has it, of ten one in 2000.
_MIN_AGREEMENT = 0.8
#: The smallest number whose logarithm is taken.
_SMALLEST = 1e-12


@dataclass(frozen=True)
class Forecast:
    """What a series will do if it goes on like this.

    Args:
        slope: its change per step, now.
        step: the step at which it crosses the limit; the last step where it has already, infinite where it never will.
        is_exponential: whether it changes by a factor in equal times, rather than by a difference.
    """

    slope: float
    step: float
    is_exponential: bool


def least_squares_slopes(steps_T: Array, values_TP: Array) -> Array:
    """The slope of each series by least squares; NaN where it has fewer than two values.

    Args:
        steps_T: the steps.
        values_TP: the series side by side, NaN where there is no value.

    Returns:
        (P,) change per step.
    """
    present_TP = np.isfinite(values_TP)
    count_P = np.maximum(present_TP.sum(axis=0), 1)
    filled_TP = np.where(present_TP, values_TP, 0.0)
    steps_TP = np.where(present_TP, steps_T[:, None], 0.0)
    from_mean_TP = np.where(present_TP, steps_TP - steps_TP.sum(axis=0) / count_P, 0.0)
    spread_P = (from_mean_TP**2).sum(axis=0)
    covariance_P = (from_mean_TP * (filled_TP - filled_TP.sum(axis=0) / count_P)).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes_P: Array = np.where(spread_P > 0, covariance_P / spread_P, np.nan)
    return slopes_P


def may_cross(steps_T: Array, values_TP: Array, limit: float, horizon: float) -> Array:
    """Which series are worth a closer look: by least squares, straight or in logarithms, they cross a limit in time.

    Args:
        steps_T: the steps.
        values_TP: the series.
        limit: from below or from above.
        horizon: within so many steps from the last one.

    Returns:
        (P,) booleans. Those that are beyond the limit at last are among them.
    """
    last_P = values_TP[-1]
    rises_P = last_P < limit
    ahead_P = last_P + least_squares_slopes(steps_T, values_TP) * horizon
    crosses_P = np.where(rises_P, ahead_P >= limit, ahead_P <= limit)
    if limit > 0:
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            log_TP = np.log(np.where(values_TP > _SMALLEST, values_TP, np.nan))
            ahead_P = log_TP[-1] + least_squares_slopes(steps_T, log_TP) * horizon
        crosses_P |= np.where(rises_P, ahead_P >= np.log(limit), ahead_P <= np.log(limit))
    found_P: Array = crosses_P & np.isfinite(last_P)
    return found_P


def robust_slope(steps_T: Array, values_T: Array) -> float | None:
    """The median slope over all pairs of points; ``None`` where there are too few of them.

    Args:
        steps_T: the steps.
        values_T: the values, NaN where there is none.

    Example:
        >>> import numpy as np
        >>> robust_slope(np.arange(6.0), np.array([0.0, 2.0, 4.0, 99.0, 8.0, 10.0]))
        2.0
    """
    present_T = np.isfinite(values_T)
    if present_T.sum() < 2:
        return None
    return float(np.median(_pair_slopes(steps_T[present_T], values_T[present_T])))


def forecast(steps_T: Array, values_T: Array, limit: float) -> Forecast | None:
    """Say when a series crosses a limit, if it has a direction.

    Both a straight line and, for positive values, an exponential are laid through the series; the one that fits better
    counts. Each is also laid through the newer half alone, and the later of the two crossings is taken, so that growth
    that levels off is given the time it takes.

    Args:
        steps_T: the steps, increasing.
        values_T: the values, NaN where there is none.
        limit: to be crossed, from below or from above.

    Returns:
        The forecast; ``None`` for a series without a direction, or with fewer than five values.

    Example:
        >>> import numpy as np
        >>> steps = np.arange(0.0, 100.0, 10.0)
        >>> round(forecast(steps, 0.1 * steps, limit=20.0).step)
        200
        >>> round(forecast(steps, np.exp(0.01 * steps), limit=np.e**2).step)
        200
    """
    present_T = np.isfinite(values_T)
    steps_T, values_T = steps_T[present_T], values_T[present_T]
    if len(values_T) < MIN_POINTS:
        return None
    slopes_K = _pair_slopes(steps_T, values_T)
    rising, falling = (slopes_K > 0).mean(), (slopes_K < 0).mean()
    if max(rising, falling) < _MIN_AGREEMENT:
        return None
    straight = _Line.through(steps_T, values_T)
    if values_T.min() > _SMALLEST and limit > _SMALLEST:
        logarithms_T = np.log(values_T)
        exponential = _Line.through(steps_T, logarithms_T)
        error = np.median(np.abs(np.exp(exponential.at(steps_T)) - values_T))
        if error < np.median(np.abs(straight.at(steps_T) - values_T)):
            step = _crossing(exponential, steps_T, logarithms_T, float(np.log(limit)))
            return Forecast(exponential.slope * float(np.exp(exponential.at(steps_T)[-1])), step, is_exponential=True)
    return Forecast(straight.slope, _crossing(straight, steps_T, values_T, limit), is_exponential=False)


@dataclass(frozen=True)
class _Line:
    slope: float
    intercept: float

    @classmethod
    def through(cls, steps_T: Array, values_T: Array) -> _Line:
        slope = float(np.median(_pair_slopes(steps_T, values_T)))
        return cls(slope, float(np.median(values_T - slope * steps_T)))

    def at(self, steps_T: Array) -> Array:
        return self.intercept + self.slope * steps_T

    def crossing(self, last_step: float, is_below: bool, limit: float) -> float:
        """The step at which the line crosses a limit that the series has not crossed yet."""
        if self.slope == 0 or (self.slope > 0) != is_below:
            return float("inf")
        return max((limit - self.intercept) / self.slope, last_step)


def _crossing(line: _Line, steps_T: Array, values_T: Array, limit: float) -> float:
    last = float(steps_T[-1])
    is_below = bool(values_T[-1] < limit)
    if not is_below and values_T[0] < limit:
        return last
    newer = slice(-max(len(steps_T) // 2, 3), None)
    newer_line = _Line.through(steps_T[newer], values_T[newer])
    return max(line.crossing(last, is_below, limit), newer_line.crossing(last, is_below, limit))


def _pair_slopes(steps_T: Array, values_T: Array) -> Array:
    earlier_K, later_K = np.triu_indices(len(steps_T), k=1)
    return (values_T[later_K] - values_T[earlier_K]) / (steps_T[later_K] - steps_T[earlier_K])
