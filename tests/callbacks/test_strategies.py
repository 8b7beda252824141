"""Whatever the strategy, ranks see what one process sees of all their batches together."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from distributed_training import sharded_strategy, strategy
from models import trainer
from rank_pool import RankPool
from shared_batches import EVEN, SEQUENCES, UNEVEN, SharesBatches
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

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


# DistributedDataParallel.


def under_ddp(sizes: tuple[int, ...], of_model: dict[str, Any], of_ddp: dict[str, Any], **of_trainer: Any) -> Any:
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
    assert_same(ranks(under_ddp, EVEN[size], *DDP[kind], ranks=size), alone(EVEN[size]))


@pytest.mark.parametrize("size", EVEN)
def test_parts_of_uneven_size(ranks: RankPool, size: int) -> None:
    """Sequences count alike, not ranks; one of four ranks has none."""
    assert_same(ranks(under_ddp, UNEVEN[size], {}, {}, ranks=size), alone(UNEVEN[size]))


def accumulating(sizes: tuple[int, ...]) -> list[Snapshot]:
    return under_ddp(sizes, {"batches": 4}, {}, accumulate_grad_batches=2)


def test_accumulated_gradients_without_synchronisation(ranks: RankPool) -> None:
    """The batch that is watched is one of which gradients are not synchronised."""
    expected = alone(EVEN[2], batches=4, accumulate=2)
    assert len(expected) == 2
    assert_same(ranks(accumulating, EVEN[2]), expected)


def in_double_precision(sizes: tuple[int, ...]) -> list[Snapshot]:
    return under_ddp(sizes, {}, {}, precision="64-true")


def test_precision_of_the_trainer(ranks: RankPool) -> None:
    assert_same(ranks(in_double_precision, EVEN[2]), alone(EVEN[2]))


def compiled(sizes: tuple[int, ...], whole: bool) -> list[Snapshot]:
    model = SharesBatches(sizes)
    try:
        if whole:
            return trained(torch.compile(model, backend="eager"), strategy=strategy(), devices=len(sizes))
        for block in model.transformer.blocks:
            block.compile(backend="eager")
        return trained(model, strategy=strategy(), devices=len(sizes))
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("whole", [True, False], ids=["model", "blocks"])
def test_compiled(ranks: RankPool, whole: bool) -> None:
    assert_same(ranks(compiled, EVEN[2], whole), alone(EVEN[2]))


# FSDP2.


class Shards(SharesBatches):
    """Shards its blocks, or every layer by itself.

    Args:
        every_layer: whether every linear layer is sharded by itself.
        options: of `fully_shard`.
        of_batches: of `SharesBatches`.
    """

    def __init__(self, every_layer: bool, options: dict[str, Any], **of_batches: Any) -> None:
        super().__init__(**of_batches)
        self.every_layer = every_layer
        self.options = options

    def configure_model(self) -> None:
        options = {"mesh": self.device_mesh["data_parallel"], **self.options}
        layers = [module for module in self.transformer.modules() if isinstance(module, torch.nn.Linear)]
        for module in [*(layers if self.every_layer else self.transformer.blocks), self.transformer]:
            fully_shard(module, **options)


def under_fsdp2(sizes: tuple[int, ...], every_layer: bool, options: dict[str, Any]) -> list[Snapshot]:
    return trained(Shards(every_layer, options, sizes=sizes), strategy=sharded_strategy(), devices=len(sizes))


FSDP2: dict[str, tuple[bool, dict[str, Any]]] = {
    "blocks": (False, {}),
    "blocks that stay whole until the backward pass": (False, {"reshard_after_forward": False}),
    "layers": (True, {}),
    "layers that stay whole until the backward pass": (True, {"reshard_after_forward": False}),
    "parameters on the CPU": (False, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}


@pytest.mark.parametrize("size", EVEN)
@pytest.mark.parametrize("kind", FSDP2)
def test_fully_sharded(ranks: RankPool, kind: str, size: int) -> None:
    assert_same(ranks(under_fsdp2, EVEN[size], *FSDP2[kind], ranks=size), alone(EVEN[size]))
