"""What ranks that do not do the same are told: who speaks, who is out of step, who asks for something else."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from collectives import collectives
from listening import hearing
from rank_pool import Raised, RankPool
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from lightning_attn import AttentionObserver
from lightning_attn.capture.report import Messages
from lightning_attn.distributed import RankReduction
from lightning_attn.statistics import resolve
from lightning_attn.statistics.measure import Sums
from lightning_attn.statistics.statistic import Maximum, Ratio

CPU = torch.device("cpu")
FIRST, STEADY = ["MAX", "gather", "MAX", "SUM"], ["MAX", "SUM"]
#: News for which the layout has room already.
SAID = ["MAX", "gather", "SUM"]


def sums(*names: str, value: float = 0.5) -> Sums:
    """What a rank found of one head at a site."""
    statistics = resolve(list(names))
    found, one = Sums.nothing(statistics, 1, CPU), torch.ones(1, 1, dtype=torch.float64)
    kinds = {"mean": Ratio(value * one, one), "max": Maximum(value * one)}
    found.add({statistic.name: kinds[statistic.joined_by] for statistic in statistics}, slice(None))
    return found


def values(joined: dict[str, Sums]) -> dict[str, dict[str, list[float]]]:
    return {site: {name: s.or_nan.tolist() for name, s in of_site.items()} for site, of_site in joined.items()}


# Who speaks.


def who_says(captures: list[list[list[str]]]) -> list[tuple[list[str], list[str]]]:
    """For each capture what a rank said and the collectives, if each rank has some faults in it."""
    reduction, messages, found = RankReduction(), Messages(), {"a": sums("entropy")}
    messages.are_held_back = True
    results = []
    for of_ranks in captures:
        with hearing() as said, collectives() as called:
            for fault in of_ranks[dist.get_rank()]:
                messages.say("a", fault, fault)
            assert not said
            reduction(found, resolve(["entropy"]), set(), CPU, messages)
            messages.release()
        results.append((said, called))
    return results


def test_a_fault_everywhere_is_said_by_the_lowest_rank_and_one_elsewhere_by_its_own(ranks: RankPool) -> None:
    captures = [[["x"], ["x", "y"], ["y", "x"], []], [[]] * 4, [[], [], [], ["x", "z"]], [["z"], ["z"], [], []]]
    results = ranks(who_says, captures, ranks=4)
    assert [[said for said, _ in of_rank] for of_rank in results] == [
        [["x"], [], [], []],
        [["y"], [], [], []],
        [[], [], [], []],
        [[], [], ["z"], []],
    ]
    for of_rank in results:
        assert [called for _, called in of_rank] == [FIRST, STEADY, SAID, STEADY]


# Out of step.


def steps_of(steps: list[list[int]]) -> list[tuple[int, list[str], list[str]]]:
    reduction, found = RankReduction(), {"a": sums("entropy")}
    results = []
    for of_ranks in steps:
        reduction.step = of_ranks[dist.get_rank()]
        with hearing() as said, collectives() as called:
            reduction(found, resolve(["entropy"]), set(), CPU)
        results.append((reduction.step, said, called))
    return results


def test_ranks_out_of_step_are_told_of_once_and_carry_the_largest(ranks: RankPool) -> None:
    first, second = ranks(steps_of, [[0, 0], [10, 10], [20, 15], [30, 20]])
    for of_rank in (first, second):
        assert [step for step, _, _ in of_rank] == [0, 10, 20, 30]
        assert [called for _, _, called in of_rank] == [FIRST, STEADY, STEADY, STEADY]
    (warning,) = [message for _, said, _ in first for message in said]
    assert "a capture is of step 15 on one and of step 20 on another" in warning
    assert not [message for _, said, _ in second for message in said]


# Asked for something else.


def asked(captures: list[list[list[str]]], numbers: list[int] | None = None) -> list[Any]:
    reduction, results = RankReduction(), []
    for of_ranks in captures:
        names = of_ranks[dist.get_rank()]
        reduction.numbers = [1.0] * (numbers[dist.get_rank()] if numbers else 0)
        with collectives() as called:
            joined = reduction({"a": sums(*names, value=0.5 + dist.get_rank())}, resolve(names), set(), CPU)
        results.append((values(joined), called))
    return results


MEAN, MAXIMUM, OTHER = "entropy", "max_logit", "max_weight"


@pytest.mark.parametrize(
    ("first", "second"),
    [([MEAN], [MAXIMUM]), ([MEAN], [MEAN, MAXIMUM]), ([MEAN, OTHER], [OTHER, MEAN]), ([MEAN, OTHER], [OTHER])],
    ids=lambda names: "+".join(names),
)
@pytest.mark.parametrize("before", [[], [[[MEAN, OTHER, MAXIMUM]] * 2]], ids=["at once", "later"])
def test_ranks_that_ask_for_other_statistics_are_all_told(
    first: list[str], second: list[str], before: list[list[list[str]]], ranks: RankPool
) -> None:
    for raised in ranks.try_on(asked, [*before, [first, second]], seconds=20):
        assert isinstance(raised, Raised)
        assert raised.error.startswith("ValueError: All ranks must ask for the same statistics in the same order")
        assert f"rank 0 asks for {first}, and rank 1 for {second}" in raised.error


def test_ranks_with_other_numbers_of_callbacks_are_all_told(ranks: RankPool) -> None:
    for raised in ranks.try_on(asked, [[[MEAN]] * 2], [1, 2], seconds=20):
        assert isinstance(raised, Raised)
        assert "1 of them watch this step on rank 0, and 2 on rank 1" in raised.error


def test_statistics_that_change_from_capture_to_capture_cost_an_exchange_when_they_are_new(ranks: RankPool) -> None:
    """As those of several callbacks do that are due at different steps."""
    requests = [[MEAN], [MAXIMUM, MEAN], [OTHER], [MEAN], [OTHER, MAXIMUM, MEAN], [MAXIMUM]]
    first, second = ranks(asked, [[names] * 2 for names in requests])
    assert first == second
    assert [called for _, called in first] == [FIRST, FIRST, FIRST, STEADY, STEADY, STEADY]
    joined = {MEAN: [1.0], OTHER: [1.0], MAXIMUM: [1.5]}
    assert [found for found, _ in first] == [{"a": {name: joined[name] for name in names}} for names in requests]


# Ranks that do not come.


def one_does_not_come() -> None:
    reduction, found = RankReduction(), {"a": sums("entropy")}
    reduction.step = 7
    reduction(found, resolve(["entropy"]), set(), CPU)
    reduction.step = 14
    if dist.get_rank() == 1:
        raise KeyError("an exception of its own")
    reduction(found, resolve(["entropy"]), set(), CPU)


def test_a_rank_that_does_not_come_is_told_of_in_our_words(ranks: RankPool) -> None:
    first, second = ranks.try_on(one_does_not_come, seconds=20)
    assert second.error.startswith("KeyError")
    assert first.error.startswith("RuntimeError: The attention statistics of step 14 cannot be joined")
    assert "not all of the 2 ranks came" in first.error
    assert "The above exception was the direct cause" in first.trace


def waits_for_another() -> str:
    """On a process group whose time is short."""
    dist.distributed_c10d._get_default_group()._get_backend(CPU)._set_default_timeout(timedelta(seconds=1))
    reduction = RankReduction()
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="cannot be joined") as raised:
            reduction({"a": sums("entropy")}, resolve(["entropy"]), set(), CPU)
        return str(raised.value.__cause__)
    time.sleep(3)
    return ""


def test_waiting_ends_with_the_time_of_the_process_group(ranks: RankPool) -> None:
    first, _ = ranks(waits_for_another, seconds=20)
    assert "imed out" in first


# A process group of other ranks, in the same process.

_KEPT: dict[str, RankReduction] = {}


def again(new: bool) -> list[str]:
    if new:
        _KEPT.clear()
    reduction = _KEPT.setdefault("reduction", RankReduction())
    with collectives() as called:
        reduction({"a": sums("entropy")}, resolve(["entropy"]), set(), CPU)
    return called


def test_a_layout_is_agreed_anew_with_other_ranks(ranks: RankPool) -> None:
    """Two ranks go on as four, of which two know nothing."""
    assert ranks(again, True, ranks=2) == [FIRST] * 2
    assert ranks(again, False, ranks=4, seconds=20) == [FIRST] * 4
    assert ranks(again, False, ranks=2, seconds=20) == [FIRST] * 2
    assert ranks(again, True, ranks=1) == [[]]


# torch's Join.


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True).double()


def tokens(rank: int) -> list[torch.Tensor]:
    """Three batches of the first rank, five of the second."""
    random = torch.Generator().manual_seed(rank)
    return list(torch.randn(3 + 2 * rank, 4, 8, 16, generator=random, dtype=torch.float64))


def trained_within_join(snapshot_inside: bool, bare: bool) -> Any:
    model = layer()
    parallel = DistributedDataParallel(model)
    observer = AttentionObserver(model if bare else parallel, statistics=["entropy", "max_logit"])
    with Join([parallel]):
        for step, batch in enumerate(tokens(dist.get_rank())):
            with observer:
                parallel(batch).square().sum().backward()
            if snapshot_inside:
                observer.snapshot(step)
    return observer.snapshot(5).to_dict()


@pytest.mark.parametrize("bare", [False, True])
def test_watching_inside_join_adds_up_and_the_snapshot_comes_after_it(bare: bool, ranks: RankPool) -> None:
    first, second = ranks(trained_within_join, False, bare)
    alone = AttentionObserver(layer(), statistics=["entropy", "max_logit"])
    for batch in [*tokens(0), *tokens(1)]:
        with alone:
            alone.model(batch)
    assert first == second
    for name, heads in alone.snapshot().to_dict()["self_attn"].items():
        assert first["self_attn"][name] == pytest.approx(heads, rel=1e-6)


def test_a_snapshot_inside_join_ends_in_an_error(ranks: RankPool) -> None:
    results = ranks.try_on(trained_within_join, True, False, seconds=20)
    assert all(isinstance(result, Raised) for result in results)
    assert any("inside torch's `Join`" in result.error for result in results), results
