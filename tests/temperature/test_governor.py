"""What is decided on snapshots, when it is done, and what is told of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw
from temperature_runs import awake
from torch import Tensor, nn

from lightning_attn import Snapshot
from lightning_attn.temperature import AttentionTemperature, ConstantTemperature, HoldEntropy, HoldLogitScale
from lightning_attn.temperature.change import TemperatureChange
from lightning_attn.temperature.governor import TemperatureGovernor
from lightning_attn.temperature.plan import Control, TemperaturePlan

SITE = "(root)"


def governor(control: Control | None = None, is_dry: bool = False, **limits: float) -> TemperatureGovernor:
    """Governs a module of two heads."""
    layer = nn.MultiheadAttention(16, num_heads=2, batch_first=True)
    tokens = torch.randn(3, 5, 16)
    temperature = AttentionTemperature(layer)
    temperature.find(lambda: layer(tokens, tokens, tokens))
    return TemperatureGovernor(temperature, TemperaturePlan(control, **limits), is_dry)


def seen(*values: float, statistic: str = "logit_std", step: int = 0) -> Snapshot:
    return Snapshot(step, {SITE: len(values)}, (statistic,), torch.tensor([values], dtype=torch.float64))


def test_what_is_decided_is_done_later() -> None:
    governed = governor(awake(4.0, gain=1.0, max_change=100.0))
    governed.look(seen(40.0, 2.0))
    assert governed.temperatures() == {SITE: [1.0, 1.0]} and not governed.has_changes
    governed.act(7)
    assert governed.temperatures()[SITE] == pytest.approx([10.0, 1.0])
    (change,) = governed.take_changes()
    assert (change.step, change.site, change.before, change.limited) == (7, SITE, [1.0, 1.0], ())
    assert change.after == governed.temperatures()[SITE] and change.heads == [0]
    assert change.scale == pytest.approx([40.0, 2.0])
    assert governed.take_changes() == []
    governed.act(8)
    assert governed.take_changes() == []


def test_the_raw_scale_is_that_before_the_temperature() -> None:
    governed = governor(awake(4.0, gain=1.0, max_change=100.0))
    governed.look(seen(40.0, 2.0))
    governed.act(1)
    governed.take_changes()
    governed.look(seen(4.0, 2.0))  # as it is brought down to
    governed.act(2)
    assert governed.temperatures()[SITE] == pytest.approx([10.0, 1.0])
    governed.look(seen(8.0, math.nan))
    governed.act(3)
    assert governed.temperatures()[SITE] == pytest.approx([20.0, 1.0])
    (change,) = governed.take_changes()
    assert change.scale == [pytest.approx(80.0), None]


def test_a_loop_sleeps_until_a_head_wakes_it_and_holds_all_from_then_on() -> None:
    governed, again = governor(HoldLogitScale(4.0, 10.0)), governor(HoldLogitScale(4.0, 10.0))
    for scale in (3.0, 5.0, 7.5, 6.0):
        assert governed.look(seen(scale, 8.0)) == []
        governed.act(1)
    assert governed.temperatures()[SITE] == [1.0, 1.0] and governed.take_changes() == []
    again.load_state_dict(governed.state_dict())
    for one in (governed, again):
        (woken,) = one.look(seen(6.0, 10.5))
        assert (woken.site, woken.head) == (SITE, 1)
        one.act(2)
        assert min(one.temperatures()[SITE]) > 1
        assert one.look(seen(6.0, 12.0)) == []
    again = governor(HoldLogitScale(4.0, 10.0))
    again.load_state_dict(governed.state_dict())
    again.look(seen(5.0, 5.0))
    again.act(3)
    assert min(again.temperatures()[SITE]) > 1
    woken_at_once = governor(HoldLogitScale(4.0, 10.0))
    woken_at_once.wake()
    woken_at_once.look(seen(5.0, 1.0))
    woken_at_once.act(1)
    assert woken_at_once.temperatures()[SITE][0] > 1


def test_a_loop_that_is_held_back_says_so_where_nothing_changes() -> None:
    governed = governor(awake(4.0), max_temperature=1.0)
    governed.look(seen(40.0, 2.0))
    governed.act(1)
    assert governed.take_changes() == []
    (move,) = governed.take_held_back()
    assert move.limited == (0,) and move.before == move.after == [1.0, 1.0] and governed.take_held_back() == []
    assert governed.take_highest_scale() == 40.0 and governed.take_highest_scale() is None


def test_the_hottest_head_is_named_with_what_has_woken_the_loop() -> None:
    governed = governor(HoldLogitScale(4.0, 10.0))
    (woken,) = governed.look(seen(11.0, 12.0))
    assert (woken.head, woken.read, woken.before) == (1, {"logit_std": 12.0}, None)
    assert woken.reason == "raw scale 12"
    governed = governor(HoldLogitScale(4.0, 10.0))
    governed.look(seen(1.5, 9.0))
    (woken,) = governed.look(seen(9.4, 9.3))
    assert woken.head == 0 and woken.reason == "raw scale 9.4 after 1.5 at the measurement before"


def test_what_a_bias_adds_is_taken_off() -> None:
    governed = governor(awake(4.0, gain=1.0, max_change=100.0))
    governed.temperature.sites[SITE].bias_std = torch.tensor([3.0, 50.0])
    governed.look(seen(5.0, 40.0))
    governed.act(1)
    assert governed.temperatures()[SITE] == [1.0, 1.0]
    governed.look(seen(math.hypot(3.0, 8.0), 40.0))
    governed.act(2)
    assert governed.temperatures()[SITE] == pytest.approx([2.0, 1.0])


@given(scales=draw.lists(draw.floats(1e-3, 1e6), min_size=2, max_size=2), limit=draw.floats(1.0, 100.0))
@settings(max_examples=20, deadline=None)
def test_no_temperature_is_beyond_a_limit(scales: list[float], limit: float) -> None:
    governed = governor(awake(4.0, lower=2.0, gain=1.0, max_change=1e9), max_temperature=limit)
    governed.look(seen(*scales))
    governed.act(1)
    (values,) = governed.temperatures().values()
    assert all(0.1 - 1e-12 <= value <= limit * (1 + 1e-12) for value in values)
    wanted = [scale / 4 if scale > 4 else scale / 2 if scale < 2 else 1.0 for scale in scales]
    limited = {head for change in governed.take_changes() for head in change.limited}
    assert limited == {
        head for head, value in enumerate(wanted)
        if (value > limit or value < 0.1) and values != [1.0, 1.0]
    }  # fmt: skip


@pytest.mark.parametrize("temperature", [0.7, 1.1, 3.0, 4.0, 7.3, 123.4])
def test_a_schedule_that_stands_still_changes_once(temperature: float) -> None:
    governed = governor(ConstantTemperature(temperature))
    changes: list[TemperatureChange] = []
    for step in range(5, 12):
        governed.follow_schedules(step, 5)
        changes += governed.take_changes()
    assert [change.step for change in changes] == [5]


def test_steps_that_nobody_asked_about_become_one_record() -> None:
    governed = governor(lambda step: 1.0 + step)
    for step in range(10, 14):
        governed.follow_schedules(step, 9)
    (change,) = governed.take_changes()
    assert (change.step, change.before, change.after) == (13, [1.0, 1.0], pytest.approx([5.0, 5.0]))


def test_a_state_goes_on_with_what_was_decided() -> None:
    first, second = governor(awake(4.0)), governor(awake(4.0))
    first.look(seen(40.0, 2.0))
    second.load_state_dict(first.state_dict())
    first.act(3)
    second.act(3)
    assert first.temperatures() == second.temperatures() and first.take_changes() == second.take_changes()
    first.look(seen(60.0, 2.0))
    first.act(4)
    second.load_state_dict(first.state_dict())
    assert second.take_changes() == first.take_changes() != []


def test_a_dry_run_follows_what_it_would_have_done() -> None:
    dry, wet = governor(awake(4.0), is_dry=True), governor(awake(4.0))
    raw = torch.tensor([40.0, 2.0])
    for step in range(1, 6):
        held: Tensor = wet.temperature.sites[SITE].log_temperatures
        dry.look(seen(*raw.tolist()))
        wet.look(seen(*(raw.double() / held.exp()).tolist()))
        dry.act(step)
        wet.act(step)
        (would,), (did,) = dry.take_changes(), wet.take_changes()
        assert would.after == pytest.approx(did.after) and would.scale == pytest.approx(did.scale)
    assert dry.temperature[SITE] == [1.0, 1.0] and dry.temperatures()[SITE] == pytest.approx(wet.temperature[SITE])
    # It begins with what is applied, as of a run that was not dry.
    dry = governor(awake(4.0, gain=1.0, max_change=100.0), is_dry=True)
    dry.temperature.set_temperatures(SITE, [5.0, 1.0])
    assert dry.temperatures()[SITE] == pytest.approx([5.0, 1.0])
    dry.look(seen(8.0, 2.0))
    dry.act(1)
    assert dry.temperatures()[SITE] == pytest.approx([10.0, 1.0])
    assert dry.temperature[SITE] == pytest.approx([5.0, 1.0])
    dry = governor(HoldEntropy(), is_dry=True)
    for step in range(50):
        dry.look(seen(0.1, 0.5, statistic="entropy"))
        dry.act(step)
    assert dry.temperatures()[SITE][0] == pytest.approx(math.exp(0.4 * 0.3)) and dry.temperatures()[SITE][1] == 1.0
