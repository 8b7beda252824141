"""Closed loops on simulated heads, of which it is known how they answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw
from temperature_runs import awake
from torch import Tensor

from lightning_attn.temperature import HoldEntropy, HoldLogitScale, TemperatureControl

Course = list[float]


def holds(scale: Callable[[int, float], float], control: HoldLogitScale, moves: int = 60) -> tuple[Course, Course]:
    """The logarithms of the temperature and of the raw scale before each move of a head.

    Args:
        scale: of the products of queries and keys, by the number of moves and the temperature before.
    """
    log_temperature, temperatures, scales = torch.zeros(1, dtype=torch.float64), [], []
    for move in range(moves):
        raw = scale(move, float(log_temperature.exp()))
        temperatures.append(float(log_temperature))
        scales.append(math.log(raw) if raw > 0 else -math.inf)
        seen = torch.tensor([raw], dtype=torch.float64) / log_temperature.exp()
        log_temperature = control.moved(log_temperature, {"logit_std": seen})
    return temperatures, scales


gains = draw.floats(0.05, 1.0)


@given(scale=draw.floats(1e-3, 1e4), gain=gains, upper=draw.floats(0.1, 50.0), most=draw.floats(1.01, 100.0))
@settings(max_examples=30, deadline=None)
def test_a_constant_scale_is_approached_by_equal_shares_and_not_passed(
    scale: float, gain: float, upper: float, most: float
) -> None:
    control = awake(upper, gain=gain, max_change=most)
    temperatures, _ = holds(lambda move, temperature: scale, control, moves=40)
    wanted = max(0.0, math.log(scale / upper))
    for before, after in itertools.pairwise(temperatures):
        distance = wanted - before
        assert after - before == pytest.approx(min(gain * distance, math.log(most)), abs=1e-9)
        assert -1e-9 <= wanted - after <= distance + 1e-9


@given(growth=draw.floats(1.0, 1.9), gain=gains)
@settings(max_examples=20, deadline=None)
def test_logits_that_grow_stay_behind_by_a_bounded_factor(growth: float, gain: float) -> None:
    control = awake(4.0, gain=gain, max_change=1e9)
    temperatures, scales = holds(lambda move, temperature: 4.0 * growth**move, control, moves=120)
    behind = [scale - math.log(4.0) - temperature for scale, temperature in zip(scales, temperatures, strict=True)]
    assert max(behind) <= math.log(growth) / gain + 1e-9
    assert behind[-1] == pytest.approx(math.log(growth) / gain, rel=1e-3, abs=1e-9) or gain < 0.1


@given(response=draw.floats(0.0, 0.9), gain=draw.floats(0.3, 1.0))
@settings(max_examples=20, deadline=None)
def test_weights_that_grow_with_the_temperature_settle_below_a_response_of_one(response: float, gain: float) -> None:
    control = awake(4.0, gain=gain)
    temperatures, _ = holds(lambda move, temperature: 16.0 * temperature**response, control, moves=400)
    assert temperatures[-1] == pytest.approx(math.log(4.0) / (1 - response), rel=1e-3)
    assert temperatures == pytest.approx(sorted(temperatures), abs=1e-12)


@pytest.mark.parametrize("response", [1.0, 1.3])
def test_from_one_on_they_chase_each_other(response: float) -> None:
    control = awake(4.0, gain=0.5)
    temperatures, _ = holds(lambda move, temperature: min(16.0 * temperature**response, 1e30), control)
    assert temperatures == sorted(temperatures) and temperatures[-1] > math.log(1000)
    assert max(b - a for a, b in itertools.pairwise(temperatures)) <= math.log(4) + 1e-9


def test_noise_is_not_amplified() -> None:
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(1500, generator=random, dtype=torch.float64) * 0.3
    control = awake(4.0, gain=0.8)
    temperatures, _scales = holds(lambda move, temperature: 40.0 * math.exp(float(noise[move])), control, moves=1500)
    # A first-order filter of gain g has the variance g / (2 - g) of what enters.
    spread = torch.tensor(temperatures[50:]).std()
    assert float(spread) == pytest.approx(0.3 * math.sqrt(0.8 / 1.2), rel=0.1)
    assert torch.tensor(temperatures[50:]).mean() == pytest.approx(math.log(10), abs=0.02)


@given(move=draw.integers(1, 30), factor=draw.floats(0.01, 100.0))
@settings(max_examples=20, deadline=None)
def test_a_sudden_change_is_followed_and_undone(move: int, factor: float) -> None:
    control = awake(4.0)
    temperatures, _ = holds(lambda now, temperature: 8.0 * (factor if now >= move else 1.0), control, moves=80)
    assert temperatures[-1] == pytest.approx(max(0.0, math.log(2 * factor)), abs=1e-6)


def test_a_head_inside_the_band_keeps_exactly_one() -> None:
    heads = torch.tensor([0.0, 1e-30, 1.0, 3.999, 4.0])
    for control in (awake(4.0), awake(4.0, lower=None, gain=1.0)):
        assert control.moved(torch.zeros(5, dtype=torch.float64), {"logit_std": heads}).tolist() == [0.0] * 5


def test_a_head_below_the_band_is_brought_up() -> None:
    control = awake(upper=4.0, lower=1.0)
    temperatures, _ = holds(lambda move, temperature: 0.25, control)
    assert temperatures[-1] == pytest.approx(math.log(0.25))
    temperatures, _ = holds(lambda move, temperature: 0.25 if move < 30 else 2.0, control)
    assert temperatures[29] < -1 and temperatures[-1] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("control", [awake(), HoldEntropy()])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_moves_nothing(control: TemperatureControl, value: float) -> None:
    before = torch.tensor([0.0, 1.5], dtype=torch.float64)
    (name,) = control.statistics
    moved = control.moved(before, {name: torch.full((2,), value)})
    assert moved.isfinite().all()
    if math.isnan(value):
        assert torch.equal(moved, before)
    assert (moved - before).abs().max() <= math.log(4) + 1e-9


# Loops that sleep.


@pytest.mark.parametrize(
    ("before", "now", "wakes"),
    [
        (None, 10.1, True),
        (None, 10.0, False),
        (3.0, 5.1, False),  # the next would be 8.7
        (2.0, 6.4, True),  # 20.5
        (1.0, 4.9, False),  # 24, but below half of it still
        (6.0, 6.4, False),
        (math.nan, 6.4, False),
        (0.0, 6.4, True),
        (5.0, math.nan, False),
    ],
)
def test_what_wakes_a_loop(before: float | None, now: float, wakes: bool) -> None:
    read = {"logit_std": torch.tensor([now, 1.0], dtype=torch.float64)}
    earlier = None if before is None else {"logit_std": torch.tensor([before, 1.0], dtype=torch.float64)}
    assert HoldLogitScale().wakes(read, earlier).tolist() == [wakes, False]
    assert awake().wakes(read, earlier).tolist() == [True, True]


# Entropy, of a head whose softmax is computed.


def entropy(logits_RM: Tensor, log_temperature: Tensor) -> Tensor:
    weights_RM = (logits_RM / log_temperature.exp()).softmax(-1)
    return (-(weights_RM * weights_RM.clamp(min=1e-300).log()).sum(-1) / math.log(logits_RM.shape[-1])).mean()[None]


def holds_entropy(control: HoldEntropy, logits_RM: Tensor, moves: int = 300, start: float = 0.0) -> Course:
    log_temperature = torch.tensor([start], dtype=torch.float64)
    course = []
    for _ in range(moves):
        course.append(float(entropy(logits_RM, log_temperature)))
        log_temperature = control.moved(log_temperature, {"entropy": entropy(logits_RM, log_temperature)})
    course.append(float(log_temperature))
    return course


@pytest.mark.parametrize("keys", [8, 256])
@pytest.mark.parametrize("scale", [5.0, 500.0])
def test_a_collapsed_head_comes_into_the_band_and_stays(keys: int, scale: float) -> None:
    logits_RM = scale * torch.randn(32, keys, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    *course, log_temperature = holds_entropy(HoldEntropy(0.4, 0.6), logits_RM)
    assert 0.39 <= course[-1] <= 0.61 and log_temperature > 0
    settled = course[100:]
    assert max(settled) - min(settled) < 1e-2


@given(scale=draw.floats(2.0, 200.0), keys=draw.sampled_from([4, 16, 256]), speed=draw.floats(0.05, 0.4))
@settings(max_examples=25, deadline=None)
def test_slow_loops_do_not_oscillate(scale: float, keys: int, speed: float) -> None:
    logits_RM = scale * torch.randn(8, keys, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    *course, _ = holds_entropy(HoldEntropy(0.5, 0.5, speed=speed), logits_RM, moves=60)
    below = [value < 0.5 + 1e-9 for value in course]
    assert not (below[0] and not all(below))  # a head that comes from below is never above


@pytest.mark.parametrize(("strength", "keys"), [(40.0, 1024), (60.0, 4096)])
def test_a_head_with_one_strong_key_settles_at_the_defaults(strength: float, keys: int) -> None:
    logits_RM = torch.zeros(1, keys, dtype=torch.float64)
    logits_RM[:, 0] = strength
    *course, _ = holds_entropy(HoldEntropy(), logits_RM, moves=120)
    assert all(0.3 < value < 0.7 for value in course[-20:])


def test_a_soft_head_is_left_alone_unless_it_is_asked_for() -> None:
    logits_RM = 0.1 * torch.randn(8, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert holds_entropy(HoldEntropy(), logits_RM)[-1] == 0.0
    *course, log_temperature = holds_entropy(HoldEntropy(sharpens=True), logits_RM)
    assert log_temperature < 0 and 0.39 <= course[-1] <= 0.61


def test_a_temperature_that_is_not_needed_any_more_goes_back_to_one() -> None:
    logits_RM = 0.1 * torch.randn(8, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert holds_entropy(HoldEntropy(), logits_RM, start=2.0)[-1] == 0.0


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: awake(upper=0), "upper"),
        (lambda: awake(upper=4, lower=5), "lower"),
        (lambda: awake(lower=0), "lower"),
        (lambda: awake(gain=0), "gain"),
        (lambda: awake(gain=1.1), "gain"),
        (lambda: awake(max_change=1), "max_change"),
        (lambda: HoldEntropy(lower=0), "lower"),
        (lambda: HoldEntropy(lower=0.7), "upper"),
        (lambda: HoldEntropy(upper=1.2), "upper"),
        (lambda: HoldEntropy(speed=0), "speed"),
        (lambda: HoldLogitScale(upper=4, wakes_at=3), "wakes_at"),
        (lambda: HoldLogitScale(wakes_at=math.nan), "wakes_at"),
        (lambda: awake(upper=math.inf), "upper"),
        (lambda: awake(upper=math.nan), "upper"),
        (lambda: awake(upper="4"), "upper"),  # type: ignore[arg-type]
        (lambda: awake(max_change=math.inf), "max_change"),
    ],
)
def test_arguments_are_refused_by_name(make: Callable[[], TemperatureControl], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        make()


def test_it_says_what_it_does() -> None:
    assert str(awake()) == "holds the logit_std of all heads at most 4"
    assert str(awake(4, 1)) == "holds the logit_std of all heads between 1 and 4"
    assert repr(awake(2.0)) == "HoldLogitScale(gain=0.8, max_change=4.0, upper=2.0, wakes_at=None, lower=None)"
    assert str(HoldEntropy()) == "holds entropy between 0.4 and 0.6"
