"""What the monitor adds to a training step under DDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from models import SIZES, Size
from rank_processes import on_ranks
from table import header
from torch import distributed as dist
from training_steps import DEFAULT_CADENCE, step_seconds
from turns import Effort, Ratio, progress, ratios

HEADER = header("model", "ranks", "cadence", "plain step", "with `AttentionMonitor`", "middle half of the rounds")


def training_rows(worlds: Sequence[int], backend: str, effort: Effort) -> Iterator[str]:
    """The table, a line for each number of ranks and cadence."""
    name, size = "demo", SIZES["demo"]
    for ranks in worlds:
        progress(f"training steps of the {name} LM under DDP with {ranks} ranks")
        found = on_ranks(_ratios, size, effort, ranks=ranks, backend=backend)
        for every_n_steps, ratio in found.items():
            cadence = f"`every_n_steps={every_n_steps}`"
            yield (
                f"| {name} LM: {size} | {ranks} | {cadence} | {1000 * ratio.baseline_seconds:.3g} ms "
                f"| × {ratio.value:.3f} | {ratio.low:.3f} – {ratio.high:.3f} |"
            )


def _ratios(size: Size, effort: Effort) -> dict[int, Ratio]:
    """A run with the monitor over one without, of the same length, by cadence."""
    steps = {DEFAULT_CADENCE: DEFAULT_CADENCE, 1: effort.steps}
    return {
        every_n_steps: ratios(
            lambda count=count: step_seconds(size, count, **_trainer()),
            {"monitor": lambda count=count, every=every_n_steps: step_seconds(size, count, every, **_trainer())},
            effort.rounds,
        )["monitor"]
        for every_n_steps, count in steps.items()
    }


def _trainer() -> dict[str, Any]:
    return {
        "strategy": DDPStrategy(cluster_environment=LightningEnvironment()),
        "accelerator": "gpu" if dist.get_backend() == "nccl" else "cpu",
        "devices": dist.get_world_size(),
        "use_distributed_sampler": False,  # each rank has batches of its own
    }
