"""The callback that keeps the temperature of every head where it should be while the model trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, WeakSet

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback

from lightning_attn.callbacks.averaged_models import averaged_models
from lightning_attn.callbacks.cadence import Cadence, check_positive
from lightning_attn.callbacks.loggers import output_folder
from lightning_attn.callbacks.misconfiguration import misconfiguration
from lightning_attn.callbacks.refused_strategies import refuse_flat_shards
from lightning_attn.callbacks.schedule import CaptureSchedule
from lightning_attn.callbacks.subscription import Subscription
from lightning_attn.callbacks.temperature_log import TemperatureLog
from lightning_attn.callbacks.temperature_overlap import refuse_overlap
from lightning_attn.callbacks.temperature_search import TemperatureSearch, some
from lightning_attn.callbacks.temperature_start import TemperatureStart
from lightning_attn.callbacks.warning_board import WarningBoard
from lightning_attn.capture.sites import SiteNames
from lightning_attn.joined_ranks import WhoJoins
from lightning_attn.request import Request
from lightning_attn.snapshot import Snapshot
from lightning_attn.temperature.attention_temperature import AttentionTemperature
from lightning_attn.temperature.governor import TemperatureGovernor
from lightning_attn.temperature.plan import Controls, TemperaturePlan

if TYPE_CHECKING:
    import lightning.pytorch as pl


class AdaptiveTemperature(Callback):
    """Divides each head's logits by a temperature ``τ`` that keeps them where they should be: ``Q Kᵀ / (τ √d)``.

    Where logits grow until the softmax passes no gradient, a run stalls. By default the deviation of each head's logits
    is measured every 10 optimiser steps, and nothing is done until that of a head is above 10 or about to be: such a
    run keeps its losses to the last digit. From then on the temperature of every head rises so far that its logits
    deviate by at most 3 (`lightning_attn.temperature.HoldLogitScale`). Or temperatures follow a schedule.

    The queries are divided where their projection makes them, so that nothing else is: no bias, no mask, no key.
    Training, validation and tests see it alike. The model that is saved or leaves training is an ordinary one: in every
    state dict, and in the model when training has ended, temperatures are written into the weights of the query
    projections. A resumed run goes on to the last digit. The optimiser knows nothing of it: its moments stay as they
    are.

    Args:
        control: what temperatures follow: a closed loop (`lightning_attn.temperature.HoldLogitScale`, `HoldEntropy`), a
            schedule over optimiser steps (`ConstantTemperature`, `CosineTemperature`, …), a number, a function of the
            step (all ranks follow that of rank zero), or a mapping to these from glob patterns of sites, of which the
            first that matches counts; ``None`` for ``HoldLogitScale()``. What fails, or gives no temperature, leaves
            temperatures as they are.
        start: when that begins: an optimiser step; or with the first early warning of a run that is at least so severe
            (``"info"``, ``"warning"``, ``"critical"``), or comes from one of the named rules, which takes an
            `AttentionEarlyWarning` beside it.
        every_n_steps: the optimiser steps from one measurement to the next; see `AttentionMonitor`.
        sites: glob patterns over `named_modules()` names of the LightningModule; ``None`` for all.
        min_temperature: no temperature is lower.
        max_temperature: no temperature is higher; that one has come to it is said.
        max_sequences: the first so many sequences of each rank's batch are measured; ``None`` for all.
        heat_map_every_n_steps: the steps from one heat map of all temperatures to the next; ``None`` for none.
        file: a file of JSON lines, one for each change, in the directory of the Trainer's logger or its
            ``default_root_dir`` unless it is an absolute path; ``None`` for none.
        print_summary: whether the temperatures are printed when training ends.
        dry_run: measure, decide and log, and change nothing.
        strict: raise a fault in a statistic or a control; by default it is reported, and its site left alone.
        compiled: what becomes of compiled modules while they are measured; see `AttentionMonitor`.
        max_overhead: the share of the training time that captures may take; see `AttentionMonitor`.

    Raises:
        MisconfigurationException: if an argument is not allowed, a pattern matches no module of the model, the strategy
            shards parameters in a way in which they cannot be changed by rows, or ``start`` waits for warnings and
            nothing warns, or for a kind of them that nothing gives.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_attn import AttentionEarlyWarning
        >>> rescue = AdaptiveTemperature(start="warning")
        >>> trainer = Trainer(callbacks=[AttentionEarlyWarning(), rescue], logger=False, accelerator="cpu")
        >>> rescue.temperatures
        {}
    """

    def __init__(
        self,
        control: Controls | None = None,
        start: int | str | list[str] = 0,
        every_n_steps: int | dict[int, int] = 10,
        sites: str | list[str] | None = None,
        min_temperature: float = 0.1,
        max_temperature: float = 1000.0,
        max_sequences: int | None = 4,
        heat_map_every_n_steps: int | None = 500,
        file: str | None = "attention_temperature.jsonl",
        print_summary: bool = True,
        dry_run: bool = False,
        strict: bool = False,
        compiled: Literal["eager", "skip"] = "eager",
        max_overhead: float | None = None,
    ) -> None:
        with misconfiguration():
            self._plan = TemperaturePlan(control, min_temperature, max_temperature)
            self._start = TemperatureStart(start)
            self._schedule = CaptureSchedule(every_n_steps, max_overhead)
            self._logging = Cadence(every_n_steps)
            statistics = self._plan.statistics or ("logit_std",)
            self._subscription = Subscription(Request.of(sites, statistics, max_sequences, 1, strict, compiled))
            if heat_map_every_n_steps is not None:
                check_positive(heat_map_every_n_steps, "heat_map_every_n_steps", " or None")
            if not isinstance(dry_run, bool):
                raise ValueError(f"`dry_run` must be True or False, got {dry_run!r}.")
            self._log = TemperatureLog(file, heat_map_every_n_steps, print_summary, dry_run)
        self._is_dry = dry_run
        # Not what may be changed when a run goes on.
        self._key = self._generate_state_key(sites=sites, controls=[str(one) for one in self._plan.patterns])
        self._search = TemperatureSearch(self._log.warn)
        self._is_evaluating = False
        self._folder = "."
        #: ``None`` where nothing is trained.
        self._governor: TemperatureGovernor | None = None
        #: What was loaded from a checkpoint and waits for its model.
        self._loaded: dict[str, Any] | None = None
        #: The state at the end of the last fit.
        self._kept: dict[str, Any] | None = None
        self._temperatures: dict[str, list[float]] = {}
        #: What could not be written into the model at the end of the last fit, and stays on it.
        self._left: AttentionTemperature | None = None
        self._begin()

    def _begin(self) -> None:
        self._started_at: int | None = None
        #: The last step at whose beginning it was looked whether something is to be done.
        self._begun_step: int | None = None
        self._has_looked = False
        self._search.begin()

    @property
    def temperatures(self) -> dict[str, list[float]]:
        """The temperature of each head of each site, while training and after it."""
        return self._temperatures if self._governor is None else self._governor.temperatures()

    @property
    def started_at(self) -> int | None:
        """The optimiser step at which it was switched on; ``None`` where it was not."""
        return self._started_at

    @property
    def state_key(self) -> str:
        """Tells the adaptive temperatures of one Trainer apart."""
        return self._key

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on to the last digit, in plain values and tensors; all ranks must ask."""
        return self._state(self._governor) if self._governor is not None else self._loaded or self._kept or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint left off when training starts, unless it is loaded to be evaluated."""
        if not self._is_evaluating and state_dict:
            self._loaded = state_dict

    def governs(self, site: str) -> bool:
        """Whether the temperatures of a site are those of this callback, if it is one."""
        return self._subscription.request.sites.match(site) and self._plan.governs(site)

    def may_divide(self, site: str) -> bool:
        """Whether it divides the queries of a site in this run, or has yet to find out whether it can."""
        return self.governs(site) and (self._governor is None or site not in self._governor.temperature.refused)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Learn what a checkpoint is loaded for."""
        self._is_evaluating = stage != "fit"

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot be, and find out where files go, which ranks do together."""
        refuse_flat_shards(trainer, "AdaptiveTemperature")
        names = SiteNames(pl_module)
        with misconfiguration():
            for patterns in (self._subscription.request.sites, *self._plan.patterns):
                patterns.check(names)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        refuse_overlap([one for one in callbacks if isinstance(one, AdaptiveTemperature)], names)
        self._folder = output_folder(trainer)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the queries of the model where their names tell them."""
        self._take_over(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a run, or go on with one."""
        self._take_over(trainer, pl_module)
        if self._schedule.start(trainer):
            self._begin()
            self._log.begin()
        self._log.open(trainer, self._folder)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Switch on when it is time, follow schedules, and have the batch watched if it is due."""
        governor, step = self._governor, self._schedule.step
        if governor is None:
            return
        if step != self._begun_step:  # nothing changes between the batches of a step
            self._begun_step = step
            self._begin_step(trainer, governor, step)
        is_due = self._schedule.batch_starts(trainer)
        if is_due and (self._search.is_on or (self._started_at is not None and self._plan.loops)):
            self._subscription.open(
                trainer,
                pl_module,
                "training_step",
                self._schedule.needed_steps,
                receive_module=self._search.meet if self._search.is_on else None,
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Find the queries of what was seen, decide on temperatures, and change them at the end of a step."""
        governor = self._governor
        if governor is None:
            return
        was_watched = self._subscription.is_open
        snapshot = self._subscription.collect(trainer) if was_watched else None
        if snapshot:
            self._schedule.settle(self._subscription.number)
            governed = [site for site in snapshot.sites if self._plan.governs(site)]
            self._search.settle(governor.temperature, governed, trainer.precision_plugin.forward_context)
            if self._started_at is not None and self._plan.loops:
                self._look(governor, snapshot)
                self._has_looked = True
        self._search.forget()
        if self._schedule.batch_ends(trainer, was_watched, was_captured=bool(snapshot)):
            governor.act(self._schedule.step)
            if self._has_looked:
                self._has_looked = False
                self._log.write(trainer, self._schedule.step, governor)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give up a batch that never ended."""
        self._subscription.give_up(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write down what is not yet, and keep the state of spread parameters while ranks can still be asked."""
        if self._governor is None:
            return
        if self._governor.has_changes:
            self._log.write(trainer, self._schedule.step, self._governor)
        self._log.draw_last(trainer, self._schedule.step, self._governor.temperatures())
        if self._governor.temperature.is_spread:
            self._kept = self._state(self._governor)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the temperatures into the model, after the last checkpoint."""
        self._finish(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the temperatures into the model; a checkpoint that is saved because of it goes on all the same."""
        self._subscription.give_up(trainer)
        self._finish(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self._is_evaluating = False
        self._subscription.give_up(trainer)
        self._finish(trainer)

    def _take_over(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the model, once what came before training, as finding a learning rate, is over."""
        if self._governor is not None:
            return
        if self._left is not None:  # of the last fit
            self._left.detach()
            self._left = None
        sites = self._subscription.request.sites.patterns
        joins: WhoJoins = "alone" if trainer.world_size == 1 else None
        temperature = AttentionTemperature(pl_module, list(sites), process_group=joins)
        temperature.follow(averaged_models(trainer))
        self._governor = TemperatureGovernor(
            temperature,
            self._plan,
            self._is_dry,
            None if self._subscription.request.strict else self._warn_of_failure,
            None if trainer.world_size == 1 else trainer.strategy.broadcast,
        )
        if self._loaded is None and trainer.global_step > 0 and self in _ENDED.get(trainer, ()):
            self._loaded = self._kept  # the same Trainer goes on
        if self._loaded is not None:
            self._restore(self._governor, self._loaded)
            self._loaded = self._kept = None
            return
        self._kept = None
        self._begin()
        if self._plan.has_schedules and self._start.has_come(0, ()) and not self._is_dry:
            temperature.guess()
            self._governor.follow_schedules(0, 0)

    def _begin_step(self, trainer: pl.Trainer, governor: TemperatureGovernor, step: int) -> None:
        """Switch on when it is time, and follow schedules."""
        is_first = self._started_at is None and self._has_come(trainer, step)
        if is_first:
            self._started_at = step
            if self._start.waits_for_warnings:
                governor.wake()
            if step > 0:
                self._log.say(f"switched on at step {step}; {self._plan}.")
        if self._started_at is not None and self._plan.has_schedules:
            governor.follow_schedules(step, self._started_at)
            if is_first or self._logging.is_due(step):
                self._log.write(trainer, step, governor)

    def _look(self, governor: TemperatureGovernor, snapshot: Snapshot) -> None:
        """Decide on temperatures, and say what has woken a loop that slept."""
        for woken in governor.look(snapshot):
            if snapshot.step > 0:
                head = f"head {woken.head} of {woken.site}"
                self._log.say(f"{head} wakes it at step {snapshot.step} ({woken.reason}); {woken.loop}.")

    def _warn_of_failure(self, sites: Sequence[str], what: str) -> None:
        self._log.warn(f"the temperature of {some(sites)} {what}")

    def _has_come(self, trainer: pl.Trainer, step: int) -> bool:
        """Whether it is time to switch on."""
        board = WarningBoard.of(trainer)
        if self._start.waits_for_warnings and not board.has_owner:
            raise MisconfigurationException(
                "`start` waits for an early warning, and the Trainer has no AttentionEarlyWarning among its callbacks; "
                "add one, or let `start` be a step."
            )
        with misconfiguration():
            self._start.check(board.rules)
        return self._start.has_come(step, board)

    def _state(self, governor: TemperatureGovernor) -> dict[str, Any]:
        return {
            "schedule": self._schedule.state_dict(),
            "started_at": self._started_at,
            "begun_step": self._begun_step,
            "has_looked": self._has_looked,
            "search": self._search.state_dict(),
            "governor": governor.state_dict(),
            "sites": governor.temperature.state_dict(),
            "log": self._log.state_dict(),
        }

    def _restore(self, governor: TemperatureGovernor, state: dict[str, Any]) -> None:
        """Go on where a checkpoint left off, now that its model is there."""
        self._schedule.load_state_dict(state["schedule"])
        self._started_at = state["started_at"]
        self._begun_step = state["begun_step"]
        self._has_looked = state["has_looked"]
        self._search.load_state_dict(state["search"])
        self._log.load_state_dict(state["log"])
        governor.load_state_dict(state["governor"])
        others = governor.temperature.load_state_dict(state["sites"])
        if others:
            self._log.warn(
                f"the weights of {some(others)} are not those that were saved with their temperatures; these are 1."
            )

    def _finish(self, trainer: pl.Trainer) -> None:
        """Write the temperatures into the model, and let go of it."""
        governor, self._governor = self._governor, None
        if self._loaded is not None:  # there was nothing left to train
            self._kept, self._loaded = self._loaded, None
        if governor is None:
            return
        self._temperatures = governor.temperatures()
        _ENDED.setdefault(trainer, WeakSet()).add(self)
        temperature = governor.temperature
        if not temperature.is_spread:
            self._kept = self._state(governor)
        elif self._kept is None and any(value != 1 for values in self._temperatures.values() for value in values):
            # Training was broken off, and ranks may no longer talk to each other.
            self._log.warn(
                "a checkpoint that is saved from now on holds its temperatures in the weights alone; go on from one "
                "that was saved before."
            )
        self._search.forget()
        broken = [
            site
            for site, held in temperature.sites.items()
            if held.projection.is_broken and bool(held.log_temperatures.any())
        ]
        if broken:
            self._log.warn(
                f"the query projections of {some(broken)} have weights that are not finite at the end of training: the "
                "run has diverged; go on from a checkpoint that was saved before."
            )
        left = temperature.fold()
        self._left = temperature if left else None
        self._log.end(trainer, self._temperatures, left)


#: Which callbacks have been to the end of a fit of a Trainer, and may go on from there.
_ENDED: WeakKeyDictionary[Any, WeakSet[AdaptiveTemperature]] = WeakKeyDictionary()
