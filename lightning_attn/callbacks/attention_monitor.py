"""The callback that shows every head's health over training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Callback

from lightning_attn.callbacks.cadence import check_positive
from lightning_attn.callbacks.misconfiguration import misconfiguration
from lightning_attn.callbacks.notices import Notices
from lightning_attn.callbacks.schedule import CaptureSchedule
from lightning_attn.callbacks.session import CaptureSession
from lightning_attn.callbacks.snapshot_log import SnapshotLog
from lightning_attn.callbacks.subscription import Subscription
from lightning_attn.callbacks.summaries import check_summary_names, reduced_metric, summary_value
from lightning_attn.capture.sites import SiteNames
from lightning_attn.history import History
from lightning_attn.request import Request
from lightning_attn.snapshot import Snapshot

if TYPE_CHECKING:
    import lightning.pytorch as pl


class AttentionMonitor(Callback):
    """Watches the attention of the model while it trains, and logs every head's health.

    Every ``every_n_steps`` optimiser steps the attention calls of one batch are seen as they happen, whatever computes
    them, and their statistics go to every logger of the Trainer: ``attention/<statistic>/min``, ``mean`` and ``max``
    over all heads, ``attention/<statistic>/<site>`` for some statistics, and heat maps of all heads in TensorBoard. The
    model, its losses and its gradients are not changed, and steps without a capture cost nothing.

    Args:
        every_n_steps: the optimiser steps from one capture to the next. A mapping makes it dense at first: ``{0: 10,
            500: 50}`` is every 10 steps from step 0 and every 50 from step 500. On several ranks every batch of a
            model that optimises by hand counts as a step, since its optimisers may step on some ranks only.
        sites: glob patterns over `named_modules()` names of the LightningModule, such as ``"model.blocks.*"``; ``None``
            for all.
        statistics: names of statistics; ``None`` for those of the default set, ``"all"`` for every one.
        max_sequences: the first so many sequences of each rank's batch; ``None`` for all.
        spectral_sequences: of those, the first so many for the spectral statistics, which cost more; ``None`` for all.
        stage: ``"train"`` watches training batches; ``"validate"`` the first batch of every validation run, which makes
            curves of the same data comparable.
        heat_map_every_n_steps: the steps from one set of heat maps to the next; ``None`` for none.
        callback_metrics: summaries, such as ``"entropy/min"``, that `ModelCheckpoint` and `EarlyStopping` can monitor
            under their tag, ``"attention/entropy/min"``.
        history_size: how many snapshots `history` keeps.
        print_summary: whether a table of the most extreme heads is printed when training ends.
        prefix: what all tags begin with; by default ``"attention"``, and ``"attention_validate"`` in validation.
        strict: raise a fault in a statistic; by default it is reported, and its site is left alone from then on.
        compiled: ``"eager"`` runs modules compiled by `torch.compile` eagerly on capture steps, which takes the memory
            of an eager step; ``"skip"`` does not watch a model that has such modules, and says so.
        max_overhead: the share of the training time that captures may take, such as ``0.01``. Where they take more,
            they are made rarer than ``every_n_steps`` asks for, and not so rare again when they get cheaper; this is
            said, and logged as ``attention/every_n_steps``. ``None`` for no limit. It takes a few captures to be known.

    Raises:
        MisconfigurationException: if an argument is not allowed, or a pattern matches no module of the model.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(
        ...     callbacks=[AttentionMonitor(every_n_steps={0: 10, 500: 50})], logger=False, accelerator="cpu"
        ... )
    """

    def __init__(
        self,
        every_n_steps: int | dict[int, int] = 50,
        sites: str | list[str] | None = None,
        statistics: str | list[str] | None = None,
        max_sequences: int | None = 4,
        spectral_sequences: int | None = 1,
        stage: Literal["train", "validate"] = "train",
        heat_map_every_n_steps: int | None = 500,
        callback_metrics: str | list[str] | None = None,
        history_size: int = 1000,
        print_summary: bool = True,
        prefix: str | None = None,
        strict: bool = False,
        compiled: Literal["eager", "skip"] = "eager",
        max_overhead: float | None = None,
    ) -> None:
        with misconfiguration():
            self._schedule = CaptureSchedule(every_n_steps, max_overhead)
            if heat_map_every_n_steps is not None:
                check_positive(heat_map_every_n_steps, "heat_map_every_n_steps", "or None for no heat maps")
            check_positive(history_size, "history_size")
            if not isinstance(callback_metrics, (str, Sequence, type(None))):
                raise ValueError(
                    f"`callback_metrics` must be a name, a list of them or None, got {callback_metrics!r}."
                )
            metrics = (callback_metrics,) if isinstance(callback_metrics, str) else tuple(callback_metrics or ())
            if prefix is not None and not (isinstance(prefix, str) and prefix.strip("/")):
                raise ValueError(f"`prefix` must be a name that tags begin with, or None, got {prefix!r}.")
            if stage not in ("train", "validate"):
                raise ValueError(f"`stage` must be 'train' or 'validate', got {stage!r}.")
            if stage == "validate" and max_overhead is not None:
                raise ValueError(
                    f"`max_overhead` makes captures of training batches rarer, and must be None with stage='validate', "
                    f"which watches one batch of every validation run, got {max_overhead!r}."
                )
            request = Request.of(sites, statistics, max_sequences, spectral_sequences, strict, compiled)
            check_summary_names(metrics, request.names)
        self._subscription = Subscription(request)
        self._stage = stage
        self._callback_metrics: dict[str, float | None] = dict.fromkeys(metrics)
        self._print_summary = print_summary
        self._prefix = (prefix or "").strip("/") or ("attention" if stage == "train" else "attention_validate")
        self._notices = Notices()
        self._log = SnapshotLog(self._prefix, heat_map_every_n_steps, self._notices)
        self._key = self._generate_state_key(
            every_n_steps=every_n_steps,
            sites=sites,
            statistics=statistics,
            max_sequences=max_sequences,
            spectral_sequences=spectral_sequences,
            stage=stage,
            callback_metrics=callback_metrics,
            prefix=prefix,
            max_overhead=max_overhead,
        )
        self._owes_metrics = False
        self._is_evaluating = False
        #: The snapshots of this run, oldest first.
        self.history = History(history_size)

    @property
    def snapshot(self) -> Snapshot | None:
        """The last snapshot, ``None`` before the first."""
        return self.history[-1] if self.history else None

    @property
    def state_key(self) -> str:
        """Tells the monitors of one Trainer apart."""
        return self._key

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on at the same cadence."""
        return {
            **self._schedule.state_dict(),
            "last_heat_map": self._log.last_heat_map,
            "callback_metrics": dict(self._callback_metrics),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint left off, unless it is loaded to be evaluated."""
        if self._is_evaluating:  # a run goes on with fit alone
            return
        self._schedule.load_state_dict(state_dict)
        self._log.last_heat_map = state_dict.get("last_heat_map")
        self._callback_metrics |= state_dict.get("callback_metrics", {})
        self._owes_metrics = True  # callbacks that monitor them may ask before the next capture

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Learn what a checkpoint is loaded for."""
        self._is_evaluating = stage != "fit"

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse patterns that no module has."""
        with misconfiguration():
            self._subscription.request.sites.check(SiteNames(pl_module))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a run, or go on with one."""
        if self._schedule.start(trainer):
            self._log.begin()
            self.history.clear()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Have the batch watched if it is due."""
        if self._stage == "train" and self._schedule.batch_starts(trainer):
            self._subscription.open(trainer, pl_module, "training_step", self._schedule.needed_steps)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the snapshot of a watched batch, and count the step."""
        was_watched = self._subscription.is_open
        was_captured = was_watched and self._take_snapshot(trainer, pl_module)
        if self._owes_metrics and self._stage == "train":
            self._log_callback_metrics(pl_module)
        self._schedule.batch_ends(trainer, was_watched, was_captured)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the first batch of a validation run watched; ranks that have none request it too, and add nothing."""
        if self._stage != "validate" or trainer.sanity_checking:
            return
        if trainer.world_size > 1 and _allows_no_batches(trainer, pl_module):
            self._notices.warn(
                "Validation is not watched, since `allow_zero_length_dataloader_with_multiple_devices` is set: a rank "
                "whose dataloader has no batches then leaves validation out, and the others would wait for it."
            )
            return
        self._subscription.open(trainer, pl_module, "validation_step")

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Do not take the first batch of another dataloader for it, where the first dataloader is empty."""
        if self._stage == "validate" and self._subscription.is_open and dataloader_idx > 0:
            CaptureSession.of(trainer).pass_over()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the snapshot of the watched batch, where every rank comes, however many batches it had."""
        if self._stage == "validate" and self._subscription.is_open:
            self._take_snapshot(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give up a batch that never ended."""
        self._subscription.give_up(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give up a batch that never ended."""
        self._subscription.give_up(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give up a batch that never ended."""
        self._is_evaluating = False
        self._subscription.give_up(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the most extreme heads, and write which of them went over from position to content or back."""
        self._log.end(trainer, self.history)
        if self._print_summary and self.snapshot and trainer.is_global_zero:
            print(f"\n{self.snapshot.table()}")

    def _take_snapshot(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Give the watched step's snapshot to everyone who wants it; whether there was any attention."""
        snapshot = self._subscription.collect(trainer)
        if not snapshot:
            return False
        self.history.append(snapshot)
        self._notices.warn_of_oddities(snapshot, self._subscription.request.sites)
        self._schedule.settle(self._subscription.number)
        interval = self._schedule.interval
        self._log.write(trainer, self.history, {} if interval is None else {"every_n_steps": interval})
        for name in self._callback_metrics:
            self._callback_metrics[name] = summary_value(snapshot, name)
            if self._callback_metrics[name] is None:
                self._notices.warn(f"{name!r} of `callback_metrics` has no value: no head of this model defines it.")
        self._log_callback_metrics(pl_module)
        return True

    def _log_callback_metrics(self, pl_module: pl.LightningModule) -> None:
        """Make summaries known to callbacks that monitor metrics; they are reduced already, the same on every rank."""
        self._owes_metrics = False
        training = self._stage == "train"
        for name, value in self._callback_metrics.items():
            if value is not None:
                pl_module.log(
                    f"{self._prefix}/{name}",
                    value if training else reduced_metric(value).to(pl_module.device),
                    metric_attribute=None if training else name,  # the model has none, and is not to be searched
                    logger=False,
                    on_step=training,
                    on_epoch=not training,
                    batch_size=1,
                    add_dataloader_idx=False,
                )


def _allows_no_batches(trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
    """Whether a rank may leave a loop out, all its hooks with it, that other ranks run."""
    return any(
        getattr(hooks, "allow_zero_length_dataloader_with_multiple_devices", False)
        for hooks in (pl_module, getattr(trainer, "datamodule", None))
    )
