"""Where a series is going, held against growth whose crossing is known."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import theilslopes

from lightning_attn.warning.forecast import forecast, forecasts, least_squares_slopes, may_cross, robust_slope

NAN, INF = math.nan, math.inf
Array = np.ndarray


def steps_of(points: int, first: int = 0, every: int = 10) -> Array:
    return first + every * np.arange(points, dtype=np.float64)


@st.composite
def growing_steps(draw: st.DrawFn, least: int = 5, most: int = 20) -> Array:
    """Steps of any beginning and any distances."""
    gaps = draw(st.lists(st.integers(1, 1000), min_size=least - 1, max_size=most - 1))
    return draw(st.integers(0, 10**6)) + np.cumsum([0, *gaps]).astype(np.float64)


@st.composite
def any_series(draw: st.DrawFn) -> tuple[Array, Array]:
    """Steps, and a series on them that may do anything."""
    steps_T = draw(growing_steps(least=1, most=14))
    number = st.one_of(
        st.floats(-100, 100), st.floats(width=64), st.integers(-3, 3).map(float), st.sampled_from([NAN, INF, -INF])
    )
    kind = draw(st.sampled_from(["any", "tame", "trend"]))
    if kind == "any":
        return steps_T, draw(arrays(np.float64, len(steps_T), elements=number))
    noise_T = draw(arrays(np.float64, len(steps_T), elements=st.floats(-1, 1)))
    slope = draw(st.floats(-1, 1)) if kind == "trend" else 0.0
    values_T = 10 + slope * (steps_T - steps_T[0]) / 10 + noise_T
    values_T[draw(st.integers(0, len(values_T) - 1))] = draw(number)  # an outlier, or a gap
    return steps_T, values_T


@st.composite
def trends(draw: st.DrawFn) -> tuple[Array, Array]:
    """A series that nearly always has a direction, with noise, gaps and an outlier at most."""
    steps_T = draw(growing_steps(least=6, most=14))
    change_T = np.linspace(0, draw(st.floats(-30, 30)), len(steps_T))
    values_T = draw(st.floats(-20, 20)) + change_T + draw(arrays(np.float64, len(steps_T), elements=st.floats(-1, 1)))
    if draw(st.booleans()):
        values_T = np.exp(values_T / 10)
    values_T[draw(st.integers(0, len(values_T) - 1))] += draw(st.sampled_from([0, NAN, 50, -50, 1e6]))
    return steps_T, values_T


# Growth whose crossing is known


@settings(deadline=None)
@given(
    growing_steps(),
    st.floats(-1e3, 1e3),
    st.floats(1e-2, 1e3),
    st.sampled_from([-1, 1]),
    st.floats(0.1, 20),
)
def test_exact_lines(steps_T: Array, start: float, change: float, sense: int, windows: float) -> None:
    """A line that changes by so much in the window, and crosses so many windows later."""
    window = steps_T[-1] - steps_T[0]
    slope = sense * change / window
    values_T = start + slope * (steps_T - steps_T[0])
    wait = windows * window
    found = forecast(steps_T, values_T, limit=values_T[-1] + slope * wait)
    assert found is not None
    assert found.step - steps_T[-1] == pytest.approx(wait, rel=0.1)
    assert found.slope == pytest.approx(slope, rel=0.1)


@settings(deadline=None)
@given(growing_steps(), st.floats(1e-3, 1e4), st.floats(0.01, 5), st.sampled_from([-1, 1]), st.floats(0.1, 5))
def test_exact_exponentials(steps_T: Array, start: float, growth: float, sense: int, windows: float) -> None:
    """Growth by a factor e to the power of so much in the window."""
    window = steps_T[-1] - steps_T[0]
    rate = sense * growth / window
    values_T = start * np.exp(rate * (steps_T - steps_T[0]))
    wait = windows * window
    found = forecast(steps_T, values_T, limit=float(values_T[-1] * np.exp(rate * wait)))
    assert found is not None
    assert found.is_exponential
    assert found.step - steps_T[-1] == pytest.approx(wait, rel=0.1)
    assert found.slope == pytest.approx(rate * values_T[-1], rel=0.1)


@pytest.mark.parametrize("sense", [1, -1])
@pytest.mark.parametrize("outlier", [-50.0, 100.0])
@pytest.mark.parametrize("at", range(2, 10))
def test_an_outlier_does_not_move_it(at: int, outlier: float, sense: int) -> None:
    steps_T = steps_of(12)
    values_T = 2 + 0.1 * steps_T
    values_T[at] = outlier
    found = forecast(steps_T, sense * values_T, limit=sense * 22.0)
    if found is not None:  # an outlier may hide the direction, and must not change it
        assert found.step == pytest.approx(200)
        assert found.slope == pytest.approx(0.1 * sense)
    else:
        assert at in (2, 9)


def test_noise_moves_it_little() -> None:
    steps_T = steps_of(20)
    found = forecast(steps_T, 2 + 0.1 * steps_T + np.random.default_rng(0).normal(0, 0.5, 20), limit=30.0)
    assert found is not None
    assert 250 < found.step < 330


@pytest.mark.parametrize(
    ("values_T", "limit"),
    [
        (20 * (1 - np.exp(-steps_of(10) / 40)), 18.5),
        (np.sqrt(steps_of(10)), 12.0),
        (np.log1p(steps_of(10)), 6.0),
        (20 * np.exp(-steps_of(10) / 40), 1.5),
    ],
)
def test_what_levels_off_is_given_time(values_T: Array, limit: float) -> None:
    """Later than by a straight line through all points."""
    steps_T = steps_of(10)
    slope, start = np.polyfit(steps_T, values_T, 1)
    found = forecast(steps_T, values_T, limit)
    assert found is not None
    assert found.step > (limit - start) / slope


def test_what_has_levelled_off_never_crosses() -> None:
    found = forecast(steps_of(12), np.array([0, 2, 3, 4, 5, 6, 7] + [7.5] * 5), limit=12.0)
    assert found is not None and found.step == INF


@pytest.mark.parametrize(
    ("values_T", "limit"),
    [
        (10 - 0.1 * steps_of(8), 20.0),  # away from the limit
        (30 + 0.1 * steps_of(8), 20.0),
        (30 * np.exp(-0.01 * steps_of(8)), 0.0),  # what shrinks by factors does not reach 0
        (30 * np.exp(-0.01 * steps_of(8)), -5.0),
    ],
)
def test_never(values_T: Array, limit: float) -> None:
    found = forecast(steps_of(8), values_T, limit)
    assert found is not None
    assert found.step == INF


@pytest.mark.parametrize(
    ("values_T", "limit", "step"),
    [
        (0.1 * steps_of(8), 5.0, 70),  # crossed within the window, from below
        (10 - 0.1 * steps_of(8), 5.0, 70),  # and from above
        (0.1 * steps_of(8), 7.0, 70),  # just reached
        (-5 + 0.1 * steps_of(8), 5.0, 100),  # through zero
        (-10 - 0.1 * steps_of(8), -20.0, 100),  # negative altogether
        (0.1 * steps_of(8), 0.0, INF),  # 0 at the beginning is at the limit, not below it
    ],
)
def test_crossings(values_T: Array, limit: float, step: float) -> None:
    found = forecast(steps_of(8), values_T, limit)
    assert found is not None
    assert found.step == pytest.approx(step)


@pytest.mark.parametrize(
    "values_T",
    [
        np.full(8, 3.0),
        np.array([1.0, 2.0] * 4),
        np.array([1.0, 1, 1, 1, 1, 1, 1, 9]),  # a jump is no trend
        np.array([1.0, 1, 1, 1, 9, 9, 9, 9]),
        np.array([1.0, 2, 3, 4, NAN, NAN, NAN, INF]),  # four points
        np.full(8, NAN),
        np.zeros(8),
        np.array([1.0, 2, 3, 4]),
        np.array([1.0]),
        np.array([]),
    ],
)
def test_without_a_direction(values_T: Array) -> None:
    assert forecast(steps_of(len(values_T)), values_T, limit=10.0) is None


def test_gaps_are_left_out() -> None:
    steps_T = steps_of(12)
    values_T = 0.1 * steps_T
    values_T[[0, 4, 5, 9]] = NAN, INF, NAN, -INF
    found = forecast(steps_T, values_T, limit=20.0)
    assert found is not None
    assert found.step == pytest.approx(200)


@settings(deadline=None)
@given(st.lists(any_series(), min_size=1, max_size=6), st.floats(-50, 50))
def test_several_at_once_are_the_same_as_one_by_one(series: list[tuple[Array, Array]], limit: float) -> None:
    points = min(len(values_T) for _, values_T in series)
    steps_T = series[0][0][:points]
    assume(len(steps_T) == points)
    values_TP = np.stack([values_T[:points] for _, values_T in series], axis=1)
    assert forecasts(steps_T, values_TP, limit) == [forecast(steps_T, values_T, limit) for values_T in values_TP.T]


@settings(deadline=None)
@given(any_series(), st.floats(-50, 50))
def test_whatever_comes_is_survived_in_silence(series: tuple[Array, Array], limit: float) -> None:
    steps_T, values_T = series
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = forecast(steps_T, values_T, limit)
        may_cross(steps_T, values_T[:, None], limit, 50)
    if found is not None:
        assert math.isfinite(found.slope)
        assert found.step >= steps_T[np.isfinite(values_T)][-1]


# The screen


@settings(max_examples=500, deadline=None)
@given(st.one_of(any_series(), trends()), st.floats(-50, 50), st.floats(0, 20))
def test_the_screen_misses_nothing(series: tuple[Array, Array], limit: float, windows: float) -> None:
    steps_T, values_T = series
    horizon = windows * (steps_T[-1] - steps_T[0])
    found = forecast(steps_T, values_T, limit)
    if found is not None and math.isfinite(values_T[-1]) and found.step <= steps_T[-1] + horizon:
        assert may_cross(steps_T, values_T[:, None], limit, horizon)[0]


@pytest.mark.parametrize("bad", [0, 9])
def test_the_screen_sees_through_an_outlier(bad: int) -> None:
    """Least squares alone would see the series fall."""
    steps_T = steps_of(10)
    values_T = 0.1 * steps_T
    values_T[bad] += 40 if bad == 0 else -40
    assert least_squares_slopes(steps_T, values_T[:, None])[0] < 0.1
    assert may_cross(steps_T, values_T[:, None], limit=12.0, horizon=50)[0]


@pytest.mark.parametrize(
    ("values_T", "worth"),
    [
        (0.1 * steps_of(8), True),  # crosses 12 after 50 more steps
        (0.08 * steps_of(8), False),
        (np.full(8, 5.0), False),
        (np.full(8, 15.0), False),
        (5 * np.exp(0.008 * steps_of(8)), True),  # not by a straight line
        (np.array([4.8, 5, 5.2, 5, 4.8, 5, 5.2, 5]), False),  # noise far from it
        (np.array([5.0] * 7 + [NAN]), False),
    ],
)
def test_the_screen_spares_what_goes_nowhere(values_T: Array, worth: bool) -> None:
    assert bool(may_cross(steps_of(8), values_T[:, None], limit=12.0, horizon=50)[0]) is worth


# Slopes


@settings(deadline=None)
@given(growing_steps(least=2), st.integers(1, 5), st.randoms(use_true_random=False))
def test_least_squares_slopes(steps_T: Array, places: int, random: object) -> None:
    values_TP = np.random.default_rng(random.randrange(2**32)).normal(5, 3, (len(steps_T), places))  # type: ignore[attr-defined]
    expected = np.polyfit(steps_T - steps_T[0], values_TP, 1)[0]
    assert least_squares_slopes(steps_T, values_TP) == pytest.approx(expected, rel=1e-7, abs=1e-10)


def test_least_squares_slopes_with_gaps() -> None:
    steps_T = steps_of(8, first=1000)
    values_TP = np.random.default_rng(0).normal(size=(8, 4))
    values_TP[[0, 3], 0] = NAN
    values_TP[7, 1] = INF
    values_TP[1:, 2] = NAN  # one value
    values_TP[:, 3] = NAN  # none
    slopes_P = least_squares_slopes(steps_T, values_TP)
    for column in (0, 1):
        there = np.isfinite(values_TP[:, column])
        expected = np.polyfit(steps_T[there] - 1000, values_TP[there, column], 1)[0]
        assert slopes_P[column] == pytest.approx(expected)
    assert np.isnan(slopes_P[2:]).all()


@settings(deadline=None)
@given(growing_steps(least=2), st.integers(0, 2**32 - 1))
def test_the_robust_slope_is_that_of_theil_and_sen(steps_T: Array, seed: int) -> None:
    values_T = np.random.default_rng(seed).normal(size=len(steps_T))
    assert robust_slope(steps_T, values_T) == pytest.approx(theilslopes(values_T, steps_T).slope)


def test_the_robust_slope_leaves_gaps_out() -> None:
    assert robust_slope(steps_of(5), np.array([0.0, NAN, 20.0, INF, 40.0])) == pytest.approx(1.0)
    assert robust_slope(steps_of(3), np.array([NAN, 1.0, NAN])) is None
    assert robust_slope(steps_of(0), np.array([])) is None
