"""From one attention call to the sums of every statistic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall
from lightning_attn.statistics.row_pass import RowPass, passes
from lightning_attn.statistics.statistic import Maximum, Ratio, Statistic, wide

#: The sums or the maximum of each statistic, by name, with one entry per head.
Sums = dict[str, Ratio | Maximum]


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
        block_bytes: see `lightning_attn.statistics.row_pass.passes`.

    Returns:
        Sums over sequences, of shape (H,).
    """
    one_walk = [statistic for statistic in statistics if not statistic.is_spectral]
    spectral = [statistic for statistic in statistics if statistic.is_spectral]
    sums = _measure(call, one_walk, passes(call, block_bytes))
    sampled = call.select(slice(spectral_sequences))
    return sums | _measure(sampled, spectral, passes(sampled, block_bytes, whole_matrices=True))


def _measure(call: AttentionCall, statistics: Sequence[type[Statistic]], row_passes: Iterable[RowPass]) -> Sums:
    if not statistics:
        return {}
    sums = {statistic.name: nothing(statistic, call.heads, call.query.device) for statistic in statistics}
    if 0 in (call.sequences, call.queries, call.keys):
        return sums
    for row_pass in row_passes:
        measurements = [statistic(row_pass) for statistic in statistics]
        for rows in row_pass.blocks():
            for measurement in measurements:
                measurement.add(rows)
        heads = slice(row_pass.first_head, row_pass.first_head + row_pass.call.heads)
        for measurement in measurements:
            _join_heads(sums[measurement.name], measurement.result(), heads)
    return sums


def nothing(statistic: type[Statistic], heads: int, device: torch.device) -> Ratio | Maximum:
    """The sums of a statistic before anything was seen."""
    zeros_H = torch.zeros(heads, dtype=wide(device), device=device)
    return Maximum(zeros_H - torch.inf) if statistic.joined_by == "max" else Ratio(zeros_H, zeros_H.clone())


def _join_heads(known: Ratio | Maximum, found: Ratio | Maximum, heads: slice) -> None:
    """Add the sums of some sequences and heads to those of all heads, in place."""
    if isinstance(known, Maximum):
        assert isinstance(found, Maximum)
        known.value[heads] = torch.maximum(known.value[heads], found.value.amax(0).to(known.value.dtype))
    else:
        assert isinstance(found, Ratio)
        known.numerator[heads] += found.numerator.sum(0)
        known.denominator[heads] += found.denominator.sum(0)


def joined(first: Ratio | Maximum, second: Ratio | Maximum) -> Ratio | Maximum:
    """The sums of two calls together."""
    if isinstance(first, Maximum):
        assert isinstance(second, Maximum)
        return Maximum(torch.maximum(first.value, second.value))
    assert isinstance(second, Ratio)
    return Ratio(first.numerator + second.numerator, first.denominator + second.denominator)


def head_values(sums: Ratio | Maximum) -> Tensor:
    """The value of each head, NaN where it is absent."""
    if isinstance(sums, Maximum):
        return torch.where(sums.value.isneginf(), torch.nan, sums.value)
    return torch.where(sums.denominator > 0, sums.numerator / sums.denominator, torch.nan)
