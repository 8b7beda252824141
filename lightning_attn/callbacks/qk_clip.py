"""The callback that makes the queries and keys of a head smaller when its logits have become too large."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Callback

from lightning_attn.callbacks.adaptive_temperature import AdaptiveTemperature
from lightning_attn.callbacks.clip_log import ClipLog, listed
from lightning_attn.callbacks.loggers import output_folder
from lightning_attn.callbacks.misconfiguration import misconfiguration
from lightning_attn.callbacks.refused_strategies import refuse_flat_shards
from lightning_attn.callbacks.schedule import CaptureSchedule
from lightning_attn.callbacks.site_search import TRIES, SiteSearch
from lightning_attn.callbacks.subscription import Subscription
from lightning_attn.clipping.attention_clip import AttentionClip
from lightning_attn.request import Request
from lightning_attn.snapshot import Snapshot

if TYPE_CHECKING:
    import lightning.pytorch as pl


class QKClip(Callback):
    r"""Multiplies the weights of a head's queries and keys by a factor after its logits have become too large.

    After an optimiser step, each head whose largest logit :math:`S` in the forward pass of that step exceeded
    ``threshold`` has the rows that make its queries multiplied by :math:`\gamma^\alpha`, and those that make its keys
    by :math:`\gamma^{1-\alpha}`, with :math:`\gamma` = ``threshold`` / :math:`S`: weights and biases, in place. The
    same batch would then have had ``threshold`` for its largest logit. A head that never exceeds it is left alone to
    the last digit.

    Which rows these are is found from the model and proven in the first capture. Where several heads share keys, and
    where it could not be proven which weights make the keys, queries alone are multiplied, by :math:`\gamma`. Sites
    whose queries are normalised after their projection and sites with soft-capped logits are left alone. All of this is
    said once. The optimiser's moments stay as they are.

    What a bias adds (ALiBi, T5) is part of the largest logit, and is not made smaller: :math:`\gamma` is
    (``threshold`` − b) / (:math:`S` − b) with b the largest bias of the head, at least zero, as it was when the site
    was found, and the largest logit comes to ``threshold`` or below. A head whose bias alone reaches ``threshold`` is
    left alone.

    Args:
        threshold: the largest logit that is left alone.
        alpha: the part of a factor that queries take, as an exponent; 1 clips queries alone.
        every_n_steps: the optimiser steps from one look to the next; see `AttentionMonitor`. A head that grows between
            them is clipped later.
        sites: glob patterns over `named_modules()` names of the LightningModule; ``None`` for all.
        max_sequences: the first so many sequences of each rank's batch are looked at; ``None`` for all.
        dry_run: look, decide and log, and change nothing.
        file: a file of JSON lines, one for each clip of a head, in the directory of the Trainer's logger or its
            ``default_root_dir`` unless it is an absolute path; ``None`` for none.
        print_summary: whether it is printed when training ends how often which head was clipped.
        strict: raise a fault in a statistic; by default it is reported, and its site left alone.
        compiled: what becomes of compiled modules while they are looked at; see `AttentionMonitor`.
        max_overhead: the share of the training time that captures may take; see `AttentionMonitor`.

    Raises:
        MisconfigurationException: if an argument is not allowed, a pattern matches no module of the model, or the
            strategy shards parameters in a way in which they cannot be changed by rows.

    Source: Kimi Team 2025, arXiv:2507.20534 (MuonClip).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> clip = QKClip(threshold=100.0)
        >>> trainer = Trainer(callbacks=[clip], logger=False, accelerator="cpu")
        >>> clip.counts  # how often each head of each site was clipped
        {}
    """

    def __init__(
        self,
        threshold: float = 100.0,
        alpha: float = 0.5,
        every_n_steps: int | dict[int, int] = 1,
        sites: str | list[str] | None = None,
        max_sequences: int | None = None,
        dry_run: bool = False,
        file: str | None = "attention_qk_clip.jsonl",
        print_summary: bool = True,
        strict: bool = False,
        compiled: Literal["eager", "skip"] = "eager",
        max_overhead: float | None = None,
    ) -> None:
        with misconfiguration():
            _check(_is_number(threshold) and threshold > 0, "threshold", threshold, "a positive number")
            _check(_is_number(alpha) and 0 <= alpha <= 1, "alpha", alpha, "a number from 0 to 1")
            _check(isinstance(dry_run, bool), "dry_run", dry_run, "True or False")
            self._threshold, self._alpha = float(threshold), float(alpha)
            self._schedule = CaptureSchedule(every_n_steps, max_overhead)
            self._subscription = Subscription(Request.of(sites, ["max_logit"], max_sequences, 1, strict, compiled))
            self._log = ClipLog(file, print_summary, dry_run)
        self._is_dry = dry_run
        self._key = self._generate_state_key(
            threshold=threshold, alpha=alpha, every_n_steps=every_n_steps, sites=sites, file=file
        )
        self._is_evaluating = False
        self._is_due = False
        self._folder = "."
        #: ``None`` where nothing is trained.
        self._clip: AttentionClip | None = None
        #: What was loaded from a checkpoint and waits for its model.
        self._loaded: dict[str, Any] | None = None
        #: The state at the end of the last fit.
        self._kept: dict[str, Any] | None = None
        self._begin()

    def _begin(self) -> None:
        #: How often each head of each site was clipped, or would have been in a dry run.
        self.counts: dict[str, list[int]] = {}
        self._search = SiteSearch()
        #: The largest logit of each head in the micro-batches of the present step.
        self._largest: dict[str, list[float]] = {}

    @property
    def state_key(self) -> str:
        """Tells the clips of one Trainer apart."""
        return self._key

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on to the last digit, in plain values and tensors."""
        return self._state(self._clip) if self._clip is not None else self._kept or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint left off, unless it is loaded to be evaluated."""
        if self._is_evaluating or not state_dict:
            return
        self._loaded = state_dict
        if self._clip is not None:  # a strategy that loads the model after it was set up
            self._restore(self._clip)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Learn what a checkpoint is loaded for."""
        self._is_evaluating = stage != "fit"

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over what is known of the model's queries and keys from a checkpoint."""
        refuse_flat_shards(trainer, "QKClip")
        self._folder = output_folder(trainer)
        sites = list(self._subscription.request.sites.patterns)
        with misconfiguration():
            clip = AttentionClip(pl_module, sites, process_group="alone" if trainer.world_size == 1 else None)
        self._clip = clip
        if self._loaded is None and trainer.global_step > 0:
            self._loaded = self._kept  # the same Trainer goes on
        if self._loaded is not None:
            self._restore(clip)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a run, or go on with one."""
        if self._schedule.start(trainer):
            self._begin()
            self._log.begin()
        self._log.open(trainer, self._folder)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Have the batch watched if it is due, or another one of its optimiser step was."""
        if self._clip is None:
            return
        self._is_due = self._schedule.batch_starts(trainer)
        if self._is_due or self._largest:
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
        """Keep the largest logits that were seen, and clip heads at the end of a step."""
        clip = self._clip
        if clip is None:
            return
        snapshot = self._subscription.collect(trainer) if self._subscription.is_open else None
        if snapshot:
            self._schedule.settle(self._subscription.number)
            self._find(trainer, clip, snapshot)
            self._say_what_is_left_alone(clip)
            self._keep_largest(trainer, clip, snapshot)
        if self._schedule.batch_ends(trainer, was_watched=self._is_due, was_captured=bool(snapshot)):
            self._act(trainer, clip)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give up a batch that never ended."""
        self._subscription.give_up(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave nothing behind; a checkpoint that is saved because of it goes on all the same."""
        self._finish(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Sum up, and leave nothing behind."""
        self._is_evaluating = False
        self._finish(trainer)

    def _find(self, trainer: pl.Trainer, clip: AttentionClip, snapshot: Snapshot) -> None:
        """Find the queries and keys of the sites that were seen, and say which cannot be found."""
        if not self._search.is_on:
            self._search.notice(snapshot.sites)
            return
        given_up = self._search.look(
            snapshot.sites,
            lambda met: clip.find_among(met, lambda: _precision(trainer)),
            lambda: clip.sites.keys() | clip.refused.keys(),
        )
        if given_up:
            self._log.warn(f"{listed(given_up)}: its queries could not be told in {TRIES} captures; not clipped.")
        biased = [site for site, held in clip.sites.items() if max(held.largest_bias) >= self._threshold]
        if biased:
            self._log.warn(
                f"what is added to the logits of {listed(biased)} reaches the threshold of {self._threshold:g} alone; "
                "heads of which this is so are not clipped. Let `threshold` be well above the bias."
            )
        queries_alone = {site: held.reason for site, held in clip.sites.items() if held.keys is None}
        for reason, sites in _by_reason(queries_alone).items():
            self._log.info(f"only the queries of {listed(sites)} will be clipped: {reason}.")

    def _say_what_is_left_alone(self, clip: AttentionClip) -> None:
        clip.leave_divided()
        for reason, sites in _by_reason(clip.refused).items():
            self._log.warn(f"{listed(sites)} cannot be clipped: {reason}.")

    def _keep_largest(self, trainer: pl.Trainer, clip: AttentionClip, snapshot: Snapshot) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        # It looks for queries when this batch ends, as this callback does, and perhaps after it.
        dividing = [callback for callback in callbacks if isinstance(callback, AdaptiveTemperature)]
        for site in snapshot.sites:
            if any(callback.may_divide(site) for callback in dividing):
                continue
            if site in clip.sites and len(snapshot[site, "max_logit"]) == clip.sites[site].heads:
                seen = [_finite(value) for value in snapshot[site, "max_logit"]]
                before = self._largest.get(site, seen)
                self._largest[site] = [max(pair) for pair in zip(before, seen, strict=True)]

    def _act(self, trainer: pl.Trainer, clip: AttentionClip) -> None:
        """Clip heads whose logits were too large, at the end of an optimiser step."""
        largest, self._largest = self._largest, {}
        if not largest:
            return
        clips = clip.clips(self._schedule.step, largest, self._threshold, self._alpha)
        if not self._is_dry:
            clip.apply(clips)
        for site, of_heads in largest.items():
            self.counts.setdefault(site, [0] * len(of_heads))
        for one in clips:
            self.counts[one.site][one.head] += 1
        values = [value for of_heads in largest.values() for value in of_heads if value > -math.inf]
        self._log.write(trainer, self._schedule.step, max(values, default=None), clips)

    def _state(self, clip: AttentionClip) -> dict[str, Any]:
        return {
            "schedule": self._schedule.state_dict(),
            "search": self._search.state_dict(),
            "found": clip.state_dict(),
            "largest": dict(self._largest),
            "counts": {site: list(counts) for site, counts in self.counts.items()},
            "log": self._log.state_dict(),
        }

    def _restore(self, clip: AttentionClip) -> None:
        """Go on where a checkpoint left off, now that its model is there."""
        state, self._loaded = self._loaded, None
        assert state is not None
        self._schedule.load_state_dict(state["schedule"])
        self._search.load_state_dict(state["search"])
        clip.load_state_dict(state["found"])
        self._largest = dict(state["largest"])
        self.counts = {site: list(counts) for site, counts in state["counts"].items()}
        self._log.load_state_dict(state["log"], self._schedule.step)

    def _finish(self, trainer: pl.Trainer) -> None:
        self._subscription.give_up(trainer)
        self._search.forget()
        if self._clip is not None:
            self._kept, self._clip = self._state(self._clip), None
            self._log.end(trainer, self.counts)


def _check(is_allowed: bool, name: str, value: object, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _precision(trainer: pl.Trainer) -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = trainer.precision_plugin.forward_context()
    return context


def _finite(value: float | None) -> float:
    return -math.inf if value is None or not math.isfinite(value) else value


def _by_reason(reasons: dict[str, str]) -> dict[str, list[str]]:
    sites: dict[str, list[str]] = {}
    for site, reason in reasons.items():
        sites.setdefault(reason, []).append(site)
    return sites
