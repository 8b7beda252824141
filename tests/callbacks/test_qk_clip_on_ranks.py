"""Ranks clip the same heads by the same factors, as one process that has the whole batch and the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_training import StartedRanks, sharded_strategy, strategy
from lightning.pytorch.strategies import ModelParallelStrategy
from models import batches, trainer
from rank_pool import RankPool
from shared_batches import EVEN, SEQUENCES, UNEVEN, SharesBatches
from test_model_parallel import Divided
from test_model_parallel import LanguageModel as Whole
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_attn import QKClip

Counts = dict[str, list[int]]
Weights = dict[str, Tensor]


class Shards(SharesBatches):
    """Shards its blocks."""

    def configure_model(self) -> None:
        for module in [*self.transformer.blocks, self.transformer]:
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


def weights(model: nn.Module) -> Weights:
    return {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }


def clipped(kind: type[SharesBatches], sizes: tuple[int, ...]) -> tuple[Counts, Weights]:
    clip = QKClip(2.0, file=None, print_summary=False)
    model = kind(sizes, batches=4)
    arguments: dict[str, Any] = {}
    if dist.is_initialized() and dist.get_world_size() > 1:
        chosen = sharded_strategy if kind is Shards else strategy
        arguments = {"strategy": chosen(), "devices": dist.get_world_size(), "use_distributed_sampler": False}
    trainer(clip, **arguments).fit(model)
    return clip.counts, weights(model)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [(SharesBatches, EVEN[2]), (SharesBatches, UNEVEN[2]), (Shards, EVEN[2])],
    ids=["ddp", "ddp, uneven", "fsdp2"],
)
def test_ranks_clip_as_one_process_does(ranks: RankPool, kind: type[SharesBatches], sizes: tuple[int, ...]) -> None:
    counts, expected = clipped(SharesBatches, (SEQUENCES,))
    assert sum(map(sum, counts.values())) > 2
    first, second = ranks(clipped, kind, sizes)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert first[0] == counts
    torch.testing.assert_close(first[1], expected, rtol=1e-9, atol=1e-12)


def trained(model: Whole, part: int = 0, parts: int = 1, **arguments: Any) -> tuple[Counts, Weights]:
    torch.manual_seed(3)
    clip = QKClip(0.5, file=None, print_summary=False)
    (tokens,) = batches(4).dataset.tensors
    loader = DataLoader(TensorDataset(tokens[part::parts]), batch_size=4 // parts)
    trainer(clip, use_distributed_sampler=False, **arguments).fit(model, loader)
    return clip.counts, weights(model)


def seeded(kind: type[Whole]) -> Whole:
    torch.manual_seed(3)
    model = kind()
    with torch.no_grad():
        for block in model.model.blocks:
            block.query.weight *= 3
            block.key.weight *= 3
    return model


def divided_among(tensor_parallel: int) -> tuple[Counts, Weights]:
    size = dist.get_world_size()
    groups = size // tensor_parallel
    chosen = ModelParallelStrategy(groups, tensor_parallel, process_group_backend="gloo")
    part = dist.get_rank() // tensor_parallel
    return trained(seeded(Divided), part, groups, strategy=chosen, plugins=[StartedRanks()], devices=size)


@pytest.mark.parametrize(
    ("size", "tensor_parallel"),
    [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)],
    ids=["tensor parallel", "and fsdp2"],
)
def test_divided_heads_are_clipped_as_in_one_process(ranks: RankPool, size: int, tensor_parallel: int) -> None:
    counts, expected = trained(seeded(Whole))
    assert sum(map(sum, counts.values())) > 2
    found = ranks(divided_among, tensor_parallel, ranks=size)
    for of_rank in found:
        assert of_rank[0] == counts
        torch.testing.assert_close(of_rank[1], expected, rtol=1e-9, atol=1e-12)
