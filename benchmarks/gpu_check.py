"""Whether the monitor tells the truth, and changes nothing, under every strategy that this machine can run.

    python benchmarks/gpu_check.py                                         # one GPU
    torchrun --nproc-per-node 4 benchmarks/gpu_check.py                    # several
    torchrun --nproc-per-node 4 benchmarks/gpu_check.py --only TP,FSDP2
    torchrun --nproc-per-node 2 benchmarks/gpu_check.py --device cpu       # what runs without GPUs, over gloo

A small transformer is trained for some steps, each of them captured. Every snapshot is compared with the truth: the
same steps in a loop without Lightning, on one process that has the whole batch, from the same weights. The losses are
compared with those of a run without the monitor. One table is printed; the exit status is 1 if a cell fails.

What is told of a cell is its largest difference from the truth over steps, sites, heads and statistics, each relative
to the largest value that the statistic has on any head. Statistics that compare sequences are left out: they pair those
of one rank, so that one process has other pairs.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Literal, NamedTuple, get_args

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from table import header
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_attn import AttentionMonitor, AttentionObserver
from lightning_attn.snapshot import Snapshot
from lightning_attn.statistics import RowStatistic, known_statistics

Precision = Literal["32-true", "bf16-mixed"]
Device = Literal["cuda", "cpu"]

VOCABULARY, WIDTH, HEADS, LAYERS, TOKENS = 64, 64, 8, 2, 32
#: Sequences of all ranks together: a multiple of every number of ranks up to 8.
SEQUENCES, STEPS = 16, 3
LEARNING_RATE = 1e-2
#: A cell that hangs ends with an error.
TIMEOUT = timedelta(seconds=120)

#: How far values may be from the truth. In single precision ranks differ from one process by the order of sums alone; a
#: bfloat16 number has 8 bits, and strategies differ in what they round to it: FSDP normalises in it, autocast does not.
TOLERANCES: dict[Precision, float] = {"32-true": 1e-4, "bf16-mixed": 5e-2}

STATISTICS = [
    name
    for name, statistic in known_statistics().items()
    if not (issubclass(statistic, RowStatistic) and statistic.compares_sequences)
]
#: These choose a key or count what is above a threshold: a rounding in bfloat16 may move them by a whole sequence.
BY_DECISION = {
    *("any_sink_rate", "large_logit_ratio", "leader_position"),
    *("massive_activation_rate", "sink_position", "sink_rate"),
}


class Attention(nn.Module):
    """Queries, keys and values by a layer each, so that tensor parallelism can divide them by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.perceptron(hidden)


class LanguageModel(LightningModule):
    """A causal transformer that keeps its losses, and is divided as its strategy says."""

    def __init__(self, is_compiled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)  # the same weights everywhere
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses: list[float] = []
        if is_compiled:
            self.blocks.compile(backend="inductor" if torch.cuda.is_available() else "aot_eager")

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.head(self.blocks(self.embedding(tokens)))
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(batch[0])
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        # Dealt out in order: together the ranks have the sequences of the truth at every step. Lightning would shuffle.
        ranks: dict[str, int] = self.trainer.strategy.distributed_sampler_kwargs
        tokens = TensorDataset(all_tokens())
        sampler = DistributedSampler(tokens, shuffle=False, **ranks)
        return DataLoader(tokens, batch_size=SEQUENCES // ranks["num_replicas"], sampler=sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Tensor parallelism leaves some parameters plain, and torch does not step these and divided ones in one go.
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, foreach=False)

    def configure_model(self) -> None:
        if self.device_mesh is None:  # any other strategy than `ModelParallelStrategy`
            return
        by_data, by_tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        for block in self.blocks:
            if by_tensor.size() > 1:
                by_heads = dict.fromkeys(("attention.query", "attention.key", "attention.value"), ColwiseParallel())
                perceptron = {"perceptron.1": ColwiseParallel(), "perceptron.3": RowwiseParallel()}
                parallelize_module(block, by_tensor, {**by_heads, "attention.out": RowwiseParallel(), **perceptron})
            if by_data.size() > 1:
                fully_shard(block, mesh=by_data)
        if by_data.size() > 1:
            fully_shard(self, mesh=by_data)


class World(NamedTuple):
    """What there is to run on."""

    device: Device
    ranks: int

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"


@dataclass(frozen=True)
class Cell:
    """One way of training.

    Args:
        name: of the strategy.
        strategy: makes it.
        missing: says what the cell lacks here; nothing if it can run.
        is_compiled: whether the model's blocks are compiled. On capture steps they run eagerly.
    """

    name: str
    strategy: Callable[[World], Strategy]
    missing: Callable[[World], str | None]
    is_compiled: bool = False


