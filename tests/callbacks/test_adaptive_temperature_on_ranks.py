"""Ranks have the same temperatures as one process, whatever they divide among each other."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from collectives import collectives
from distributed_training import StartedRanks, sharded_strategy, strategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from listening import hearing
from models import trainer
from rank_pool import RankPool
from shared_batches import EVEN, UNEVEN, SharesBatches, batch, parts
from temperature_runs import awake, lines
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_attn import AdaptiveTemperature, AttentionMonitor
from lightning_attn.temperature import CosineTemperature

FILE = "attention_temperature.jsonl"
LOOP, COURSE = awake(upper=0.5), CosineTemperature(4.0, 1.5, 4)
FIRST, SEARCH, STEADY = ["MAX", "gather", "MAX", "SUM"], ["gather"], ["MAX", "SUM"]
TOLD = ["broadcast_object_list"]


def differs(step: int) -> float:
    if step == 3 and dist.get_rank() == 1:
        raise ValueError("not here")
    return 2.0 + step + dist.get_rank()


def fails_on_the_first(step: int) -> float:
    if step >= 3 and dist.get_rank() == 0:
        raise ValueError("not here")
    return 2.0 + step


def adaptive(control: Any, **arguments: Any) -> AdaptiveTemperature:
    return AdaptiveTemperature(
        control, **{"every_n_steps": 2, "max_sequences": None, "print_summary": False, **arguments}
    )


class Shares(SharesBatches):
    """Six batches, and queries that are large enough to be brought down."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes, batches=6)
        with torch.no_grad():
            for block in self.transformer.blocks:
                block.attention.qkv.weight[:16] *= 3

    def training_step(self, pieces: list[Tensor], batch_idx: int) -> Tensor:
        """Take the batch that the step tells, so that it trains alike from any checkpoint."""
        mine = parts(batch(self.trainer.global_step), self.sizes)
        return super().training_step([mine[self.global_rank]] if dist.is_initialized() else mine, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)  # Lightning loads no empty state of ranks


class Shards(Shares):
    def configure_model(self) -> None:
        for module in [*self.transformer.blocks, self.transformer]:
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model that ranks may have divided."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def trained(
    kind: str, sizes: tuple[int, ...], control: Any, folder: Path, path: Path | None = None, **arguments: Any
) -> dict[str, Any]:
    """What comes of a run, alone or on ranks."""
    model = (Shards if kind == "sharded" else Shares)(sizes)
    callback = adaptive(control)
    mine = folder / (str(dist.get_rank()) if dist.is_initialized() else "alone")
    of_ranks: dict[str, Any] = {}
    if dist.is_initialized():
        chosen: Any = sharded_strategy() if kind == "sharded" else strategy()
        chosen._save_distributed_checkpoint = False
        of_ranks = {"strategy": chosen, "devices": dist.get_world_size()}
    saves = ModelCheckpoint(folder / "saved", every_n_train_steps=1, save_top_k=-1)
    running = trainer(callback, saves, default_root_dir=mine, use_distributed_sampler=False,
                      enable_checkpointing=True, **of_ranks, **arguments)  # fmt: skip
    with hearing() as said, redirect_stdout(io.StringIO()):
        running.fit(model, ckpt_path=path)
    return {
        "temperatures": callback.temperatures,
        "losses": model.losses,
        "weights": {name: value.tolist() for name, value in whole(model).items()},
        "hooks": [name for name, module in model.named_modules() for hook in module._forward_hooks.values()
                  if type(hook).__name__ == "ChannelScale"],
        "said": said,
        "files": sorted(str(found.relative_to(mine)) for found in mine.rglob("*.jsonl")) if mine.exists() else [],
        "lines": lines(mine / FILE) if (mine / FILE).exists() else [],
    }  # fmt: skip


