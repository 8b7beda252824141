"""How the sums of all ranks lie in tensors of one shape, whatever each rank found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_attn.statistics.measure import Sums
from lightning_attn.statistics.statistic import Statistic, wide


@dataclass(frozen=True)
class Layout:
    """The sites, statistics and numbers that all ranks know of; tensors of ranks with one layout have one shape.

    It does not hang on what is asked for in one capture: a statistic that was asked for once keeps its place, so that
    ranks that ask for different ones can still tell each other.

    Args:
        heads: the sites in the order in which they run, and their numbers of heads.
        statistics: the statistics.
        numbers: how many numbers ranks agree on beside.
    """

    heads: Mapping[str, int] = field(default_factory=dict)
    statistics: tuple[type[Statistic], ...] = ()
    numbers: int = 0

    @property
    def sites(self) -> list[str]:
        """The sites in order."""
        return list(self.heads)

    def has_room(self, heads: Mapping[str, int], statistics: Sequence[type[Statistic]], numbers: int) -> bool:
        """Whether what a rank found has its place."""
        if numbers > self.numbers or any(self.heads.get(site) != count for site, count in heads.items()):
            return False
        return not heads or set(statistics) <= set(self.statistics)

    def joined(self, heads: Mapping[str, int], statistics: Sequence[type[Statistic]], numbers: int) -> Layout:
        """The layout with room for more."""
        return Layout(
            _in_order(self.heads, heads),
            tuple(dict.fromkeys((*self.statistics, *statistics))),
            max(self.numbers, numbers),
        )

    def packed(
        self, found: Mapping[str, Sums], statistics: Sequence[type[Statistic]], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The sums of every site as two flat tensors: of those that add, and of the maxima.

        Args:
            found: the sums of some sites. Sites with other numbers of heads, or none, are as if nothing was seen.
            statistics: the statistics of these sums.
            device: where the tensors are.
        """
        laid_out = [self._laid_out(found.get(site), heads, statistics, device) for site, heads in self.heads.items()]
        empty = torch.zeros(0, dtype=wide(device), device=device)  # lest there be none
        return (
            torch.cat([empty, *(sums.ratios_S2H.flatten().to(device) for sums in laid_out)]),
            torch.cat([empty, *(sums.maxima_XH.flatten().to(device) for sums in laid_out)]),
        )

    def unpacked(self, ratios: Tensor, maxima: Tensor, statistics: Sequence[type[Statistic]]) -> dict[str, Sums]:
        """The sums of some statistics at every site, from the tensors of `packed`."""
        rows_of_means, rows_of_maxima = self._rows(statistics)
        maxima_count = sum(_is_maximum(statistic) for statistic in self.statistics)
        means_count = len(self.statistics) - maxima_count
        heads = list(self.heads.values())
        of_ratios = ratios.split([2 * means_count * count for count in heads])
        of_maxima = maxima.split([maxima_count * count for count in heads])
        return {
            site: Sums(
                statistics,
                ratios_.view(means_count, 2, count)[rows_of_means],
                maxima_.view(maxima_count, count)[rows_of_maxima],
            )
            for site, count, ratios_, maxima_ in zip(self.heads, heads, of_ratios, of_maxima, strict=True)
        }

    def _laid_out(
        self, found: Sums | None, heads: int, statistics: Sequence[type[Statistic]], device: torch.device
    ) -> Sums:
        """The sums of a site, with places for all statistics."""
        is_known = found is not None and found.heads == heads and set(statistics) <= set(self.statistics)
        if found is not None and is_known and tuple(statistics) == self.statistics:
            return found
        sums = Sums.nothing(self.statistics, heads, device)
        if found is not None and is_known:
            means, maxima = self._rows(statistics)
            sums.ratios_S2H[means] = found.ratios_S2H.to(device)
            sums.maxima_XH[maxima] = found.maxima_XH.to(device)
        return sums

    def _rows(self, statistics: Sequence[type[Statistic]]) -> tuple[list[int], list[int]]:
        """The places of some statistics among those that are means, and of the others among the maxima."""
        maxima = [statistic for statistic in self.statistics if _is_maximum(statistic)]
        means = [statistic for statistic in self.statistics if not _is_maximum(statistic)]
        return (
            [means.index(statistic) for statistic in statistics if statistic in means],
            [maxima.index(statistic) for statistic in statistics if statistic in maxima],
        )


def _is_maximum(statistic: type[Statistic]) -> bool:
    return statistic.joined_by == "max"


def _in_order(known: Mapping[str, int], met: Mapping[str, int]) -> dict[str, int]:
    """The heads of two layouts, in the order in which sites run: one that was skipped before is put where it ran.

    Layouts without a common site are those of different parts of a model, as the stages of a pipeline are.
    """
    order = list(known)
    place = 0 if known.keys() & met.keys() else len(order)
    for site in met:
        if site not in known:
            order.insert(place, site)
        place = order.index(site) + 1
    together = {**known, **met}
    return {site: together[site] for site in order}
