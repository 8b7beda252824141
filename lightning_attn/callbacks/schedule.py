"""Which training batches a callback watches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_attn.callbacks.budget import TimeBudget, wait_for
from lightning_attn.callbacks.cadence import Cadence
from lightning_attn.callbacks.session import CaptureSession
from lightning_attn.callbacks.trainer_steps import OptimizerSteps

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: So many batches are tried when the one that was due computed no attention, as a step that returns early does.
_TRIES = 10


class CaptureSchedule:
    """Counts steps, and says of each training batch whether it is to be watched.

    Every rank comes to the same answers: what was measured on one goes with a capture to all before it counts.

    Args:
        every_n_steps: see `Cadence`.
        max_overhead: see `TimeBudget`; ``None`` for no limit.

    Raises:
        ValueError: if one of them is not allowed.
    """

    def __init__(self, every_n_steps: int | Mapping[int, int], max_overhead: float | None) -> None:
        self._cadence = Cadence(every_n_steps)
        self._budget = None if max_overhead is None else TimeBudget(max_overhead)
        self._steps = OptimizerSteps()
        self._last_capture: int | None = None
        self._tries_left = 0
        self._watched_steps = 0
        self._announced = 0

    @property
    def step(self) -> int:
        """How many optimiser steps the run has made."""
        return self._steps.count

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on at the same cadence."""
        return {
            "optimizer_steps": self._steps.count,
            "global_step": self._steps.global_step,
            "last_capture": self._last_capture,
            # Not 0 while a batch is watched: who saves then, before this is told of its end, has lost its snapshot.
            "tries_left": self._tries_left,
            "fewest_steps": None if self._budget is None else self._budget.fewest_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self._steps.restore(state.get("optimizer_steps", 0), state.get("global_step"))
        self._last_capture = state.get("last_capture")
        self._tries_left = state.get("tries_left", 0)
        fewest_steps = state.get("fewest_steps")
        if self._budget is not None and fewest_steps is not None:
            self._budget.fewest_steps = fewest_steps
            self._announced = self.interval or 0

    def start(self, trainer: pl.Trainer) -> bool:
        """Begin to count, or go on; whether this is the beginning of a run."""
        begins = self._steps.start(trainer)
        if begins:
            self._last_capture, self._announced, self._tries_left = None, 0, 0
            if self._budget is not None:
                self._budget.restart()
        return begins

    def batch_starts(self, trainer: pl.Trainer) -> bool:
        """Whether the batch that starts is to be watched."""
        step, last = self._steps.count, self._last_capture
        is_affordable = self._budget is None or last is None or step - last >= self._budget.fewest_steps
        if step != last and is_affordable and self._cadence.is_due(step):
            self._tries_left = _TRIES
        if self._budget is not None:
            wait = partial(wait_for, trainer.strategy.root_device) if self._tries_left else None
            self._budget.batch_starts(wait)
        return self._tries_left > 0

    def batch_ends(self, trainer: pl.Trainer, was_watched: bool, was_captured: bool) -> bool:
        """Count the batch.

        Args:
            trainer: the Trainer.
            was_watched: whether it was watched because `batch_starts` said so.
            was_captured: whether there was any attention in it.

        Returns:
            Whether an optimiser stepped in it.
        """
        self._tries_left -= was_watched
        if was_captured:
            self._last_capture, self._tries_left = self._steps.count, 0
        stepped = self._steps.batch_ended(trainer)
        if self._budget is not None:
            before, self._watched_steps = self._watched_steps, CaptureSession.of(trainer).watched_steps
            is_plain = before == self._watched_steps
            self._budget.batch_ends("capture" if was_captured else "plain" if is_plain else "other", stepped)
        return stepped

    @property
    def needed_steps(self) -> float:
        """What the time budget needs on this rank, for `settle`."""
        return 0.0 if self._budget is None else self._budget.needed_steps

    @property
    def interval(self) -> int | None:
        """The steps from one capture to the next at present; ``None`` where there is no time budget to change them."""
        return None if self._budget is None else self._cadence.interval(self._steps.count, self._budget.fewest_steps)

    def settle(self, needed_steps: float) -> None:
        """Take up what the slowest rank needs, and say so if it makes captures much rarer."""
        if self._budget is None:
            return
        asked = self._cadence.interval(self._steps.count)
        self._budget.settle(needed_steps, asked)
        interval = self._cadence.interval(self._steps.count, self._budget.fewest_steps)
        capture, plain_step = self._budget.capture, self._budget.plain_step
        if asked < interval >= 2 * self._announced and capture is not None and plain_step is not None:
            rank_zero_info(
                f"Attention is captured every {interval} steps from step {self._steps.count} on, where {asked} were"
                f" asked for: a capture takes {capture:.3g} s beyond its step, a step without one {plain_step:.3g} s,"
                f" and `max_overhead` is {self._budget.max_overhead:g}."
            )
            self._announced = interval
        self._announced = min(self._announced, interval)
