r"""Where a series is going: which ones may cross a limit, and when.

Least squares over all series at once says which are worth a closer look. Those get the slope of Theil ("A
rank-invariant method of linear and polynomial regression analysis", 1950) and Sen ("Estimates of the regression
coefficient based on Kendall's tau", JASA 1968), the median over all pairs of points, which a few outliers do not move.

Shape suffixes: T snapshots, P places, K pairs of snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_attn.warning.series import Array

#: A trend needs so many points: of fewer, a pair in six decides.
MIN_POINTS = 5
#: So large a share of pairs of points must rise (or all but so many fall) for a series to have a direction. Of five
#: random points one series in 42 has it, of ten one in 2000.
_MIN_AGREEMENT = 0.8
#: What the screen allows for rounding, as a share of what is compared.
_ROUNDING = 1e-9

_Booleans = npt.NDArray[np.bool_]
_Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Forecast:
    """What a series will do if it goes on like this.

    Args:
        slope: its change per step, now: that of the newer half, 0 where that goes the other way.
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
        values_TP: the series side by side; what is not finite is no value.

    Returns:
        (P,) change per step.

    Example:
        >>> import numpy as np
        >>> least_squares_slopes(np.array([0.0, 10.0, 20.0]), np.array([[1.0], [2.0], [3.0]])).tolist()
        [0.1]
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        slopes_P, _ = _least_squares(steps_T, values_TP, np.isfinite(values_TP))
    return slopes_P


def may_cross(steps_T: Array, values_TP: Array, limit: float, horizon: float) -> _Booleans:
    r"""Which series are worth a closer look, so that most need none.

    The least-squares line, straight or in logarithms, comes as near to the limit as the robust one could if it crossed.
    The slope of Theil and Sen is the median of :math:`(y_j - y_i) / (t_j - t_i)` over pairs. With residuals of least
    squares in a range :math:`R`, each of these differs from the slope of least squares by at most
    :math:`R / (t_j - t_i)`, hence their median by at most the median of that.

    Args:
        steps_T: the steps.
        values_TP: the series side by side; what is not finite is no value.
        limit: to be crossed, from below or from above.
        horizon: within so many steps from the last one.

    Returns:
        (P,) booleans; true wherever there is a last value and `forecast` tells of a crossing within the horizon.

    Example:
        >>> import numpy as np
        >>> steps = np.arange(0.0, 100.0, 10.0)
        >>> series = np.stack([0.1 * steps, np.full(10, 5.0)], axis=1)
        >>> may_cross(steps, series, limit=12.0, horizon=50).tolist()
        [True, False]
    """
    present_TP = np.isfinite(values_TP)
    found_P: _Booleans = present_TP[-1] & (present_TP.sum(axis=0) >= MIN_POINTS)
    if not found_P.any():
        return found_P
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        first_P = values_TP[present_TP.argmax(axis=0), np.arange(values_TP.shape[1])]
        has_crossed_P = (first_P < limit) != (values_TP[-1] < limit)
        reaches_P = _may_reach(steps_T, values_TP, present_TP, limit, horizon)
        if limit > 0:  # nothing that shrinks by factors reaches 0
            is_positive_P = ((values_TP > 0) | ~present_TP).all(axis=0)
            logarithms_TP = np.log(np.where(present_TP & is_positive_P, values_TP, 1.0))
            reaches_P |= is_positive_P & _may_reach(steps_T, logarithms_TP, present_TP, float(np.log(limit)), horizon)
    found_P &= has_crossed_P | reaches_P
    return found_P


def robust_slope(steps_T: Array, values_T: Array) -> float | None:
    """The median slope over all pairs of points; ``None`` where there are too few of them.

    Args:
        steps_T: the steps, increasing.
        values_T: the values; what is not finite is none.

    Example:
        >>> import numpy as np
        >>> robust_slope(np.arange(6.0), np.array([0.0, 2.0, 4.0, 99.0, 8.0, 10.0]))
        2.0
    """
    present_T = np.isfinite(values_T)
    if present_T.sum() < 2:
        return None
    return float(_median(_pair_slopes(steps_T[present_T], values_T[present_T][:, None]))[0])


