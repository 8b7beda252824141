"""What early warnings see, of which steps, and that they leave a run as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from early_warning_runs import SITES, Repeatable, SignsAt
from lightning.pytorch import callbacks
from listening import hearing
from models import LanguageModel, Trained, VisionTransformer, fit
from torch import Tensor, nn

from lightning_attn import AttentionEarlyWarning, AttentionMonitor
from lightning_attn.callbacks import session
from lightning_attn.warning import LimitRule


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Sees(SignsAt):
    """Keeps what it is shown."""

    def __init__(self, name: str = "sees", statistic: str = "entropy") -> None:
        super().__init__([], name, statistic=statistic)
        self._keep(seen={})

    def signs(self, record: Any) -> list[Any]:
        self.seen[record.step] = record.snapshots[-1]  # type: ignore[attr-defined]
        return []

    @property
    def steps_seen(self) -> list[int]:
        return list(self.seen)  # type: ignore[attr-defined]


def watching(rule: Sees, **arguments: Any) -> AttentionEarlyWarning:
    return AttentionEarlyWarning(rule, "all", **{"print_summary": False, **arguments})


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[str, ...]]]:
    """The step and the statistics of every snapshot that is made."""
    made: list[tuple[int, tuple[str, ...]]] = []

    class Counted(session.AttentionObserver):
        def snapshot(self, step: int = 0) -> Any:
            made.append((step, self.request.names))
            return super().snapshot(step)

    monkeypatch.setattr(session, "AttentionObserver", Counted)
    return made


# Which steps.


def test_it_captures_every_ten_steps_with_the_statistics_that_its_rules_read(
    captures: list[tuple[int, tuple[str, ...]]],
) -> None:
    early_warning = AttentionEarlyWarning()
    fit(LanguageModel(), early_warning, steps=21)
    assert [step for step, _ in captures] == [0, 10, 20]
    read = {name for rule in early_warning.rules for name in rule.statistics}
    assert {name for _, names in captures for name in names} == read


@pytest.mark.parametrize("monitor_first", [True, False])
def test_a_step_that_a_monitor_captures_too_is_captured_once(
    monitor_first: bool, captures: list[tuple[int, tuple[str, ...]]]
) -> None:
    """And either sees what it would see alone."""
    alone_rule, alone_monitor = Sees(), AttentionMonitor(3, statistics=["max_logit"], print_summary=False)
    fit(Repeatable(), watching(alone_rule, every_n_steps=2), steps=8)
    torch.manual_seed(0)
    fit(Repeatable(), alone_monitor, steps=8)
    captures.clear()
    rule, monitor = Sees(), AttentionMonitor(3, statistics=["max_logit"], print_summary=False)
    both = [watching(rule, every_n_steps=2), monitor]
    torch.manual_seed(0)
    fit(Repeatable(), *(both[::-1] if monitor_first else both), steps=8)
    assert [step for step, _ in captures] == [0, 2, 3, 4, 6]
    assert [set(names) for _, names in captures if len(names) == 2] == [{"entropy", "max_logit"}] * 2
    assert rule.steps_seen == [0, 2, 4, 6] and monitor.history.steps == [0, 3, 6]
    assert list(monitor.history) == list(alone_monitor.history)
    torch.manual_seed(0)
    again = Sees()
    fit(Repeatable(), watching(again, every_n_steps=2), steps=8)
    assert rule.seen == again.seen  # type: ignore[attr-defined]


def test_two_early_warnings_share_a_capture(captures: list[tuple[int, tuple[str, ...]]]) -> None:
    first, second = Sees("first", "entropy"), Sees("second", "max_logit")
    fit(
        LanguageModel(),
        watching(first, every_n_steps=2, sites="blocks.0.*"),
        watching(second, every_n_steps=4, sites="blocks.1.*"),
    )
    assert [step for step, _ in captures] == [0, 2, 4]
    assert (first.steps_seen, second.steps_seen) == ([0, 2, 4], [0, 4])
    assert {snapshot.sites for snapshot in first.seen.values()} == {SITES[:1]}  # type: ignore[attr-defined]
    assert {snapshot.statistics for snapshot in second.seen.values()} == {("max_logit",)}  # type: ignore[attr-defined]


class TwoOptimizers(LanguageModel):
    """Steps two optimisers by hand in every second batch."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.blocks, self.head)]


def test_steps_are_those_of_the_optimiser() -> None:
    rule = Sees()
    fit(LanguageModel(), watching(rule, every_n_steps=2), steps=12, accumulate_grad_batches=3)
    assert rule.steps_seen == [0, 2]
    rule = Sees()
    fit(TwoOptimizers(), watching(rule, every_n_steps=2), steps=12)
    assert len(rule.steps_seen) == 3


