r"""When a head went over from attending by position to attending by content, or back.

Cui et al. ("A Phase Transition between Positional and Semantic Learning in a Solvable Model of Dot-Product Attention",
NeurIPS 2024, arXiv:2402.03902) find a positional and a semantic solution of attention, and a transition between them in
the number of samples. A transition of one head in training time, seen as a change of its `positional_share`, is a
proposal of this package and not a result of that paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Direction = Literal["positional_to_semantic", "semantic_to_positional"]

_Array = npt.NDArray[np.float64]

#: A side has a level from so many points on: two spikes at the end of a series do not move the median of five.
MIN_SIDE = 5
#: Of the splits after 1, 2, … n − 1 points, those that leave as many on both sides.
_SPLITS = slice(MIN_SIDE - 1, 1 - MIN_SIDE)

#: The change statistic of random walks: of the share given second, it exceeds what is given first. Simulated, 100 000
#: walks of 100 points; it is the same for 300, and lower for fewer, whose certainty is thus understated.
_OF_RANDOM_WALKS = (
    (0.0, 1.0), (37.0, 0.5), (77.0, 0.25), (143.0, 0.1), (204.0, 0.05), (280.0, 0.025), (397.0, 0.01), (500.0, 0.005),
    (800.0, 0.001),
)  # fmt: skip


class Transition(NamedTuple):
    """A lasting change of a head between attending by position and attending by content.

    Args:
        step: the first step seen after the change.
        direction: whether the share of position fell or rose.
        certainty: 0 … 0.999, the share of random walks that show no change as clear as this one.
        before: median of the series before the change.
        after: median from the change on.
    """

    step: int
    direction: Direction
    certainty: float
    before: float
    after: float


def find_transition(
    steps: Sequence[int],
    values: Sequence[float | None],
    *,
    min_change: float = 0.2,
    min_certainty: float = 0.95,
) -> Transition | None:
    r"""Find the one lasting change of a series such as `positional_share`, in which 1 is position and 0 is content.

    The change statistic is the self-normalised CUSUM of Shao and Zhang ("Testing for Change Points in Time Series",
    JASA 2010): with the mean taken off :math:`y`, and :math:`S_{a,b} = \sum_{t=a}^b y_t`, the largest over :math:`k` of

    .. math:: \frac{n \, S_{1,k}^2}
        {\sum_{t \le k} (S_{1,t} - \tfrac{t}{k} S_{1,k})^2 +
        \sum_{t > k} (S_{t,n} - \tfrac{n-t+1}{n-k} S_{k+1,n})^2}, \qquad 5 \le k \le n - 5

    It holds a change against what wanders within the two sides, so that no bandwidth and no noise level need be chosen.
    A mere slope reaches 30, however long and steep, and two changes that undo each other less. The certainty is read
    off what random walks reach, the worst of autocorrelated noise: of these 5 % have a certainty of 0.95, and of noise
    that forgets, white or AR(1), fewer.

    Outliers make no change: values are brought within three robust deviations of their median first (at least 0.1), and
    levels are medians. Only the order of the steps counts, not their distances. A change that takes more than about a
    quarter of the series is a drift, and of several changes none need be found.

    Args:
        steps: the steps, not decreasing.
        values: the value at each step; ``None`` or NaN where there is none.
        min_change: the difference of levels from which on a change counts.
        min_certainty: how certain it must be. Whoever looks at many heads, or again and again, finds more by chance.

    Returns:
        The transition; ``None`` where there is none, or there are fewer than 10 values.

    Raises:
        ValueError: if steps and values differ in number, steps decrease, or a limit is out of range.

    Example:
        >>> steps = range(0, 2000, 100)
        >>> values = [0.91, 0.94, 0.90, 0.93, 0.92, 0.89, 0.93, 0.91, 0.92, 0.90] + [0.31, 0.28, 0.33, 0.30, 0.29] * 2
        >>> find_transition(steps, values)
        Transition(step=1000, direction='positional_to_semantic', certainty=0.999, before=0.915, after=0.3)
    """
    _check(steps, values, min_change, min_certainty)
    series = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    present = np.isfinite(series)
    series, at = series[present], np.asarray(steps)[present]
    if len(series) < 2 * MIN_SIDE:
        return None
    bounded = _bounded(series)
    change = _place(bounded)
    before, after = float(np.median(series[:change])), float(np.median(series[change:]))
    if abs(after - before) < min_change:
        return None
    certainty = _certainty(_change_statistic(bounded))
    if certainty < min_certainty:
        return None
    falls = after < before
    direction: Direction = "positional_to_semantic" if falls else "semantic_to_positional"
    return Transition(int(at[change]), direction, certainty, before, after)


def _check(steps: Sequence[int], values: Sequence[float | None], min_change: float, min_certainty: float) -> None:
    if len(steps) != len(values):
        raise ValueError(f"`steps` and `values` must be equally many, got {len(steps)} and {len(values)}.")
    for earlier, later in pairwise(steps):
        if later < earlier:
            raise ValueError(f"`steps` must not decrease, got {later} after {earlier}.")
    if not min_change > 0:
        raise ValueError(f"`min_change` must be greater than 0, got {min_change!r}.")
    if not 0 <= min_certainty < 1:
        raise ValueError(f"`min_certainty` must be at least 0 and less than 1, got {min_certainty!r}.")


def _bounded(series: _Array) -> _Array:
    """The values within three robust deviations of their median, so that a spike weighs no more than a large value."""
    median = np.median(series)
    deviation = 1.4826 * np.median(np.abs(series - median))  # of a normal distribution, the standard deviation
    bound = max(3 * float(deviation), 0.1)  # so that a change late in a quiet series is not taken for spikes
    return np.clip(series, median - bound, median + bound)


def _change_statistic(series: _Array) -> float:
    """The largest over the splits of what the sum of one side is beside the wandering within both."""
    centred = series - series.mean()
    wandering = _wandering(centred)[:-1] + _wandering(centred[::-1])[:-1][::-1]
    changes = len(series) * np.cumsum(centred)[:-1] ** 2
    rounding = np.finfo(np.float64).eps * changes.max()  # two constant sides do not wander at all
    if rounding == 0:
        return 0.0
    return float((changes / np.maximum(wandering, rounding))[_SPLITS].max())


def _wandering(series: _Array) -> _Array:
    r""":math:`\sum_{t \le k} (S_t - \tfrac{t}{k} S_k)^2` for every k, multiplied out into running sums."""
    sums, t = np.cumsum(series), np.arange(1.0, len(series) + 1)
    slopes = sums / t
    expanded = np.cumsum(sums**2) - 2 * slopes * np.cumsum(t * sums) + slopes**2 * np.cumsum(t**2)
    return np.asarray(np.maximum(expanded, 0.0))


def _place(series: _Array) -> int:
    """The number of points before the split into two levels that leaves the smallest sum of squares."""
    sums, k = np.cumsum(series - series.mean())[:-1], np.arange(1, len(series))
    explained = sums**2 / (k * (len(series) - k))
    return int(explained[_SPLITS].argmax()) + MIN_SIDE


def _certainty(statistic: float) -> float:
    limits, shares = zip(*_OF_RANDOM_WALKS, strict=True)
    return 1.0 - float(np.exp(np.interp(statistic, limits, np.log(shares))))
