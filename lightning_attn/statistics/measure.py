"""From one attention call to the sums of every statistic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall
from lightning_attn.statistics.rows.row_pass import RowPass, passes
from lightning_attn.statistics.statistic import Maximum, Ratio, RowMean, RowStatistic, RowSums, Statistic, wide


class Sums(Mapping[str, Ratio | Maximum]):
    """The sums of some statistics over sequences and calls, by name, with one entry per head.

    The entry of a statistic of sites is at the first head, and nothing at the others.

    Shape suffixes: S statistics that are means, X statistics that are maxima, H heads; 2: numerator and denominator.

    Args:
        statistics: which statistics, in the order of the tensors.
        ratios_S2H: the sums of the means.
        maxima_XH: the maxima.
    """

    def __init__(self, statistics: Sequence[type[Statistic]], ratios_S2H: Tensor, maxima_XH: Tensor) -> None:
        self.statistics = tuple(statistics)
        self.ratios_S2H = ratios_S2H
        self.maxima_XH = maxima_XH
        self._means = [statistic.name for statistic in statistics if statistic.joined_by == "mean"]
        self._maxima = [statistic.name for statistic in statistics if statistic.joined_by == "max"]

    @classmethod
    def nothing(cls, statistics: Sequence[type[Statistic]], heads: int, device: torch.device) -> Sums:
        """The sums before anything was seen."""
        maxima = sum(statistic.joined_by == "max" for statistic in statistics)
        kind = wide(device)
        return cls(
            statistics,
            torch.zeros(len(statistics) - maxima, 2, heads, dtype=kind, device=device),
            torch.full((maxima, heads), -torch.inf, dtype=kind, device=device),
        )

    @property
    def heads(self) -> int:
        """Number of heads, H."""
        return self.ratios_S2H.shape[-1]

    def __getitem__(self, name: str) -> Ratio | Maximum:
        if name in self._maxima:
            return Maximum(self.maxima_XH[self._maxima.index(name)])
        if name not in self._means:
            raise KeyError(name)
        return Ratio(*self.ratios_S2H[self._means.index(name)])

    def __iter__(self) -> Iterator[str]:
        return (statistic.name for statistic in self.statistics)

    def __len__(self) -> int:
        return len(self.statistics)

    def joined(self, other: Sums) -> Sums:
        """The sums of both, which are of the same statistics and heads."""
        return Sums(
            self.statistics,
            self.ratios_S2H + other.ratios_S2H,
            torch.maximum(self.maxima_XH, other.maxima_XH),
        )

    def among(self, statistics: Sequence[type[Statistic]]) -> Sums:
        """The sums of more statistics, of which those that are not among these saw nothing."""
        sums = Sums.nothing(statistics, self.heads, self.ratios_S2H.device)
        for name, found in self.items():
            if isinstance(found, Maximum):
                sums.maxima_XH[sums._maxima.index(name)] = found.value
            else:
                sums.ratios_S2H[sums._means.index(name)] = torch.stack(list(found))
        return sums

    def among_heads(self, first: int, heads: int) -> Sums:
        """The sums of more heads, of which these are some and the others saw nothing.

        Args:
            first: the number of the first of these among all.
            heads: how many there are in all.
        """
        sums = Sums.nothing(self.statistics, heads, self.ratios_S2H.device)
        of_sites = {statistic.name for statistic in self.statistics if statistic.per == "site"}
        for mine, theirs, names in (
            (self.ratios_S2H, sums.ratios_S2H, self._means),
            (self.maxima_XH, sums.maxima_XH, self._maxima),
        ):
            theirs[..., first : first + self.heads] = mine
            rows = [name in of_sites for name in names]
            theirs[rows] = theirs[rows].roll(-first, -1)  # these stand at the first head of all
        return sums

    @classmethod
    def side_by_side(cls, parts: Sequence[Sums]) -> Sums:
        """The sums of several heads, or groups of them, as those of one site."""
        ratios_S2H = torch.cat([part.ratios_S2H for part in parts], dim=-1)
        return cls(parts[0].statistics, ratios_S2H, torch.cat([part.maxima_XH for part in parts], dim=-1))

    def divided(self, heads: Sequence[int]) -> list[Sums]:
        """The sums of sites whose heads were measured as those of one.

        Args:
            heads: how many heads each of them has.
        """
        of_ratios, of_maxima = self.ratios_S2H.split(list(heads), dim=-1), self.maxima_XH.split(list(heads), dim=-1)
        return [Sums(self.statistics, *part) for part in zip(of_ratios, of_maxima, strict=True)]

    def add(self, found: Mapping[str, Ratio | Maximum], heads: slice) -> None:
        """Add what was found, of shape (B, H), for some heads."""
        ratios = {name: sums for name, sums in found.items() if isinstance(sums, Ratio)}
        if ratios:
            numerators, denominators = zip(*ratios.values(), strict=True)
            self.add_means(list(ratios), Ratio(torch.stack(numerators), torch.stack(denominators)), heads)
        for name, sums in found.items():
            if isinstance(sums, Maximum):
                known_H = self.maxima_XH[self._maxima.index(name), heads]
                torch.maximum(known_H, sums.value.amax(0).to(known_H.dtype), out=known_H)

    def add_means(self, names: Sequence[str], ratios_SBH: Ratio, heads: slice) -> None:
        """Add what was found of several means at once, of shape (S, B, H), for some heads."""
        rows = [self._means.index(name) for name in names]
        self.ratios_S2H[rows, 0, heads] += ratios_SBH.numerator.sum(1)
        self.ratios_S2H[rows, 1, heads] += ratios_SBH.denominator.sum(1)

    def head_values(self, names: Sequence[str]) -> Tensor:
        """The value of some statistics for every head, NaN where it is absent, as (names, H)."""
        values_SH = torch.cat([Ratio(*self.ratios_S2H.unbind(1)).or_nan, Maximum(self.maxima_XH).or_nan])
        order = [*self._means, *self._maxima]
        return values_SH[[order.index(name) for name in names]]


def measure(
    call: AttentionCall,
    statistics: Sequence[type[Statistic]],
    *,
    spectral_sequences: int | None = None,
    block_bytes: int | None = None,
) -> Sums:
    """Compute statistics of one call without writing its attention matrix down.

    Args:
        call: the call; no gradient must be recorded while this runs.
        statistics: which ones.
        spectral_sequences: how many sequences the spectral statistics are taken of; ``None`` for all.
        block_bytes: see `lightning_attn.statistics.rows.row_pass.passes`.

    Returns:
        Sums over sequences.
    """
    sums = Sums.nothing(statistics, call.heads, call.query.device)
    if 0 in (call.sequences, call.queries, call.keys):
        return sums
    of_rows = [statistic for statistic in statistics if issubclass(statistic, RowStatistic)]
    one_walk = [statistic for statistic in of_rows if not statistic.is_spectral]
    together = any(statistic.compares_sequences for statistic in one_walk)
    _add_passes(sums, one_walk, passes(call, block_bytes, all_sequences=together))
    spectral = [statistic for statistic in of_rows if statistic.is_spectral]
    sampled = call.select(slice(spectral_sequences))
    _add_passes(sums, spectral, passes(sampled, block_bytes, whole_matrices=True))
    return sums


def _add_passes(sums: Sums, statistics: Sequence[type[RowStatistic]], row_passes: Iterable[RowPass]) -> None:
    if not statistics:
        return
    for row_pass in row_passes:
        measurements = [statistic(row_pass) for statistic in statistics]
        means = [measurement for measurement in measurements if isinstance(measurement, RowMean)]
        others = [measurement for measurement in measurements if not isinstance(measurement, RowMean)]
        row_sums = RowSums(means)
        for rows in row_pass.blocks():
            if means:
                row_sums.add(rows)
            for measurement in others:
                measurement.add(rows)
        heads = slice(row_pass.first_head, row_pass.first_head + row_pass.call.heads)
        if means:
            sums.add_means([mean.name for mean in means], row_sums.result(), heads)
        sums.add({measurement.name: measurement.result() for measurement in others}, heads)
