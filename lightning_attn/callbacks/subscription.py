"""One callback's part in the captures of its Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_attn.callbacks.session import CaptureSession, Step
from lightning_attn.callbacks.trainer_steps import logger_step
from lightning_attn.capture.met import Met
from lightning_attn.request import Request
from lightning_attn.snapshot import Snapshot

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Subscription:
    """Asks for the next batch to be watched, and takes from the snapshot that all share what it asked for.

    Args:
        request: what is wanted.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        #: Whether a batch is to be watched that was not collected.
        self.is_open = False
        #: The number that was given with the request; after `collect` the largest of all ranks.
        self.number = 0.0
        self._place = 0

    def open(
        self,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        step: Step,
        number: float = 0.0,
        receive_module: Callable[[Met], None] | None = None,
    ) -> None:
        """Have the next step watched; see `CaptureSession.request`."""
        session = CaptureSession.of(trainer)
        self._place = session.request(trainer, model, self.request, step, number, receive_module)
        self.is_open = True

    def collect(self, trainer: pl.Trainer) -> Snapshot:
        """What was seen of the sites and statistics that were asked for; every rank collects it."""
        self.is_open = False
        session = CaptureSession.of(trainer)
        snapshot = session.collect(logger_step(trainer))
        self.number = session.numbers[self._place]
        return snapshot.select(self.request.sites, self.request.names)

    def give_up(self, trainer: pl.Trainer) -> None:
        """Do not wait any more for a batch that never ended."""
        if self.is_open:
            CaptureSession.of(trainer).close()
            self.is_open = False
