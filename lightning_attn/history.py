"""The snapshots of a run, oldest first, as many as are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import overload

from lightning_attn.snapshot import Snapshot
from lightning_attn.statistics.registry import is_per_site
from lightning_attn.transition import Transition, find_transition


class History(Sequence[Snapshot]):
    """A bounded series of snapshots; the oldest make room for new ones.

    Args:
        size: how many are kept.

    Raises:
        ValueError: if the size is not a positive integer.
    """

    def __init__(self, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"`size` must be a positive integer, got {size!r}.")
        self._snapshots: deque[Snapshot] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._snapshots)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._snapshots)

    @overload
    def __getitem__(self, index: int) -> Snapshot: ...
    @overload
    def __getitem__(self, index: slice) -> list[Snapshot]: ...
    def __getitem__(self, index: int | slice) -> Snapshot | list[Snapshot]:
        """One snapshot by its place, or several."""
        if isinstance(index, slice):
            return list(self._snapshots)[index]
        return self._snapshots[index]

    def append(self, snapshot: Snapshot) -> None:
        """Keep one more."""
        self._snapshots.append(snapshot)

    def clear(self) -> None:
        """Forget all."""
        self._snapshots.clear()

    @property
    def steps(self) -> list[int]:
        """The steps of the snapshots."""
        return [snapshot.step for snapshot in self._snapshots]

    def series(self, site: str, head: int | None, statistic: str) -> tuple[list[int], list[float]]:
        """One head over training, or one site.

        Args:
            site: the site.
            head: number of the head; for a statistic of sites ``None`` or 0, where its value stands.
            statistic: the statistic.

        Returns:
            The steps at which the head has a value, and the values.

        Raises:
            KeyError: if no snapshot holds such a site, head or statistic.
        """
        place = head if head is not None else 0 if is_per_site(statistic) else -1
        holding = [s for s in self._snapshots if site in s.heads and statistic in s.statistics]
        values = [(snapshot.step, snapshot[site, statistic]) for snapshot in holding]
        of_head = [(step, of_site[place]) for step, of_site in values if 0 <= place < len(of_site)]
        if self._snapshots and not of_head:
            last = self._snapshots[-1]
            raise KeyError(
                f"no snapshot holds {statistic!r} of head {head} of {site!r}; the last one holds "
                f"{list(last.statistics)} of the heads {dict(last.heads)}"
            )
        present = [(step, value) for step, value in of_head if value is not None]
        return [step for step, _ in present], [value for _, value in present]

    def transitions(self, statistic: str = "positional_share") -> dict[tuple[str, int], Transition | None]:
        """What `lightning_attn.find_transition` finds in each head's series of a statistic.

        Args:
            statistic: a share of position, 1 where a head attends by position and 0 where it attends by content.

        Returns:
            For each site and head that ever had the statistic, its transition, or ``None``.
        """
        series: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
        for snapshot in self._snapshots:
            for site in snapshot.sites if statistic in snapshot.statistics else ():
                for head, value in enumerate(snapshot[site, statistic]):
                    if value is not None:
                        steps, values = series.setdefault((site, head), ([], []))
                        while steps and steps[-1] > snapshot.step:  # the run went back to a checkpoint
                            steps.pop(), values.pop()
                        steps.append(snapshot.step)
                        values.append(value)
        return {place: find_transition(steps, values) for place, (steps, values) in series.items()}

    def __repr__(self) -> str:
        span = f"steps {self.steps[0]} to {self.steps[-1]}" if self._snapshots else "empty"
        return f"History({len(self)} snapshots, {span})"
