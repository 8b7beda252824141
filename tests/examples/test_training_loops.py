"""The training loops in plain PyTorch and in Fabric: what they print and what they log."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import fabric
import plain_pytorch
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.mark.parametrize("example", [plain_pytorch, fabric])
def test_it_watches_and_warns_of_logits_that_grow(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example.train(steps=41, learning_rate=0.03, watch_every=20)
    printed = capsys.readouterr().out
    assert "step   20  loss" in printed and "step   40  loss" in printed
    assert "warning: logit_std of head" in printed
    assert "Attention at step 40" in printed
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    logged = EventAccumulator(str(events)).Reload()
    for tag in ("loss", "attention/entropy/min", "attention/logit_std/max"):
        assert [event.step for event in logged.Scalars(tag)] == [0, 20, 40]


@pytest.mark.parametrize("example", [plain_pytorch, fabric])
def test_it_is_silent_about_a_run_that_has_just_begun(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example.train(steps=3, learning_rate=0.001, watch_every=1)
    assert "warning" not in capsys.readouterr().out
