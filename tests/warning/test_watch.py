"""What is warned of when: patience, coming back, gaps, steps that go back, and checkpoints."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_series import course, snapshot, warned

from lightning_attn import Snapshot
from lightning_attn.warning import LimitRule, Place, Record, Rule, Sign, TrendRule, Watch, built_in_rules

NAN = math.nan


def wide(**arguments: Any) -> LimitRule:
    return LimitRule("wide", "max_logit", **{"above": 10, "patience": 2, **arguments})


def steps(rule: Rule, values: list[Any]) -> list[int]:
    """At which of the snapshots a rule warns."""
    return [warning.step for warning in warned(rule, course("max_logit", values, every=1))]


@pytest.mark.parametrize(
    ("arguments", "values", "expected"),
    [
        ({"patience": 1}, [1, 11, 11, 11], [1]),
        ({"patience": 3}, [1, 11, 11, 11, 11], [3]),
        ({"patience": 3}, [11, 11, 1, 11, 11, 1], []),  # in a row
        ({"patience": 2}, [11, 9.5, 11, 9.5, 11], []),  # within the limit does not count, near it or not
        # again: when the place has shown no sign for as long
        ({"patience": 2}, [11, 11, 1, 11, 11], [1]),
        ({"patience": 2}, [11, 11, 1, 1, 11, 11], [1, 5]),
        ({"patience": 2}, [11, 11, 9.5, 9.5, 11, 11], [1]),  # not far enough back
        ({"patience": 2}, [11, 11, 1, 9.5, 1, 9.5, 11, 11], [1]),
        ({"patience": 2, "hysteresis": 0}, [11, 11, 9.5, 9.5, 11, 11], [1, 5]),
        # grades: worse is warned of too, by the least of those in a row
        ({"patience": 2, "above": [10, 20]}, [11, 11, 21, 21, 11, 11, 21, 21], [1, 3]),
        ({"patience": 2, "above": [10, 20]}, [21, 21], [1]),
        ({"patience": 2, "above": [10, 20]}, [11, 21, 11, 21, 21], [1, 4]),
        # gaps say nothing
        ({"patience": 2}, [11, NAN, 11], [2]),
        ({"patience": 2}, [11, 11, NAN, NAN, NAN, 11, 11], [1]),
        ({"patience": 2}, [11, 11, 1, NAN, 1, 11, 11], [1, 6]),
        # warm-up
        ({"patience": 2, "warmup_steps": 3}, [11, 11, 11, 11, 11], [4]),
        ({"patience": 1, "warmup_steps": 3}, [11, 11, 11, 1, 1], []),
        ({"patience": 1, "warmup_steps": 4}, [11] * 6, [4]),
    ],
)
def test_when_it_warns(arguments: dict[str, Any], values: list[float], expected: list[int]) -> None:
    assert steps(wide(**arguments), values) == expected


def test_severity_and_limit_are_of_what_counts() -> None:
    """One snapshot beyond the second limit is not enough for it."""
    rule = wide(above=[10, 20], severity=["info", "critical"])
    first, second = warned(rule, course("max_logit", [11, 21, 21]))
    assert (first.severity, first.limit, first.value) == ("info", 10, 21)
    assert (second.severity, second.limit, second.value) == ("critical", 20, 21)


@pytest.mark.parametrize(
    ("values", "since"),
    [
        ([1, 11, 11, 11], 10),
        ([11, NAN, 11, 11], 0),  # a gap is no break
        ([11, 1, 11, 11, 11], 20),
        ([11, 9.5, 11, 11, 11], 20),
    ],
)
def test_since_when(values: list[float], since: int) -> None:
    (warning,) = warned(wide(patience=3), course("max_logit", values))
    assert warning.since == since


def test_how_fast() -> None:
    heads = {"a": 2}
    (warning,) = warned(wide(), course("max_logit", [[n, 1] for n in range(0, 40, 2)], heads))
    assert warning.slope == pytest.approx(0.2)
    (of_site,) = warned(wide(scope="site"), course("max_logit", [[2 * n, 0] for n in range(0, 40, 2)], heads))
    assert (of_site.site, of_site.head, of_site.slope) == ("a", None, pytest.approx(0.2))
    (at_once,) = warned(wide(patience=1), course("max_logit", [11]))
    assert at_once.slope is None


def test_each_place_by_itself() -> None:
    found = warned(wide(), course("max_logit", [[11, 1], [11, 11], [11, 11]], {"a": 2}))
    assert [(warning.step, warning.place) for warning in found] == [(10, "a #0"), (20, "a #1")]


def test_a_site_that_is_absent_for_a_while() -> None:
    """It neither counts, nor interrupts, nor is warned of anew."""
    here, away = {"a": 1, "b": 1}, {"b": 1}
    heads = [here, away, here, away, away, away, here, here]
    snapshots = [snapshot(step, of, max_logit=[11.0, 1.0][-len(of) :]) for step, of in enumerate(heads)]
    (warning,) = warned(wide(), snapshots)
    assert (warning.step, warning.since) == (2, 0)


def test_a_statistic_that_is_absent_for_a_while() -> None:
    for rule in (wide(), wide(scope="model"), wide(scope="model", share_of_heads=0.5)):
        snapshots = [snapshot(n, **{name: 11.0}) for n, name in enumerate(["max_logit"] * 2 + ["entropy"] * 4)]
        snapshots += course("max_logit", [11.0, 11.0], first=50)
        assert [warning.step for warning in warned(rule, snapshots)] == [1]


def test_another_number_of_heads() -> None:
    snapshots = [snapshot(n, {"a": count}, max_logit=11.0) for n, count in enumerate([2, 2, 3, 3, 1, 1, 2, 2])]
    assert [(warning.step, warning.head) for warning in warned(wide(), snapshots)] == [(1, 0), (1, 1), (3, 2)]


def test_rules_do_not_hang_on_each_other() -> None:
    """What a rule is shown is what it asks for, whatever others need."""

    class Counting(Rule):
        def __init__(self, name: str, snapshots: int) -> None:
            super().__init__(name, ["max_logit"], snapshots=snapshots)

        def signs(self, record: Record) -> Iterator[Sign]:
            yield Sign(Place("attention", 0), "max_logit", len(record.snapshots), grade=len(record.snapshots))

    found = warned([Counting("two", 2), Counting("six", 6)], course("max_logit", [1] * 9))
    assert [warning.value for warning in found if warning.rule == "two"] == [1, 2]
    assert [warning.value for warning in found if warning.rule == "six"] == [1, 2, 3, 4, 5, 6]


def test_steps_that_go_back() -> None:
    """What was warned of is known; what was counted, and what was seen after that step, is not."""
    watch = Watch([wide(patience=3), TrendRule("trend", "max_logit", above=12, horizon=1000, patience=1)])

    def look(*steps_and_values: tuple[int, float]) -> list[tuple[str, int, int | None]]:
        return [
            (warning.rule, warning.step, warning.since)
            for step, value in steps_and_values
            for warning in watch.look(snapshot(step, max_logit=value))
        ]

    assert look((10, 1), (20, 11), (30, 11)) == []
    assert look((15, 11), (25, 11)) == []
    assert look((35, 11)) == [("wide", 35, 15)]
    assert look((0, 11), (10, 11), (20, 11)) == []
    assert watch.raised() == {"wide": 1, "trend": 0}
    assert look((20, 11), (30, 1), (40, 1), (50, 1), (60, 11), (70, 11), (80, 11)) == [("wide", 80, 60)]


def test_raised() -> None:
    watch = Watch([wide()])
    counts = []
    for one in course("max_logit", [[11, 1], [11, 11], [11, 11], [1, 11], [1, 11]], {"a": 2}):
        watch.look(one)
        counts.append(watch.raised()["wide"])
    assert counts == [0, 1, 2, 2, 1]


def test_clear() -> None:
    watch = Watch([wide()])
    for _ in range(2):
        assert len([warning for one in course("max_logit", [11, 11, 11]) for warning in watch.look(one)]) == 1
        watch.clear()
    assert watch.raised() == {"wide": 0}


def test_rules_of_one_name() -> None:
    with pytest.raises(ValueError, match="`rules` must have different names"):
        Watch([wide(), wide(above=3)])


# Rules that fail


WRONG_SIGNS: dict[str, Any] = {
    "nothing": None,
    "value": Sign(Place("attention", 1), "max_logit", "much"),  # type: ignore[arg-type]
    "grade": Sign(Place("attention", 1), "max_logit", 1.0, grade="bad"),  # type: ignore[arg-type]
}


class Failing(Rule):
    """Works for a while."""

    def __init__(self, fault: str) -> None:
        super().__init__("failing", ["max_logit"])
        self._keep(fault=fault)

    fault: str

    def signs(self, record: Record) -> Iterator[Any]:
        yield Sign(Place("attention", 0), "max_logit", 1.0)
        if record.step >= 20:
            if self.fault == "raises":
                raise RuntimeError("no idea")
            yield WRONG_SIGNS[self.fault]


@pytest.mark.parametrize("fault", ["raises", *WRONG_SIGNS])
def test_a_rule_that_fails_is_left_out(fault: str) -> None:
    reported: list[tuple[str, str]] = []
    rule = Failing(fault)
    watch = Watch([rule, wide()], report=lambda rule, error: reported.append((rule.name, type(error).__name__)))
    found = [warning for one in course("max_logit", [1, 11, 1, 11, 11, 11]) for warning in watch.look(one)]
    assert [(warning.rule, warning.step) for warning in found] == [("failing", 0), ("wide", 40)]
    assert [name for name, _ in reported] == ["failing"]
    assert watch.raised() == {"failing": 0, "wide": 1}


def test_without_a_report_it_is_raised() -> None:
    watch = Watch([Failing("raises")])
    with pytest.raises(RuntimeError, match="no idea"):
        for one in course("max_logit", [1, 1, 1]):
            watch.look(one)


# Checkpoints


def restored(watch: Watch) -> Watch:
    """As a checkpoint brings it back, which is loaded without trust."""
    file = io.BytesIO()
    torch.save(watch.state_dict(), file)
    file.seek(0)
    another = Watch(watch.rules)
    another.load_state_dict(torch.load(file, weights_only=True))
    return another


RULES = (
    wide(),
    LimitRule("mean", "max_logit", above=[4, 8], scope="model"),
    LimitRule("many", "max_logit", above=9, scope="site", share_of_heads=0.5, patience=3),
    LimitRule("fast", "max_logit", above=30, quantity="rate", patience=1),
    TrendRule("trend", "max_logit", above=14, horizon=40, window=5),
)
values = st.one_of(st.sampled_from([1.0, 9.5, 11.0, 11.0, 21.0, NAN]), st.floats(0, 30))
heads = st.sampled_from([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 2}, {"b": 2}, {"a": 3}])


@st.composite
def runs(draw: st.DrawFn) -> list[Snapshot]:
    found = []
    for step in range(draw(st.integers(2, 25))):
        of = draw(heads)
        count = sum(of.values())
        found.append(snapshot(10 * step, of, max_logit=draw(st.lists(values, min_size=count, max_size=count))))
    return found


@settings(max_examples=100, deadline=None)
@given(runs(), st.data())
def test_a_checkpoint_is_no_interruption(run: list[Snapshot], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(run)))
    watch = Watch(RULES)
    for one in run[:at]:
        watch.look(one)
    resumed = restored(watch)
    for one in run[at:]:
        assert resumed.look(one) == watch.look(one)
        assert resumed.raised() == watch.raised()
    assert restored(resumed).look(snapshot(1000, {"a": 1}, max_logit=11)) == watch.look(
        snapshot(1000, {"a": 1}, max_logit=11)
    )


def test_unknown_rules_in_a_state_are_left_out() -> None:
    watch = Watch([wide()])
    for one in course("max_logit", [11, 11]):
        watch.look(one)
    another = Watch([LimitRule("other", "max_logit", above=10)])
    another.load_state_dict(watch.state_dict())
    assert another.state_dict()["standings"] == []
    found = [warning.rule for one in course("max_logit", [11, 11], first=100) for warning in another.look(one)]
    assert found == ["other"]


def test_a_state_is_plain() -> None:
    watch = Watch(built_in_rules())
    for one in course("logit_std", [2.0, *[200.0] * 4]):
        watch.look(one)
    state = watch.state_dict()
    assert json.loads(json.dumps(state["standings"])) == state["standings"] != []