class Outcome(NamedTuple):
    """How a cell ended."""

    verdict: Literal["OK", "differs", "fails", "skipped"]
    worst: str = ""
    losses: str = ""
    reason: str = ""


# What cells lack.


def nothing(world: World) -> str | None:
    return None


def gpus(world: World) -> str | None:
    return None if world.device == "cuda" else "needs GPUs"


def several_ranks(world: World) -> str | None:
    return None if world.ranks > 1 else "needs 2 ranks or more"


def divided_heads(world: World) -> str | None:
    if HEADS % world.ranks:
        return f"{HEADS} heads cannot be divided among {world.ranks} ranks"
    return several_ranks(world)


def pairs_of_pairs(world: World) -> str | None:
    return None if world.ranks >= 4 and world.ranks % 2 == 0 else "needs 4 ranks or more, an even number"


def deepspeed(world: World) -> str | None:
    return gpus(world) or (None if find_spec("deepspeed") else "deepspeed is not installed")


# Strategies.


def ddp(world: World) -> Strategy:
    return DDPStrategy(process_group_backend=world.backend, timeout=TIMEOUT)


def ddp_static_graph(world: World) -> Strategy:
    return DDPStrategy(process_group_backend=world.backend, timeout=TIMEOUT, static_graph=True)


def fsdp(world: World) -> Strategy:
    return FSDPStrategy(process_group_backend=world.backend, timeout=TIMEOUT, auto_wrap_policy={Block})


def model_parallel(world: World, by_data: int, by_tensor: int) -> Strategy:
    return ModelParallelStrategy(by_data, by_tensor, process_group_backend=world.backend, timeout=TIMEOUT)


def fsdp2(world: World) -> Strategy:
    return model_parallel(world, by_data=world.ranks, by_tensor=1)


def tensor_parallel(world: World) -> Strategy:
    return model_parallel(world, by_data=1, by_tensor=world.ranks)


