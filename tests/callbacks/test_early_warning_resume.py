"""A run that goes on from a checkpoint neither repeats a warning nor loses one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from early_warning_runs import Repeatable, SignsAt, lines, without_origin
from lightning.pytorch.callbacks import ModelCheckpoint
from listening import hearing
from models import LanguageModel, batches, fit, trainer

from lightning_attn import AttentionEarlyWarning, AttentionMonitor
from lightning_attn.callbacks import warning_log
from lightning_attn.warning import LimitRule, Rule, TrendRule

STEPS, EPOCHS = 6, 3
FILE = "attention_warnings.jsonl"
RULES: list[Rule] = [
    SignsAt([2, 4, 6, 10, 12, 14], name="lasting", patience=3),
    SignsAt([4, 12], name="twice", severity="critical", heads=3),
    TrendRule("growing", "logit_std", above=2.0, horizon=20, window=6),
    LimitRule("spread", "logit_std", above=[0.6, 1.2], severity=["info", "warning"], patience=2),
    LimitRule("pace", "entropy", below=-0.1, quantity="rate", patience=2),
]


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages."""
    messages: list[str] = []
    for name in ("rank_zero_warn", "rank_zero_info"):
        monkeypatch.setattr(warning_log, name, lambda text, **_: messages.append(text))
    return messages


def early_warning(rules: list[Rule] | Rule | None = None, **arguments: Any) -> AttentionEarlyWarning:
    usual = {"every_n_steps": 2, "quiet_steps": 6, "print_summary": False}
    return AttentionEarlyWarning(rules or RULES, "all", **{**usual, **arguments})


def told(folder: Path) -> list[dict[str, Any]]:
    return [without_origin(line) for line in lines(folder / FILE)]


class Counts(pl.Callback):
    """How much was said by the end of each step."""

    def __init__(self, said: list[str]) -> None:
        self.said = said
        self.until: dict[int, int] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.until[trainer.global_step] = len(self.said)


@pytest.mark.parametrize("place", ["same directory", "another directory"])
def test_from_every_capture(place: str, said: list[str], tmp_path: Path) -> None:
    """In the same directory the file is ahead of the checkpoint, in another one it is not there."""
    whole, counts = early_warning(), Counts(said)
    checkpoints = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    folder = tmp_path / "whole"
    of_trainer: dict[str, Any] = {"max_epochs": EPOCHS, "enable_checkpointing": True}
    fit(Repeatable(), whole, counts, checkpoints, steps=STEPS, default_root_dir=folder, **of_trainer)
    expected = list(said)
    assert {warning.rule for warning in whole.warnings} == {rule.name for rule in RULES}
    assert [warning.to_dict() for warning in whole.warnings] == told(folder)
    assert len(expected) < len(whole.warnings)

    paths = {int(path.stem.split("step=")[1]): path for path in (tmp_path / "saved").glob("*.ckpt")}
    assert len(paths) == STEPS * EPOCHS
    for step in [*range(1, STEPS * EPOCHS, 2), STEPS]:  # just behind each capture, and at the end of an epoch
        again = tmp_path / f"again {step}"
        if place == "same directory":
            shutil.copytree(folder, again)
        said.clear()
        after = early_warning()
        running = trainer(after, max_epochs=EPOCHS, default_root_dir=again)
        running.fit(Repeatable(), batches(STEPS), ckpt_path=paths[step], weights_only=True)
        assert running.global_step == STEPS * EPOCHS
        assert after.warnings == whole.warnings, step
        assert said == expected[counts.until[step] :], step
        assert told(again) == told(folder), step
        assert len({line["run"] for line in lines(again / FILE)}) == 1


