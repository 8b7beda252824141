"""The statistics of every site and head at one capture step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isnan
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_attn.capture.sites import SitePatterns
from lightning_attn.statistics.measure import Sums
from lightning_attn.statistics.registry import is_per_site, known_statistics
from lightning_attn.table import aligned

#: The statistics that have one scalar for each site.
PER_SITE = ("entropy", "max_logit", "logit_std", "sink_strength", "token_similarity")


class HeadValue(NamedTuple):
    """A value and the head it belongs to: ``None`` for a statistic of the site as a whole."""

    site: str
    head: int | None
    value: float

    @property
    def place(self) -> str:
        """Site and head, for people."""
        return self.site if self.head is None else f"{self.site} #{self.head}"


class Summary(NamedTuple):
    """A statistic over all heads that have it, or over all sites if it is one of sites."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All statistics of all sites and heads at one capture step, the same on every rank.

    A value is absent, and `None` where values are given one by one, if nothing that was captured defines it: the
    entropy of a head that never had two keys to choose from, the consensus rate of a head that looks ahead.

    Args:
        step: the optimiser step, as the loggers count it.
        heads: number of heads of each site, in the order in which the sites ran.
        statistics: names of the statistics.
        values: (statistics, heads of all sites) in float64, NaN where a value is absent. A statistic of sites stands at
            the first head of each.

    Example:
        >>> import torch
        >>> from lightning_attn import AttentionObserver
        >>> layer = torch.nn.MultiheadAttention(16, num_heads=2, batch_first=True)
        >>> observer = AttentionObserver(layer, statistics=["entropy", "max_logit"])
        >>> tokens = torch.zeros(1, 5, 16)
        >>> with observer:
        ...     output, _ = layer(tokens, tokens, tokens, need_weights=False)
        >>> snapshot = observer.snapshot()
        >>> snapshot["(root)", "entropy"]
        [1.0, 1.0]
        >>> snapshot.summary("max_logit")
        Summary(min=0.0, mean=0.0, max=0.0)
        >>> list(snapshot.select(statistics=["entropy"]).scalars())
        ['attention/entropy/min', 'attention/entropy/mean', 'attention/entropy/max', 'attention/entropy/(root)']
    """

    step: int
    heads: Mapping[str, int]
    statistics: tuple[str, ...]
    values: Tensor

    @classmethod
    def from_sums(cls, step: int, sums: Mapping[str, Sums], statistics: Sequence[str]) -> Snapshot:
        """Make a snapshot of the reduced sums of each site.

        Args:
            step: the optimiser step.
            sums: for each site the sums of every statistic.
            statistics: names of the statistics, in the order to keep.
        """
        heads = {site: found.heads for site, found in sums.items()}
        columns = [found.head_values(statistics).double().cpu() for found in sums.values()]
        empty = torch.empty(len(statistics), 0, dtype=torch.float64)
        return cls(step, heads, tuple(statistics), torch.cat([empty, *columns], dim=1))

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites, in the order in which they ran."""
        return tuple(self.heads)

    def __bool__(self) -> bool:
        return bool(self.heads)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot):
            return NotImplemented
        return (
            (self.step, dict(self.heads), self.statistics) == (other.step, dict(other.heads), other.statistics)
        ) and torch.equal(self.values.nan_to_num(torch.inf), other.values.nan_to_num(torch.inf))

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, key: tuple[str, str]) -> list[float | None]:
        """The value of every head of a site: ``snapshot[site, statistic]``; one value if it is a statistic of sites.

        Raises:
            KeyError: if the snapshot holds no such site or statistic.
        """
        site, statistic = key
        return [None if value != value else value for value in self._of(site, statistic).tolist()]

    def summary(self, statistic: str) -> Summary | None:
        """Smallest, mean and largest value over all heads of all sites, or over sites; ``None`` where none has one."""
        present = _present(self._row(statistic))
        return Summary(min(present), fsum(present) / len(present), max(present)) if present else None

    def over_heads(self, site: str, statistic: str) -> float | None:
        """One number for a site: the largest of its heads for logits and faults, their mean otherwise."""
        present = _present(self._of(site, statistic))
        if not present:
            return None
        registered = known_statistics().get(statistic)
        largest = registered is not None and registered.over_heads == "max"
        return max(present) if largest else fsum(present) / len(present)

    def lowest(self, statistic: str) -> HeadValue | None:
        """The head (or site) with the smallest value; ``None`` where none has one."""
        return self._extreme(statistic, sign=1)

    def highest(self, statistic: str) -> HeadValue | None:
        """The head (or site) with the largest value; ``None`` where none has one."""
        return self._extreme(statistic, sign=-1)

    def matrix(self, statistic: str) -> Tensor:
        """The values as (sites, most heads of a site) in float64, NaN where there is none: for drawing.

        A statistic of sites has one column.
        """
        values = [self._of(site, statistic) for site in self.heads]
        matrix = torch.full((len(values), max(map(len, values), default=0)), torch.nan, dtype=torch.float64)
        for row, of_site in zip(matrix, values, strict=True):
            row[: len(of_site)] = of_site
        return matrix

    def select(
        self, sites: SitePatterns | str | Sequence[str] | None = None, statistics: Iterable[str] | None = None
    ) -> Snapshot:
        """A snapshot of some sites and statistics; what it does not hold is left out.

        Args:
            sites: glob patterns of the sites; ``None`` for all.
            statistics: names; ``None`` for all.
        """
        if sites is not None and not isinstance(sites, SitePatterns):
            sites = SitePatterns(sites)
        heads = {site: count for site, count in self.heads.items() if sites is None or sites.match(site)}
        names = self.statistics if statistics is None else tuple(n for n in statistics if n in self.statistics)
        if heads == dict(self.heads) and names == self.statistics:
            return self
        rows = [self.statistics.index(name) for name in names]
        columns = [column for site in heads for column in range(*self._columns(site).indices(self.values.shape[1]))]
        return Snapshot(self.step, heads, names, self.values[rows][:, columns])

    def to_dict(self) -> dict[str, dict[str, list[float | None]]]:
        """The values as ``{site: {statistic: [value of each head]}}``, ready for JSON."""
        return {site: {statistic: self[site, statistic] for statistic in self.statistics} for site in self.heads}

    def scalars(self, prefix: str = "attention", per_site: bool = True) -> dict[str, float]:
        """The values that loggers get, by their tags.

        For every statistic ``<prefix>/<statistic>/min``, ``mean`` and ``max`` over all heads of all sites, or over all
        sites; for ``entropy``, ``max_logit``, ``logit_std``, ``sink_strength`` and ``token_similarity`` also
        ``<prefix>/<statistic>/<site>``, which is what `over_heads` gives. Absent values have no tag, and faults have
        one only where they are not zero.

        Args:
            prefix: what all tags begin with.
            per_site: whether sites have scalars of their own.
        """
        tagged: dict[str, float] = {}
        known = known_statistics()
        for statistic in self.statistics:
            summary = self.summary(statistic)
            if summary is None or (known[statistic].is_fault and summary.max == 0):
                continue
            tagged |= {f"{prefix}/{statistic}/{name}": value for name, value in summary._asdict().items()}
            if per_site and statistic in PER_SITE:
                values = {site: self.over_heads(site, statistic) for site in self.sites}
                tagged |= {f"{prefix}/{statistic}/{site}": value for site, value in values.items() if value is not None}
        return tagged

    def table(self) -> str:
        """The most extreme heads of every statistic, for printing."""
        return _table(self)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        heads = sum(self.heads.values())
        return f"Snapshot(step={self.step}, {len(self.heads)} sites, {heads} heads, statistics={list(self.statistics)})"

    def _row(self, statistic: str) -> Tensor:
        if statistic not in self.statistics:
            raise KeyError(f"{statistic!r} is not in this snapshot, which holds {list(self.statistics)}")
        return self.values[self.statistics.index(statistic)]

    def _columns(self, site: str) -> slice:
        if site not in self.heads:
            raise KeyError(f"{site!r} is not in this snapshot, which holds the sites {list(self.heads)}")
        start = 0
        for name, heads in self.heads.items():
            if name == site:
                return slice(start, start + heads)
            start += heads
        raise AssertionError

    def _of(self, site: str, statistic: str) -> Tensor:
        values = self._row(statistic)[self._columns(site)]
        return values[:1] if is_per_site(statistic) else values

    def _extreme(self, statistic: str, sign: int) -> HeadValue | None:
        values = self._row(statistic)
        if bool(values.isnan().all()):
            return None
        column = int((values * sign).nan_to_num(torch.inf).argmin())
        value = float(values[column])
        for site, heads in self.heads.items():
            if column < heads:
                return HeadValue(site, None if is_per_site(statistic) else column, value)
            column -= heads
        raise AssertionError


def _present(values: Tensor) -> list[float]:
    """The values that are there; for so few, plain numbers are faster than tensors."""
    return [value for value in values.tolist() if not isnan(value)]


def _table(snapshot: Snapshot) -> str:
    title = f"Attention at step {snapshot.step}: {len(snapshot.heads)} sites, {sum(snapshot.heads.values())} heads"
    rows = [("statistic", "lowest", "in head", "mean", "highest", "in head")]
    for statistic in snapshot.statistics:
        summary, lowest, highest = snapshot.summary(statistic), snapshot.lowest(statistic), snapshot.highest(statistic)
        if summary is None or lowest is None or highest is None:
            rows.append((statistic, "–", "", "–", "–", ""))
            continue
        rows.append(
            (
                statistic,
                f"{lowest.value:.4g}",
                lowest.place,
                f"{summary.mean:.4g}",
                f"{highest.value:.4g}",
                highest.place,
            )
        )
    return "\n".join([title, *aligned(rows, "<><>><")])