def tensor_parallel_and_fsdp2(world: World) -> Strategy:
    return model_parallel(world, by_data=world.ranks // 2, by_tensor=2)


def deepspeed_2(world: World) -> Strategy:
    return DeepSpeedStrategy(stage=2, timeout=TIMEOUT)


def deepspeed_3(world: World) -> Strategy:
    return DeepSpeedStrategy(stage=3, timeout=TIMEOUT)


CELLS = [
    Cell("DDP", ddp, nothing),
    Cell("DDP, static graph", ddp_static_graph, nothing),
    Cell("DDP, compiled", ddp, nothing, is_compiled=True),
    Cell("FSDP", fsdp, gpus),
    Cell("FSDP2", fsdp2, several_ranks),
    Cell("FSDP2, compiled", fsdp2, several_ranks, is_compiled=True),
    Cell("TP", tensor_parallel, divided_heads),
    Cell("TP × FSDP2", tensor_parallel_and_fsdp2, pairs_of_pairs),
    Cell("DeepSpeed stage 2", deepspeed_2, deepspeed),
    Cell("DeepSpeed stage 3", deepspeed_3, deepspeed),
]


# Training.


def all_tokens() -> Tensor:
    return torch.randint(VOCABULARY, (STEPS * SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))


def truth(device: Device, precision: Precision) -> list[Snapshot]:
    """The snapshots of a loop on one process, which has the whole batch of every step.

    It must run before there is a process group, with whose ranks the observer would join its sums.
    """
    model = LanguageModel().to(device)
    optimizer = model.configure_optimizers()
    observer = AttentionObserver(model, statistics=STATISTICS, spectral_sequences=None)
    snapshots = []
    for step, tokens in enumerate(all_tokens().to(device).split(SEQUENCES)):
        with observer, torch.autocast(device, torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = model(tokens)
        snapshots.append(observer.snapshot(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return snapshots


def train(cell: Cell, world: World, precision: Precision, *callbacks: Callback) -> list[float]:
    """The losses of a run on this rank."""
    torch.compiler.reset()  # what an earlier run compiled
    model = LanguageModel(cell.is_compiled)
    trainer = Trainer(
        strategy=cell.strategy(world),
        precision=precision,
        accelerator="gpu" if world.device == "cuda" else "cpu",
        devices=world.ranks,
        max_epochs=1,
        callbacks=list(callbacks),
        deterministic="warn",  # else two runs differ with or without a monitor
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return model.losses


# Comparing.


def check(cell: Cell, world: World, precision: Precision, expected: Sequence[Snapshot]) -> Outcome:
    """Run a cell with the monitor and without."""
    reason = cell.missing(world)
    if reason is not None:
        return Outcome("skipped", reason=reason)
    every_n_steps = 2 if cell.is_compiled else 1  # compiled modules run eagerly where they are captured
    monitor = AttentionMonitor(
        every_n_steps,
        statistics=STATISTICS,
        max_sequences=None,
        spectral_sequences=None,
        print_summary=False,
        strict=True,
    )
    try:
        plain = train(cell, world, precision)
        watched = train(cell, world, precision, monitor)
    except Exception as error:
        traceback.print_exc()
        return Outcome("fails", reason=f"{type(error).__name__}: {error}".splitlines()[0][:100])
    expected = expected[::every_n_steps]
    if len(monitor.history) != len(expected):
        return Outcome("fails", reason=f"{len(monitor.history)} captures, not {len(expected)}")
    worst, place = max(differences(monitor.history, expected, precision))
    loss = max(abs(a - b) / abs(b) for a, b in zip(watched, plain, strict=True))
    # Eager kernels round otherwise than compiled ones do.
    is_right = worst <= TOLERANCES[precision] and loss <= (TOLERANCES[precision] if cell.is_compiled else 0.0)
    losses = "the same" if loss == 0 else f"{loss:.1e} apart"
    return Outcome("OK" if is_right else "differs", f"{worst:.1e} ({place})", losses)


def differences(
    found: Iterable[Snapshot], expected: Iterable[Snapshot], precision: Precision
) -> Iterator[tuple[float, str]]:
    """How far each statistic of each snapshot is from the truth, and which it is."""
    for snapshot, true in zip(found, expected, strict=True):
        if dict(snapshot.heads) != dict(true.heads):
            yield math.inf, f"heads {dict(snapshot.heads)}"[:60]
            continue
        for statistic in STATISTICS:
            if precision == "bf16-mixed" and statistic in BY_DECISION:
                continue
            yield difference(snapshot, true, statistic), statistic


def difference(snapshot: Snapshot, true: Snapshot, statistic: str) -> float:
    """The largest difference over heads, relative to the largest value; infinite where only one of both is absent."""
    values, truths = snapshot.matrix(statistic), true.matrix(statistic)
    if not torch.equal(values.isnan(), truths.isnan()):
        return math.inf
    values, truths = values.nan_to_num(), truths.nan_to_num()
    largest = float(truths.abs().amax())
    return float((values - truths).abs().amax()) / (largest or 1.0)


def names(text: str) -> list[str]:
    chosen = text.split(",")
    known = [cell.name for cell in CELLS]
    unknown = [name for name in chosen if not any(name in cell for cell in known)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is in none of {', '.join(known)}")
    return chosen


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare what the monitor tells with the truth, in a Markdown table.")
    parser.add_argument(
        "--device", choices=get_args(Device), default="cuda", help="cpu: what runs without GPUs, over gloo"
    )
    parser.add_argument(
        "--only", type=names, default=[""], metavar="NAME,…", help="cells that have one of these in their names"
    )
    parser.add_argument(
        "--precision", choices=get_args(Precision), nargs="+", default=get_args(Precision), help="both by default"
    )
    return parser.parse_args()


def main() -> int:
    given = arguments()
    rank, world = int(os.environ.get("RANK", 0)), World(given.device, int(os.environ.get("WORLD_SIZE", 1)))
    if given.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("No GPU is there; --device cpu checks what runs without one.")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        torch.set_num_threads(1)
    for package in ("lightning", "lightning.pytorch"):
        logging.getLogger(package).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.pytorch")
    expected = {precision: truth(given.device, precision) for precision in given.precision}
    if rank == 0:
        print(f"torch {torch.__version__}, lightning {lightning.__version__}, {world.ranks} × {_name(given.device)}\n")
        print(header("strategy", "precision", "result", "largest difference", "losses with the monitor and without"))
    failed = False
    for cell in CELLS:
        for precision in given.precision if any(name in cell.name for name in given.only) else ():
            outcome = check(cell, world, precision, expected[precision])
            failed |= outcome.verdict in ("differs", "fails")
            if rank == 0:
                result = f"{outcome.verdict}: {outcome.reason}" if outcome.reason else outcome.verdict
                print(f"| {cell.name} | {precision} | {result} | {outcome.worst} | {outcome.losses} |", flush=True)
            elif outcome.verdict in ("differs", "fails"):
                print(f"rank {rank}: {cell.name}, {precision}: {' '.join(outcome)}", file=sys.stderr, flush=True)
    with suppress(RuntimeError):  # where a cell left the ranks in disorder
        if dist.is_initialized():
            dist.barrier()  # torchrun ends all ranks when the first ends with an error
            dist.destroy_process_group()
    return int(failed)


def _name(device: Device) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU process"


if __name__ == "__main__":
    sys.exit(main())
