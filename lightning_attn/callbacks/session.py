"""One capture for all callbacks of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from lightning_attn.capture.met import Met
from lightning_attn.observer import AttentionObserver
from lightning_attn.request import Request
from lightning_attn.snapshot import Snapshot

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: The method of the Trainer's strategy that computes a batch.
Step = Literal["training_step", "validation_step"]


class CaptureSession:
    """The observer of a Trainer, which every callback of this package on it shares.

    Before a batch, each callback that wants to know of it makes a request. The first one has the strategy's next step
    watched; the step restores itself as soon as it begins. After the batch, each of these callbacks collects the one
    snapshot.

    The step is wrapped as a whole, rather than watching begun in one hook and ended in another: what ends watching must
    run whether the step returns, raises or is skipped, and must find on top of torch's stack of modes what it put
    there.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._observer: AttentionObserver | None = None
        self._request: Request | None = None
        self._snapshot: Snapshot | None = None
        self._unwatch: Callable[[], None] | None = None
        self._receivers: list[Callable[[Met], None]] = []
        #: How many steps were to be watched.
        self.watched_steps = 0
        #: A number of each request for the step; after `collect` the largest of all ranks.
        self.numbers: list[float] = []

    @classmethod
    def of(cls, trainer: pl.Trainer) -> CaptureSession:
        """The session of a Trainer; it lives as long as the Trainer does."""
        session = _SESSIONS.get(trainer)
        if session is None:
            session = _SESSIONS[trainer] = cls(trainer)
        return session

    def request(
        self,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        request: Request,
        step: Step,
        number: float = 0.0,
        receive_module: Callable[[Met], None] | None = None,
    ) -> int:
        """Have the next step watched.

        Args:
            trainer: the Trainer of this session.
            model: its model.
            request: what is wanted.
            step: which step is watched.
            number: a number of which the largest of all ranks is wanted: it travels with the capture.
            receive_module: called with each module that computes attention in the step, if anybody asks.

        Returns:
            The place of that number in `numbers`.
        """
        if receive_module is not None:
            self._receivers.append(receive_module)
        if self._request is not None:  # another callback was first
            self._request |= request
            self.numbers.append(number)
            return len(self.numbers) - 1
        self._request, self._snapshot = request, None
        self.watched_steps += 1
        self.numbers = [number]
        if self._observer is None or self._observer.model is not model:
            self._observer = AttentionObserver(model, device=trainer.strategy.root_device)
        # Asked each time: the Trainer may go on with another strategy. A Trainer of one device trains alone, whatever
        # else the process is part of.
        self._observer.reduction.process_group = "alone" if trainer.world_size == 1 else None
        self._watch(trainer, step, self._observer)
        return 0

    def collect(self, step: int) -> Snapshot:
        """The snapshot of the step that was watched; every rank collects it.

        Args:
            step: the optimiser step, which the snapshot carries.
        """
        self._restore()
        if self._snapshot is None:
            assert self._observer is not None and self._request is not None
            self._observer.request, self._request = self._request, None
            self._receivers.clear()
            self._observer.reduction.numbers = self.numbers
            self._snapshot = self._observer.snapshot(step)
            self.numbers = self._observer.reduction.numbers
        return self._snapshot

    def pass_over(self) -> None:
        """Do not watch the next step after all; ranks collect all the same."""
        self._restore()

    def close(self) -> None:
        """Give up a step that was to be watched and never ended."""
        self._restore()
        self._request = None
        self._receivers.clear()
        if self._observer is not None:
            self._observer.forget()

    def _met(self, met: Met) -> None:
        for receive in self._receivers:
            receive(met)

    def _watch(self, trainer: pl.Trainer, name: Step, observer: AttentionObserver) -> None:
        strategy = trainer.strategy
        original = getattr(strategy, name)
        was_instance_attribute = name in vars(strategy)

        def unwatch() -> None:
            if vars(strategy).get(name) is not watched:
                return
            if was_instance_attribute:
                setattr(strategy, name, original)
            else:
                delattr(strategy, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._restore()
            if self._request is None:
                return original(*args, **kwargs)
            observer.request = self._request
            observer.receive_module = self._met if self._receivers else None
            with observer:
                return original(*args, **kwargs)

        setattr(strategy, name, watched)
        self._unwatch = unwatch

    def _restore(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None


_SESSIONS: WeakKeyDictionary[Any, CaptureSession] = WeakKeyDictionary()
