"""Transitions that AttentionMonitor writes to TensorBoard, of snapshots that a test makes up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from models import LanguageModel, fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_attn import AttentionMonitor, Snapshot
from lightning_attn.callbacks import session
from lightning_attn.statistics import Range, RowBlock, RowMean, known_statistics, registry

Course = Callable[[int], tuple[float, ...]]


class MadeUp(RowMean):
    name = "positional_share"
    range, uniform, reading = Range(None, 1), "absent", "1: by position; 0: by content."

    def values(self, rows: RowBlock) -> torch.Tensor:
        return rows.square_sum_BHR


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[tuple[int, str]]]:
    """Train, with heads that follow a course, and give the texts in TensorBoard with their steps."""
    if "positional_share" not in known_statistics():
        monkeypatch.setitem(registry._STATISTICS, "positional_share", MadeUp)

    def run(course: Course, **arguments: int | None) -> list[tuple[int, str]]:
        def snapshot(self: session.AttentionObserver, step: int = 0) -> Snapshot:
            shares = course(step)
            values = torch.tensor([shares, [1.0] * len(shares)], dtype=torch.float64)
            return Snapshot(step, {"block": len(shares)}, ("positional_share", "entropy"), values)

        monkeypatch.setattr(session.AttentionObserver, "snapshot", snapshot)
        logger = TensorBoardLogger(tmp_path, name="", version="")
        monitor = AttentionMonitor(every_n_steps=1, print_summary=False, **arguments)  # type: ignore[arg-type]
        fit(LanguageModel(), monitor, logger=[logger, CSVLogger(tmp_path / "csv")], steps=32)
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        if "attention_transitions/text_summary" not in events.Tags()["tensors"]:
            return []
        texts = events.Tensors("attention_transitions/text_summary")
        return [(text.step, text.tensor_proto.string_val[0].decode()) for text in texts]

    return run


def test_each_new_transition_is_written_once_and_all_at_the_end(
    watched: Callable[..., list[tuple[int, str]]],
) -> None:
    texts = watched(lambda step: (0.9 if step < 8 else 0.2, 0.1 if step < 18 else 0.8, 0.5), heat_map_every_n_steps=4)
    assert [step for step, _ in texts] == [12, 24, 31]
    assert "| `block` | 0 | 8 | positional → semantic | 0.999 | 0.90 → 0.20 |" in texts[0][1]
    assert "None in the other 2 of 3 heads." in texts[0][1]
    for _, text in texts[1:]:
        assert "| `block` | 0 | 8 |" in text
        assert "| `block` | 1 | 18 | semantic → positional |" in text
        assert "None in the other 1 of 3 heads." in text


@pytest.mark.parametrize("heat_map_every_n_steps", [4, None])
def test_none_is_said_at_the_end(
    watched: Callable[..., list[tuple[int, str]]], heat_map_every_n_steps: int | None
) -> None:
    texts = watched(lambda step: (0.9, 0.1), heat_map_every_n_steps=heat_map_every_n_steps)
    assert texts == [(31, "**None**: no head of 2 went over from position to content, or back.")]


def test_nothing_is_said_of_heads_without_the_statistic(watched: Callable[..., list[tuple[int, str]]]) -> None:
    assert watched(lambda step: (float("nan"), float("nan"))) == []
