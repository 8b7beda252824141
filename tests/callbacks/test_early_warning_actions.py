"""What is done about early warnings, and when."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from early_warning_runs import Repeatable, SignsAt, lines
from lightning.pytorch.callbacks import ModelCheckpoint
from listening import hearing
from models import LanguageModel, batches, fit, trainer

from lightning_attn import AttentionEarlyWarning, AttentionMonitor, EarlyWarning, EarlyWarningError

RULES = [
    SignsAt([1], name="news", severity="info"),
    SignsAt([2, 4], name="early", severity="warning", heads=2),
    SignsAt([3], name="late", severity="critical"),
]


def warned(action: Any, **arguments: Any) -> tuple[AttentionEarlyWarning, pl.Trainer]:
    """A run of six steps that three rules warn of."""
    early_warning = acting(action)
    with hearing():
        running = fit(Repeatable(), early_warning, **arguments)
    return early_warning, running


def acting(action: Any, rules: Any = None, **arguments: Any) -> AttentionEarlyWarning:
    return AttentionEarlyWarning(
        rules or RULES, "all", action, **{"every_n_steps": 1, "print_summary": False, **arguments}
    )


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of checkpoints, in the order in which they are saved."""
    names: list[str] = []
    save = pl.Trainer.save_checkpoint

    def noted(self: pl.Trainer, path: Any, *arguments: Any, **options: Any) -> None:
        names.append(Path(path).name)
        save(self, path, *arguments, **options)

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", noted)
    return names


# Warn and stop.


def test_all_that_is_found_is_kept_whatever_is_done() -> None:
    for action in ("warn", [], {"info": "warn"}, lambda *_: None):
        early_warning, running = warned(action)
        found = [(warning.step, warning.rule, warning.head) for warning in early_warning.warnings]
        assert found == [
            (1, "news", 0),
            (2, "early", 0),
            (2, "early", 1),
            (3, "late", 0),
            (4, "early", 0),
            (4, "early", 1),
        ]
        assert running.global_step == 6 and early_warning.stopped_for is None


@pytest.mark.parametrize(
    ("action", "rule", "steps"),
    [
        ("stop", "early", 3),
        (["warn", "stop"], "early", 3),
        ({"critical": "stop"}, "late", 4),
        ({"critical": "warn", "early": ["stop"]}, "early", 3),
        ({"warning": "stop", "early": "warn"}, None, 6),  # the rule counts, and not how severe it is
        ({"info": "stop"}, "news", 2),
        ({"late": "stop", "news": "warn"}, "late", 4),
    ],
)
def test_training_stops_at_the_end_of_the_step(action: Any, rule: str | None, steps: int) -> None:
    early_warning, running = warned(action)
    assert running.global_step == steps
    assert (early_warning.stopped_for.rule if early_warning.stopped_for else None) == rule


def test_news_stop_nothing_by_themselves() -> None:
    early_warning = acting("stop", RULES[0])
    running = fit(LanguageModel(), early_warning)
    assert running.global_step == 6 and len(early_warning.warnings) == 1


def test_the_reason_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logging.getLogger("lightning.pytorch").propagate = True
        logging.getLogger("lightning").propagate = True
        warned("stop")
    (reason,) = [record.getMessage() for record in caplog.records if "stops training" in record.getMessage()]
    assert "early" in reason and "Step 2" in reason


@pytest.mark.parametrize("least", [{"min_epochs": 2}, {"min_epochs": 1}, {"min_steps": 6}, {"min_steps": 2}], ids=str)
def test_training_goes_on_for_as_long_as_it_has_to(least: dict[str, int]) -> None:
    """As when any callback sets ``trainer.should_stop``: that callback is the measure."""

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step == 3

    expected = fit(Repeatable(), Stops(), steps=4, max_epochs=5, **least)
    early_warning = acting("stop")
    with hearing():
        running = fit(Repeatable(), early_warning, steps=4, max_epochs=5, **least)
    assert running.global_step == expected.global_step
    assert early_warning.stopped_for is not None and early_warning.stopped_for.step == 2


def test_a_second_fit_can_be_stopped_again() -> None:
    early_warning = acting("stop", SignsAt([2, 5]))
    with hearing():
        running = fit(Repeatable(), early_warning, max_epochs=4)
        assert running.global_step == 3
        running.fit(running.model, running.train_dataloader)
    assert early_warning.stopped_for is not None and early_warning.stopped_for.step == 5
    assert running.global_step == 6


def test_a_run_that_is_not_stopped_again_was_not_stopped() -> None:
    early_warning = acting("stop", SignsAt([2]))
    with hearing():
        running = fit(Repeatable(), early_warning, max_epochs=4)
        running.fit(running.model, running.train_dataloader)
    assert early_warning.stopped_for is None and len(early_warning.warnings) == 1


# The end of the step.


def test_accumulated_gradients_are_stepped_with_before_anything_is_done() -> None:
    """The first micro-batch is the one that is seen."""
    called: list[tuple[int, int]] = []

    def note(trainer: pl.Trainer, model: Any, warnings: list[EarlyWarning]) -> None:
        called.append((warnings[0].step, trainer.global_step))

    early_warning = acting([note, "stop"], SignsAt([1]))
    model = LanguageModel()
    with hearing():
        running = fit(model, early_warning, steps=12, accumulate_grad_batches=3)
    assert called == [(1, 2)]
    assert running.global_step == 2 and len(model.losses) == 6


