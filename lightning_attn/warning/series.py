"""One statistic over training, at every place that has it.

Shape suffixes: T snapshots, P places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    def averaged(self, scope: Scope) -> Series:
        """The mean over the heads of each site, or of the model; of those that have a value."""
        if scope == "head":
            return self
        groups: dict[str | None, list[int]] = {}
        for column, place in enumerate(self.places):
            groups.setdefault(place.site if scope == "site" else None, []).append(column)
        means = [_mean_T(self.values_TP[:, columns]) for columns in groups.values()]
        values_TP = np.stack(means, axis=1) if means else np.empty((len(self.steps_T), 0))
        return Series(self.steps_T, values_TP, [Place(site, None) for site in groups])


class Record:
    """The newest snapshots, as rules want to see them.

    Args:
        snapshots: oldest first, their steps increasing.

    Example:
        >>> import torch
        >>> from lightning_attn import Snapshot
        >>> values = torch.tensor([[0.9, 0.8]], dtype=torch.float64)
        >>> record = Record([Snapshot(10, {"attention": 2}, ("entropy",), values)])
        >>> record.series("entropy").places
        [Place(site='attention', head=0), Place(site='attention', head=1)]
    """

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self.snapshots = snapshots
        self._known: dict[str, Series] = {}

    @property
    def step(self) -> int:
        """The step of the last snapshot."""
        return self.snapshots[-1].step

    def has(self, statistic: str) -> bool:
        """Whether the last snapshot holds the statistic."""
        return statistic in self.snapshots[-1].statistics

    def series(self, statistic: str) -> Series:
        """A statistic at every head of the last snapshot, or every site if it is one of sites."""
        if statistic not in self._known:
            self._known[statistic] = self._series(statistic)
        return self._known[statistic]

    def _series(self, statistic: str) -> Series:
        newest = self.snapshots[-1]
        per_site = is_per_site(statistic)
        places = _places(newest.heads, per_site)
        rows = [_row(snapshot, statistic, newest.heads, per_site) for snapshot in self.snapshots]
        steps_T = np.array([snapshot.step for snapshot in self.snapshots], dtype=np.float64)
        return Series(steps_T, np.stack(rows), places)


def _places(heads: Mapping[str, int], per_site: bool) -> list[Place]:
    if per_site:
        return [Place(site, None) for site in heads]
    return [Place(site, head) for site, count in heads.items() for head in range(count)]


def _row(snapshot: Snapshot, statistic: str, heads: Mapping[str, int], per_site: bool) -> Array:
    """The values of a snapshot, at the places of another one."""
    if statistic not in snapshot.statistics:
        return np.full(len(heads) if per_site else sum(heads.values()), np.nan)
    values: Array = snapshot.values[snapshot.statistics.index(statistic)].numpy()
    if list(snapshot.heads.items()) != list(heads.items()):
        values = _rearranged(values, snapshot.heads, heads)
    if per_site:
        starts = np.cumsum([0, *heads.values()])[:-1]
        values = values[starts]
    return values


def _rearranged(values: Array, have: Mapping[str, int], want: Mapping[str, int]) -> Array:
    ends = np.cumsum(list(have.values()))
    of_site = {site: values[end - count : end] for (site, count), end in zip(have.items(), ends, strict=True)}
    parts = [
        of_site[site] if site in of_site and len(of_site[site]) == count else np.full(count, np.nan)
        for site, count in want.items()
    ]
    return np.concatenate([np.empty(0), *parts])


def _mean_T(values_TP: Array) -> Array:
    present = ~np.isnan(values_TP)
    count_T = present.sum(axis=1)
    sum_T = np.where(present, values_TP, 0).sum(axis=1)
    return np.where(count_T > 0, sum_T / np.maximum(count_T, 1), np.nan)
