"""What the loggers get to see of a monitor's snapshots, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_attn.callbacks.loggers import has_tensorboard, log_heat_maps, log_layout, log_scalars, log_text
from lightning_attn.callbacks.notices import Notices
from lightning_attn.history import History
from lightning_attn.snapshot import Snapshot
from lightning_attn.tensorboard import scalar_layout, statistics_table, transitions_table

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: TensorBoard becomes slow with thousands of tags; with more than so many, heat maps take the place of scalars per
#: site.
MAX_TAGS = 250


class SnapshotLog:
    """Scalars with every snapshot, a layout and a key to them with the first, heat maps and new transitions at times.

    Args:
        prefix: what all tags begin with.
        heat_map_every_n_steps: the steps from one set of heat maps to the next; ``None`` for none.
        notices: where it says that there is too much to be shown.
    """

    def __init__(self, prefix: str, heat_map_every_n_steps: int | None, notices: Notices) -> None:
        self._prefix = prefix
        self._heat_map_every_n_steps = heat_map_every_n_steps
        self._notices = notices
        self._transitions: dict[tuple[str, int], str] = {}
        self._explained: tuple[str, ...] = ()
        #: The step of the last heat maps.
        self.last_heat_map: int | None = None

    def begin(self) -> None:
        """Begin a run."""
        self.last_heat_map = None
        self._transitions = {}
        self._explained = ()

    def write(self, trainer: pl.Trainer, history: History, more: Mapping[str, float]) -> None:
        """Write of the last snapshot what is due.

        Args:
            trainer: whose loggers.
            history: the snapshots of the run, of which there is one at least.
            more: scalars of the monitor itself, by the names that follow the prefix.
        """
        snapshot = history[-1]
        tagged = self._scalars(snapshot)
        log_scalars(trainer, tagged | {f"{self._prefix}/{name}": more[name] for name in more}, snapshot.step)
        if has_tensorboard(trainer):
            log_layout(trainer, scalar_layout(tagged, self._prefix))
            if snapshot.statistics != self._explained:
                self._explained = snapshot.statistics
                log_text(trainer, f"{self._prefix}_statistics", statistics_table(self._explained), snapshot.step)
        if self._heat_map_every_n_steps is None:
            return
        if self.last_heat_map is None or snapshot.step - self.last_heat_map >= self._heat_map_every_n_steps:
            self.last_heat_map = snapshot.step
            log_heat_maps(trainer, snapshot, self._prefix)
            self._write_transitions(trainer, history, only_new=True)

    def end(self, trainer: pl.Trainer, history: History) -> None:
        """End a run: say which heads went over from position to content, or that none did."""
        self._write_transitions(trainer, history, only_new=False)

    def _scalars(self, snapshot: Snapshot) -> dict[str, float]:
        tagged = snapshot.scalars(self._prefix)
        if len(tagged) > MAX_TAGS:
            self._notices.warn(
                f"AttentionMonitor has {len(tagged)} scalars for {len(snapshot.sites)} sites; it logs summaries over"
                " all heads, and the sites are in the heat maps.",
                once_for="tags",
            )
            tagged = snapshot.scalars(self._prefix, per_site=False)
        return tagged

    def _write_transitions(self, trainer: pl.Trainer, history: History, only_new: bool) -> None:
        if not has_tensorboard(trainer):
            return
        transitions = history.transitions()
        found = {place: transition.direction for place, transition in transitions.items() if transition}
        is_new = bool(found.items() - self._transitions.items())
        self._transitions |= found
        if transitions and (is_new or not only_new):
            log_text(trainer, f"{self._prefix}_transitions", transitions_table(transitions), history[-1].step)
