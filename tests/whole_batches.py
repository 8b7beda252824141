"""What one process sees of whole batches, and that ranks see the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from models import trainer
from shared_batches import SEQUENCES, SharesBatches

from lightning_attn import AttentionMonitor, Snapshot
from lightning_attn.statistics import known_statistics

PAIRED = [name for name, statistic in known_statistics().items() if statistic.compares_sequences]


def everything() -> AttentionMonitor:
    return AttentionMonitor(
        every_n_steps=1, statistics="all", max_sequences=None, spectral_sequences=None, print_summary=False
    )


def trained(model: SharesBatches, **of_trainer: Any) -> list[Snapshot]:
    monitor = everything()
    trainer(monitor, use_distributed_sampler=False, **of_trainer).fit(model)
    return list(monitor.history)


@cache
def alone(sizes: tuple[int, ...], batches: int = 2, accumulate: int = 1) -> list[Snapshot]:
    """What one process sees: of whole batches, and of their parts for the statistics that compare sequences."""
    whole, in_parts = (
        trained(SharesBatches(of_one, batches=batches), accumulate_grad_batches=accumulate)
        for of_one in ((SEQUENCES,), sizes)
    )
    for snapshot, of_parts in zip(whole, in_parts, strict=True):
        assert snapshot.heads == of_parts.heads
        for name in PAIRED:
            row = snapshot.statistics.index(name)
            snapshot.values[row] = of_parts.values[row]
    return whole


def assert_same(of_ranks: list[list[Snapshot]], expected: list[Snapshot], relative: float = 1e-6) -> None:
    """The same on all ranks, to the last digit; and as expected, every statistic of the registry."""
    assert all(history == of_ranks[0] for history in of_ranks)
    assert len(of_ranks[0]) == len(expected) > 0
    for found, wanted in zip(of_ranks[0], expected, strict=True):
        assert (found.step, found.heads) == (wanted.step, wanted.heads)
        assert found.statistics == wanted.statistics == tuple(known_statistics())
        for name, values, wanted_values in zip(found.statistics, found.values, wanted.values, strict=True):
            assert not wanted_values.isnan().all(), f"{name} has no value anywhere"
            torch.testing.assert_close(
                values,
                wanted_values,
                rtol=relative,
                atol=1e-12,
                equal_nan=True,
                msg=lambda m, name=name: f"{name}: {m}",
            )
