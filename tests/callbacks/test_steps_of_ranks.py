"""Models that optimise by hand on several ranks: which batches are watched does not hang on who steps in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from collectives import counted_captures
from distributed_training import strategy
from listening import hearing
from models import LanguageModel, batches, trainer
from rank_pool import RankPool
from torch import Tensor, distributed

from lightning_attn import AttentionMonitor

FIRST, STEADY = ["MAX", "gather", "MAX", "SUM"], ["MAX", "SUM"]


class ByHand(LanguageModel):
    """Steps on each rank in the batches that are given for it.

    Args:
        steps_in: the batches of each rank in which its optimisers step.
        optimizers: how many there are, each of which has a block of its own.
    """

    def __init__(self, steps_in: list[list[int]], optimizers: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps_in = steps_in
        self.number_of_optimizers = optimizers

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            self.manual_backward(self.loss(batch))
            if batch_idx in self.steps_in[self.global_rank]:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return [torch.optim.SGD(self.blocks[block].parameters(), 0.01) for block in range(self.number_of_optimizers)]


def trained(
    model: ByHand, every_n_steps: int, epochs: int = 1, path: str | None = None, save: str | None = None, fits: int = 1
) -> dict[str, Any]:
    """Six batches an epoch: which batches were watched, what it cost, and what was said."""
    monitor = AttentionMonitor(every_n_steps, statistics="entropy", print_summary=False)
    size = distributed.get_world_size() if distributed.is_initialized() else 1
    over_ranks = {"strategy": strategy(), "devices": size, "use_distributed_sampler": False} if size > 1 else {}
    running = trainer(monitor, max_epochs=epochs, **over_ranks)
    steps, collectives = [], []
    for fit in range(fits):
        running.fit_loop.max_epochs = epochs + fit
        with hearing() as said, counted_captures() as captures:
            running.fit(model, batches(6), ckpt_path=path)
        steps.append(list(monitor.history.steps))
        collectives += captures
    if save is not None:
        running.save_checkpoint(save)
    return {"steps": steps, "collectives": collectives, "said": said, "optimizer steps": running.global_step}


def on_ranks(steps_in: list[list[int]], every_n_steps: int, arguments: dict[str, Any]) -> dict[str, Any]:
    optimizers = arguments.pop("optimizers", 1)
    return trained(ByHand(steps_in, optimizers), every_n_steps, **arguments)


ALL, NONE = list(range(6)), list[int]()


@pytest.mark.parametrize("steps_in", [[ALL, [0, 2, 3, 4, 5]], [[1], ALL], [ALL, NONE], [[0, 3], [2, 5]]], ids=str)
@pytest.mark.parametrize(("every_n_steps", "watched"), [(1, ALL), (2, [0, 2, 4]), (4, [0, 4])])
def test_ranks_that_step_in_other_batches_watch_the_same(
    steps_in: list[list[int]], every_n_steps: int, watched: list[int], ranks: RankPool
) -> None:
    results = ranks(on_ranks, steps_in, every_n_steps, {}, seconds=20)
    for result, batches_with_steps in zip(results, steps_in, strict=True):
        assert result["steps"] == [watched]
        assert result["collectives"] == [FIRST, *[STEADY] * (len(watched) - 1)]
        assert result["said"] == []
        assert result["optimizer steps"] == len(batches_with_steps)


def test_a_rank_that_never_stepped_goes_on_in_another_fit(ranks: RankPool) -> None:
    for result in ranks(on_ranks, [ALL, NONE], 4, {"fits": 2}, seconds=20):
        assert result["steps"] == [[0, 4], [0, 4, 8]]


def test_two_optimisers_count_once_on_ranks_and_in_one_process(ranks: RankPool) -> None:
    alone = trained(ByHand([ALL], optimizers=2), 4)
    assert alone["steps"] == [[0, 4]] and alone["optimizer steps"] == 12
    for result in ranks(on_ranks, [ALL, ALL], 4, {"optimizers": 2}, seconds=20):
        assert result["steps"] == alone["steps"]


def test_one_process_counts_its_optimiser_steps() -> None:
    """Which are in every second batch: of the six batches the first and the fifth begin with an even number of them."""
    assert trained(ByHand([[1, 3, 5]]), 2)["steps"] == [[0, 4]]


def test_a_resumed_run_keeps_its_cadence(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    apart = [[0, 1, 2], [3, 4, 5]]
    for result in ranks(on_ranks, apart, 4, {"save": path}, seconds=20):
        assert result["steps"] == [[0, 4]]
    for result in ranks(on_ranks, apart, 4, {"path": path, "epochs": 3}, seconds=20):
        assert result["steps"] == [[8, 12, 16]]
