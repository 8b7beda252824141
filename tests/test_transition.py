"""Finding the one lasting change of a series, and nothing where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lfilter

from lightning_attn import Transition, find_transition
from lightning_attn.transition import _bounded, _change_statistic

NAN = math.nan
Array = np.ndarray


def reference_statistic(series: Array) -> float:
    """Shao and Zhang (2010), as it is written, every sum on its own; five points are left on each side."""
    y = series - series.mean()
    n = len(y)
    largest = 0.0
    for k in range(5, n - 4):
        left = sum((y[:t].sum() - t / k * y[:k].sum()) ** 2 for t in range(1, k + 1))
        right = sum((y[t - 1 :].sum() - (n - t + 1) / (n - k) * y[k:].sum()) ** 2 for t in range(k + 1, n + 1))
        largest = max(largest, (y[:k].sum() / math.sqrt(n)) ** 2 / ((left + right) / n**2))
    return largest


def autoregressive(random: np.random.Generator, count: int, points: int, memory: float, deviation: float) -> Array:
    """Stationary AR(1) noise around one half."""
    shocks = random.standard_normal((count, points + 200)) * deviation * math.sqrt(1 - memory**2)
    return 0.5 + lfilter([1], [1, -memory], shocks, axis=1)[:, -points:]


def noisy(level: Callable[[Array], Array], points: int = 40, noise: float = 0.08, seed: int = 0) -> list[float]:
    """A course over 0 … 1, and noise."""
    course = level(np.arange(points) / points)
    return (course + noise * np.random.default_rng(seed).standard_normal(points)).tolist()


def falls(time: Array) -> Array:
    return np.where(time < 0.5, 0.9, 0.3)


def search(values: list[float], **limits: float) -> Transition | None:
    return find_transition(range(0, 100 * len(values), 100), values, **limits)


# The statistic


@pytest.mark.parametrize("points", [10, 11, 30, 57])
def test_the_statistic_is_that_of_the_paper(points: int) -> None:
    random = np.random.default_rng(points)
    for series in (random.standard_normal(points), np.cumsum(random.standard_normal(points)), random.random(points)):
        assert _change_statistic(series) == pytest.approx(reference_statistic(series), rel=1e-9)


def test_a_slope_reaches_thirty() -> None:
    assert _change_statistic(np.linspace(0, 1, 1000)) == pytest.approx(30, rel=0.01)


def test_two_constant_sides_do_not_wander() -> None:
    assert _change_statistic(np.repeat([0.9, 0.3], 10)) > 1e9
    assert _change_statistic(np.full(20, 0.5)) == 0


def test_quantiles_without_a_change_are_those_of_the_paper() -> None:
    """Table 1 of Shao and Zhang (2010), one parameter: 29.6, 40.1 and 68.6."""
    noise = np.random.default_rng(0).standard_normal((4000, 100))
    found = np.quantile([_change_statistic(series) for series in noise], [0.9, 0.95, 0.99])
    assert found == pytest.approx([29.6, 40.1, 68.6], rel=0.1)


# What is a transition


@pytest.mark.parametrize("seed", range(20))
def test_a_step(seed: int) -> None:
    found = search(noisy(falls, seed=seed))
    assert found is not None
    assert found.direction == "positional_to_semantic"
    assert found.step == pytest.approx(2000, abs=100)
    assert 0.95 <= found.certainty <= 0.999
    assert found.before == pytest.approx(0.9, abs=0.1)
    assert found.after == pytest.approx(0.3, abs=0.1)


def test_a_step_back() -> None:
    found = search(noisy(lambda time: 1.2 - falls(time)))
    assert found is not None
    assert found.direction == "semantic_to_positional"
    assert found.after - found.before == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize("at", [0.15, 0.3, 0.7, 0.85])
def test_an_early_and_a_late_step(at: float) -> None:
    found = search(noisy(lambda time: np.where(time < at, 0.9, 0.3), points=100))
    assert found is not None
    assert found.step == pytest.approx(10_000 * at, abs=200)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.08])
def test_a_smooth_fall_within_a_tenth_of_the_run(noise: float) -> None:
    found = search(noisy(lambda time: 0.3 + 0.6 / (1 + np.exp((time - 0.5) / 0.02)), noise=noise))
    assert found is not None
    assert found.step == pytest.approx(2000, abs=200)


def test_without_noise_the_numbers_are_exact() -> None:
    found = search([0.75] * 6 + [0.25] * 6)
    assert found == Transition(600, "positional_to_semantic", pytest.approx(0.999), 0.75, 0.25)


def test_missing_values_are_left_out_and_steps_kept() -> None:
    values = [0.75, None, 0.75, 0.75, NAN, 0.75, 0.75, None, 0.25, 0.25, 0.25, 0.25, NAN, 0.25, 0.25]
    steps = [0, 1, 2, 5, 9, 20, 21, 22, 1000, 1000, 1001, 1002, 5000, 5001, 9000]
    found = find_transition(steps, values)
    assert found is not None
    assert found.step == 1000
    assert find_transition(steps, [None] * len(steps)) is None


def test_spikes_do_not_hide_a_step_nor_move_it() -> None:
    values = noisy(falls, points=60)
    values[7], values[21], values[40], values[53] = -3.0, -5.0, 1.0, 1.0
    found = search(values)
    assert found is not None
    assert found.step == pytest.approx(3000, abs=100)
    assert found.before == pytest.approx(0.9, abs=0.1)


def test_the_scale_of_steps_is_of_no_matter() -> None:
    values = noisy(falls)
    steps = np.cumsum(np.random.default_rng(0).integers(1, 1000, len(values))).tolist()
    regular, irregular = search(values), find_transition(steps, values)
    assert regular is not None and irregular is not None
    assert irregular.step == steps[regular.step // 100]
    assert irregular[1:] == regular[1:]


# What is none


@pytest.mark.parametrize(
    "course",
    [
        lambda time: np.full_like(time, 0.6),
        lambda time: 0.9 - 0.7 * time,
        lambda time: np.where((time > 0.3) & (time < 0.65), 0.9, 0.3),
        lambda time: 0.55 - 0.1 * (time > 0.5),
        lambda time: 0.5 + 0.3 * np.sin(12 * time),
    ],
    ids=["flat", "slope", "up and down", "small", "waves"],
)
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_no_transition(course: Callable[[Array], Array], noise: float) -> None:
    for seed in range(20):
        assert search(noisy(course, noise=noise, points=60, seed=seed)) is None


@pytest.mark.parametrize("where", [(0,), (20,), (39,), (0, 1), (38, 39), (10, 30)])
def test_spikes_are_no_transition(where: tuple[int, ...]) -> None:
    for noise in (0.0, 0.02):
        values = noisy(lambda time: np.full_like(time, 0.8), noise=noise)
        for place in where:
            values[place] = -4.0
        assert search(values) is None


@pytest.mark.parametrize("points", range(10))
def test_few_points_are_no_series(points: int) -> None:
    assert search([0.9] * (points // 2) + [0.1] * (points - points // 2)) is None


def test_limits_can_be_moved() -> None:
    small = noisy(lambda time: 0.55 - 0.1 * (time > 0.5), noise=0.005)
    assert search(small) is None
    assert search(small, min_change=0.05) is not None
    slope = noisy(lambda time: 0.9 - 0.7 * time, noise=0.01)
    assert search(slope, min_certainty=0.3) is not None


# How certain


@pytest.mark.parametrize("points", [12, 20, 50, 200])
@pytest.mark.parametrize("memory", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("deviation", [0.1, 0.4])
def test_noise_has_a_transition_in_at_most_one_case_of_twenty(points: int, memory: float, deviation: float) -> None:
    noise = autoregressive(np.random.default_rng(3), 1000, points, memory, deviation)
    false = sum(search(series.tolist()) is not None for series in noise) / len(noise)
    assert false <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / len(noise))


@pytest.mark.parametrize("points", [20, 100])
def test_certainty_is_the_share_of_random_walks_that_are_less_clear(points: int) -> None:
    walks = np.cumsum(np.random.default_rng(5).standard_normal((4000, points)), axis=1)
    found = [search(walk.tolist(), min_certainty=0.0, min_change=1e-9) for walk in walks]
    certainties = np.array([transition.certainty for transition in found if transition is not None])
    for certainty in (0.75, 0.9, 0.95, 0.99):
        assert (certainties > certainty).sum() / len(walks) <= (1 - certainty) * 1.15
    # and not needlessly shy
    assert (certainties > 0.9).sum() / len(walks) >= 0.07


@given(st.lists(st.floats(-1, 1) | st.none() | st.just(NAN), max_size=60))
def test_any_series_has_one_or_none(values: list[float]) -> None:
    found = search(values, min_certainty=0.0)
    if found is not None:
        assert 0 <= found.certainty <= 0.999
        assert abs(found.after - found.before) >= 0.2
        assert (found.after < found.before) == (found.direction == "positional_to_semantic")
        present = [value for value in values if value is not None and not math.isnan(value)]
        split = sum(value is not None and not math.isnan(value) for value in values[: found.step // 100])
        assert 5 <= split <= len(present) - 5
        assert (found.before, found.after) == (np.median(present[:split]), np.median(present[split:]))


@given(st.lists(st.floats(0, 1), min_size=10, max_size=60))
def test_read_from_the_other_side_it_is_the_other_transition(values: list[float]) -> None:
    found, mirrored = search(values), search([1 - value for value in values])
    assert (found is None) == (mirrored is None)
    if found is not None and mirrored is not None:
        assert found.direction != mirrored.direction


def test_bounds_are_robust() -> None:
    series = np.concatenate([np.full(20, 0.5), [1.0, -9.0]])
    assert _bounded(series).tolist() == [*[0.5] * 20, 0.6, 0.4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [0.5]), "`steps` and `values` must be equally many, got 2 and 1"),
        (([1, 2, 1], [0.5] * 3), "`steps` must not decrease, got 1 after 2"),
    ],
)
def test_bad_series(arguments: tuple[list[int], list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_transition(*arguments)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"min_change": 0.0}, "`min_change` must be greater than 0, got 0.0"),
        ({"min_change": NAN}, "`min_change` must be greater than 0, got nan"),
        ({"min_certainty": 1.0}, "`min_certainty` must be at least 0 and less than 1, got 1.0"),
        ({"min_certainty": -0.1}, "`min_certainty` must be"),
    ],
)
def test_bad_limits(limits: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_transition([], [], **limits)
