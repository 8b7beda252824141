"""How many bytes the two collectives of a capture carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from rank_processes import on_ranks
from table import header
from torch import distributed as dist

from lightning_attn.distributed import RankReduction
from lightning_attn.statistics import Statistic, resolve
from lightning_attn.statistics.measure import Sums

#: Layers and heads of models, from small ones to the largest.
MODELS = ((12, 12), (24, 16), (32, 32), (48, 16), (96, 96))
CHOICES = {"the default set": None, "all": "all"}
BYTES_OF_A_NUMBER = 8  # sums are taken in double precision

HEADER = header("model", "statistics", "entries per head", "`SUM`", "`MAX`", "together", "names at first, per rank")


def formula(layers: int, heads: int, statistics: Sequence[type[Statistic]], numbers: int = 1) -> tuple[int, int]:
    """Bytes of the tensor that adds and of the one of which the largest entries count.

    Args:
        layers: sites.
        heads: of each site.
        statistics: what is measured.
        numbers: that travel with a capture; each monitor has one.
    """
    maxima = sum(statistic.joined_by == "max" for statistic in statistics)
    means = len(statistics) - maxima
    signals = 5  # whether a rank has news; its step and what it was asked for, each twice, to be compared
    flags = signals + 2 * layers  # of each site, whether it failed and whether it ran
    return (
        BYTES_OF_A_NUMBER * 2 * means * layers * heads,
        BYTES_OF_A_NUMBER * (flags + numbers + maxima * layers * heads),
    )


def layout(layers: int, heads: int) -> dict[str, int]:
    """The names of a model's sites, as a rank gives them at first, with their numbers of heads."""
    return {f"model.layers.{layer}.self_attn": heads for layer in range(layers)}


def payload_rows() -> Iterator[str]:
    """The table, with bytes that were counted; an error where the formula gives others."""
    counted = on_ranks(_count, ranks=2, backend="gloo")
    for (layers, heads, choice), (added, largest, names) in zip(_cases(), counted, strict=True):
        statistics = resolve(CHOICES[choice])
        if (added, largest) != formula(layers, heads, statistics):
            raise RuntimeError(f"{(added, largest)} bytes were sent, not {formula(layers, heads, statistics)}.")
        entries = (added + largest) / BYTES_OF_A_NUMBER / layers / heads
        yield (
            f"| {layers} layers × {heads} heads | {choice}, {len(statistics)} | {entries:.1f} | {_kilobytes(added)} "
            f"| {_kilobytes(largest)} | {_kilobytes(added + largest)} | {_kilobytes(names)} |"
        )


def bytes_of_names(layers: int, heads: int) -> int:
    """What a rank tells all others at first, with the default set of statistics."""
    return int(on_ranks(_bytes_of_a_capture, layers, heads, resolve(None), ranks=2, backend="gloo")[2])


def _cases() -> list[tuple[int, int, str]]:
    return [(layers, heads, choice) for layers, heads in MODELS for choice in CHOICES]


def _count() -> list[tuple[int, int, int]]:
    return [_bytes_of_a_capture(layers, heads, resolve(CHOICES[choice])) for layers, heads, choice in _cases()]


def _bytes_of_a_capture(layers: int, heads: int, statistics: Sequence[type[Statistic]]) -> tuple[int, int, int]:
    """Bytes that add, bytes whose largest count, and bytes of the names that a rank gives at first."""
    sums = Sums.nothing(statistics, heads, torch.device("cpu"))
    found = dict.fromkeys(layout(layers, heads), sums)
    reduction = RankReduction()
    sent: dict[str, int] = {}
    all_reduce, all_gather = dist.all_reduce, dist.all_gather

    def seen_all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        sent[str(op)] = tensor.nbytes
        return all_reduce(tensor, op=op, **options)

    def seen_all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent["names"] = tensor.nbytes  # the last gather of an object is of its bytes; the first, of their number
        return all_gather(tensors, tensor, *arguments, **options)

    gather = patch("torch.distributed.distributed_c10d.all_gather", seen_all_gather)
    with patch.object(dist, "all_reduce", seen_all_reduce), gather:
        reduction.numbers = [0.0]
        reduction(found, statistics, set(), torch.device("cpu"))
    return sent[str(dist.ReduceOp.SUM)], sent[str(dist.ReduceOp.MAX)], sent["names"]


def _kilobytes(count: int) -> str:
    return f"{count / 1000:,.1f} kB"
