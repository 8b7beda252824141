"""Off capture steps, and after a run however it ended, nothing of the monitor is left."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from models import LanguageModel, fit
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_attn import AttentionMonitor, AttentionWarning
from lightning_attn.statistics import Range, RowBlock, RowMean, registry


def depth() -> int:
    return torch._C._len_torch_function_stack()


def hooks(model: torch.nn.Module) -> int:
    return sum(
        len(getattr(module, name))
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def assert_clean(trainer: pl.Trainer | None, model: pl.LightningModule) -> None:
    assert depth() == 0
    assert hooks(model) == 0
    if trainer is not None and trainer.strategy is not None:
        assert not {"training_step", "validation_step"} & vars(trainer.strategy).keys()


class SeesItsMode(LanguageModel):
    """Writes down in which steps a mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.depths: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.depths.append(depth())
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        assert depth() == 0
        super().backward(loss, *args, **kwargs)


def test_a_mode_is_on_in_capture_steps_alone() -> None:
    model = SeesItsMode()
    trainer = fit(model, AttentionMonitor(every_n_steps=3), steps=7)
    assert model.depths == [1, 0, 0, 1, 0, 0, 1]
    assert_clean(trainer, model)


class SeesHooks(LanguageModel):
    """Writes down how many hooks of the process are set in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.counts.append(len(torch.nn.modules.module._global_forward_hooks))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("statistics", "hooks"), [(None, 1), ("rank_residual", 1), (["entropy", "max_logit"], 0)])
def test_a_hook_is_set_in_capture_steps_alone_and_where_states_are_asked_for(statistics: Any, hooks: int) -> None:
    model = SeesHooks()
    fit(model, AttentionMonitor(every_n_steps=3, statistics=statistics), steps=7)
    assert model.counts == [hooks, 0, 0, hooks, 0, 0, hooks]


class CountsOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class CountedMonitor(AttentionMonitor):
    """Counts the operations on tensors in its own hooks: where there is none, there is no wait for a device either."""

    operations: list[int]

    def on_train_start(self, *args: Any) -> None:
        self.operations = []
        super().on_train_start(*args)

    def on_train_batch_start(self, *args: Any) -> None:
        with CountsOperations() as counter:
            super().on_train_batch_start(*args)
        self.operations.append(counter.count)

    def on_train_batch_end(self, *args: Any) -> None:
        with CountsOperations() as counter:
            super().on_train_batch_end(*args)
        self.operations[-1] += counter.count


@pytest.mark.parametrize("max_overhead", [None, 0.9999])
def test_off_capture_steps_the_hooks_touch_no_tensor(max_overhead: float | None) -> None:
    monitor = CountedMonitor(every_n_steps=9, max_overhead=max_overhead)
    fit(LanguageModel(), monitor, steps=18)
    captured, others = monitor.operations[::9], [n for i, n in enumerate(monitor.operations) if i % 9]
    assert len(captured) == 2 and all(captured)
    assert not any(others)


class RaisesAt(LanguageModel):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.step:
            raise RuntimeError("out of luck")
        return loss


@pytest.mark.parametrize("step", [0, 1])
def test_after_an_exception_in_the_training_step(step: int) -> None:
    monitor = AttentionMonitor(every_n_steps=2)
    model = RaisesAt(step)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(model, monitor)
    assert_clean(None, model)
    fit(LanguageModel(), monitor, steps=4)  # the same callback goes on
    assert monitor.history.steps == [0, 2]


class SkipsTheEpoch(LanguageModel):
    """Ends the epoch before the batch that was to be watched begins."""

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


def test_after_a_batch_that_never_began() -> None:
    model = SkipsTheEpoch()
    monitor = AttentionMonitor(every_n_steps=1)
    trainer = fit(model, monitor, max_epochs=2)
    assert_clean(trainer, model)
    assert monitor.history.steps == [0, 1]


def test_three_fits_in_a_row() -> None:
    monitor = AttentionMonitor(every_n_steps=2)
    for _ in range(3):
        model = LanguageModel()
        trainer = fit(model, monitor, steps=5)
        assert_clean(trainer, model)
        assert monitor.history.steps == [0, 2, 4]


def test_one_trainer_that_fits_on() -> None:
    model, monitor = LanguageModel(), AttentionMonitor(every_n_steps=2)
    trainer = fit(model, monitor, steps=3)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, trainer.train_dataloader)
    assert monitor.history.steps == [0, 2, 4]


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_callback_pickles_and_copies(is_trained: bool) -> None:
    monitor = AttentionMonitor(every_n_steps=2)
    if is_trained:
        fit(LanguageModel(), monitor)
    for twin in (pickle.loads(pickle.dumps(monitor)), copy.deepcopy(monitor)):
        assert twin.state_key == monitor.state_key
        assert list(twin.history) == list(monitor.history)
        fit(LanguageModel(), twin, steps=1)
        assert twin.history.steps == [0]


class Broken(RowMean):
    """A statistic with a fault."""

    name = "broken"
    range = Range(0, 1)
    uniform = "0"
    reading = "none"

    def values(self, rows: RowBlock) -> Tensor:
        raise ArithmeticError("no such number")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    registry.known_statistics()
    monkeypatch.setitem(registry._STATISTICS, Broken.name, Broken)
    yield Broken.name


def test_a_fault_in_a_statistic_is_reported_once_per_site_and_training_goes_on(broken: str) -> None:
    plain = LanguageModel()
    fit(plain)
    torch.manual_seed(0)
    model, monitor = LanguageModel(), AttentionMonitor(every_n_steps=1)
    with pytest.warns(AttentionWarning) as said:
        trainer = fit(model, monitor)
    faults = [str(warning.message) for warning in said if "no such number" in str(warning.message)]
    assert len(faults) == 2
    for site, fault in zip(("blocks.0.attention", "blocks.1.attention"), faults, strict=True):
        assert site in fault and "ArithmeticError" in fault
    assert model.losses == plain.losses
    assert_clean(trainer, model)


def test_other_statistics_of_healthy_runs_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttentionWarning)
        fit(LanguageModel(), AttentionMonitor(every_n_steps=1))


def test_strict_raises_a_fault(broken: str) -> None:
    model = LanguageModel()
    with pytest.raises(ArithmeticError, match="no such number"):
        fit(model, AttentionMonitor(every_n_steps=1, strict=True))
    assert_clean(None, model)