def test_from_what_an_action_has_saved(said: list[str], tmp_path: Path) -> None:
    whole = early_warning(action={"lasting": "checkpoint"})
    fit(Repeatable(), whole, steps=STEPS, max_epochs=EPOCHS)
    expected = told(tmp_path)
    (path,) = (tmp_path / "checkpoints").iterdir()
    written = path.stat().st_mtime_ns
    after = early_warning(action={"lasting": "checkpoint"})
    trainer(after, max_epochs=EPOCHS).fit(Repeatable(), batches(STEPS), ckpt_path=path)
    assert after.warnings == whole.warnings and told(tmp_path) == expected
    assert path.stat().st_mtime_ns == written  # not saved again


def test_a_run_that_was_stopped_goes_on(said: list[str], tmp_path: Path) -> None:
    stopped = early_warning(action={"lasting": ["checkpoint", "stop"]})
    running = fit(Repeatable(), stopped, steps=STEPS, max_epochs=EPOCHS)
    assert stopped.stopped_for is not None and running.global_step < STEPS * EPOCHS
    (path,) = (tmp_path / "checkpoints").iterdir()
    after = early_warning(action={"lasting": ["checkpoint", "stop"]})
    running = trainer(after, max_epochs=EPOCHS)
    running.fit(Repeatable(), batches(STEPS), ckpt_path=path)
    assert after.stopped_for is None and running.global_step == STEPS * EPOCHS


