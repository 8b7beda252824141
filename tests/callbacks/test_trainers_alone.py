"""Trainers of one device in a process whose default group is up: they train alone, and nobody waits for anybody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collectives import collectives
from distributed_training import strategy
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from models import LanguageModel, batches, trainer
from rank_pool import RankPool
from torch import distributed

from lightning_attn import AttentionMonitor

HeadValues = list[dict[str, dict[str, list[float | None]]]]


def monitor(**arguments: Any) -> AttentionMonitor:
    return AttentionMonitor(1, statistics=["entropy", "max_logit"], print_summary=False, **arguments)


def history(of_monitor: AttentionMonitor) -> HeadValues:
    return [snapshot.to_dict() for snapshot in of_monitor.history]


def assert_close(found: HeadValues, expected: HeadValues) -> None:
    assert len(found) == len(expected) > 0
    for of_step, wanted in zip(found, expected, strict=True):
        assert of_step.keys() == wanted.keys()
        for site, statistics in wanted.items():
            for name, values in statistics.items():
                assert of_step[site][name] == pytest.approx(values, rel=1e-4)


def own_model(seed: int) -> tuple[HeadValues, list[str]]:
    """Trains a model of its own, on more batches the higher its number is."""
    torch.manual_seed(seed)
    watching = monitor()
    with collectives() as called:
        trainer(watching).fit(LanguageModel(), batches(3 + 2 * seed))
    return history(watching), called


def one_of_a_sweep() -> tuple[HeadValues, list[str]]:
    return own_model(distributed.get_rank())


def test_a_sweep_of_one_trainer_for_each_rank_does_not_mix_its_models(ranks: RankPool) -> None:
    for rank, (found, called) in enumerate(ranks(one_of_a_sweep, seconds=20)):
        assert called == []
        assert_close(found, own_model(rank)[0])


def validated(again: bool) -> Any:
    """All ranks train; then rank zero validates alone, with the same Trainer or another one."""
    model, validating = LanguageModel(), monitor(stage="validate")
    over_ranks = {"strategy": strategy(), "devices": distributed.get_world_size(), "use_distributed_sampler": False}
    running = trainer(validating, **over_ranks, num_sanity_val_steps=0)
    running.fit(model, batches(2), batches(2))
    assert len(validating.history) == 1
    if distributed.get_rank() > 0:
        return None
    if again:
        running._accelerator_connector.strategy = SingleDeviceStrategy(torch.device("cpu"), CPUAccelerator())
    else:
        running = trainer(validating)
    with collectives() as called:
        running.validate(model, batches(2), verbose=False)
    alone = monitor(stage="validate")
    trainer(alone).validate(model, batches(2), verbose=False)
    return history(validating)[1:], called, history(alone)


@pytest.mark.parametrize("again", [False, True], ids=["another Trainer", "another strategy"])
def test_rank_zero_may_validate_alone_after_all_have_trained(again: bool, ranks: RankPool) -> None:
    (found, called, alone), _ = ranks(validated, again, seconds=20)
    assert called == []
    assert found == alone
