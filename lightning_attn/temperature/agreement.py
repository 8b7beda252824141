"""What ranks have found of the same sites, made one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_attn.joined_ranks import JoinedRanks, WhoJoins


@dataclass(frozen=True)
class Finding:
    """What was found of a site.

    Args:
        projection: what makes its queries, in plain values; ``None`` where that was not found.
        bias_std: see `Proven`.
        reason: why it was not found.
        is_for_later: whether it may be found another time.
        is_soft_capped: see `Proven`.
        largest_bias: see `Proven`.
    """

    projection: dict[str, Any] | None = None
    bias_std: Tensor = field(default_factory=lambda: torch.zeros(0))
    reason: str = ""
    is_for_later: bool = False
    is_soft_capped: bool = False
    largest_bias: Tensor = field(default_factory=lambda: torch.zeros(0))


def agreed(mine: Mapping[str, Finding], process_group: WhoJoins) -> dict[str, Finding]:
    """What all ranks have found together, the same on each; every rank must come.

    Args:
        mine: what this rank has found.
        process_group: the ranks; see `JoinedRanks`.
    """
    ranks = JoinedRanks.of(process_group)
    if not ranks.are_several:
        return dict(mine)
    of_ranks: list[dict[str, Finding]] = [{} for _ in range(ranks.size)]
    dist.all_gather_object(of_ranks, dict(mine), group=ranks.group)
    sites = dict.fromkeys(site for of_rank in of_ranks for site in of_rank)
    return {site: _one([of_rank[site] for of_rank in of_ranks if site in of_rank]) for site in sites}


def _one(findings: list[Finding]) -> Finding:
    certain = [finding for finding in findings if not finding.is_for_later]
    if not certain:
        return findings[0]
    failed = next((finding for finding in certain if finding.projection is None), None)
    if failed is not None:
        return failed
    first = certain[0]
    if not all(_are_alike(finding.projection, first.projection) for finding in certain):
        return Finding(reason="ranks have found different layouts of its queries")
    return Finding(
        first.projection,
        _largest([finding.bias_std for finding in certain]),
        is_soft_capped=any(finding.is_soft_capped for finding in certain),
        largest_bias=_largest([finding.largest_bias for finding in certain]),
    )


def _largest(of_ranks: list[Tensor]) -> Tensor:
    """The largest of each head; a rank has NaN for the heads of others."""
    return torch.stack(of_ranks).nan_to_num(-torch.inf).amax(0).nan_to_num(neginf=0.0)


def _are_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_alike(one[name], other[name]) for name in one)
    return bool(one == other)
