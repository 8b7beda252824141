"""Which site follows what, within which limits."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_attn.temperature import ConstantTemperature, FunctionTemperature, HoldEntropy, HoldLogitScale
from lightning_attn.temperature.plan import TemperaturePlan


def test_a_closed_loop_by_default() -> None:
    plan = TemperaturePlan()
    loop = plan.loop_of("anything")
    assert isinstance(loop, HoldLogitScale) and (loop.upper, loop.wakes_at) == (3.0, 10.0)
    assert plan.statistics == ("logit_std",) and not plan.has_schedules and plan.governs("anything")
    assert str(plan) == "holds the logit_std of all heads at most 3"


def test_the_first_pattern_that_matches_counts() -> None:
    plan = TemperaturePlan({"blocks.0*": 2.0, "blocks.*": HoldEntropy(), "*.0": HoldLogitScale()})
    assert plan.schedule_of("blocks.0") is not None and plan.loop_of("blocks.0") is None
    assert isinstance(plan.loop_of("blocks.1"), HoldEntropy) and plan.schedule_of("blocks.1") is None
    assert isinstance(plan.loop_of("encoder.0"), HoldLogitScale)
    assert not plan.governs("head") and plan.loop_of("head") is None and plan.schedule_of("head") is None
    assert plan.statistics == ("entropy", "logit_std") and plan.has_schedules and len(plan.loops) == 2


@pytest.mark.parametrize("given", [2, 2.0, ConstantTemperature(2.0), lambda step: 2.0])
def test_what_may_stand_for_a_schedule(given: Any) -> None:
    schedule = TemperaturePlan(given).schedule_of("any")
    assert schedule is not None and schedule(3) == 2.0
    assert isinstance(schedule, FunctionTemperature if callable(given) and not isinstance(given, ConstantTemperature)
                      else ConstantTemperature)  # fmt: skip


@pytest.mark.parametrize("given", [True, 0, -1.0, "cosine", [2.0], {}, {"*": None}, HoldEntropy, ConstantTemperature])
def test_what_may_not(given: Any) -> None:
    with pytest.raises(ValueError, match="`control`"):
        TemperaturePlan(given)


@pytest.mark.parametrize("limits", [(2.0, 4.0), (0.1, 0.5), (0.0, 2.0), (0.5, float("inf"))])
def test_limits_hold_one_between_them(limits: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="_temperature`"):
        TemperaturePlan(None, *limits)
