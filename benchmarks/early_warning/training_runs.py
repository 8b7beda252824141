"""Training runs, kept as what a detector could have seen of them: every loss, and every tenth step's snapshot."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import lightning.pytorch as pl
import torch
from settings import FAMILIES, Family
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from watched_run import LossHistory

from lightning_attn import AttentionMonitor, Snapshot

#: The optimiser steps from one snapshot to the next.
EVERY_N_STEPS = 10
#: The loss at the end of a run is the mean of so many steps.
LAST_STEPS = 30


@dataclass(frozen=True)
class Run:
    """A run, by its setting and seed, and what was seen of it.

    Args:
        family: name of the family.
        setting: name of the setting.
        seed: of weights and batches.
        losses: of every optimiser step.
        snapshots: oldest first.
    """

    family: str
    setting: str
    seed: int
    losses: list[float]
    snapshots: list[Snapshot]

    @property
    def final_loss(self) -> float:
        """The mean loss of the last steps; not a number where one of them is not."""
        return mean(self.losses[-LAST_STEPS:])


def trained(family: Family, setting: str, seed: int) -> Run:
    """Train a model of a family."""
    pl.seed_everything(seed, verbose=False)
    data = family.data()
    model = family.model(data, family.settings[setting])
    monitor = AttentionMonitor(EVERY_N_STEPS, statistics="all", heat_map_every_n_steps=None, print_summary=False)
    losses = LossHistory()
    trainer = pl.Trainer(
        callbacks=[monitor, losses],
        logger=False,
        accelerator="cpu",
        max_epochs=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    sampler = RandomSampler(data, num_samples=family.steps * family.batch_size)
    trainer.fit(model, DataLoader(data, family.batch_size, sampler=sampler))
    return Run(family.name, setting, seed, losses.losses, list(monitor.history))


class Runs:
    """Runs in a folder, each in a file of its own; those that are there are not trained again.

    Args:
        folder: where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def train(self, seeds: Sequence[int]) -> None:
        """Train what is missing, seed by seed, and say how far it is."""
        wanted = [
            (family, setting, seed) for seed in seeds for family in FAMILIES.values() for setting in family.settings
        ]
        for number, (family, setting, seed) in enumerate(wanted, start=1):
            path = self._path(family.name, setting, seed)
            if path.exists():
                continue
            run = trained(family, setting, seed)
            self._save(run, path)
            print(
                f"{number:4}/{len(wanted)}  seed {seed:3}  {family.name}, {setting}: {run.final_loss:.3f}", flush=True
            )

    def of(self, seeds: Sequence[int]) -> Iterator[Run]:
        """The runs of some seeds that are there."""
        for family in FAMILIES.values():
            for setting in family.settings:
                for seed in seeds:
                    path = self._path(family.name, setting, seed)
                    if path.exists():
                        yield self._loaded(path)

    def _path(self, family: str, setting: str, seed: int) -> Path:
        return self.folder / re.sub(r"\W+", "_", family) / f"{re.sub(r'[^0-9a-z]+', '_', setting)}-{seed}.pt"

    @staticmethod
    def _save(run: Run, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        first = run.snapshots[0]
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "run": (run.family, run.setting, run.seed),
                "losses": torch.tensor(run.losses, dtype=torch.float64),
                "heads": dict(first.heads),
                "statistics": first.statistics,
                "steps": [snapshot.step for snapshot in run.snapshots],
                "values": torch.stack([snapshot.values for snapshot in run.snapshots]).float(),
            },
            partial,
        )
        partial.rename(path)  # so that a file that is there is whole

    @staticmethod
    def _loaded(path: Path) -> Run:
        kept = torch.load(path)
        values: Tensor = kept["values"].double()
        snapshots = [
            Snapshot(step, kept["heads"], kept["statistics"], of_step)
            for step, of_step in zip(kept["steps"], values, strict=True)
        ]
        return Run(*kept["run"], kept["losses"].tolist(), snapshots)
