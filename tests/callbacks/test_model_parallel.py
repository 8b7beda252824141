"""Lightning's `ModelParallelStrategy`: ranks divide heads, and groups of them divide batches and shard weights."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from distributed_training import StartedRanks
from lightning.pytorch.strategies import ModelParallelStrategy
from models import batches, trainer
from rank_pool import RankPool
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_attn import AttentionMonitor
from lightning_attn.statistics import known_statistics

VOCABULARY, WIDTH, HEADS = 32, 32, 4

History = list[dict[str, Any]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = (
            layer(tokens).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class LanguageModel(pl.LightningModule):
    """Learns fast, so that the second capture sees other weights than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder().double()  # so that parts do not round otherwise than the whole

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        return functional.cross_entropy(self.model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Divided(LanguageModel):
    def configure_model(self) -> None:
        mesh = self.device_mesh
        for block in self.model.blocks:
            plan = {name: ColwiseParallel() for name in ("query", "key", "value")}
            parallelize_module(block, mesh["tensor_parallel"], {**plan, "out": RowwiseParallel()})
        if mesh["data_parallel"].size() > 1:
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=mesh["data_parallel"])


def history(model: type[LanguageModel], parts: int = 1, part: int = 0, **arguments: Any) -> History:
    """What a monitor of the same training saw, of which this rank has one of several parts of each batch."""
    pl.seed_everything(3, verbose=False)
    monitor = AttentionMonitor(
        every_n_steps=2, statistics="all", max_sequences=None, spectral_sequences=None, print_summary=False
    )
    (tokens,) = batches(4).dataset.tensors
    loader = DataLoader(TensorDataset(tokens[part::parts]), batch_size=4 // parts)
    running = trainer(monitor, use_distributed_sampler=False, **arguments)
    running.fit(model(), loader)
    return [snapshot.to_dict() for snapshot in monitor.history]


def divided_among(tensor_parallel: int) -> History:
    size = dist.get_world_size()
    groups = size // tensor_parallel
    chosen = ModelParallelStrategy(groups, tensor_parallel, process_group_backend="gloo")
    part = dist.get_rank() // tensor_parallel
    return history(Divided, groups, part, strategy=chosen, plugins=[StartedRanks()], devices=size)


@pytest.mark.parametrize(("size", "tensor_parallel"), [(2, 2), (4, 4), (4, 2)], ids=["2", "4", "2x2"])
def test_training_with_divided_heads_is_seen_as_in_one_process(
    ranks: RankPool, size: int, tensor_parallel: int
) -> None:
    expected = history(LanguageModel)
    found = ranks(divided_among, tensor_parallel, ranks=size)
    assert all(of_rank == found[0] for of_rank in found)
    assert len(found[0]) == len(expected) == 2
    assert expected[0] != expected[1]
    for mine, whole in zip(found[0], expected, strict=True):
        assert list(mine) == list(whole) == ["model.blocks.0", "model.blocks.1"]
        for site, statistics in whole.items():
            for statistic, heads in statistics.items():
                if known_statistics()[statistic].compares_sequences and size > tensor_parallel:
                    continue  # those of different ranks are not paired
                assert len(mine[site][statistic]) == len(heads)
                for one, other in zip(mine[site][statistic], heads, strict=True):
                    is_equal = one == other or one == pytest.approx(other, rel=1e-6, abs=1e-9)
                    assert is_equal, (site, statistic, one, other)
