"""Two processes that train together see what one process sees of both their batches.

The tests marked as slow have Lightning start its own processes; the others do the same in processes that are there.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from distributed_training import strategy
from lightning.pytorch.strategies import Strategy
from models import LanguageModel, batches, trainer
from rank_pool import RankPool
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_attn import AttentionMonitor, Snapshot
from lightning_attn.callbacks import session
from lightning_attn.statistics import known_statistics


class WritesSnapshots(pl.Callback):
    """Tells the test what a process that has ended by then knew."""

    def __init__(self, monitor: AttentionMonitor, folder: Path) -> None:
        self.monitor = monitor
        self.folder = folder

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        content = [snapshot.to_dict() for snapshot in self.monitor.history]
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(content))


class DividesItsBatches(LanguageModel):
    """Four batches, of which each rank gets its part."""

    def train_dataloader(self) -> DataLoader[Any]:
        (tokens,) = batches(4).dataset.tensors
        mine = tokens[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(TensorDataset(mine), batch_size=4 // self.trainer.world_size)


def monitor() -> AttentionMonitor:
    return AttentionMonitor(every_n_steps=2, max_sequences=None, spectral_sequences=None, print_summary=False)


def snapshots(folder: Path, **of_trainer: Any) -> list[dict[str, Any]]:
    """What one process knows of its training; every process also writes that to the folder."""
    pl.seed_everything(1, verbose=False)
    watched = monitor()
    running = trainer(watched, WritesSnapshots(watched, folder), use_distributed_sampler=False, **of_trainer)
    running.fit(DividesItsBatches().eval())
    return [snapshot.to_dict() for snapshot in watched.history]


def snapshots_of_started_rank(folder: Path) -> None:
    snapshots(folder, strategy=strategy(), devices=2)


def written(folder: Path) -> tuple[Any, Any]:
    """What the two ranks wrote."""
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    return first, second


def assert_same_as_alone(together: Path, folder: Path) -> None:
    alone = snapshots(folder)
    first, second = written(together)
    assert first == second
    assert len(first) == len(alone) == 2
    assert_close(first[0], alone[0])


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_spawned_ranks_agree_with_each_other_and_with_one_process(tmp_path: Path) -> None:
    together = tmp_path / "together"
    together.mkdir()
    assert snapshots(together, strategy="ddp_spawn", devices=2) == []  # which ended with the ranks, as the docs say
    assert_same_as_alone(together, tmp_path)


def test_ranks_agree_with_each_other_and_with_one_process(ranks: RankPool, tmp_path: Path) -> None:
    together = tmp_path / "together"
    together.mkdir()
    ranks(snapshots_of_started_rank, together)
    assert_same_as_alone(together, tmp_path)


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same sites and statistics, and heads equal to what float32 products of other batch sizes allow."""
    assert found.keys() == expected.keys()
    for site, statistics in expected.items():
        for statistic, heads in statistics.items():
            if known_statistics()[statistic].compares_sequences:  # those of one rank, of which there are fewer
                continue
            assert found[site][statistic] == pytest.approx(heads, rel=1e-5, abs=1e-7), (site, statistic)


class TakesTime(DividesItsBatches):
    """On a clock of its own a batch takes a second, and a capture ten more, on the second rank alone."""

    def on_train_start(self) -> None:
        self.now = 0.0
        (monitor,) = (callback for callback in self.trainer.callbacks if isinstance(callback, AttentionMonitor))
        monitor._schedule._budget._clock = lambda: self.now
        snapshot = session.AttentionObserver.snapshot

        def takes_long(observer: session.AttentionObserver, step: int = 0) -> Snapshot:
            self.now += 10.0 * self.trainer.global_rank
            return snapshot(observer, step)

        self.restore = partial(setattr, session.AttentionObserver, "snapshot", snapshot)
        session.AttentionObserver.snapshot = takes_long

    def on_train_end(self) -> None:
        self.restore()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.now += 1.0
        return super().training_step(batch, batch_idx)


class WritesSteps(WritesSnapshots):
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(self.monitor.history.steps))


def keep_cadence(folder: Path, kind: str | Strategy) -> None:
    watched = AttentionMonitor(every_n_steps=4, statistics="max_weight", max_overhead=0.1, print_summary=False)
    running = trainer(
        watched, WritesSteps(watched, folder), strategy=kind, devices=2, use_distributed_sampler=False, max_epochs=36
    )
    running.fit(TakesTime())


def keep_cadence_on_started_rank(folder: Path) -> None:
    keep_cadence(folder, strategy())


#: Ten seconds may take a tenth every 90 steps of one; at most eight times as far at once, that is every 64.
STEPS = [0, 8, 16, 80]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_spawned_ranks_keep_one_cadence_however_long_captures_take_on_one(tmp_path: Path) -> None:
    keep_cadence(tmp_path, "ddp_spawn")
    assert written(tmp_path) == (STEPS, STEPS)


def test_ranks_keep_one_cadence_however_long_captures_take_on_one(ranks: RankPool, tmp_path: Path) -> None:
    ranks(keep_cadence_on_started_rank, tmp_path)
    assert written(tmp_path) == (STEPS, STEPS)
