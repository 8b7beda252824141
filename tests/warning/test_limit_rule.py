"""A statistic beyond a limit: where it is, and where it is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_series import course, record, snapshot, warned

from lightning_attn.warning import LimitRule, Place, Sign

NAN, INF = math.nan, math.inf


def rule(**settings: Any) -> LimitRule:
    return LimitRule("wide", "max_logit", **settings)


def grades(one: LimitRule, values: list[float]) -> list[int | None]:
    """The grade of the sign at each head; ``None`` where there is none."""
    found = {
        sign.place.head: sign.grade for sign in one.signs(record(snapshot(0, {"a": len(values)}, max_logit=values)))
    }
    return [found.get(head) for head in range(len(values))]


@pytest.mark.parametrize(
    ("settings", "values", "expected"),
    [
        ({"above": 10}, [9, 10, 10.1, NAN, INF, -INF], [None, 0, 1, None, 1, None]),
        ({"above": 10, "hysteresis": 0}, [9, 10, 10.1], [None, None, 1]),
        ({"above": 10, "hysteresis": 0.5}, [4.9, 5, 5.1, 11], [None, None, 0, 1]),
        ({"above": [10, 20, 40]}, [1, 9.5, 11, 21, 41, INF], [None, 0, 1, 2, 3, 3]),
        ({"below": 10}, [9, 10, 10.9, 11.1, -INF, INF, NAN], [1, 0, 0, None, 1, None, None]),
        ({"below": [10, 5, -5]}, [12, 7, 2, -6], [None, 1, 2, 3]),
        ({"above": 0}, [-1, 0, 1e-300, 1], [None, None, 1, 1]),  # coming back to 0 is enough
        ({"below": 0}, [-1e-300, 0, 1], [1, None, None]),
        ({"above": -10}, [-12, -11, -10.5, -10, -9], [None, None, 0, 0, 1]),  # 11 is within the limit, not beyond
        ({"below": -10}, [-11, -10, -9.5, -9, -8], [1, 0, 0, None, None]),
        ({"above": 1e308}, [1e307, 1.7e308], [None, 1]),
    ],
)
def test_grades(settings: dict[str, Any], values: list[float], expected: list[int | None]) -> None:
    assert grades(rule(**settings), values) == expected


def test_a_sign_says_what_it_has_gone_beyond() -> None:
    (sign,) = rule(above=[10, 20]).signs(record(snapshot(0, {"a": 2}, max_logit=[1, 25])))
    assert sign == Sign(Place("a", 1), "max_logit", 25.0, 20.0, grade=2)


def test_the_mean_of_a_site_and_of_the_model() -> None:
    found = record(snapshot(0, {"a": 2, "b": 2}, max_logit=[1, 21, 1, NAN]))
    assert list(rule(above=10, scope="site").signs(found)) == [Sign(Place("a", None), "max_logit", 11.0, 10.0)]
    assert list(rule(above=7, scope="model").signs(found)) == [Sign(Place(None, None), "max_logit", 23 / 3, 7.0)]
    assert list(rule(above=10, scope="model").signs(found)) == []


@pytest.mark.parametrize(
    ("share", "values", "beyond"),
    [
        (0.5, [1, 1, 11, 11], 2),
        (0.5, [1, 1, 1, 11], None),
        (1.0, [11, 11, 11, 11], 4),
        (0.5, [11, NAN, NAN, 1], 1),  # of those that have a value
        (1.0, [INF, INF, 11, NAN], 3),
        (0.01, [1, 1, 1, 1], None),  # one head at least
        (0.01, [1, 1, 1, 11], 1),
        (0.5, [NAN] * 4, None),
    ],
)
def test_a_share_of_heads(share: float, values: list[float], beyond: int | None) -> None:
    one = rule(above=10, scope="model", share_of_heads=share)
    signs = [sign for sign in one.signs(record(snapshot(0, {"a": 2, "b": 2}, max_logit=values))) if sign.grade]
    assert [sign.heads for sign in signs] == ([] if beyond is None else [beyond])


@settings(deadline=None)
@given(st.integers(1, 400), st.data())
def test_a_share_is_reached_by_so_many_heads(of_heads: int, data: st.DataObject) -> None:
    """However the product of a share and a number is rounded: 0.1 · 30 is more than 3 in floats."""
    heads = data.draw(st.integers(1, of_heads))
    one = rule(above=10, scope="model", share_of_heads=heads / of_heads)
    for beyond, expected in ((heads, 1), (heads - 1, 0)):
        values = [11.0] * beyond + [1.0] * (of_heads - beyond)
        assert len(list(one.signs(record(snapshot(0, {"a": of_heads}, max_logit=values))))) == expected


def test_tenths_of_thirty() -> None:
    values = [11.0] * 3 + [1.0] * 27
    one = rule(above=10, scope="model", share_of_heads=0.1)
    assert [sign.heads for sign in one.signs(record(snapshot(0, {"a": 30}, max_logit=values)))] == [3]


def test_a_share_names_the_worst_head() -> None:
    found = record(snapshot(0, {"a": 2, "b": 2}, max_logit=[11, 12, 13, 30]))
    one = rule(above=[10, 25], scope="site", share_of_heads=0.5)
    assert list(one.signs(found)) == [
        Sign(Place("a", None), "max_logit", 12.0, 10.0, 1, worst=Place("a", 1), heads=2, of_heads=2),
        Sign(Place("b", None), "max_logit", 30.0, 25.0, 2, worst=Place("b", 1), heads=1, of_heads=2),
    ]


def test_a_rate_is_per_100_steps_over_five_snapshots() -> None:
    rises = rule(above=19, quantity="rate")
    assert list(rises.signs(record(*course("max_logit", [0, 2, 4, 6])))) == []
    (sign,) = rises.signs(record(*course("max_logit", [0, 2, 4, 6, 8])))
    assert sign.value == pytest.approx(20)
    assert list(rises.signs(record(*course("max_logit", [0, 2, NAN, 6, 8])))) == []
    falls = rule(below=-19, quantity="rate")
    assert len(list(falls.signs(record(*course("max_logit", [8, 6, 4, 2, 0]))))) == 1


def test_a_rate_forgets_what_was_before() -> None:
    """The record may hold more, since other rules need it."""
    (sign,) = rule(above=19, quantity="rate").signs(record(*course("max_logit", [500, 100, 300, 0, 2, 4, 6, 8])))
    assert sign.value == pytest.approx(20)


def test_without_the_statistic() -> None:
    assert list(rule(above=1).signs(record(snapshot(0, entropy=5)))) == []
    assert list(rule(above=1).signs(record(snapshot(0, {}, max_logit=[])))) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "either `above` or `below`, must be given, got above=None and below=None"),
        ({"above": 1, "below": 0}, "either `above` or `below`, must be given, got above=1 and below=0"),
        ({"above": "9"}, "`above`, must be a finite number or a list of increasing ones, got '9'"),
        ({"above": NAN}, "`above`.*got nan"),
        ({"above": INF}, "`above`.*got inf"),
        ({"above": True}, "`above`.*got True"),
        ({"above": []}, r"`above`.*got \[\]"),
        ({"above": [2, 1]}, r"`above`.*increasing ones, got \[2, 1\]"),
        ({"above": [1, 1]}, r"`above`.*got \[1, 1\]"),
        ({"below": [1, 2]}, r"`below`.*decreasing ones, got \[1, 2\]"),
        ({"below": [1, None]}, r"`below`.*got \[1, None\]"),
        ({"above": 1, "quantity": "speed"}, "`quantity` must be 'value' or 'rate', got 'speed'"),
        ({"above": 1, "scope": "layer"}, "`scope` must be 'head', 'site' or 'model', got 'layer'"),
        ({"above": 1, "share_of_heads": 0.5}, "`share_of_heads` needs `scope` to be 'site' or 'model', got 'head'"),
        ({"above": 1, "scope": "site", "share_of_heads": 0}, "`share_of_heads` must be above 0 and at most 1, got 0"),
        ({"above": 1, "scope": "site", "share_of_heads": 1.1}, "`share_of_heads`.*got 1.1"),
        ({"above": 1, "scope": "site", "share_of_heads": NAN}, "`share_of_heads`.*got nan"),
        ({"above": 1, "hysteresis": -0.1}, "`hysteresis` must be a finite number from 0 to 1, got -0.1"),
        ({"above": 1, "hysteresis": "0"}, "`hysteresis`.*got '0'"),
        ({"above": 1, "severity": "bad"}, "`severity` must be one of .*'info'.* got 'bad'"),
        ({"above": 1, "severity": ["info", "warning"]}, "`severity` must be one, or one for each of 1 limits"),
        ({"above": [1, 2], "severity": []}, r"`severity`.*got \[\]"),
        ({"above": 1, "severity": None}, "`severity`.*got None"),
        ({"above": 1, "warmup_steps": -1}, "`warmup_steps` must be an integer of at least 0, got -1"),
        ({"above": 1, "patience": 0}, "`patience` must be an integer of at least 1, got 0"),
        ({"above": 1, "patience": 1.5}, "`patience`.*got 1.5"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rule(**settings)


@pytest.mark.parametrize("statistic", ["max_logits", "all", "", None, 3])
def test_an_unknown_statistic(statistic: Any) -> None:
    with pytest.raises(ValueError, match=f"{statistic!r}, which is none of"):
        LimitRule("wide", statistic, above=1)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_rule_needs_a_name(name: Any) -> None:
    with pytest.raises(ValueError, match=f"`name` must be .* got {name!r}"):
        LimitRule(name, "max_logit", above=1)


def test_a_rate_is_told_as_a_rate_whatever_is_taken_off() -> None:
    rising = LimitRule("rising", "logit_std", above=20.0, quantity="rate", without_start=True, patience=1)
    found = warned(rising, course("logit_std", [5.0 + 3 * n for n in range(12)]))
    # What is above 10 is 0, 1, 4, 7, 10 in the first five snapshots that rise fast enough.
    assert [(warning.statistic, round(warning.value)) for warning in found] == [("logit_std per 100 steps", 26)]
