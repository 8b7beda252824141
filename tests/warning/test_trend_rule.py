"""A statistic that is going to cross a limit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from snapshot_series import course, record, snapshot, warned

from lightning_attn.warning import Place, TrendRule

NAN = math.nan
LINE = [10 + n for n in range(20)]  # 0.1 per step: 25 is 150 steps after 10


def rule(**settings: Any) -> TrendRule:
    return TrendRule("growing", "logit_std", **{"above": 25.0, "horizon": 60, "patience": 1, **settings})


@pytest.mark.parametrize(
    ("values", "step"),
    [
        (LINE[:10], 150),  # 60 steps ahead
        (LINE[:9], None),  # 70
        (LINE[3:12], 120),
        (LINE[12:], 70),  # crossed within the window
        (LINE[7:17], 90),  # crosses in the last snapshot
        (LINE[9:14], 60),
        (LINE[10:14], None),  # four points
        ([10.0] * 10, None),
        ([10.0] * 9 + [40], None),  # a jump
        ([30.0 - n for n in range(10)], None),  # comes down to the limit: the other way round
        ([30.0 + n for n in range(10)], None),  # beyond it from the beginning
        ([NAN, *LINE[1:10]], 150),
        ([*LINE[:9], NAN], None),
        ([5 * math.exp(0.15 * n) for n in range(8)], 108),
    ],
)
def test_when_it_will_cross(values: list[float], step: int | None) -> None:
    signs = [sign for sign in rule().signs(record(*course("logit_std", values))) if sign.grade]
    assert [sign.predicted_step for sign in signs] == ([] if step is None else [pytest.approx(step, abs=1)])


def test_from_above() -> None:
    falling = TrendRule("narrowing", "entropy", below=0.1, horizon=65, patience=1)
    values = [0.9 - 0.05 * n for n in range(11)]
    (sign,) = falling.signs(record(*course("entropy", values)))
    assert sign.grade == 1
    assert sign.predicted_step == pytest.approx(160, abs=1)
    assert sign.slope == pytest.approx(-0.005)
    signs = falling.signs(record(*course("entropy", [value - 0.85 for value in reversed(values)])))
    assert [sign.grade for sign in signs] in ([], [0])


def test_only_what_has_come_so_far_is_looked_at() -> None:
    growing = [2.0 * 1.25**n for n in range(10)]  # 14.9 at last, and doubles in 31 steps
    grades = {
        beyond: [sign.grade for sign in rule(beyond=beyond).signs(record(*course("logit_std", growing)))]
        for beyond in (None, 14.0, 15.0)
    }
    assert grades == {None: [1], 14.0: [1], 15.0: [0]}
    falling = TrendRule("narrowing", "entropy", below=0.1, beyond=0.3, horizon=100, patience=1)
    values = [0.9 - 0.05 * n for n in range(14)]
    assert [sign.grade for sign in falling.signs(record(*course("entropy", values[:11])))] == [0]
    assert [sign.grade for sign in falling.signs(record(*course("entropy", values)))] == [1]


def test_it_is_said_where() -> None:
    heads = {"a": 2, "b": 1}
    values = [[5, value, 5] for value in LINE[:10]]
    (sign,) = rule().signs(record(*course("logit_std", values, heads)))
    assert (sign.place, sign.value, sign.limit) == (Place("a", 1), 19, 25)
    (of_site,) = rule(above=15.0, scope="site").signs(record(*course("logit_std", values, heads)))
    assert (of_site.place, of_site.value) == (Place("a", None), 12)
    (of_model,) = rule(above=11.0, scope="model").signs(record(*course("logit_std", values, heads)))
    assert of_model.place == Place(None, None)
    assert of_model.slope == pytest.approx(0.1 / 3)


def test_only_its_window_counts() -> None:
    values = [500.0, 0.0, 300.0, *LINE[:10]]
    (sign,) = rule(window=10).signs(record(*course("logit_std", values)))
    assert sign.predicted_step == 180


def test_warned_once_while_it_goes_on() -> None:
    (warning,) = warned(rule(patience=2), course("logit_std", [10.0] * 5 + LINE + [29.0] * 20))
    assert warning.limit == 25
    assert warning.since == warning.step - 10
    assert warning.predicted_step is not None and warning.step < warning.predicted_step <= warning.step + 60


def test_warned_again_when_it_grows_again() -> None:
    calm = [10.0] * 15
    assert len(warned(rule(patience=2), course("logit_std", calm + LINE + calm + LINE + calm))) == 2


def test_noise_about_a_level_is_no_trend() -> None:
    values_TP = 20 + np.random.default_rng(0).normal(0, 1, (200, 16))
    found = warned(rule(patience=2), course("logit_std", values_TP, {"a": 16}))
    assert len(found) <= 1  # of 3 100 looks


def test_a_growing_head_is_found_among_thousands_that_waver() -> None:
    values_TP = 23 + np.random.default_rng(0).normal(0, 0.5, (10, 4000))
    values_TP[:, 1234] = LINE[:10]
    signs = rule().signs(record(*course("logit_std", values_TP, {"a": 4000})))
    assert Place("a", 1234) in [sign.place for sign in signs if sign.grade]


def test_without_the_statistic() -> None:
    assert list(rule().signs(record(snapshot(0, entropy=1)))) == []
    assert list(rule().signs(record(*[snapshot(step, {}, logit_std=[]) for step in range(10)]))) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"above": None}, "either `above` or `below`, must be given, got above=None and below=None"),
        ({"below": 3}, "either `above` or `below`, must be given, got above=25.0 and below=3"),
        ({"above": "25"}, "`limit` must be a finite number, got '25'"),
        ({"above": NAN}, "`limit` .*got nan"),
        ({"above": math.inf}, "`limit` .*got inf"),
        ({"above": [25.0]}, r"`limit` .*got \[25.0\]"),
        ({"horizon": 0}, "`horizon` must be an integer of at least 1, got 0"),
        ({"horizon": 10.0}, "`horizon` .*got 10.0"),
        ({"window": 4}, "`window` must be an integer of at least 5, got 4"),
        ({"scope": "all"}, "`scope` must be 'head', 'site' or 'model', got 'all'"),
        ({"severity": "loud"}, "`severity` .*got 'loud'"),
        ({"warmup_steps": -1}, "`warmup_steps` .*got -1"),
        ({"patience": -2}, "`patience` .*got -2"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rule(**settings)
