"""Train a model once, watched, and keep what the demo compares."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lightning_attn import AdaptiveTemperature, AttentionEarlyWarning, AttentionMonitor, EarlyWarning, History


@dataclass(frozen=True)
class Domain:
    """A model, what it learns from, and for how long.

    Args:
        name: what it is called in file names.
        title: what it is called in print.
        model: makes the model with a learning rate.
        data: what it is trained on.
        batch_size: so many examples of it in each step.
        steps: optimiser steps.
        loss_unit: what the loss is measured in.
        test_data: what the trained model is tested on, if it has a ``test_accuracy``.
    """

    name: str
    title: str
    model: Callable[[float], pl.LightningModule]
    data: Dataset[Tensor] | Dataset[tuple[Tensor, ...]]
    batch_size: int
    steps: int
    loss_unit: str
    test_data: Dataset[tuple[Tensor, ...]] | None = None


@dataclass(frozen=True)
class Run:
    """What is left of a training run: every step's loss, what the callbacks saw and did, how good the model became."""

    title: str
    learning_rate: float
    losses: list[float]
    history: History
    warnings: list[EarlyWarning]
    test_accuracy: float | None
    rescued_at: int | None = None

    @property
    def early(self) -> tuple[int, int]:
        """From a fifth to a quarter of the way: early enough to save a run that goes wrong."""
        return len(self.losses) // 5, len(self.losses) // 4

    @property
    def faults(self) -> list[EarlyWarning]:
        """The warnings of faults; without what is merely worth knowing."""
        return [warning for warning in self.warnings if warning.severity != "info"]

    def smooth_losses(self, width: int = 20) -> list[float]:
        """The mean of the last so many losses at each step, of fewer at the beginning."""
        return [
            sum(window) / len(window)
            for window in (self.losses[max(0, step - width) : step] for step in range(1, len(self.losses) + 1))
        ]


def train(domain: Domain, title: str, learning_rate: float, seed: int, folder: Path, is_rescued: bool = False) -> Run:
    """Train the model of a domain; equal seeds begin with equal weights and see the same batches.

    Watching it takes one callback, `AttentionMonitor`, being warned another, `AttentionEarlyWarning`, and being rescued
    a third, `AdaptiveTemperature`, which does nothing until a warning is given.
    """
    pl.seed_everything(seed, verbose=False)
    model = domain.model(learning_rate)
    monitor = AttentionMonitor(every_n_steps=10, heat_map_every_n_steps=100, print_summary=False)
    early_warning = AttentionEarlyWarning(print_summary=False)
    rescue = AdaptiveTemperature(start="warning", print_summary=False)
    losses = LossHistory()
    watching = [monitor, early_warning, rescue] if is_rescued else [monitor, early_warning]
    trainer = pl.Trainer(
        callbacks=[*watching, losses, ProgressBar(title, domain.steps)],
        logger=TensorBoardLogger(folder, title.replace(" ", "_"), version="", default_hp_metric=False),
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    sampler = RandomSampler(domain.data, num_samples=domain.steps * domain.batch_size)
    trainer.fit(model, DataLoader(domain.data, domain.batch_size, sampler=sampler))
    test_accuracy = None
    if domain.test_data is not None:
        (tested,) = trainer.test(model, DataLoader(domain.test_data, batch_size=len(domain.test_data)), verbose=False)
        test_accuracy = tested["test_accuracy"]
    warnings, rescued_at = early_warning.warnings, rescue.started_at
    return Run(title, learning_rate, losses.losses, monitor.history, warnings, test_accuracy, rescued_at)


class LossHistory(pl.Callback):
    """Keeps the loss of every step for the picture."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: dict[str, Tensor], *_: object
    ) -> None:
        self.losses.append(outputs["loss"].item())


class ProgressBar(TQDMProgressBar):
    """Says which run it is; in a log, where each update is a line, it is updated rarely."""

    def __init__(self, title: str, steps: int) -> None:
        super().__init__(refresh_rate=5 if sys.stdout.isatty() else steps // 4)
        self.title = title

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: object) -> None:
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description(f"{self.title:8}")

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.disable()  # a test takes a moment
        super().on_test_start(trainer, pl_module)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, int | str | float]:
        metrics = super().get_metrics(trainer, pl_module)
        return {name: value for name, value in metrics.items() if name != "v_num"}