def assert_near(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert found["said"] == [] and found["hooks"] == []
    assert found["temperatures"].keys() == alone["temperatures"].keys()
    for site, values in alone["temperatures"].items():
        assert found["temperatures"][site] == pytest.approx(values, rel=1e-6)
    for name, value in alone["weights"].items():
        torch.testing.assert_close(torch.tensor(found["weights"][name]), torch.tensor(value), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("kind", "control", "sizes"),
    [
        ("data parallel", LOOP, UNEVEN[2]),
        ("data parallel", COURSE, EVEN[2]),
        ("sharded", LOOP, UNEVEN[2]),
        ("sharded", COURSE, EVEN[2]),
    ],
)
def test_ranks_have_what_one_process_has(
    kind: str, control: Any, sizes: tuple[int, ...], ranks: RankPool, tmp_path: Path
) -> None:
    alone = trained("alone", (sum(sizes),), control, tmp_path / "one")
    assert len(alone["temperatures"]) == 2 and max(map(max, alone["temperatures"].values())) > 1.1
    first, second = ranks(trained, kind, sizes, control, tmp_path / "ranks")
    assert first["temperatures"] == second["temperatures"] and first["weights"] == second["weights"]
    assert_near(first, alone)
    assert first["files"] == [FILE] and second["files"] == []
    assert [(line["step"], line["site"]) for line in first["lines"]] == [
        (line["step"], line["site"]) for line in alone["lines"]
    ]
    # What is saved is an ordinary model, whole, and goes on to the last digit.
    path = next((tmp_path / "ranks" / "saved").glob("*step=3.ckpt"))
    saved = torch.load(path, weights_only=True)["state_dict"]
    Shares(sizes).load_state_dict(saved)
    of_one = torch.load(next((tmp_path / "one" / "saved").glob("*step=3.ckpt")), weights_only=True)["state_dict"]
    for name, value in of_one.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-6, atol=1e-8)
    again = ranks(trained, kind, sizes, control, tmp_path / "again", path)
    for found, before in zip(again, (first, second), strict=True):
        assert found["said"] == []
        assert found["losses"] == before["losses"][3:]
        assert found["temperatures"] == before["temperatures"] and found["weights"] == before["weights"]


