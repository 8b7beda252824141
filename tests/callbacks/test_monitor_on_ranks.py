"""What the monitor costs on several ranks, what it leaves as it is, and who writes."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from collectives import collectives
from distributed_training import sharded_strategy, strategy
from lightning.pytorch.loggers import TensorBoardLogger
from models import trainer
from rank_pool import RankPool
from shared_batches import EVEN, HEADS, SEQUENCES, UNEVEN, SharesBatches, loss_of
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from lightning_attn import AttentionMonitor, AttentionWarning
from lightning_attn.metrics import AttentionEntropy, AttentionMaxLogit, TokenSimilarity


class Shards(SharesBatches):
    """Shards its blocks."""

    def configure_model(self) -> None:
        for module in [*self.transformer.blocks, self.transformer]:
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


def over_ranks(model: SharesBatches) -> dict[str, Any]:
    """What a Trainer needs to train the model on the ranks that are there."""
    kind = sharded_strategy if isinstance(model, Shards) else strategy
    return {"strategy": kind(), "devices": dist.get_world_size(), "use_distributed_sampler": False}


both_strategies = pytest.mark.parametrize("kind", [SharesBatches, Shards], ids=["ddp", "fsdp2"])


# What is left as it is.


def with_and_without(kind: type[SharesBatches]) -> list[Any]:
    """Losses, gradients and parameters of training with dropout."""
    found = []
    for watched in (True, False):
        monitor = AttentionMonitor(every_n_steps=2, statistics="all", print_summary=False)
        model = kind(EVEN[2], dropout=0.2, batches=4)
        torch.manual_seed(dist.get_rank())
        trainer(*[monitor] * watched, **over_ranks(model)).fit(model)
        assert len(monitor.history) == 2 * watched
        found.append((model.losses, model.gradients, torch.get_rng_state()))
    return found


@both_strategies
def test_losses_gradients_and_random_numbers_are_those_without_the_monitor(
    ranks: RankPool, kind: type[SharesBatches]
) -> None:
    for watched, bare in ranks(with_and_without, kind):
        assert len(bare[0]) == len(bare[1]) == 4
        torch.testing.assert_close(watched, bare, rtol=0, atol=0)


# What it costs.


class Marks(pl.Callback):
    """Writes down where each batch begins."""

    def __init__(self, called: list[str]) -> None:
        self.called = called

    def on_train_batch_start(self, *_: Any) -> None:
        self.called.append("batch")


def collectives_of_batches(kind: type[SharesBatches], blocks: int, statistics: str, watched: bool) -> list[list[str]]:
    monitor = AttentionMonitor(every_n_steps=2, statistics=statistics, print_summary=False)
    model = kind(EVEN[2], blocks=blocks, batches=5)
    with collectives() as called:
        trainer(Marks(called), *[monitor] * watched, **over_ranks(model)).fit(model)
    batches = " ".join(called).split("batch")[1:]
    return [of_batch.split() for of_batch in batches]


@both_strategies
@pytest.mark.parametrize(("blocks", "statistics"), [(1, "entropy"), (4, "all")])
def test_a_capture_costs_two_collectives_and_a_step_without_one_none(
    ranks: RankPool, kind: type[SharesBatches], blocks: int, statistics: str
) -> None:
    """Of five batches the first, the third and the last are captured; the first makes sites known.

    They come before what Lightning itself exchanges at the end of a batch.
    """
    bare = ranks(collectives_of_batches, kind, blocks, statistics, False)
    watched = ranks(collectives_of_batches, kind, blocks, statistics, True)
    capture = ["MAX", "SUM"]
    expected = [["MAX", "gather", *capture], [], capture, [], capture]
    for without, with_monitor in zip(bare, watched, strict=True):
        assert len(without) == 5
        assert with_monitor == [[*more, *others] for others, more in zip(without, expected, strict=True)]


# Who writes.


def what_is_written(folder: Path) -> dict[str, Any]:
    """Every rank logs to a folder of its own."""
    mine = folder / str(dist.get_rank())
    monitor = AttentionMonitor(every_n_steps=1, sites=["*attention*", "*embedding*"], heat_map_every_n_steps=1)
    model = SharesBatches(EVEN[2])
    with (
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as error,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        trainer(monitor, **over_ranks(model), logger=TensorBoardLogger(mine), log_every_n_steps=1).fit(model)
    return {
        "files": sorted(path.name.split(".")[0] for path in mine.rglob("*") if path.is_file()),
        "out": out.getvalue(),
        "error": error.getvalue(),
        "said": [str(w.message) for w in said if issubclass(w.category, AttentionWarning)],
    }


def test_only_rank_zero_writes(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(what_is_written, tmp_path)
    assert "events" in first["files"]
    assert "transformer.blocks.0.attention" in first["out"]
    assert any("No attention was seen at the sites '*embedding*'" in message for message in first["said"])
    assert second == {"files": [], "out": "", "error": "", "said": []}


# Metrics.


class LogsMetrics(SharesBatches):
    """Gives every batch's attention and states to metrics, which the Trainer computes at the end of the epoch."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes)
        self.entropy = AttentionEntropy(HEADS, over_heads="mean")
        self.max_logit = AttentionMaxLogit(HEADS, over_heads="max")
        self.similarity = TokenSimilarity()

    def training_step(self, pieces: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = pieces
        entering = self.transformer.embedding(tokens)
        query, key, _ = self.transformer.blocks[0].attention.qkv(entering).unflatten(-1, (3, HEADS, -1)).unbind(2)
        heads = {"query": query.transpose(1, 2), "key": key.transpose(1, 2), "is_causal": True}
        self.entropy.update(**heads)
        self.max_logit.update(**heads)
        self.similarity.update(entering=entering, leaving=2 * entering)
        for name in ("entropy", "max_logit", "similarity"):
            self.log(name, getattr(self, name), on_step=False, on_epoch=True)
        return loss_of(self.transformer(tokens), tokens)


def logged(sizes: tuple[int, ...], **of_trainer: Any) -> dict[str, float]:
    running = trainer(use_distributed_sampler=False, **of_trainer)
    running.fit(LogsMetrics(sizes))
    return {name: value.item() for name, value in running.callback_metrics.items()}


def logged_on_ranks(sizes: tuple[int, ...]) -> dict[str, float]:
    return logged(sizes, strategy=strategy(), devices=len(sizes))


@pytest.mark.parametrize("sizes", [EVEN[2], UNEVEN[2], EVEN[4]], ids=str)
def test_logged_metrics_have_the_value_of_one_process(ranks: RankPool, sizes: tuple[int, ...]) -> None:
    expected = logged((SEQUENCES,))
    assert expected.keys() == {"entropy", "max_logit", "similarity"}
    for found in ranks(logged_on_ranks, sizes, ranks=len(sizes)):
        assert found == pytest.approx(expected, rel=1e-6)