class NeverSteps(LanguageModel):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def test_where_no_optimiser_steps_it_is_done_at_the_end_of_the_epoch() -> None:
    early_warning = acting("stop", SignsAt([0]))
    with hearing():
        running = fit(NeverSteps(), early_warning, max_epochs=3)
    assert early_warning.stopped_for is not None
    assert running.current_epoch == 1


# Raise.


def test_an_error_carries_the_warnings_and_everything_is_written_before(tmp_path: Path) -> None:
    early_warning = acting(["checkpoint", "raise"])
    with hearing() as said, pytest.raises(EarlyWarningError) as error:
        fit(Repeatable(), early_warning)
    assert [(warning.rule, warning.head) for warning in error.value.warnings] == [("early", 0), ("early", 1)]
    assert error.value.warnings == early_warning.warnings[1:]
    assert str(error.value).count("What to try: ask for less") == 1  # one message for a rule
    assert [line["rule"] for line in lines(tmp_path / "attention_warnings.jsonl")] == ["news", "early", "early"]
    assert len(said) == 1
    (state,) = torch.load(tmp_path / "checkpoints/early-warning-step=2.ckpt", weights_only=True)["callbacks"].values()
    assert len(state["warnings"]) == 3


def test_an_error_can_be_sent_between_processes() -> None:
    warning = EarlyWarning(3, "sharp", "critical", "attention", 1, "entropy", 0.0)
    error = pickle.loads(pickle.dumps(EarlyWarningError([warning])))
    assert error.warnings == [warning] and "head 1 of attention" in str(error)


# Functions.


def test_a_function_is_called_with_the_trainer_the_model_and_what_is_new() -> None:
    calls: list[tuple[Any, Any, list[tuple[int, str]]]] = []

    def take(trainer: Any, model: Any, warnings: list[EarlyWarning]) -> None:
        calls.append((trainer, model, [(warning.step, warning.rule) for warning in warnings]))

    model = Repeatable()
    with hearing():
        running = fit(model, acting(take))
    assert [warnings for _, _, warnings in calls] == [[(2, "early")] * 2, [(3, "late")], [(4, "early")] * 2]
    assert all(one is running and other is model for one, other, _ in calls)


class Unhashable:
    """Something that can be called and is equal to others."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1

    def __eq__(self, other: object) -> bool:
        return True


def test_functions_are_told_apart() -> None:
    first, second = Unhashable(), Unhashable()
    with hearing():
        fit(Repeatable(), acting({"early": [first, second], "critical": second}))
    assert (first.calls, second.calls) == (2, 3)


def test_what_a_function_raises_goes_through_after_all_is_saved(saved: list[str]) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("mine")

    with hearing(), pytest.raises(ZeroDivisionError, match="mine"):
        fit(Repeatable(), acting([fail, "checkpoint"]))
    assert saved == ["early-warning-step=2.ckpt"]


# Checkpoints.


def test_a_checkpoint_for_the_first_warning_of_each_rule(saved: list[str], tmp_path: Path) -> None:
    warned("checkpoint")
    assert saved == ["early-warning-step=2.ckpt", "early-warning-step=3.ckpt"]
    found = torch.load(tmp_path / "checkpoints" / saved[0], weights_only=True)
    assert found["global_step"] == 3


def test_checkpoints_go_where_those_of_the_trainer_go(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path / "mine", save_top_k=1, monitor=None)
    with hearing():
        fit(Repeatable(), acting("checkpoint"), checkpoints, enable_checkpointing=True)
    assert {"early-warning-step=2.ckpt", "early-warning-step=3.ckpt"} < {p.name for p in (tmp_path / "mine").iterdir()}


def test_a_checkpoint_takes_the_place_of_none(tmp_path: Path) -> None:
    with hearing():
        for _ in range(3):
            fit(Repeatable(), acting("checkpoint", SignsAt([2])))
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"early-warning-step=2{version}.ckpt" for version in ("", "-v1", "-v2")}


def test_a_quick_trial_writes_nothing(tmp_path: Path) -> None:
    with hearing():
        fit(Repeatable(), acting("checkpoint", SignsAt([0])), fast_dev_run=2)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_checkpoint_holds_what_all_early_warnings_found_in_the_step(tmp_path: Path) -> None:
    """And other callbacks of ours that are told of the step's end later have counted it when they go on from there."""

    def together() -> list[Any]:
        saves = acting("checkpoint", SignsAt([2], name="saves"))
        finds = acting("warn", SignsAt([2, 5], name="finds"), file=None)
        return [saves, finds, AttentionMonitor(3, print_summary=False, statistics="entropy")]

    with hearing():
        fit(Repeatable(), *together())
        saves, finds, monitor = after = together()
        path = tmp_path / "checkpoints/early-warning-step=2.ckpt"
        trainer(*after, max_epochs=2).fit(Repeatable(), batches(6), ckpt_path=path)
    assert [warning.step for warning in finds.warnings] == [2, 5]
    assert [warning.step for warning in saves.warnings] == [2]
    assert monitor.history.steps == [3, 6, 9]
