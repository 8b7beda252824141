"""Capture, statistics and reduction together, for people without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import cast

import torch
from torch import nn

from lightning_attn.capture.call import AttentionCall
from lightning_attn.capture.capture import Capture, Compiled
from lightning_attn.capture.isolation import compiled_modules
from lightning_attn.capture.met import Met
from lightning_attn.capture.module_tree import parameters_of
from lightning_attn.capture.report import SiteFaults, warn_of_compiled, warn_of_nothing
from lightning_attn.capture.sites import SiteNames
from lightning_attn.capture.states import HiddenStates
from lightning_attn.distributed import RankReduction
from lightning_attn.findings import Findings
from lightning_attn.joined_ranks import WhoJoins
from lightning_attn.request import Request
from lightning_attn.snapshot import Snapshot
from lightning_attn.statistics.joint import SmallCalls
from lightning_attn.statistics.measure import Sums, measure
from lightning_attn.statistics.state_statistic import StateSums, measure_states


class AttentionObserver:
    """Watches the attention of a model while a `with` block runs, and gives its statistics.

    The statistics of a call are computed when it happens, and nothing of it is kept but a few sums per head; those of
    small calls are computed together, when a few megabytes of them have come or `snapshot` is asked for. Several calls
    of a site, in one block or in several, add up until then.

    Args:
        model: the model to be watched; it is not changed.
        sites: glob patterns over `named_modules()` names; ``None`` for all.
        statistics: names of statistics; ``None`` for those of the default set, ``"all"`` for every one.
        max_sequences: look at the first so many sequences of each call; ``None`` for all.
        spectral_sequences: of those, the first so many for the spectral statistics, which cost more; ``None`` for all.
        strict: raise a fault in a statistic; by default it is reported, and its site is left alone from then on.
        compiled: ``"eager"`` runs modules compiled by `torch.compile` eagerly while they are watched, which takes the
            memory of an eager step; ``"skip"`` does not watch a model that has such modules, and says so.
        device: where ranks exchange their sums; by default where the model's first parameter is.
        process_group: which ranks join what they see: ``None`` for all there are, a process group of
            `torch.distributed` for its ranks, ``"alone"`` for this process alone.

    Raises:
        ValueError: if a pattern matches no module, a statistic is unknown, a number of sequences is not positive,
            ``compiled`` is neither ``"eager"`` nor ``"skip"``, or ``process_group`` is not allowed.

    Example:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> observer = AttentionObserver(layer, statistics="max_weight")
        >>> with observer:
        ...     output = layer(torch.zeros(4, 8, 16))
        >>> observer.snapshot().to_dict()
        {'self_attn': {'max_weight': [0.125, 0.125]}}
    """

    def __init__(
        self,
        model: nn.Module,
        sites: str | Sequence[str] | None = None,
        statistics: str | Sequence[str] | None = None,
        max_sequences: int | None = None,
        spectral_sequences: int | None = 1,
        strict: bool = False,
        compiled: Compiled = "eager",
        device: torch.device | None = None,
        process_group: WhoJoins = None,
    ) -> None:
        #: What is wanted of it. May be replaced between two snapshots.
        self.request = Request.of(sites, statistics, max_sequences, spectral_sequences, strict, compiled)
        self.request.sites.check(SiteNames(model))
        #: What is watched.
        self.model = model
        self._device = device
        self._capture: Capture | None = None
        self._findings = Findings()
        self._small: SmallCalls | None = None
        self._saw_attention = False
        self._in_pieces: set[str] = set()
        self._faults = SiteFaults()
        #: Called with each module that is seen computing attention, once it returns; ``None`` for nobody.
        self.receive_module: Callable[[Met], None] | None = None
        #: Joins the ranks' sums with every snapshot.
        self.reduction = RankReduction(process_group)

    def __enter__(self) -> AttentionObserver:
        if self._capture is not None:
            raise RuntimeError("This observer is watching already; leave its `with` block first.")
        if self._leaves_out():
            return self
        self._faults.messages.are_held_back = self.reduction.ranks.are_several
        if self._small is None and not self.request.strict:  # a fault is to be raised where it happens
            self._small = SmallCalls(self.request.statistics, self.request.spectral_sequences)
        self._capture = Capture(
            self.model,
            self._take,
            sites=self.request.sites,
            max_sequences=self.request.max_sequences,
            with_values=self.request.needs_values,
            receive_states=self._take_states if self.request.needs_states else None,
            receive_module=self.receive_module,
            compiled=self.request.compiled,
            strict=self.request.strict,
            faults=self._faults,
        )
        self._capture.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.__exit__(kind, error, trace)
        if kind is not None:
            self._faults.messages.release()

    def snapshot(self, step: int = 0) -> Snapshot:
        """The statistics of what was seen since the last snapshot, joined over the ranks of ``process_group``.

        Where there are several, each of them must call this, also one that saw nothing, and after the
        same step. Inside torch's `Join` a rank that has no batches left does not come to it: watch there, and take the
        snapshot after the block.

        Args:
            step: the optimiser step, which the snapshot carries; the largest where ranks are out of step, which is
                said.

        Raises:
            RuntimeError: if not all ranks came.
            ValueError: on every rank, if they were not asked for the same statistics.
        """
        self._measure_small()
        for site in self._findings.sites_in_loops:
            with self._reporting(site):
                self._findings.end_loop(site)
        found = self._without_pieces(self._findings.all())
        self._clear()
        self.reduction.step = step
        device = self._device or self._model_device()
        messages = self._faults.messages
        try:
            sums = self.reduction(found, self.request.statistics, self._faults.quiet, device, messages)
        finally:
            messages.release()
        if not (sums or self._faults.reported or self._saw_attention):
            self._saw_attention = True  # said once
            if self.reduction.ranks.is_first:
                warn_of_nothing(self.model, self.request.sites)
        self._saw_attention |= bool(sums)
        return Snapshot.from_sums(self.reduction.step, sums, self.request.names)

    def forget(self) -> None:
        """Drop what was seen since the last snapshot."""
        self._clear()
        self._faults.messages.release()

    def _clear(self) -> None:
        self._findings = Findings()
        self._small = None

    def _without_pieces(self, found: dict[str, Sums]) -> dict[str, Sums]:
        """Drop what was found of attention before a piece of it turned out to be unreadable."""
        new = self._faults.in_pieces - self._in_pieces
        self._in_pieces |= new
        return {site: sums for site, sums in found.items() if site not in new}

    def _leaves_out(self) -> bool:
        """Whether the model is compiled and compiled models are not to be watched, which is said once."""
        if self.request.compiled == "eager":
            return False
        modules = compiled_modules(self.model)
        if modules and not self._saw_attention:
            self._saw_attention = True  # so that nobody is told that there is none
            if self.reduction.ranks.is_first:
                warn_of_compiled(modules)
        return bool(modules)

    def _model_device(self) -> torch.device:
        devices = (parameter.device for parameter in parameters_of(self.model))
        return next((device for device in devices if device.type != "meta"), torch.device("cpu"))

    def _take(self, call: AttentionCall) -> None:
        self._findings.meet(call.site)
        if self._small is not None and self._small.take(call):
            if self._small.is_full:
                self._measure_small()
            return
        self._add(call, measure(call, self.request.statistics, spectral_sequences=self.request.spectral_sequences))

    def _add(self, call: AttentionCall, found: Sums) -> None:
        self._findings.add(call, found)
        if call.site in self._findings.pooled:
            self._faults.report_pooled(call.site)

    def _take_states(self, states: HiddenStates) -> None:
        if self._small is not None and self._small.take_states(states):
            if self._small.is_full:
                self._measure_small()
            return
        self._measure_small()  # what was found of the module's calls comes before its states
        self._add_states(states, measure_states(states, self.request.statistics))

    def _add_states(self, states: HiddenStates, found: StateSums) -> None:
        self._findings.end_loop(states.site)  # the module has returned
        known = self._findings.of(states.site)
        if known is not None:  # nobody took a snapshot in the middle of the module
            found.add_to(known)

    def _measure_small(self) -> None:
        if self._small is None:
            return
        left_out: set[str] = set()
        for item, found in self._small.measured():
            with self._reporting(item.site):
                if isinstance(item, AttentionCall):
                    left_out.add(item.site)
                    self._add(item, cast(Sums, found()))
                    left_out.remove(item.site)
                elif item.site not in left_out:  # as they are where a call is refused at once
                    self._add_states(item, cast(StateSums, found()))

    @contextmanager
    def _reporting(self, site: str) -> Iterator[None]:
        """Report a fault at a site where no forward pass is in its way any more."""
        try:
            yield
        except Exception as error:
            if self.request.strict:
                raise
            if site not in self._faults.quiet:
                self._faults.report(site, error)
