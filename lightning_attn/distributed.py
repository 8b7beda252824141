"""Joining the sums of all ranks, in two collectives of a fixed shape.

Every rank packs what it found into two tensors that are laid out alike everywhere: one whose entries add, one of which
the largest entries count. The layout is a list of sites and their numbers of heads. A rank that meets a site it does
not know raises a flag in the second tensor; all ranks see it, exchange what they know, and pack again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_attn.capture.report import AttentionWarning
from lightning_attn.statistics.measure import Sums, nothing
from lightning_attn.statistics.statistic import Maximum, Ratio, Statistic, wide


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
            self._heads.update(_heads(found))
        signals, maxima = self._join_maxima(found, statistics, quiet, device)
        if signals.unknown_site:
            self._exchange_layouts(found, quiet)
            signals, maxima = self._join_maxima(found, statistics, quiet, device)
        sums = self._join_sums(found, statistics, device)
        quiet.update(signals.failed)
        joined = _unpack(sums, maxima, self._heads, statistics)
        return {site: joined[site] for site in signals.ran if site not in quiet}

    def _join_maxima(
        self, found: dict[str, Sums], statistics: Sequence[type[Statistic]], quiet: set[str], device: torch.device
    ) -> tuple[_Signals, Tensor]:
        """What any rank has to say, and the largest entries of all ranks."""
        sites = list(self._heads)
        unknown = any(self._heads.get(site) != heads for site, heads in _heads(found).items())
        says = [unknown, *(site in quiet for site in sites), *(site in found for site in sites)]
        maxima = _pack(found, self._heads, [s for s in statistics if s.joined_by == "max"], device)
        packed = torch.cat([torch.tensor(says).to(maxima), maxima])
        if world_size() > 1:
            dist.all_reduce(packed, op=dist.ReduceOp.MAX)
        said, maxima = packed.cpu().split([len(says), len(maxima)])
        unknown, *flags = said.bool().tolist()
        failed, ran = flags[: len(sites)], flags[len(sites) :]
        return _Signals(unknown, set(compress(sites, failed)), list(compress(sites, ran))), maxima

    def _join_sums(self, found: dict[str, Sums], statistics: Sequence[type[Statistic]], device: torch.device) -> Tensor:
        packed = _pack(found, self._heads, [s for s in statistics if s.joined_by == "mean"], device)
        if world_size() > 1:
            dist.all_reduce(packed, op=dist.ReduceOp.SUM)
        return packed.cpu()

    def _exchange_layouts(self, found: dict[str, Sums], quiet: set[str]) -> None:
        """Agree on the sites and their numbers of heads; a site on which ranks disagree is given up by all."""
        layouts: list[dict[str, int]] = [{} for _ in range(world_size())]
        dist.all_gather_object(layouts, _heads(found))
        agreed = dict(self._heads)
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


def _heads(found: dict[str, Sums]) -> dict[str, int]:
    return {site: next(iter(sums.values()))[0].shape[0] for site, sums in found.items()}


def _pack(
    found: dict[str, Sums], heads: dict[str, int], statistics: Iterable[type[Statistic]], device: torch.device
) -> Tensor:
    """The sums of some statistics in one tensor, laid out by site, statistic and head."""
    parts = [torch.empty(0, dtype=torch.float64)]
    for site, count in heads.items():
        for statistic in statistics:
            sums = found.get(site, {}).get(statistic.name)
            if sums is None or sums[0].shape[0] != count:
                sums = nothing(statistic, count, device)
            parts.extend(sums)
    return torch.cat([part.to(device, wide(device)) for part in parts])


def _unpack(
    sums: Tensor, maxima: Tensor, heads: dict[str, int], statistics: Sequence[type[Statistic]]
) -> dict[str, Sums]:
    """The reverse of `_pack` for both tensors."""
    unpacked: dict[str, Sums] = {}
    sums_left, maxima_left = (
        iter(_split(sums, heads, statistics, "mean")),
        iter(_split(maxima, heads, statistics, "max")),
    )
    for site in heads:
        unpacked[site] = {
            statistic.name: Maximum(next(maxima_left))
            if statistic.joined_by == "max"
            else Ratio(next(sums_left), next(sums_left))
            for statistic in statistics
        }
    return unpacked


def _split(
    packed: Tensor, heads: dict[str, int], statistics: Sequence[type[Statistic]], joined_by: str
) -> tuple[Tensor, ...]:
    tensors_each = (2 if joined_by == "mean" else 1) * sum(s.joined_by == joined_by for s in statistics)
    return torch.split(packed, [count for count in heads.values() for _ in range(tensors_each)])