def test_a_function_that_differs_is_that_of_the_first_rank(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(trained, "data parallel", EVEN[2], differs, tmp_path / "differs")
    assert first["temperatures"] == second["temperatures"] and first["weights"] == second["weights"]
    assert all(value == pytest.approx(7.0) for values in first["temperatures"].values() for value in values)
    assert first["said"] == second["said"] == []
    first, second = ranks(trained, "data parallel", EVEN[2], fails_on_the_first, tmp_path / "fails")
    assert first["temperatures"] == second["temperatures"] and first["weights"] == second["weights"]
    assert all(value == pytest.approx(4.0) for values in first["temperatures"].values() for value in values)
    (message,) = first["said"]
    assert "stays as it is at step 3" in message and "not here" in message and second["said"] == []


def distributed_checkpoint(folder: Path) -> dict[str, Any]:
    """Each rank saves its part."""
    results = {}
    for number, path in enumerate((None, folder / "saved")):
        model, callback = Shards(EVEN[2]), adaptive(LOOP)
        chosen = sharded_strategy()  # which saves so by default
        running = trainer(
            callback, strategy=chosen, devices=2, default_root_dir=folder / str(number), use_distributed_sampler=False
        )
        if number == 0:
            running.callbacks.append(SavesAtThree(folder / "saved"))
        with hearing() as said:
            running.fit(model, ckpt_path=path)
        results[number] = (model.losses, callback.temperatures, said)
    return results


class SavesAtThree(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def test_sharded_checkpoints_go_on_too(ranks: RankPool, tmp_path: Path) -> None:
    for results in ranks(distributed_checkpoint, tmp_path):
        (losses, temperatures, _), (after, again, said) = results[0], results[1]
        assert after == losses[3:] and again == temperatures and said == []
        assert max(map(max, temperatures.values())) > 1.1


class Breaks(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and dist.get_rank() == 0:
            raise RuntimeError("broken off")
        if trainer.global_step == 3:
            raise KeyError("elsewhere")


def broken_off(folder: Path) -> tuple[list[str], dict[str, list[float]], int, dict[str, Any]]:
    model, callback = Shards(EVEN[2]), adaptive(LOOP, file=None)
    running = trainer(
        Breaks(), callback, strategy=sharded_strategy(), devices=2, default_root_dir=folder,
        use_distributed_sampler=False,
    )  # fmt: skip
    with hearing() as said, pytest.raises((RuntimeError, KeyError)):
        running.fit(model)
    hooks = sum(
        type(hook).__name__ == "ChannelScale" for one in model.modules() for hook in one._forward_hooks.values()
    )
    return said, callback.temperatures, hooks, callback.state_dict()


def test_sharded_ranks_that_break_off_wait_for_nobody(ranks: RankPool, tmp_path: Path) -> None:
    (said, temperatures, hooks, state), (_, others, more, _) = ranks(broken_off, tmp_path, seconds=30)
    assert temperatures == others and max(map(max, temperatures.values())) > 1.1
    assert (hooks, more, state) == (0, 0, {})
    (message,) = said
    assert "holds its temperatures in the weights alone" in message


# Heads that ranks divide.

VOCABULARY, WIDTH, HEADS = 32, 32, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = (
            layer(tokens).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(5 * query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Heads(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).double()
        self.blocks = nn.ModuleList(Attention().double() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY).double()
        self.losses: list[float] = []

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        made = torch.Generator().manual_seed(self.trainer.global_step)
        tokens = torch.randint(VOCABULARY, tokens.shape, generator=made)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        loss = functional.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([torch.zeros(4, 16)] * 6, batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)


class Divided(Heads):
    def configure_model(self) -> None:
        for block in self.blocks:
            plan = {name: ColwiseParallel() for name in ("query", "key", "value")}
            parallelize_module(block, self.device_mesh["tensor_parallel"], {**plan, "out": RowwiseParallel()})


def of_heads(control: Any, folder: Path, path: Path | None = None) -> dict[str, Any]:
    of_ranks: dict[str, Any] = {}
    if dist.is_initialized():
        chosen = ModelParallelStrategy(1, dist.get_world_size(), False, process_group_backend="gloo")
        of_ranks = {"strategy": chosen, "plugins": [StartedRanks()], "devices": dist.get_world_size()}
    model: Heads = (Divided if of_ranks else Heads)()
    callback = adaptive(control, file=None)
    saves = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)
    running = trainer(callback, saves, enable_checkpointing=True, use_distributed_sampler=False,
                      default_root_dir=folder, **of_ranks)  # fmt: skip
    with hearing() as said:
        running.fit(model, ckpt_path=path)
    return {
        "temperatures": callback.temperatures,
        "losses": model.losses,
        "weights": {name: value.tolist() for name, value in whole(model).items()},
        "hooks": [],
        "said": said,
    }


@pytest.mark.parametrize("control", [LOOP, COURSE], ids=["loop", "schedule"])
def test_heads_that_ranks_divide(control: Any, ranks: RankPool, tmp_path: Path) -> None:
    alone = of_heads(control, tmp_path / "one")
    first, second = ranks(of_heads, control, tmp_path / "ranks")
    assert first["temperatures"] == second["temperatures"] and first["weights"] == second["weights"]
    assert len(first["temperatures"]["blocks.0"]) == HEADS
    assert_near(first, alone)
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    (path,) = (tmp_path / "ranks").glob("*step=3.ckpt")
    Heads().load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    for found in ranks(of_heads, control, tmp_path / "again", path):
        assert found["said"] == []
        assert found["losses"] == first["losses"][3:] and found["temperatures"] == first["temperatures"]


# What it costs.


class Marks(pl.Callback):
    """Writes down where each batch begins."""

    def __init__(self, called: list[str]) -> None:
        self.called = called

    def on_train_batch_start(self, *_: Any) -> None:
        self.called.append("batch")


def collectives_of_batches(watching: str, folder: Path) -> list[list[str]]:
    callbacks: list[pl.Callback] = {
        "nothing": [],
        "loop": [adaptive(LOOP)],
        "schedule": [adaptive(COURSE)],
        "function": [adaptive(lambda step: 2.0 + step + dist.get_rank())],
        "both": [AttentionMonitor(2, print_summary=False), adaptive(LOOP)],
    }[watching]
    with collectives() as called, hearing():
        trainer(Marks(called), *callbacks, strategy=strategy(), devices=2, use_distributed_sampler=False,
                default_root_dir=folder).fit(Shares(EVEN[2]))  # fmt: skip
    _, *of_batches = " ".join(called).split("batch")
    return [of_batch.split() for of_batch in of_batches]


@pytest.mark.parametrize("watching", ["loop", "schedule", "function", "both"])
def test_a_capture_costs_two_collectives_and_the_search_one_more(
    watching: str, ranks: RankPool, tmp_path: Path
) -> None:
    bare = ranks(collectives_of_batches, "nothing", tmp_path)
    watched = ranks(collectives_of_batches, watching, tmp_path)
    later = [] if watching in ("schedule", "function") else STEADY
    expected = [[*FIRST, *SEARCH], [], later, [], later, []]
    if watching == "function":
        # At the start of training and at each step all hear from the first what it says.
        expected = [[*TOLD, *FIRST, *SEARCH], *[TOLD] * 5]
    for without, found in zip(bare, watched, strict=True):
        assert found == [[*more, *others] for others, more in zip(without, expected, strict=True)]
