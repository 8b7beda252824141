"""Whatever the strategy, ranks see what one process sees of all their batches together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_training import strategy
from models import trainer
from rank_pool import RankPool
from shared_batches import EVEN, SEQUENCES, STEPS, UNEVEN, SharesBatches
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

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


def alone(*sizes: int, **of_trainer: Any) -> list[Snapshot]:
    """What one process sees: of whole batches, and of their parts for the statistics that compare sequences."""
    whole = trained(SharesBatches((SEQUENCES,)), **of_trainer)
    in_parts = trained(SharesBatches(sizes), **of_trainer)
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


# DistributedDataParallel.


def under_ddp(sizes: tuple[int, ...], of_model: dict[str, Any], of_ddp: dict[str, Any], of_trainer: Any) -> Any:
    return trained(SharesBatches(sizes, **of_model), strategy=strategy(**of_ddp), devices=len(sizes), **of_trainer)


DDP: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "static graph": ({}, {"static_graph": True}),
    "unused head": ({"head": True}, {"find_unused_parameters": True}),
    "gradients as views of buckets": ({}, {"gradient_as_bucket_view": True}),
    "communication hook": ({}, {"ddp_comm_hook": allreduce_hook}),
    "activation checkpoints": ({"recompute": False}, {}),
    "reentrant activation checkpoints": ({"recompute": True}, {"static_graph": True}),
}


@pytest.mark.parametrize("size", EVEN)
@pytest.mark.parametrize("kind", DDP)
def test_data_parallel(ranks: RankPool, kind: str, size: int) -> None:
    of_model, of_ddp = DDP[kind]
    found = ranks(under_ddp, EVEN[size], of_model, of_ddp, {}, ranks=size)
    assert_same(found, alone(*EVEN[size]))
    assert len(found[0]) == STEPS


@pytest.mark.parametrize("size", EVEN)
def test_parts_of_uneven_size(ranks: RankPool, size: int) -> None:
    """Sequences count alike, not ranks; one of four ranks has none."""
    assert_same(ranks(under_ddp, UNEVEN[size], {}, {}, {}, ranks=size), alone(*UNEVEN[size]))