def test_validation_in_between_is_not_watched() -> None:
    rule = Sees()
    validating = AttentionMonitor(stage="validate", print_summary=False)
    fit(
        LanguageModel(),
        watching(rule, every_n_steps=2),
        validating,
        steps=6,
        validation=2,
        val_check_interval=2,
    )
    assert rule.steps_seen == [0, 2, 4]
    assert len(validating.history) == 3


def test_a_compiled_model() -> None:
    rule = Sees()
    model = LanguageModel()
    for block in model.blocks:
        block.compile(backend="eager")
    fit(model, watching(rule, every_n_steps=2, strict=True), steps=4)
    assert {snapshot.sites for snapshot in rule.seen.values()} == {SITES}  # type: ignore[attr-defined]


def test_a_spectral_statistic_in_a_rule() -> None:
    rule = LimitRule("rank", "stable_rank", above=0.5, patience=1)
    early_warning = AttentionEarlyWarning(rule, "all", every_n_steps=2, strict=True, print_summary=False)
    with hearing():
        fit(LanguageModel(), early_warning, steps=3)
    assert {warning.statistic for warning in early_warning.warnings} == {"stable_rank"}


def test_a_limit_on_what_it_may_take_makes_captures_rarer() -> None:
    rule = Sees()
    fit(LanguageModel(), watching(rule, every_n_steps=1, max_overhead=1e-6), steps=40)
    assert rule.steps_seen[0] == 0 and len(rule.steps_seen) < 8


class NoAttention(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        return nn.functional.cross_entropy(self.layer(tokens.float()), tokens[:, 0] % 2)


def test_a_model_without_attention_is_told_of_once_and_trains() -> None:
    early_warning = AttentionEarlyWarning(every_n_steps=1)
    model = NoAttention()
    with hearing() as said:
        fit(model, early_warning, steps=30)
    assert len(model.losses) == 30 and not early_warning.warnings
    assert len(said) == 1 and "attention" in said[0].lower()


# What is left as it is.


def run(model_class: type[Trained], *watching: pl.Callback, **arguments: Any) -> tuple[Trained, Tensor]:
    pl.seed_everything(7, verbose=False)
    model = model_class()
    with hearing():
        fit(model, *watching, **{"steps": 12, **arguments})
    return model, torch.get_rng_state()


@pytest.mark.parametrize("model_class", [LanguageModel, VisionTransformer, Repeatable])
def test_losses_weights_and_random_numbers_are_bit_identical(model_class: type[Trained]) -> None:
    plain, plain_random = run(model_class)
    early_warning = AttentionEarlyWarning(
        SignsAt([2, 6]), every_n_steps=1, action=["warn", lambda *_: None], print_summary=False, max_sequences=None
    )
    watched, watched_random = run(model_class, early_warning)
    assert [warning.step for warning in early_warning.warnings if warning.rule == "scripted"] == [2, 6]
    assert watched.losses == plain.losses
    for (name, one), other in zip(watched.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert torch.equal(watched_random, plain_random)


@pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="this Lightning has no weight averaging")
@pytest.mark.parametrize("early_warning_first", [True, False])
def test_beside_weight_averaging(early_warning_first: bool, tmp_path: Path) -> None:
    def train(*watching: pl.Callback) -> Trained:
        return run(LanguageModel, *watching, validation=2, val_check_interval=4)[0]

    plain = train(callbacks.WeightAveraging())
    early_warning = watching(Sees(), every_n_steps=1)
    saving = AttentionEarlyWarning(
        SignsAt([3]), "all", action="checkpoint", every_n_steps=1, file="other.jsonl", print_summary=False
    )
    both = [early_warning, saving, callbacks.WeightAveraging()]
    watched = train(*(both if early_warning_first else both[::-1]))
    assert watched.losses == plain.losses
    assert (tmp_path / "checkpoints" / "early-warning-step=3.ckpt").exists()


class Raises(LanguageModel):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise RuntimeError("out of luck")
        return loss


def test_it_watches_again_after_a_step_that_raised() -> None:
    rule = Sees()
    early_warning = watching(rule, every_n_steps=1)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(Raises(), early_warning)
    assert rule.steps_seen == [0, 1]
    running = fit(LanguageModel(), early_warning, steps=4)
    assert rule.steps_seen == [0, 1, 2, 3]
    assert not {"training_step", "validation_step"} & vars(running.strategy).keys()


def test_another_callback_may_hold_it() -> None:
    class Holds(pl.Callback):
        def __init__(self, held: AttentionEarlyWarning) -> None:
            self.held = held

        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name) if not name.startswith("on_") else getattr(self.held, name)

    held = AttentionEarlyWarning(SignsAt([1]), "all", "stop", every_n_steps=1, print_summary=False)
    with hearing():
        running = fit(LanguageModel(), Holds(held))
    assert held.stopped_for is not None and running.global_step == 2
