"""`max_overhead` of AttentionMonitor, on a clock that the model and the capture turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from models import LanguageModel, batches, fit, trainer
from torch import Tensor

from lightning_attn import AttentionMonitor, Snapshot
from lightning_attn.callbacks import budget, schedule, session


class Clock:
    """A batch takes a second; what a capture takes beyond it, for each statistic, is set by the test."""

    now, of_statistic = 0.0, 4.0

    def __call__(self) -> float:
        return self.now


class TakesASecond(LanguageModel):
    clock: Clock

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.clock.now += 1.0
        return super().training_step(batch, batch_idx)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = TakesASecond.clock = Clock()
    monkeypatch.setattr(budget, "monotonic", clock)
    original = session.AttentionObserver.snapshot

    def takes_long(self: session.AttentionObserver, step: int = 0) -> Snapshot:
        clock.now += clock.of_statistic * len(self.request.statistics)
        return original(self, step)

    monkeypatch.setattr(session.AttentionObserver, "snapshot", takes_long)
    yield clock


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(schedule, "rank_zero_info", messages.append)
    return messages


def a_monitor(max_overhead: float | None = 0.1, **arguments: Any) -> AttentionMonitor:
    quiet = {"every_n_steps": 10, "statistics": "max_weight", "print_summary": False}
    return AttentionMonitor(max_overhead=max_overhead, **{**quiet, **arguments})


def test_captures_become_rarer_and_this_is_said_and_logged(clock: Clock, said: list[str], tmp_path: Path) -> None:
    """4 s beyond steps of 1 s may come every 36 steps: 64 is the next power of two, 70 the next that is asked for."""
    monitor = a_monitor()
    fit(TakesASecond(), monitor, steps=170, logger=CSVLogger(tmp_path, name="", version=""))
    assert monitor.history.steps == [0, 10, 20, 90, 160]
    assert said == [
        "Attention is captured every 70 steps from step 20 on, where 10 were asked for: a capture takes 4 s beyond"
        " its step, a step without one 1 s, and `max_overhead` is 0.1."
    ]
    header, *rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    column = header.index("attention/every_n_steps")
    assert [float(row[column]) for row in rows if row[column]] == [10, 10, 70, 70, 70]


def test_without_a_limit_nothing_is_measured(clock: Clock, said: list[str], tmp_path: Path) -> None:
    monitor = a_monitor(max_overhead=None)
    fit(TakesASecond(), monitor, steps=41, logger=CSVLogger(tmp_path, name="", version=""))
    assert monitor.history.steps == [0, 10, 20, 30, 40]
    assert not said
    assert "every_n_steps" not in (tmp_path / "metrics.csv").read_text()


def test_captures_that_fit_come_as_asked(clock: Clock, said: list[str]) -> None:
    clock.of_statistic = 0.5
    monitor = a_monitor()
    fit(TakesASecond(), monitor, steps=60)
    assert monitor.history.steps == [0, 10, 20, 30, 40, 50]
    assert not said


def test_a_cadence_that_changes(clock: Clock, said: list[str]) -> None:
    """36 steps are needed, so it is every 65; at first every 10. From step 100 on the user asks for less than that."""
    monitor = a_monitor(every_n_steps={0: 5, 100: 90})
    fit(TakesASecond(), monitor, steps=300)
    assert monitor.history.steps == [0, 10, 20, 85, 190, 280]
    assert [message.split(" from")[0] for message in said] == ["Attention is captured every 65 steps"]


def test_accumulation_counts_optimiser_steps(clock: Clock, said: list[str]) -> None:
    monitor = a_monitor()
    fit(TakesASecond(), monitor, steps=4 * 61, accumulate_grad_batches=4)
    # Steps of 4 s may have 4 s every 9 steps, of which the next power of two is 16.
    assert monitor.history.steps == [0, 10, 20, 40, 60]


def test_captures_of_another_monitor_are_not_plain_steps(clock: Clock, said: list[str]) -> None:
    often = a_monitor(max_overhead=None, every_n_steps=2, statistics=["entropy", "self_weight"])
    monitor = a_monitor()
    fit(TakesASecond(), often, monitor, steps=170)
    # Its captures take 12 s with those of the other, a plain step 1 s: every 108 steps, at most 80 at once.
    assert monitor.history.steps == [0, 10, 20, 100]
    assert "12 s beyond its step, a step without one 1 s" in said[0]
    assert often.history.steps == list(range(0, 170, 2))


def test_a_resumed_run_keeps_its_cadence(clock: Clock, said: list[str], tmp_path: Path) -> None:
    before = fit(TakesASecond(), a_monitor(), steps=50)
    before.save_checkpoint(tmp_path / "last.ckpt")
    said.clear()
    monitor = a_monitor()
    after = trainer(monitor, max_epochs=4)
    after.fit(TakesASecond(), batches(50), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert monitor.history.steps == [90, 160]
    assert not said


def test_another_run_is_measured_anew(clock: Clock, said: list[str]) -> None:
    monitor = a_monitor()
    for _ in range(2):
        fit(TakesASecond(), monitor, steps=100)
        assert monitor.history.steps == [0, 10, 20, 90]
    assert len(said) == 2


@pytest.mark.parametrize("value", [0, 1.0, -0.5, "1 %", True])
def test_bad_shares(value: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"`max_overhead` must be a number between 0 and 1, .* got"):
        a_monitor(max_overhead=value)


def test_validation_has_no_cadence_to_lengthen() -> None:
    with pytest.raises(MisconfigurationException, match=r"`max_overhead` .* None with stage='validate', .* got 0\.01"):
        AttentionMonitor(stage="validate", max_overhead=0.01)
