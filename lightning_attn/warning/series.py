"""One statistic over training, at every place that has it.

Shape suffixes: T snapshots, P places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_attn.snapshot import Snapshot
from lightning_attn.statistics.registry import is_per_site

Array = npt.NDArray[np.float64]

#: What is looked at as one: each head, all heads of each site, or all heads of the model.
Scope = Literal["head", "site", "model"]


class Place(NamedTuple):
    """Where a series was seen: a head, a site as a whole, or all sites."""

    site: str | None
    head: int | None


@dataclass(frozen=True, eq=False)
class Series:
    """A statistic at several places over training.

    Args:
        steps_T: the steps of the snapshots, increasing.
        values_TP: the value at each step and place, NaN where there is none.
        places: the places.
    """

    steps_T: Array
    values_TP: Array
    places: Sequence[Place]

    @property
    def last_P(self) -> Array:
        """The newest values."""
        last_P: Array = self.values_TP[-1]
        return last_P

    def last(self, snapshots: int) -> Series:
        """Only the last so many snapshots."""
        return Series(self.steps_T[-snapshots:], self.values_TP[-snapshots:], self.places)

    def groups(self, scope: Scope) -> dict[Place, list[int]]:
        """The columns of the places that are looked at as one."""
        if scope == "model":
            return {Place(None, None): list(range(len(self.places)))} if self.places else {}
        groups: dict[Place, list[int]] = {}
        for column, place in enumerate(self.places):
            groups.setdefault(place if scope == "head" else Place(place.site, None), []).append(column)
        return groups

    def averaged(self, scope: Scope) -> Series:
        """The mean over the heads of each site, or of the model; of those that have a value."""
        if scope == "head":
            return self
        groups = self.groups(scope)
        means = [_mean_T(self.values_TP[:, columns]) for columns in groups.values()]
        values_TP = np.stack(means, axis=1) if means else np.empty((len(self.steps_T), 0))
        return Series(self.steps_T, values_TP, list(groups))

    def without(self, start_P: Array, least: float) -> Series:
        """Values above twice what was there at the start: what begins large, and varies, has not grown by that.

        Args:
            start_P: what was there, NaN where nothing is known.
            least: what is less is left alone.
        """
        is_large_P = np.isfinite(start_P) & (start_P >= least)
        if not is_large_P.any():
            return self
        with np.errstate(over="ignore", invalid="ignore"):
            grown_TP = np.maximum(self.values_TP - 2 * start_P, 0.0)
        return Series(self.steps_T, np.where(is_large_P, grown_TP, self.values_TP), self.places)


class Record:
    """The newest snapshots, as rules want to see them.

    Args:
        snapshots: oldest first, their steps increasing; at least one.
        first: the first of the run; ``None`` where that is not known.

    Example:
        >>> import torch
        >>> from lightning_attn import Snapshot
        >>> values = torch.tensor([[0.9, 0.8]], dtype=torch.float64)
        >>> record = Record([Snapshot(10, {"attention": 2}, ("entropy",), values)])
        >>> record.series("entropy").places
        (Place(site='attention', head=0), Place(site='attention', head=1))
    """

    def __init__(self, snapshots: Sequence[Snapshot], first: Snapshot | None = None) -> None:
        self.snapshots = tuple(snapshots)
        self.first = first
        self._series: dict[str, Series] = {}

    @property
    def step(self) -> int:
        """The step of the last snapshot."""
        return self.snapshots[-1].step

    def has(self, statistic: str) -> bool:
        """Whether the last snapshot holds the statistic."""
        return statistic in self.snapshots[-1].statistics

    def has_value(self, statistic: str, place: Place) -> bool:
        """Whether the last snapshot has a value of the statistic there: of the head, or of any head of what it is."""
        if not self.has(statistic):
            return False
        series = self.series(statistic)
        if place.site is None:
            return not np.isnan(series.last_P).all()
        heads = self.snapshots[-1].heads
        columns = _columns(tuple(heads.items()), is_per_site(statistic)).get(place.site, range(0))
        if place.head is not None:
            columns = columns[place.head : place.head + 1]
        return any(value == value for value in series.last_P[columns.start : columns.stop].tolist())

    def series(self, statistic: str) -> Series:
        """A statistic at every head of the last snapshot, or every site if it is one of sites; not to be written to."""
        if statistic not in self._series:
            self._series[statistic] = self._gathered(statistic)
        return self._series[statistic]

    def at_first(self, statistic: str) -> Array:
        """What a statistic was at each place in the first snapshot of the run; NaN where that is not known."""
        heads, per_site = self.snapshots[-1].heads, is_per_site(statistic)
        if self.first is None:
            return np.full(len(heads) if per_site else sum(heads.values()), np.nan)
        return _row(self.first, statistic, heads, per_site)

    def _gathered(self, statistic: str) -> Series:
        heads = self.snapshots[-1].heads
        per_site = is_per_site(statistic)
        steps_T = np.array([snapshot.step for snapshot in self.snapshots], dtype=np.float64)
        rows = [_row(snapshot, statistic, heads, per_site) for snapshot in self.snapshots]
        values_TP = np.stack(rows) if len(rows) > 1 else rows[0][None]
        for array in (steps_T, values_TP):  # rules share them
            array.flags.writeable = False
        return Series(steps_T, values_TP, _places(tuple(heads.items()), per_site))


@lru_cache(maxsize=8)
def _places(heads: tuple[tuple[str, int], ...], per_site: bool) -> tuple[Place, ...]:
    """The places of a statistic, in order; kept, since snapshots of thousands of heads mostly have the same."""
    if per_site:
        return tuple(Place(site, None) for site, _ in heads)
    return tuple(Place(site, head) for site, count in heads for head in range(count))


@lru_cache(maxsize=8)
def _columns(heads: tuple[tuple[str, int], ...], per_site: bool) -> dict[str, range]:
    """Where the places of each site are."""
    counts = [1 if per_site else count for _, count in heads]
    return {
        site: range(end - count, end) for (site, _), count, end in zip(heads, counts, accumulate(counts), strict=True)
    }


def _row(snapshot: Snapshot, statistic: str, heads: Mapping[str, int], per_site: bool) -> Array:
    """The values of a snapshot, at the places of another one."""
    if statistic not in snapshot.statistics:
        return np.full(len(heads) if per_site else sum(heads.values()), np.nan)
    values: Array = snapshot.values.numpy()[snapshot.statistics.index(statistic)]
    if snapshot.heads is not heads and list(snapshot.heads.items()) != list(heads.items()):
        values = _rearranged(values, snapshot.heads, heads)
    if per_site:
        starts = np.cumsum([0, *heads.values()])[:-1]
        values = values[starts]
    return values


def _rearranged(values: Array, have: Mapping[str, int], want: Mapping[str, int]) -> Array:
    """Values in the order of other sites; NaN at those that had other heads, or were not there."""
    ends = accumulate(have.values())
    of_site = {site: values[end - count : end] for (site, count), end in zip(have.items(), ends, strict=True)}
    parts = [of_site[site] if have.get(site) == count else np.full(count, np.nan) for site, count in want.items()]
    return np.concatenate([np.empty(0), *parts])


def _mean_T(values_TP: Array) -> Array:
    present = ~np.isnan(values_TP)
    count_T = present.sum(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite values of opposite signs have no mean
        sum_T = np.where(present, values_TP, 0).sum(axis=1)
    return np.where(count_T > 0, sum_T / np.maximum(count_T, 1), np.nan)
