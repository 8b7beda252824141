"""The bytes that the collectives of a capture carry: docs/distributed.md gives them as a formula."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_pool import RankPool
from torch import distributed as dist

from lightning_attn.distributed import RankReduction
from lightning_attn.statistics import resolve
from lightning_attn.statistics.measure import Sums

CPU = torch.device("cpu")
BYTES = 8  # of a number in double precision
SIGNALS = 5  # whether there is news; the step, and what was asked for, each twice


def bytes_of_captures(layers: int, heads: int, statistics: str | list[str] | None, numbers: int) -> list[list[Any]]:
    """What each of two captures sends: the operation and the bytes of each all-reduce."""
    wanted = resolve(statistics)
    found = {f"block.{layer}": Sums.nothing(wanted, heads, CPU) for layer in range(layers)}
    reduction, captures = RankReduction(), []
    all_reduce = dist.all_reduce
    for _ in range(2):
        sent: list[Any] = []

        def seen(tensor: torch.Tensor, op: Any, group: Any, sent: list[Any] = sent) -> None:
            sent.append(("MAX" if op == dist.ReduceOp.MAX else "SUM", tensor.nbytes))
            all_reduce(tensor, op=op, group=group)

        reduction.numbers = [0.0] * numbers
        with patch.object(dist, "all_reduce", seen):
            reduction(found, wanted, set(), CPU)
        captures.append(sent)
    return captures


@pytest.mark.parametrize("statistics", [None, "all", ["entropy"], ["max_logit"]], ids=str)
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 4), (48, 16), (32, 32)])
@pytest.mark.parametrize("numbers", [0, 1, 2])
def test_a_capture_sends_what_the_formula_says(
    ranks: RankPool, layers: int, heads: int, statistics: str | list[str] | None, numbers: int
) -> None:
    maxima = sum(statistic.joined_by == "max" for statistic in resolve(statistics))
    means = len(resolve(statistics)) - maxima
    added = BYTES * 2 * means * layers * heads
    largest = BYTES * (SIGNALS + 2 * layers + numbers + maxima * layers * heads)
    for first, second in ranks(bytes_of_captures, layers, heads, statistics, numbers):
        # At first nothing is known, and all there is to say is that there is news.
        assert first == [("MAX", BYTES * SIGNALS), ("MAX", largest), ("SUM", added)]
        assert second == [("MAX", largest), ("SUM", added)]


def test_bytes_do_not_depend_on_the_number_of_ranks(ranks: RankPool) -> None:
    assert ranks(bytes_of_captures, 3, 4, None, 1, ranks=4) == ranks(bytes_of_captures, 3, 4, None, 1, ranks=2) * 2