def test_what_was_not_acted_on_yet_is_acted_on_after_all(tmp_path: Path) -> None:
    """A checkpoint in the midst of accumulation, between a warning and the end of its step."""
    called: list[int] = []

    def note(trainer: pl.Trainer, *_: Any) -> None:
        called.append(trainer.global_step)

    class SavesMidway(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 4:
                trainer.save_checkpoint(tmp_path / "midway.ckpt")

    rule = SignsAt([1])
    with hearing():
        fit(
            LanguageModel(),
            early_warning(rule, every_n_steps=1, action=note),
            SavesMidway(),
            accumulate_grad_batches=3,
        )
        assert called == [2]
        after = early_warning(rule, every_n_steps=1, action=note)
        running = trainer(after, accumulate_grad_batches=3)
        running.fit(LanguageModel(), batches(6), ckpt_path=tmp_path / "midway.ckpt")
    assert called == [2, 2] and len(after.warnings) == 1


def test_with_a_rule_less_and_another_cadence(said: list[str], tmp_path: Path) -> None:
    """What was warned of is not warned of again because somebody has switched off something else."""
    before = early_warning()
    running = fit(Repeatable(), before, steps=STEPS, max_epochs=1)
    running.save_checkpoint(tmp_path / "last.ckpt")
    found = list(before.warnings)
    after = early_warning(RULES[:-1], every_n_steps=3)
    trainer(after, max_epochs=EPOCHS).fit(Repeatable(), batches(STEPS), ckpt_path=tmp_path / "last.ckpt")
    assert found and after.warnings[: len(found)] == found
    assert len(after.warnings) > len(found)
    assert len(set(map(str, told(tmp_path)))) == len(after.warnings)


def test_two_early_warnings_have_states_of_their_own(said: list[str], tmp_path: Path) -> None:
    def both() -> list[AttentionEarlyWarning]:
        return [early_warning(RULES[:1]), early_warning(RULES[1:])]

    running = fit(Repeatable(), *(before := both()), steps=STEPS, max_epochs=2)
    running.save_checkpoint(tmp_path / "last.ckpt")
    found = [list(one.warnings) for one in before]
    running = trainer(*(after := both()), max_epochs=2)
    running.fit(Repeatable(), batches(STEPS), ckpt_path=tmp_path / "last.ckpt")
    assert [one.warnings for one in after] == found
    assert len(lines(tmp_path / FILE)) == sum(map(len, found)) and len({r["run"] for r in lines(tmp_path / FILE)}) == 2


def test_state_is_plain(said: list[str], tmp_path: Path) -> None:
    running = fit(Repeatable(), early_warning(), steps=STEPS)
    running.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    (of_early_warning,) = [value for key, value in state.items() if key.startswith("AttentionEarlyWarning")]
    assert of_early_warning["warnings"]


# One callback in several fits.


def test_the_next_fit_of_a_trainer_goes_on(said: list[str], tmp_path: Path) -> None:
    early = early_warning()
    model = Repeatable()
    running = fit(model, early, steps=STEPS)
    found, first = list(early.warnings), list(said)
    running.fit_loop.max_epochs = EPOCHS
    running.fit(model, batches(STEPS))
    assert found and early.warnings[: len(found)] == found
    assert {warning.step for warning in early.warnings[len(found) :]} <= set(range(STEPS, STEPS * EPOCHS))
    assert told(tmp_path) == [warning.to_dict() for warning in early.warnings]
    assert len({line["run"] for line in lines(tmp_path / FILE)}) == 1
    assert len(set(said)) == len(said) > len(first)


def test_a_new_run_begins_anew(said: list[str], tmp_path: Path) -> None:
    again = early_warning()
    fit(Repeatable(), again, steps=STEPS, max_epochs=EPOCHS)
    found, first = list(again.warnings), list(said)
    said.clear()
    torch.manual_seed(0)
    other = early_warning()
    fit(Repeatable(), other, steps=STEPS, max_epochs=EPOCHS)
    expected = list(said)
    said.clear()
    torch.manual_seed(0)
    fit(Repeatable(), again, steps=STEPS, max_epochs=EPOCHS)
    assert again.warnings == other.warnings and said == expected
    assert found and first
    assert len({line["run"] for line in lines(tmp_path / FILE)}) == 3


class Evaluated(Repeatable):
    def validation_step(self, tokens: list[torch.Tensor]) -> None:
        self.log("validated", self.loss(tokens))

    def test_step(self, tokens: list[torch.Tensor]) -> None:
        self.log("tested", self.loss(tokens))


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_checkpoint_that_is_evaluated_takes_nothing_back(stage: str, tmp_path: Path) -> None:
    early, monitor = early_warning(SignsAt([2, 6, 10])), AttentionMonitor(2, statistics="entropy", print_summary=False)
    checkpoints = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    model = Evaluated()
    with hearing():
        running = trainer(
            early, monitor, checkpoints, max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path
        )
        running.fit(model, batches(8))
        path = next((tmp_path / "saved").glob("*step=3.ckpt"))
        getattr(running, stage)(model, batches(1), ckpt_path=path, verbose=False)
        assert [warning.step for warning in early.warnings] == [2, 6]
        running.fit_loop.max_epochs = 2
        running.fit(model, batches(8))
    assert [warning.step for warning in early.warnings] == [2, 6, 10]
    assert [line["step"] for line in lines(tmp_path / FILE)] == [2, 6, 10]
    assert monitor.history.steps == [0, 2, 4, 6, 8, 10, 12, 14]


class Saves(pl.Callback):
    """Saves at the end of a batch, before callbacks behind it hear of that end."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/saved/{trainer.global_step}.ckpt")


@pytest.mark.parametrize("step", range(2, 9))
def test_a_checkpoint_between_a_capture_and_its_snapshot_delays_it_at_most(step: int, tmp_path: Path) -> None:
    signs = LimitRule("there", "entropy", above=-1.0, patience=3)
    whole = early_warning(signs)
    with hearing():
        trainer(Saves(), whole, max_epochs=1, default_root_dir=tmp_path).fit(Repeatable(), batches(8))
        after = early_warning(signs)
        running = trainer(after, max_epochs=2, default_root_dir=tmp_path / "after")
        running.fit(Repeatable(), batches(8), ckpt_path=tmp_path / "saved" / f"{step}.ckpt")
    assert [(w.rule, w.place) for w in after.warnings] == [(w.rule, w.place) for w in whole.warnings] != []
    assert all(0 <= late.step - warning.step <= 1 for late, warning in zip(after.warnings, whole.warnings, strict=True))
