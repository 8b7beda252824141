"""Counting steps as Lightning does, and as users mean it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl


def logger_step(trainer: pl.Trainer) -> int:
    """The step at which Lightning itself logs right now, so that curves lie on one axis.

    It is not ``trainer.global_step``, which counts every optimiser on its own under manual optimisation. Lightning's
    built-in monitors read the same private attribute; ``global_step`` is right for one optimiser should it go away.
    """
    step = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
    return int(step)


class OptimizerSteps:
    """Counts the batches in which any optimiser stepped: accumulation counts once, and so do two optimisers.

    Every rank counts alike, so that all watch the same batches. A model that optimises by hand may step on some ranks
    only; with several ranks each of its batches counts, whether an optimiser stepped in it or not.
    """

    def __init__(self) -> None:
        self.count = 0
        #: Lightning's own count at the end of the last batch that was counted.
        self.global_step = 0
        self._is_restored = False

    def start(self, trainer: pl.Trainer) -> bool:
        """Begin to count, or go on where a checkpoint or the last fit left off.

        Returns:
            Whether this is the beginning of a run.
        """
        begins = (logger_step(trainer) if _ranks_may_step_apart(trainer) else trainer.global_step) == 0
        if begins:
            self.count = 0
        elif not self._is_restored:
            self.count = logger_step(trainer)
        elif trainer.global_step > self.global_step:  # saved by a callback that was told first of the batch's end
            self.count += 1
        self.global_step = trainer.global_step
        self._is_restored = True
        return begins

    def restore(self, count: int, global_step: int | None) -> None:
        """Take the count from a checkpoint, with Lightning's own; ``None`` where that was not kept."""
        self.count = count
        self.global_step = sys.maxsize if global_step is None else global_step
        self._is_restored = True

    def batch_ended(self, trainer: pl.Trainer) -> bool:
        """Count the batch if an optimiser stepped in it or may have on another rank, and say whether it counts."""
        stepped = trainer.global_step > self.global_step or _ranks_may_step_apart(trainer)
        self.count += stepped
        self.global_step = max(trainer.global_step, self.global_step)
        return stepped


def _ranks_may_step_apart(trainer: pl.Trainer) -> bool:
    """Whether an optimiser may step on some ranks only; Lightning's own loop has it step on all."""
    return trainer.world_size > 1 and not trainer.lightning_module.automatic_optimization
