"""Whatever the strategy, ranks see what one process sees of all their batches together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_training import sharded_strategy, strategy
from rank_pool import RankPool
from shared_batches import EVEN, UNEVEN, SharesBatches
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from whole_batches import alone, assert_same, trained

from lightning_attn import Snapshot

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
