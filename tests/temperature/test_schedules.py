"""Temperatures by optimiser steps, against values that are computed here."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

from lightning_attn.temperature import (
    ConstantTemperature,
    CosineTemperature,
    ExponentialTemperature,
    FunctionTemperature,
    HighToLow,
    LinearTemperature,
    LogLength,
    PiecewiseTemperature,
    SSMax,
    TemperatureSchedule,
)

VALUES: list[tuple[TemperatureSchedule, dict[int, float]]] = [
    (ConstantTemperature(3), {0: 3.0, 999: 3.0}),
    (LinearTemperature(4, 1, 6), {0: 4.0, 2: 3.0, 6: 1.0, 7: 1.0}),
    (CosineTemperature(3, 1, 8), {0: 3.0, 2: 2 + math.cos(math.pi / 4), 4: 2.0, 8: 1.0, 9: 1.0}),
    (ExponentialTemperature(16, 1, 4), {0: 16.0, 1: 8.0, 3: 2.0, 4: 1.0, 100: 1.0}),
    (PiecewiseTemperature({10: 2.0, 0: 4.0, 20: 8.0}), {0: 4.0, 5: 3.0, 10: 2.0, 15: 5.0, 20: 8.0, 21: 8.0}),
    (PiecewiseTemperature({5: 2.0, 10: 4.0}), {0: 2.0, 5: 2.0, 6: 2.4, 11: 4.0}),
    (PiecewiseTemperature({0: 4.0, 10: 2.0}, is_linear=False), {0: 4.0, 9: 4.0, 10: 2.0, 11: 2.0}),
    (HighToLow(2.0, 10), {0: 2.0, 5: 1.5, 10: 1.0}),
    (LogLength(256, gamma=2.0), {0: 1 / (2 * math.log(256)), 7: 1 / (2 * math.log(256))}),
    (SSMax(1024), {0: 1 / (0.43 * math.log(1024))}),
    (FunctionTemperature(lambda step: 1.0 + step), {0: 1.0, 3: 4.0}),
]


@pytest.mark.parametrize(("schedule", "values"), VALUES, ids=lambda value: type(value).__name__)
def test_values(schedule: TemperatureSchedule, values: dict[int, float]) -> None:
    for step, value in values.items():
        assert schedule(step) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("kind", [LinearTemperature, CosineTemperature, ExponentialTemperature])
@given(start=draw.floats(0.01, 100), end=draw.floats(0.01, 100), steps=draw.integers(1, 1000))
@settings(max_examples=30, deadline=None)
def test_courses_go_one_way_from_start_to_end(kind: Any, start: float, end: float, steps: int) -> None:
    course = [kind(start, end, steps)(step) for step in (0, steps // 3, steps // 2, steps, steps + 1)]
    assert course[0] == pytest.approx(start) and course[-1] == course[-2] == pytest.approx(end)
    ordered = sorted(course, reverse=start > end)
    assert course == pytest.approx(ordered)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ConstantTemperature(0), "temperature"),
        (lambda: ConstantTemperature(True), "temperature"),
        (lambda: LinearTemperature(-1, 1, 5), "start"),
        (lambda: CosineTemperature(1, math.inf, 5), "end"),
        (lambda: ExponentialTemperature(1, 2, 0), "steps"),
        (lambda: PiecewiseTemperature({}), "temperatures"),
        (lambda: PiecewiseTemperature({-1: 1.0}), "temperatures"),
        (lambda: PiecewiseTemperature({0: 0.0}), "temperatures"),
        (lambda: FunctionTemperature(3), "function"),  # type: ignore[arg-type]
        (lambda: LogLength(1), "length"),
        (lambda: LogLength(8, gamma=0), "gamma"),
        (lambda: SSMax(8, scale=-1), "scale"),
        (lambda: FunctionTemperature(lambda step: 0.0)(3), "the temperature at step 3"),
    ],
)
def test_arguments_are_refused_by_name(make: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        make()


def named(step: int) -> float:
    return 2.0


def test_they_tell_what_they_are_and_can_be_copied() -> None:
    assert repr(LinearTemperature(2, 1, 5)) == "LinearTemperature(start=2.0, end=1.0, steps=5)"
    assert repr(FunctionTemperature(named)) == "FunctionTemperature(named)"
    for schedule in (LinearTemperature(2, 1, 5), PiecewiseTemperature({0: 2.0}), SSMax(8), FunctionTemperature(named)):
        assert pickle.loads(pickle.dumps(schedule))(1) == schedule(1)
