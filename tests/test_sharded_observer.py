"""The observer in training loops of plain torch, over models that are sharded, or of which each rank has a piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from shared_batches import EVEN, Block, Transformer, batch, is_real, loss_of, parts
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_attn import AttentionObserver, Snapshot


def new() -> Transformer:
    torch.manual_seed(1)
    return Transformer().double()


def watched(model: nn.Module, batches: list[list[Tensor]]) -> list[Snapshot]:
    """Train for some batches, each in its parts, and give the snapshot of each."""
    observer = AttentionObserver(model, statistics="all", spectral_sequences=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = []
    for step, pieces in enumerate(batches):
        with observer:
            loss = torch.stack([loss_of(model(piece), piece) for piece in pieces]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        snapshots.append(observer.snapshot(step))
    return snapshots


def on_each(wrapped: Callable[[Transformer], nn.Module], sizes: tuple[int, ...]) -> list[Snapshot]:
    mine = [[parts(batch(number), sizes)[dist.get_rank()]] for number in range(2)]
    return watched(wrapped(new()), mine)


def alone(sizes: tuple[int, ...], model: nn.Module) -> list[Snapshot]:
    return watched(model, [parts(batch(number), sizes) for number in range(2)])


def assert_same(of_ranks: list[list[Snapshot]], expected: list[Snapshot]) -> None:
    """The same on all ranks, to the last digit; and as expected."""
    assert all(snapshots == of_ranks[0] for snapshots in of_ranks)
    for found, wanted in zip(of_ranks[0], expected, strict=True):
        assert found and (found.heads, found.statistics) == (wanted.heads, wanted.statistics)
        assert not wanted.values.isnan().all(1).any()
        torch.testing.assert_close(found.values, wanted.values, rtol=1e-6, atol=1e-12, equal_nan=True)


# The first FSDP, which Lightning has for GPUs alone.


def with_original_parameters(model: Transformer) -> nn.Module:
    return _fsdp(model, use_orig_params=True)


def with_flat_parameters(model: Transformer) -> nn.Module:
    return _fsdp(model, use_orig_params=False)


def with_whole_parameters_in_between(model: Transformer) -> nn.Module:
    return _fsdp(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def replicated(model: Transformer) -> nn.Module:
    return _fsdp(model, sharding_strategy=ShardingStrategy.NO_SHARD)


def _fsdp(model: Transformer, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **options
    )


@pytest.mark.parametrize("size", EVEN)
@pytest.mark.parametrize(
    "wrapped", [with_original_parameters, with_flat_parameters, with_whole_parameters_in_between, replicated]
)
def test_fsdp1(ranks: RankPool, wrapped: Callable[[Transformer], nn.Module], size: int) -> None:
    """Sites have the names of the bare model."""
    assert_same(ranks(on_each, wrapped, EVEN[size], ranks=size), alone(EVEN[size], new()))


# FSDP2 beyond what a strategy of Lightning's does.


def hybrid(model: Transformer) -> nn.Module:
    """Two copies, each in two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh)
    return model


def test_hybrid_sharding(ranks: RankPool) -> None:
    assert_same(ranks(on_each, hybrid, EVEN[4], ranks=4), alone(EVEN[4], new()))


def in_half_precision(model: Transformer) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64))
    return model


class Rounded(Transformer):
    """Computes with parameters of bfloat16, and gives its logits in double precision."""

    def forward(self, tokens: Tensor, recompute: bool | None = None) -> Tensor:
        return super().forward(tokens, recompute).double()


@pytest.mark.parametrize("size", EVEN)
def test_mixed_precision_computes_as_a_model_of_that_precision(ranks: RankPool, size: int) -> None:
    """Of the first batch: later ones are of parameters that one of the two does not round."""
    torch.manual_seed(1)
    expected = alone(EVEN[size], Rounded().double().bfloat16())
    found = ranks(on_each, in_half_precision, EVEN[size], ranks=size)
    assert_same([snapshots[:1] for snapshots in found], expected[:1])


# Each rank has other layers.


def stage_of_a_pipeline() -> Snapshot:
    """The blocks have the names that they have in the whole model."""
    mine = dist.get_rank()
    model, tokens = new(), batch(0)
    hidden = model.embedding(tokens)
    for block in model.blocks[:mine]:
        hidden = block(hidden, is_real(tokens))
    stage = nn.ModuleDict({"blocks": nn.ModuleDict({str(mine): model.blocks[mine]})})
    observer = AttentionObserver(stage, statistics="all", spectral_sequences=None)
    with observer:
        stage["blocks"][str(mine)](hidden, is_real(tokens))
    return observer.snapshot()


def test_stages_of_a_pipeline_make_one_snapshot(ranks: RankPool) -> None:
    found = ranks(stage_of_a_pipeline)
    whole = watched(new(), [[batch(0)]])
    assert list(found[0].heads) == ["blocks.0.attention", "blocks.1.attention"]
    assert_same([[snapshot] for snapshot in found], whole)
