"""The callback that says which head is going wrong while the run can still be saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn

from lightning_attn.callbacks.cadence import check_positive
from lightning_attn.callbacks.loggers import output_folder
from lightning_attn.callbacks.misconfiguration import misconfiguration
from lightning_attn.callbacks.rule_choice import chosen_rules
from lightning_attn.callbacks.schedule import CaptureSchedule
from lightning_attn.callbacks.subscription import Subscription
from lightning_attn.callbacks.warning_actions import Actions, WarningActions
from lightning_attn.callbacks.warning_board import WarningBoard
from lightning_attn.callbacks.warning_log import WarningLog
from lightning_attn.capture.report import AttentionWarning
from lightning_attn.capture.sites import SiteNames
from lightning_attn.request import Request
from lightning_attn.snapshot import Snapshot
from lightning_attn.warning.early_warning import EarlyWarning
from lightning_attn.warning.rule import Rule
from lightning_attn.warning.watch import Watch

if TYPE_CHECKING:
    import lightning.pytorch as pl


class AttentionEarlyWarning(Callback):
    """Warns of attention that goes wrong, with the head, the trend and the remedy, before the loss shows it.

    Every ``every_n_steps`` optimiser steps the statistics that its rules read are captured, as `AttentionMonitor` does
    it, and the rules are held against them. What is new is told once: as a Python warning on rank zero, in TensorBoard,
    as a line of JSON, and in `warnings`. It needs no logger and no monitor; beside a monitor a step is captured once.

    All ranks see the same values and come to the same warnings, so that they stop, raise and save together, when the
    optimiser step has ended in which a warning was found. Several early warnings on one Trainer need other rules,
    sites, cadences or files, by which their states are told apart.

    Args:
        rules: rules to be held against the run, beside those that come with the package; one of the same name takes the
            place of a built-in one.
        without: names of built-in rules that are left out; ``"all"`` leaves ``rules`` alone.
        action: what is done about warnings and critical ones: ``"warn"`` says it; ``"stop"`` also ends training at the
            end of the step, ``"raise"`` by an `EarlyWarningError`; ``"checkpoint"`` also saves the model, the first
            time each rule warns, as ``early-warning-step=<step>.ckpt`` where the Trainer's `ModelCheckpoint` saves, or
            in ``checkpoints`` beside the file; a function is called with the Trainer, the model and the list of new
            warnings, before any of this. A list for several of these; a mapping from severities (``"info"``,
            ``"warning"``, ``"critical"``) and names of rules for different ones. Everything is said, whatever else is
            done.
        every_n_steps: the optimiser steps from one capture to the next; see `AttentionMonitor`. Trends and patience are
            counted in captures, so rarer ones warn later.
        sites: glob patterns over `named_modules()` names of the LightningModule; ``None`` for all.
        max_sequences: the first so many sequences of each rank's batch; ``None`` for all.
        quiet_steps: when a rule has spoken, what else it finds in so many steps is told together afterwards, unless it
            is more severe.
        file: the file of JSON lines, in the directory of the Trainer's logger or its ``default_root_dir`` unless it is
            an absolute path; ``None`` for none.
        print_summary: whether all warnings are summed up when training ends.
        strict: raise a fault in a statistic or a rule; by default it is reported, and its site or rule left alone.
        compiled: what becomes of compiled modules on capture steps; see `AttentionMonitor`.
        max_overhead: the share of the training time that captures may take; see `AttentionMonitor`.

    Raises:
        MisconfigurationException: if an argument is not allowed, or a pattern matches no module of the model.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> early_warning = AttentionEarlyWarning(action={"critical": ["checkpoint", "stop"]})
        >>> trainer = Trainer(callbacks=[early_warning], logger=False, accelerator="cpu")
        >>> early_warning.warnings
        []
    """

    def __init__(
        self,
        rules: Rule | list[Rule] | None = None,
        without: str | list[str] | None = None,
        action: dict[str, Actions] | Actions = "warn",
        every_n_steps: int | dict[int, int] = 10,
        sites: str | list[str] | None = None,
        max_sequences: int | None = 4,
        quiet_steps: int = 100,
        file: str | None = "attention_warnings.jsonl",
        print_summary: bool = True,
        strict: bool = False,
        compiled: Literal["eager", "skip"] = "eager",
        max_overhead: float | None = None,
    ) -> None:
        with misconfiguration():
            self._schedule = CaptureSchedule(every_n_steps, max_overhead)
            self._watch = Watch(chosen_rules(rules, without), None if strict else _report)
            statistics = dict.fromkeys(name for rule in self._watch.rules for name in rule.statistics)
            self._subscription = Subscription(Request.of(sites, list(statistics), max_sequences, 1, strict, compiled))
            self._actions = WarningActions(action, [rule.name for rule in self._watch.rules])
            check_positive(quiet_steps, "quiet_steps")
            self._log = WarningLog(quiet_steps, file, print_summary)
        self._folder = "."
        self._key = self._generate_state_key(
            rules=[rule.name for rule in self._watch.rules], every_n_steps=every_n_steps, sites=sites, file=file
        )
        self._is_evaluating = False
        #: What was found in this run, oldest first.
        self.warnings: list[EarlyWarning] = []

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that are held against the run."""
        return self._watch.rules

    @property
    def stopped_for(self) -> EarlyWarning | None:
        """The warning that training was stopped for; ``None`` where it was not."""
        return self._actions.stopped_for

    @property
    def state_key(self) -> str:
        """Tells the early warnings of one Trainer apart."""
        return self._key

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to repeat no warning and lose none, in plain values and tensors."""
        return {
            "schedule": self._schedule.state_dict(),
            "watch": self._watch.state_dict(),
            "actions": self._actions.state_dict(),
            "log": self._log.state_dict(),
            "warnings": [warning.to_dict() for warning in self.warnings],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint left off, unless it is loaded to be evaluated."""
        if self._is_evaluating:  # a run goes on with fit alone
            return
        self._schedule.load_state_dict(state_dict["schedule"])
        self._watch.load_state_dict(state_dict["watch"])
        self._actions.load_state_dict(state_dict["actions"])
        self._log.load_state_dict(state_dict["log"])
        self.warnings = [EarlyWarning.from_dict(values) for values in state_dict["warnings"]]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on with other arguments too, such as a rule less, where it is clear whose state it is."""
        states = checkpoint.get("callbacks", {})
        ours = [key for key in states if key.split("{")[0] == type(self).__qualname__]
        if self._key not in states and len(ours) == 1 and _all(trainer) == [self]:
            self.load_state_dict(states[ours[0]])

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Learn what a checkpoint is loaded for."""
        self._is_evaluating = stage != "fit"

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse patterns that no module has, and find out where files go, which ranks do together."""
        with misconfiguration():
            self._subscription.request.sites.check(SiteNames(pl_module))
        self._folder = output_folder(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a run, or go on with one."""
        if self._schedule.start(trainer):
            self._watch.clear()
            self._actions.begin()
            self._log.begin()
            self.warnings.clear()
        self._actions.stopped_for = None
        WarningBoard.of(trainer).hang(self._key, self.warnings, [rule.name for rule in self.rules])
        self._log.open(trainer, self._folder, self.warnings)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Have the batch watched if it is due."""
        if self._schedule.batch_starts(trainer):
            self._subscription.open(trainer, pl_module, "training_step", self._schedule.needed_steps)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hold the rules against the snapshot of a watched batch, count the step, and act if it has ended."""
        was_watched = self._subscription.is_open
        snapshot = self._subscription.collect(trainer) if was_watched else None
        if snapshot:
            self._schedule.settle(self._subscription.number)
            self._judge(trainer, snapshot)
        if self._schedule.batch_ends(trainer, was_watched, was_captured=bool(snapshot)):
            self._act(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give up a batch that never ended, and act where no step has ended since a warning."""
        self._subscription.give_up(trainer)
        self._act(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give up a batch that never ended."""
        self._subscription.give_up(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give up a batch that never ended."""
        self._is_evaluating = False
        self._subscription.give_up(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sum up what was found."""
        self._log.end(trainer, self.warnings)

    def _judge(self, trainer: pl.Trainer, snapshot: Snapshot) -> None:
        """Find what is new in a snapshot, and tell of it."""
        new = self._watch.look(snapshot)
        self.warnings += new
        self._actions.add(new)
        standing = self._watch.raised()
        ever = dict.fromkeys(warning.rule for warning in self.warnings)
        self._log.write(trainer, snapshot.step, new, {rule: standing.get(rule, 0) for rule in ever})

    def _act(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the last early warning of a Trainer act for all, so that what one saves holds what all have found."""
        together = _all(trainer)
        if self not in together:  # it is called by another callback, which holds it
            together = [self]
        if together[-1] is self:
            for early_warning in together:
                early_warning._actions.act(trainer, pl_module, early_warning._folder)


def _all(trainer: pl.Trainer) -> list[AttentionEarlyWarning]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [callback for callback in callbacks if isinstance(callback, AttentionEarlyWarning)]


def _report(rule: Rule, error: Exception) -> None:
    rank_zero_warn(
        f"The rule {rule.name!r} failed and is left out from now on: {type(error).__name__}: {error}",
        category=AttentionWarning,
    )
