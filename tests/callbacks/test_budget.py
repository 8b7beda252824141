"""The time budget: what it measures and decides, on a clock that a test turns."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_attn.callbacks.budget import TimeBudget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Training:
    """Batches of a given length, watched as a budget allows."""

    def __init__(self, max_overhead: float, plain: float, capture: float, every_n_steps: int = 10) -> None:
        self.clock = Clock()
        self.budget = TimeBudget(max_overhead, self.clock)
        self.plain, self.capture, self.every_n_steps = plain, capture, every_n_steps
        self.batches_per_step = 1
        self.batch = 0
        self.captures: list[int] = []
        self.seconds, self.seconds_captured = 0.0, 0.0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for part in range(self.batches_per_step):
                self._batch(part)
            self.batch += 1

    def _batch(self, part: int) -> None:
        gap = self.batch - self.captures[-1] if self.captures else self.budget.fewest_steps
        is_due = part == 0 and self.batch % self.every_n_steps == 0 and gap >= self.budget.fewest_steps
        self.budget.batch_starts(self.wait if is_due else None)
        seconds = self.batch_seconds()
        if is_due:
            self.budget.settle(self.budget.needed_steps, self.every_n_steps)
            self.captures.append(self.batch)
            self.seconds_captured += self.capture
            seconds += self.capture
        self.clock.now += seconds
        self.seconds += seconds
        self.budget.batch_ends("capture" if is_due else "plain", part == self.batches_per_step - 1)

    def batch_seconds(self) -> float:
        return self.plain

    def wait(self) -> None:
        pass

    @property
    def intervals(self) -> list[int]:
        return [later - earlier for earlier, later in zip(self.captures, self.captures[1:], strict=False)]


def test_cheap_captures_stay_as_often_as_asked() -> None:
    training = Training(max_overhead=0.01, plain=1.0, capture=0.05)
    training.run(200)
    assert set(training.intervals) == {10}


def test_dear_captures_become_rarer_until_they_fit() -> None:
    """A capture of 4 plain steps may come every 4 · 0.99 / 0.01 = 396 steps; the next power of two is 512."""
    training = Training(max_overhead=0.01, plain=0.5, capture=2.0)
    training.run(4000)
    # The first is not counted, the second is measured, the third knows; no more than eight times as far at once.
    assert training.intervals[:4] == [10, 10, 80, 520]
    assert set(training.intervals[3:]) == {520}
    assert training.budget.capture == pytest.approx(2.0)
    assert training.budget.plain_step == pytest.approx(0.5)
    assert training.budget.needed_steps == pytest.approx(396)


@given(
    max_overhead=st.floats(0.002, 0.5),
    plain=st.floats(1e-3, 10),
    capture=st.floats(1e-3, 100),
    every_n_steps=st.integers(1, 60),
)
def test_the_share_holds_and_captures_are_not_rarer_than_needed(
    max_overhead: float, plain: float, capture: float, every_n_steps: int
) -> None:
    training = Training(max_overhead, plain, capture, every_n_steps)
    training.run(400)
    needed = capture / plain * (1 - max_overhead) / max_overhead
    found = training.budget.fewest_steps
    if len(training.captures) >= 10:  # long enough to have got there, eightfold at a time
        interval = every_n_steps * math.ceil(found / every_n_steps)
        share = capture / (interval * plain + capture)
        assert share <= max_overhead * (1 + 1e-6) or interval == every_n_steps
        assert found <= max(2.5 * needed, 2) * (1 + 1e-6)


def test_several_batches_to_a_step() -> None:
    training = Training(max_overhead=0.1, plain=0.25, capture=1.0)
    training.batches_per_step = 4
    training.run(100)
    assert training.budget.plain_step == pytest.approx(1.0, rel=0.05)
    assert training.budget.needed_steps == pytest.approx(9, rel=0.05)
    assert set(training.intervals[2:]) == {20}


def test_captures_come_back_when_they_get_cheaper() -> None:
    training = Training(max_overhead=0.1, plain=1.0, capture=10.0)
    training.run(600)
    assert training.intervals[-1] == 130  # 90 steps are needed, the power of two is 128
    training.capture = 0.2
    training.run(4000)
    assert training.intervals[-1] == 10


def test_it_does_not_go_back_and_forth() -> None:
    """A need that wavers by a tenth around a power of two."""
    budget = TimeBudget(0.01)
    found = []
    for turn in range(20):
        budget.settle(64 * (1.1 if turn % 2 else 0.9), asked_steps=10)
        found.append(budget.fewest_steps)
    assert found == [64] + [128] * 19


@pytest.mark.parametrize(
    ("fewest", "needed", "asked", "settled"),
    [
        (2, 2.0, 50, 2), (2, 2.1, 50, 4), (2, 128.0, 50, 128), (2, 128.1, 50, 256), (2, 1e12, 50, 400),
        (400, 1e12, 50, 3200), (2, math.inf, 50, 400),
        (64, 26.0, 50, 64), (64, 25.6, 50, 32), (64, 3.0, 50, 4), (64, 0.0, 50, 1), (2, 0.81, 1, 2), (2, 0.8, 1, 1),
        (1, 1.0, 1, 1),
    ],
)  # fmt: skip
def test_powers_of_two(fewest: int, needed: float, asked: int, settled: int) -> None:
    budget = TimeBudget(0.01)
    budget.fewest_steps = fewest
    budget.settle(needed, asked)
    assert budget.fewest_steps == settled


def test_a_stall_does_not_put_captures_off_for_long() -> None:
    """One capture waits a minute for a disk."""
    training = Training(max_overhead=0.1, plain=1.0, capture=0.5)
    training.run(15)
    training.capture = 60.0
    training.run(10)
    training.capture = 0.5
    training.run(700)
    assert max(training.intervals) <= 80
    assert training.intervals[-1] == 10


def test_the_warm_up_is_not_measured() -> None:
    class Compiles(Training):
        def batch_seconds(self) -> float:
            return 500.0 if self.batch in (0, 1, 2) else self.plain

    training = Compiles(max_overhead=0.1, plain=1.0, capture=2.0)
    training.run(30)
    assert training.budget.plain_step == pytest.approx(1.0)
    assert training.budget.capture == pytest.approx(2.0)


def test_what_is_seldom_and_dear_counts_for_its_share() -> None:
    """Every fifth capture draws heat maps and takes six times as long: twice as long on average."""

    class Draws(Training):
        def batch_seconds(self) -> float:
            self.capture = 6.0 if len(self.captures) % 5 == 0 else 1.0
            return self.plain

    training = Draws(max_overhead=0.5, plain=1.0, capture=1.0)
    training.run(400)
    assert training.budget.capture == pytest.approx(2.0)


def test_every_step_is_not_every_step_before_plain_ones_are_known() -> None:
    training = Training(max_overhead=0.5, plain=1.0, capture=0.1, every_n_steps=1)
    training.run(40)
    assert training.intervals[:2] == [8, 8]
    assert set(training.intervals[-10:]) == {1}


class Ahead(Training):
    """A host that only gives orders, in no time, until a capture or `wait` makes it wait for the device."""

    backlog = 0.0

    def batch_seconds(self) -> float:
        gap = self.batch - self.captures[-1] if self.captures else self.budget.fewest_steps
        is_due = self.batch % self.every_n_steps == 0 and gap >= self.budget.fewest_steps
        if is_due:  # the capture waits for its own batch
            return self.plain
        self.backlog += self.plain
        return 1e-5

    def wait(self) -> None:
        self.clock.now += self.backlog
        self.backlog = 0.0


def test_a_host_that_has_gone_ahead_of_its_device_is_no_mistake() -> None:
    training = Ahead(max_overhead=0.1, plain=1.0, capture=2.0)
    training.run(100)
    assert training.budget.plain_step == pytest.approx(1.0, rel=1e-3)
    assert training.budget.capture == pytest.approx(2.0, rel=1e-3)
    assert set(training.intervals[3:]) == {40}


def test_batches_that_others_captured_and_batches_without_an_end_are_not_plain() -> None:
    clock = Clock()
    budget = TimeBudget(0.1, clock)
    budget.batch_ends("plain", True)  # never started

    def batch(seconds: float, kind: Any, wait: Any = None) -> None:
        budget.batch_starts(wait)
        clock.now += seconds
        budget.batch_ends(kind, True)

    for _ in range(5):
        batch(9.0, "plain")
    batch(9.0, "capture", lambda: None)
    assert budget.plain_step is budget.capture is None
    assert budget.needed_steps == budget.fewest_steps
    for _ in range(3):
        batch(1.0, "plain")
        batch(7.0, "other")
        budget.batch_starts()  # skipped
        clock.now += 50.0
    batch(3.0, "capture", lambda: None)
    assert budget.plain_step == pytest.approx(1.0)
    assert budget.capture == pytest.approx(2.0)


def test_a_run_begins_anew() -> None:
    training = Training(max_overhead=0.01, plain=0.5, capture=2.0)
    training.run(300)
    training.budget.restart()
    assert training.budget.fewest_steps == 8
    assert training.budget.plain_step is training.budget.capture is None


def test_the_clock_stands_still() -> None:
    training = Training(max_overhead=0.01, plain=0.0, capture=0.0)
    training.run(100)
    assert set(training.intervals) == {10}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda budget: pickle.loads(pickle.dumps(budget))])
def test_copies(copied: Any) -> None:
    assert copied(TimeBudget(0.01)).max_overhead == 0.01


@pytest.mark.parametrize("value", [0, 0.0, 1, 1.0, -0.1, 5, math.nan, math.inf, "0.1", True, [0.1]])
def test_bad_shares(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"`max_overhead` must be a number between 0 and 1, .* or None for no limit, got"
    ):
        TimeBudget(value)
