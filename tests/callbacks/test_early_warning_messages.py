"""Who is told of early warnings, and how often."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
from early_warning_runs import Repeatable, SignsAt
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from listening import hearing
from models import LanguageModel, fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_attn import AttentionEarlyWarning
from lightning_attn.callbacks import warning_log

BEGIN = "AttentionEarlyWarning. "


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is given to Lightning to be logged."""
    messages: list[str] = []
    monkeypatch.setattr(warning_log, "rank_zero_info", messages.append)
    return messages


def early_warning(*rules: Any, **arguments: Any) -> AttentionEarlyWarning:
    usual = {"every_n_steps": 1, "print_summary": False}
    return AttentionEarlyWarning(list(rules), "all", **{**usual, **arguments})


def told(*callbacks: pl.Callback, **arguments: Any) -> list[str]:
    with hearing() as said:
        fit(Repeatable(), *callbacks, **arguments)
    return said


# Messages.


def test_warnings_are_warnings_of_python_and_news_go_to_the_log(log: list[str]) -> None:
    said = told(early_warning(SignsAt([1], "news", "info"), SignsAt([2], "bad"), SignsAt([3], "worse", "critical")))
    assert [message[: len(BEGIN) + 12] for message in said] == [f"{BEGIN}Step 2, warn", f"{BEGIN}Step 3, crit"]
    (news,) = [message for message in log if message.startswith(BEGIN)]
    assert news.startswith(f"{BEGIN}Step 1, info, news: head 0 of blocks.0.attention has entropy")
    for message in said:
        assert "It was asked for." in message and "What to try: ask for less." in message
        assert "docs/early-warning.md#" not in message, "the page knows no rules of users"


def test_many_heads_are_one_message() -> None:
    early = early_warning(SignsAt([0], "first", heads=96), SignsAt([0], "second", heads=48))
    with hearing() as said:
        fit(LanguageModel(blocks=24), early, steps=1)
    assert len(early.warnings) == 96 + 48
    assert [("first" in message, "second" in message) for message in said] == [(True, False), (False, True)]
    assert "95 more heads at 24 sites" in said[0] and len(said[0]) < 600


def test_a_rule_keeps_quiet_after_it_has_spoken() -> None:
    rule = SignsAt(list(range(0, 40, 2)))
    early = early_warning(rule, quiet_steps=20)
    said = told(early, steps=40)
    assert len(early.warnings) == 20
    assert len(said) == 3 and "Step 0" in said[0], "the last one when training ends"


def test_nothing_is_said_where_nothing_is_found(log: list[str]) -> None:
    assert not told(early_warning(SignsAt([])))
    assert not [message for message in log if message.startswith(BEGIN)]


# At the end.


def test_a_summary_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    told(early_warning(SignsAt([1, 3], "twice"), SignsAt([2], "once", "critical"), print_summary=True))
    heading, _, twice, once = capsys.readouterr().out.strip().splitlines()
    assert heading == "Early warnings:"
    assert twice.split()[:4] == ["twice", "warning", "1", "2"]
    assert once.split()[:4] == ["once", "critical", "2", "1"]


def test_a_healthy_run_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    told(early_warning(SignsAt([]), print_summary=True))
    assert capsys.readouterr().out.strip() == "Early warnings: none."


def test_no_summary_if_none_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    told(early_warning(SignsAt([1])))
    assert "Early" not in capsys.readouterr().out


def test_a_summary_of_a_run_that_was_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    told(early_warning(SignsAt([1]), action="stop", print_summary=True))
    assert "scripted" in capsys.readouterr().out


# Loggers.


def test_a_text_and_a_marker_in_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    early = early_warning(
        SignsAt([1, 2, 4], "early", heads=3), SignsAt([3], "late"), SignsAt([], "never"), quiet_steps=1
    )
    said = told(early, logger=logger)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("attention_warnings")]
    assert sorted(tags) == ["attention_warnings/early", "attention_warnings/late"]

    def marker(rule: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(f"attention_warnings/{rule}")]

    assert marker("early") == [(1, 3), (2, 3), (3, 0), (4, 3), (5, 0)]
    assert marker("late") == [(3, 1), (4, 0), (5, 0)]
    texts = events.Tensors("attention_warnings/text_summary")
    assert [text.step for text in texts] == [1, 3, 4]
    written = [text.tensor_proto.string_val[0].decode() for text in texts]
    assert [f"{BEGIN}{text}".replace("  \n", "\n") for text in written] == said


def test_other_loggers_get_the_markers(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    told(early_warning(SignsAt([1], "early")), logger=logger)
    header, *rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    column = header.index("attention_warnings/early")
    assert [row[column] for row in rows if row[column]] == ["1.0", "0.0", "0.0", "0.0", "0.0"]


def test_loggers_hear_nothing_of_healthy_runs() -> None:
    logger = Mock(spec=pl.loggers.Logger)
    logger.group_separator = "/"
    told(early_warning(SignsAt([])), logger=logger, log_every_n_steps=100)
    assert not logger.log_metrics.called


def test_a_logger_without_a_directory(tmp_path: Path) -> None:
    logger = Mock(spec=pl.loggers.Logger)
    logger.group_separator = "-"
    told(early_warning(SignsAt([1])), logger=logger, default_root_dir=tmp_path / "root", log_every_n_steps=100)
    assert (tmp_path / "root" / "attention_warnings.jsonl").exists()
    metrics = [call.args[0] for call in logger.log_metrics.call_args_list]
    assert metrics[0] == {"attention_warnings-scripted": 1.0}


def test_what_is_held_back_when_training_ends_is_said_then() -> None:
    said = told(early_warning(SignsAt([1, 3, 5]), quiet_steps=100))
    assert len(said) == 2
    assert said[1].startswith(f"{BEGIN}Step 5, warning, scripted: ")