def forecast(steps_T: Array, values_T: Array, limit: float) -> Forecast | None:
    """Say when a series crosses a limit, if it has a direction.

    Both a straight line and, for positive values, an exponential are laid through the series; the one that fits better
    counts. It is also laid through the newer half alone, and the later of the two crossings is taken, so that growth
    that levels off is given the time it takes.

    Args:
        steps_T: the steps, increasing.
        values_T: the values; what is not finite is none.
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
    return forecasts(steps_T, values_T[:, None], limit)[0]


def forecasts(steps_T: Array, values_TP: Array, limit: float) -> list[Forecast | None]:
    """`forecast` of several series, which takes little more time than that of one.

    Args:
        steps_T: the steps, increasing.
        values_TP: the series side by side; what is not finite is no value.
        limit: to be crossed, from below or from above.

    Returns:
        A forecast for each series, or ``None``.
    """
    found: list[Forecast | None] = [None] * values_TP.shape[1]
    present_TP = np.isfinite(values_TP)
    alike: dict[bytes, list[int]] = {}
    for column in range(values_TP.shape[1]):
        alike.setdefault(present_TP[:, column].tobytes(), []).append(column)
    for columns in alike.values():
        present_T = present_TP[:, columns[0]]
        if present_T.sum() >= MIN_POINTS:
            of_these = _forecasts_without_gaps(steps_T[present_T], values_TP[present_T][:, columns], limit)
            for column, of_one in zip(columns, of_these, strict=True):
                found[column] = of_one
    return found


def _forecasts_without_gaps(steps_T: Array, values_TP: Array, limit: float) -> Sequence[Forecast | None]:
    # Values near the largest float overflow in differences, and have no forecast.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        last_step = float(steps_T[-1])
        ages_T = steps_T - last_step  # so that intercepts are values of now
        slopes_KP = _pair_slopes(ages_T, values_TP)
        rises_P = (slopes_KP > 0).mean(axis=0) >= _MIN_AGREEMENT
        falls_P = (slopes_KP < 0).mean(axis=0) >= _MIN_AGREEMENT
        straight = _Lines.through(ages_T, values_TP, slopes_KP)
        is_positive_P = (values_TP > 0).all(axis=0)
        logarithms_TP = np.log(np.where(is_positive_P, values_TP, 1.0))
        exponential = _Lines.through(ages_T, logarithms_TP)
        straight_error_P = _median(np.abs(straight.at(ages_T) - values_TP))
        exponential_error_P = _median(np.abs(np.exp(exponential.at(ages_T)) - values_TP))
        is_exponential_P = is_positive_P & (exponential_error_P < straight_error_P)

        followed_TP = np.where(is_exponential_P, logarithms_TP, values_TP)
        limit_P = np.where(is_exponential_P, np.log(limit) if limit > 0 else -np.inf, limit)
        whole = _Lines(
            np.where(is_exponential_P, exponential.slope_P, straight.slope_P),
            np.where(is_exponential_P, exponential.now_P, straight.now_P),
        )
        newer = slice(-max(len(ages_T) // 2, 3), None)
        newer_half = _Lines.through(ages_T[newer], followed_TP[newer])
        is_below_P = values_TP[-1] < limit
        crossing_P = np.maximum(whole.crossing(limit_P, is_below_P), newer_half.crossing(limit_P, is_below_P))
        has_crossed_P = np.where(rises_P, values_TP[0] < limit, values_TP[0] >= limit) & (is_below_P != rises_P)
        wait_P = np.where(has_crossed_P, 0.0, np.where(np.isnan(crossing_P), np.inf, crossing_P))
        newest_P = np.where(is_exponential_P, np.exp(newer_half.now_P), 1.0)
        slope_P = np.where(np.sign(newer_half.slope_P) == np.sign(whole.slope_P), newer_half.slope_P * newest_P, 0.0)
    is_told_P = (rises_P | falls_P) & np.isfinite(slope_P)
    return [
        Forecast(slope, last_step + wait, is_exponential) if is_told else None
        for is_told, slope, wait, is_exponential in zip(
            is_told_P.tolist(), slope_P.tolist(), wait_P.tolist(), is_exponential_P.tolist(), strict=True
        )
    ]


@dataclass(frozen=True)
class _Lines:
    """Robust lines, one for each place, over the steps until now."""

    slope_P: Array
    now_P: Array

    @classmethod
    def through(cls, ages_T: Array, values_TP: Array, slopes_KP: Array | None = None) -> _Lines:
        slope_P = _median(_pair_slopes(ages_T, values_TP) if slopes_KP is None else slopes_KP)
        return cls(slope_P, _median(values_TP - slope_P * ages_T[:, None]))

    def at(self, ages_T: Array) -> Array:
        return self.now_P + self.slope_P * ages_T[:, None]

    def crossing(self, limit_P: Array, is_below_P: _Booleans) -> Array:
        """The steps from now to where each line crosses a limit that its series has not crossed yet."""
        nears_P = np.where(is_below_P, self.slope_P > 0, self.slope_P < 0)
        crossing_P: Array = np.where(nears_P, np.maximum((limit_P - self.now_P) / self.slope_P, 0.0), np.inf)
        return crossing_P


def _may_reach(steps_T: Array, values_TP: Array, present_TP: _Booleans, limit: float, horizon: float) -> _Booleans:
    """Whether the robust line could be at the limit so many steps ahead, by least squares and its residuals."""
    slope_P, now_P = _least_squares(steps_T, values_TP, present_TP)
    ages_T = steps_T - steps_T[-1]
    residuals_TP = np.where(present_TP, values_TP - now_P - slope_P * ages_T[:, None], 0.0)
    range_P = residuals_TP.max(axis=0) - residuals_TP.min(axis=0)
    earlier_K, later_K = _pairs(len(ages_T))
    inverse_K = 1 / (ages_T[later_K] - ages_T[earlier_K])
    inverse_P = np.where(present_TP.all(axis=0), np.median(inverse_K), inverse_K.max())
    ahead_P = now_P + slope_P * horizon
    rounding_P = _ROUNDING * (np.abs(values_TP[-1]) + np.abs(ahead_P) + abs(limit))
    margin_P = range_P * (1 + inverse_P * (horizon - ages_T[0])) + rounding_P
    is_below_P = values_TP[-1] < limit
    # what is not a number, for it overflows, is looked at too
    reaches_P: _Booleans = ~np.where(is_below_P, ahead_P + margin_P < limit, ahead_P - margin_P > limit)
    return reaches_P


def _least_squares(steps_T: Array, values_TP: Array, present_TP: _Booleans) -> tuple[Array, Array]:
    """Slopes, and what the lines are at the last step."""
    count_P = np.maximum(present_TP.sum(axis=0), 1)
    filled_TP = np.where(present_TP, values_TP, 0.0)
    ages_T = steps_T - steps_T[-1]
    ages_TP = np.where(present_TP, ages_T[:, None], 0.0)
    mean_age_P, mean_P = ages_TP.sum(axis=0) / count_P, filled_TP.sum(axis=0) / count_P
    from_mean_TP = np.where(present_TP, ages_TP - mean_age_P, 0.0)
    spread_P = (from_mean_TP**2).sum(axis=0)
    covariance_P = (from_mean_TP * (filled_TP - mean_P)).sum(axis=0)
    slope_P = np.where(spread_P > 0, covariance_P / spread_P, np.nan)
    return slope_P, mean_P - slope_P * mean_age_P


@lru_cache(maxsize=64)
def _pairs(points: int) -> tuple[_Indices, _Indices]:
    """Of each pair of points, the earlier and the later one."""
    earlier_K, later_K = np.triu_indices(points, k=1)
    return earlier_K, later_K


def _pair_slopes(steps_T: Array, values_TP: Array) -> Array:
    earlier_K, later_K = _pairs(len(steps_T))
    slopes_KP: Array = (values_TP[later_K] - values_TP[earlier_K]) / (steps_T[later_K] - steps_T[earlier_K])[:, None]
    return slopes_KP


def _median(values_TP: Array) -> Array:
    """`numpy.median` over the first axis, without what it does for NaN."""
    middle, is_even = len(values_TP) // 2, len(values_TP) % 2 == 0
    sorted_TP = np.sort(values_TP, axis=0)
    median_P: Array = sorted_TP[middle] / 2 + sorted_TP[middle - 1] / 2 if is_even else sorted_TP[middle]
    return median_P
