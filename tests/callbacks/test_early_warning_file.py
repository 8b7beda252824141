"""The file of JSON lines."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from early_warning_runs import SITES, Repeatable, SignsAt, lines, without_origin
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from listening import hearing
from models import LanguageModel, fit

from lightning_attn import AttentionEarlyWarning, EarlyWarning
from lightning_attn.callbacks.warning_file import WarningFile
from lightning_attn.warning import Place, Rule, Sign

FILE = "attention_warnings.jsonl"
FOUND = EarlyWarning(3, "sharp", "critical", "attention", 1, "entropy", 0.25, since=2, slope=-0.5)
LATER = EarlyWarning(5, "sharp", "critical", "attention", 0, "entropy", 0.125)


def early_warning(rules: Any = None, **arguments: Any) -> AttentionEarlyWarning:
    usual = {"every_n_steps": 1, "print_summary": False}
    return AttentionEarlyWarning(rules or SignsAt([1, 3]), "all", **{**usual, **arguments})


def said_while_writing(path: Path, **arguments: Any) -> list[str]:
    """What is said but the warnings themselves."""
    with hearing() as said:
        fit(LanguageModel(), early_warning(**arguments), default_root_dir=path)
    return [message for message in said if not message.startswith("AttentionEarlyWarning. Step")]


# What is in it.


class Predicts(Rule):
    """Shows a sign with every field."""

    def __init__(self) -> None:
        super().__init__("predicts", ["entropy"], "critical")

    def signs(self, record: Any) -> list[Sign]:
        if record.step != 1:
            return []
        return [Sign(Place(SITES[0], 2), "entropy", 0.5, 0.25, 1, -0.125, 3, Place(SITES[1], 1), 5, 8)]

    meaning = "It goes down."
    remedy = "hold it up"


def test_a_line_has_everything_that_is_known(tmp_path: Path) -> None:
    before = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    early = early_warning(Predicts())
    with hearing():
        fit(LanguageModel(), early, default_root_dir=tmp_path)
    (line,) = lines(tmp_path / FILE)
    assert before <= line.pop("run")[:29] <= line.pop("time") <= datetime.now(timezone.utc).isoformat()
    assert line == {
        "step": 1,
        "rule": "predicts",
        "severity": "critical",
        "scope": "head",
        "site": SITES[1],
        "head": 1,
        "statistic": "entropy",
        "value": 0.5,
        "limit": 0.25,
        "since": 1,
        "slope": -0.125,
        "predicted_step": 3,
        "heads": 5,
        "of_heads": 8,
        "meaning": "It goes down.",
        "remedy": "hold it up",
    }
    assert [EarlyWarning.from_dict(line)] == early.warnings


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    file = WarningFile(str(tmp_path / FILE), None)
    file.add([EarlyWarning(1, "rule", "info", None, None, "max_logit", float("inf"), limit=float("nan"))])
    assert "NaN" not in (tmp_path / FILE).read_text() and "Infinity" not in (tmp_path / FILE).read_text()
    (line,) = lines(tmp_path / FILE)
    assert (line["value"], line["limit"], line["site"]) == (None, None, None)


def test_runs_follow_each_other_in_one_file(tmp_path: Path) -> None:
    for _ in range(3):
        with hearing():
            fit(LanguageModel(), early_warning(), default_root_dir=tmp_path)
    found = lines(tmp_path / FILE)
    assert [line["step"] for line in found] == [1, 3] * 3
    runs = [line["run"] for line in found]
    assert len(set(runs)) == 3 and runs == sorted(runs)


def test_there_is_no_file_where_nothing_is_found(tmp_path: Path) -> None:
    fit(LanguageModel(), early_warning(SignsAt([])), default_root_dir=tmp_path)
    assert not list(tmp_path.iterdir())


# Where it is.


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_it_is_in_the_directory_of_the_run(kind: Any, tmp_path: Path) -> None:
    logger = kind(tmp_path, name="runs", version=3)
    with hearing():
        fit(LanguageModel(), early_warning(), logger=logger, default_root_dir=tmp_path / "other")
    assert len(lines(tmp_path / "runs" / "version_3" / FILE)) == 2
    assert not (tmp_path / "other").exists()


def test_it_may_be_elsewhere_or_nowhere(tmp_path: Path) -> None:
    elsewhere = tmp_path / "deep" / "down.jsonl"
    assert not said_while_writing(tmp_path / "root", file=str(elsewhere))
    assert len(lines(elsewhere)) == 2 and not (tmp_path / "root").exists()
    assert not said_while_writing(tmp_path / "root", file="sub/own.jsonl")
    assert len(lines(tmp_path / "root" / "sub" / "own.jsonl")) == 2
    assert not said_while_writing(tmp_path / "none", file=None)
    assert not (tmp_path / "none").exists()


def test_anything_that_fsspec_opens() -> None:
    import fsspec

    assert not said_while_writing(Path("memory://runs"), file="memory://elsewhere/warnings.jsonl")
    with fsspec.open("memory://elsewhere/warnings.jsonl", "r") as file:
        assert len(file.read().splitlines()) == 2


def test_where_it_cannot_be_written_this_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    early = early_warning(file=str(tmp_path / "file" / FILE))
    model = LanguageModel()
    with hearing() as said:
        running = fit(model, early, max_epochs=2)
        running.fit_loop.max_epochs = 3
        running.fit(model, running.train_dataloader)
    (message,) = [text for text in said if "not written" in text]
    assert str(tmp_path / "file" / FILE) in message
    assert len(early.warnings) == 2 and running.global_step == 18


# Going on with a run.


def test_what_came_after_the_checkpoint_is_taken_out_and_others_stay(tmp_path: Path) -> None:
    path = str(tmp_path / FILE)
    mine, other = WarningFile(path, None), WarningFile(path, None)
    mine.add([FOUND])
    other.add([LATER])
    mine.add([LATER])
    before = lines(tmp_path / FILE)
    WarningFile(path, mine.run).resume([FOUND])
    assert lines(tmp_path / FILE) == before[:2]
    assert sorted(os.listdir(tmp_path)) == [FILE]


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / FILE
    file = WarningFile(str(path), None)
    file.add([FOUND, LATER])
    before = path.read_bytes()
    WarningFile(str(path), file.run).resume([FOUND, LATER])
    assert path.read_bytes() == before


def test_a_new_directory_gets_what_was_found_before(tmp_path: Path) -> None:
    WarningFile(str(tmp_path / FILE), "the run").resume([FOUND, LATER])
    found = lines(tmp_path / FILE)
    assert [without_origin(line) for line in found] == [FOUND.to_dict(), LATER.to_dict()]
    assert {line["run"] for line in found} == {"the run"}


@pytest.mark.parametrize("known", [[FOUND], [FOUND, LATER]])
def test_a_line_that_was_cut_off_is_made_good(known: list[EarlyWarning], tmp_path: Path) -> None:
    path = tmp_path / FILE
    file = WarningFile(str(path), None)
    file.add([FOUND, LATER])
    path.write_text(path.read_text()[:-40])
    again = WarningFile(str(path), file.run)
    again.resume(known)
    again.add([FOUND])
    assert [without_origin(line) for line in lines(path)] == [w.to_dict() for w in [*known, FOUND]]


def test_lines_of_others_are_left_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text('{"somebody": "else"}\nno JSON\n')
    file = WarningFile(str(path), None)
    file.add([FOUND])
    WarningFile(str(path), file.run).resume([])
    assert path.read_text() == '{"somebody": "else"}\nno JSON\n'


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """A rule computes with what it wants."""
    import numpy as np

    class OfNumpy(SignsAt):
        def signs(self, record: Any) -> list[Sign]:
            place = Place(SITES[0], np.int64(1))
            return [Sign(place, "entropy", np.float32(0.5), np.float64(1.0), np.int64(1), heads=np.int8(2))]

    early = early_warning(OfNumpy([]))
    with hearing():
        running = fit(Repeatable(), early, default_root_dir=tmp_path)
    running.save_checkpoint(tmp_path / "last.ckpt")
    (line,) = lines(tmp_path / FILE)
    assert (line["head"], line["value"], line["limit"], line["heads"]) == (1, 0.5, 1.0, 2)
    assert json.dumps(early.warnings[0].to_dict())
