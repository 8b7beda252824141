"""Training runs with and without a treatment, kept as their losses and temperatures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import lightning.pytorch as pl
from torch.utils.data import DataLoader, RandomSampler
from treatments import CASES, Case, Treatment, treatments_of

from lightning_attn import AdaptiveTemperature

# isort: split
from settings import FAMILIES
from training_runs import LAST_STEPS
from watched_run import LossHistory


@dataclass(frozen=True)
class Run:
    """A run.

    Args:
        family: name of the family.
        setting: name of the setting.
        treatment: name of what was done about it.
        seed: of weights and batches.
        losses: of every optimiser step.
        started_at: the step at which temperatures were switched on; ``None`` where they were not.
        highest_temperature: of any head at the end.
    """

    family: str
    setting: str
    treatment: str
    seed: int
    losses: list[float]
    started_at: int | None
    highest_temperature: float

    @property
    def final_loss(self) -> float:
        """The mean loss of the last steps."""
        return mean(self.losses[-LAST_STEPS:])


def trained(case: Case, name: str, treatment: Treatment, seed: int) -> Run:
    """Train a model with a treatment; equal seeds begin with equal weights and see the same batches."""
    family = FAMILIES[case.family]
    pl.seed_everything(seed, verbose=False)
    data = family.data()
    model = family.model(data, treatment.setting(case))
    losses, callbacks = LossHistory(), treatment.callbacks()
    trainer = pl.Trainer(
        callbacks=[losses, *callbacks],
        logger=False,
        accelerator="cpu",
        max_epochs=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    sampler = RandomSampler(data, num_samples=family.steps * family.batch_size)
    trainer.fit(model, DataLoader(data, family.batch_size, sampler=sampler))
    loops = [callback for callback in callbacks if isinstance(callback, AdaptiveTemperature)]
    started_at = loops[0].started_at if loops else None
    heads = [value for loop in loops for values in loop.temperatures.values() for value in values]
    return Run(case.family, case.setting, name, seed, losses.losses, started_at, max(heads, default=1.0))


class Runs:
    """Runs in a folder, each in a file of its own; those that are there are not trained again.

    Args:
        folder: where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def train(self, seeds: Sequence[int], only: Sequence[str], share: tuple[int, int] = (0, 1)) -> None:
        """Train what is missing, seed by seed, and say how far it is.

        Args:
            seeds: the seeds.
            only: names of treatments.
            share: the number of this process, and how many there are: each trains runs of its own.
        """
        wanted = [
            (case, name, treatment, seed)
            for seed in seeds
            for case in CASES
            for name, treatment in treatments_of(case).items()
            if name in only
        ]
        for number, (case, name, treatment, seed) in enumerate(wanted, start=1):
            path = self._path(case, name, seed)
            if number % share[1] != share[0] or path.exists():
                continue
            run = trained(case, name, treatment, seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(run)))
            partial.rename(path)  # so that a file that is there is whole
            print(f"{number:4}/{len(wanted)}  seed {seed}  {case.title}, {name}: {run.final_loss:.3f}", flush=True)

    def of(self, seeds: Sequence[int]) -> Iterator[Run]:
        """The runs of some seeds that are there."""
        for case in CASES:
            for name in treatments_of(case):
                for seed in seeds:
                    path = self._path(case, name, seed)
                    if path.exists():
                        yield Run(**json.loads(path.read_text()))

    def _path(self, case: Case, treatment: str, seed: int) -> Path:
        name = re.sub(r"[^0-9a-z]+", "_", f"{case.title} {treatment}")
        return self.folder / f"{name}-{seed}.json"
