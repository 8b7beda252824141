"""Joining the sums of all ranks, in two collectives of a fixed shape.

Every rank packs what it found into two tensors that are laid out alike everywhere: one whose entries add, one of which
the largest entries count. The layout is a list of sites and their numbers of heads. A rank that meets a site it does
not know raises a flag in the second tensor; all ranks see it, exchange what they know, and pack again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_attn.capture.report import AttentionWarning
from lightning_attn.statistics.measure import Sums
from lightning_attn.statistics.statistic import Statistic


def world_size() -> int:
    """Number of processes that train together; 1 where `torch.distributed` is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_rank_zero() -> bool:
    """Whether this process is the one that speaks for all."""
    return world_size() == 1 or dist.get_rank() == 0


class _Signals(NamedTuple):
    unknown_site: bool
    failed: set[str]
    ran: list[str]


class RankReduction:
    """Joins the sums of all ranks and remembers the layout from capture to capture.

    In the steady state a capture costs one ``all_reduce(MAX)`` and one ``all_reduce(SUM)``, whatever the number of
    sites, heads and statistics; a new site costs one exchange of names more. In a single process it costs none.
    """

    def __init__(self) -> None:
        self._heads: dict[str, int] = {}
        #: Numbers to agree on, as many on every rank: the next call replaces each by the largest of all ranks.
        self.numbers: list[float] = []

    def __call__(
        self,
        found: dict[str, Sums],
        statistics: Sequence[type[Statistic]],
        quiet: set[str],
        device: torch.device,
    ) -> dict[str, Sums]:
        """Join the sums of all ranks. Every rank calls this, also one that found nothing.

        Args:
            found: this rank's sums of each site.
            statistics: the statistics, the same on every rank.
            quiet: sites that failed on this rank; those that failed on another are added.
            device: where the collectives run.

        Returns:
            The joined sums of each site that ran on some rank, on the CPU.
        """
        if world_size() == 1:
            self._heads = _merged(self._heads, _heads(found))
        signals, maxima = self._join_maxima(found, statistics, quiet, device)
        if signals.unknown_site:
            self._exchange_layouts(found, quiet)
            signals, maxima = self._join_maxima(found, statistics, quiet, device)
        ratios = self._join_ratios(found, statistics, device)
        quiet.update(signals.failed)
        joined = self._unpack(ratios, maxima, statistics)
        return {site: joined[site] for site in signals.ran if site not in quiet}

    def _join_maxima(
        self, found: dict[str, Sums], statistics: Sequence[type[Statistic]], quiet: set[str], device: torch.device
    ) -> tuple[_Signals, Tensor]:
        """What any rank has to say, and the largest entries of all ranks."""
        sites = list(self._heads)
        unknown = any(self._heads.get(site) != heads for site, heads in _heads(found).items())
        says = [unknown, *(site in quiet for site in sites), *(site in found for site in sites)]
        maxima = torch.cat([sums.maxima_XH.flatten() for sums in self._laid_out(found, statistics, device)])
        packed = torch.cat([torch.tensor([*says, *self.numbers], dtype=maxima.dtype).to(maxima.device), maxima])
        if world_size() > 1:
            dist.all_reduce(packed, op=dist.ReduceOp.MAX)
        said, numbers, maxima = packed.cpu().split([len(says), len(self.numbers), len(maxima)])
        self.numbers = numbers.tolist()
        unknown, *flags = said.bool().tolist()
        failed, ran = flags[: len(sites)], flags[len(sites) :]
        return _Signals(unknown, set(compress(sites, failed)), list(compress(sites, ran))), maxima

    def _join_ratios(
        self, found: dict[str, Sums], statistics: Sequence[type[Statistic]], device: torch.device
    ) -> Tensor:
        packed = torch.cat([sums.ratios_S2H.flatten() for sums in self._laid_out(found, statistics, device)])
        if world_size() > 1:
            dist.all_reduce(packed, op=dist.ReduceOp.SUM)
        return packed.cpu()

    def _laid_out(
        self, found: dict[str, Sums], statistics: Sequence[type[Statistic]], device: torch.device
    ) -> Iterator[Sums]:
        """The sums of every known site, nothing where this rank has none; and an empty one, lest there be none."""
        yield Sums.nothing(statistics, 0, device)
        for site, heads in self._heads.items():
            sums = found.get(site)
            if sums is None or sums.heads != heads:
                sums = Sums.nothing(statistics, heads, device)
            yield Sums(statistics, sums.ratios_S2H.to(device), sums.maxima_XH.to(device))

    def _unpack(self, ratios: Tensor, maxima: Tensor, statistics: Sequence[type[Statistic]]) -> dict[str, Sums]:
        """The sums of every known site, from the order in which `_laid_out` has them."""
        maxima_count = sum(statistic.joined_by == "max" for statistic in statistics)
        means_count = len(statistics) - maxima_count
        heads = list(self._heads.values())
        of_ratios = torch.split(ratios, [2 * means_count * count for count in heads])
        of_maxima = torch.split(maxima, [maxima_count * count for count in heads])
        return {
            site: Sums(statistics, ratios_.view(means_count, 2, count), maxima_.view(maxima_count, count))
            for site, count, ratios_, maxima_ in zip(self._heads, heads, of_ratios, of_maxima, strict=True)
        }

    def _exchange_layouts(self, found: dict[str, Sums], quiet: set[str]) -> None:
        """Agree on the sites and their numbers of heads; a site on which ranks disagree is given up by all."""
        layouts: list[dict[str, int]] = [{} for _ in range(world_size())]
        dist.all_gather_object(layouts, _heads(found))
        agreed = self._heads
        for layout in layouts:
            agreed = _merged(agreed, layout)
        for site in dict.fromkeys(site for layout in layouts for site in layout):
            counts = sorted({layout[site] for layout in layouts if site in layout})
            agreed[site] = counts[-1]
            if len(counts) > 1 and site not in quiet:
                quiet.add(site)
                warnings.warn(
                    f"Ranks count {' and '.join(map(str, counts))} heads at {site!r}; it is not watched.",
                    AttentionWarning,
                    stacklevel=4,
                )
        self._heads = agreed


def _merged(known: dict[str, int], met: dict[str, int]) -> dict[str, int]:
    """The heads of two layouts, in the order in which sites run: one that was skipped before is put where it ran.

    Layouts without a common site are those of different parts of a model, as the stages of a pipeline are.
    """
    order = list(known)
    place = 0 if known.keys() & met.keys() else len(order)
    for site in met:
        if site not in known:
            order.insert(place, site)
        place = order.index(site) + 1
    together = known | met
    return {site: together[site] for site in order}


def _heads(found: dict[str, Sums]) -> dict[str, int]:
    return {site: sums.heads for site, sums in found.items()}
