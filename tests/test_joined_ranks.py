"""Who joins what they see: all ranks, the ranks of a process group, or a process alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collectives import collectives
from listening import hearing
from rank_pool import RankPool
from torch import Tensor, distributed, nn
from torch.nn import functional

from lightning_attn import AttentionObserver
from lightning_attn.distributed import RankReduction
from lightning_attn.joined_ranks import JoinedRanks

FIRST, STEADY = ["MAX", "gather", "MAX", "SUM"], ["MAX", "SUM"]


class Attends(nn.Module):
    """Attends to its tokens, twice in a pass if it is asked to, which its observer has to say something of."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times

    def forward(self, tokens: Tensor) -> None:
        for _ in range(self.times):
            functional.scaled_dot_product_attention(tokens, tokens, tokens)


def tokens_of(rank: int) -> Tensor:
    """Two sequences for each rank, of more weight the higher it is."""
    return (1 + rank) * torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def heads(snapshot: dict[str, dict[str, list[float | None]]]) -> list[list[float | None]]:
    (of_site,) = snapshot.values()
    return list(of_site.values())


def alone_on(*members: int) -> list[list[float | None]]:
    """What one process sees of all that some ranks have."""
    model = Attends()
    observer = AttentionObserver(model, statistics=["entropy", "max_logit"])
    with observer:
        model(torch.cat([tokens_of(rank) for rank in members]))
    return heads(observer.snapshot().to_dict())


def watched(process_group: Any) -> list[Any]:
    """Two captures: the heads of each and its collectives; then what was said."""
    model = Attends()
    found: list[Any] = []
    with hearing() as said:
        observer = AttentionObserver(model, statistics=["entropy", "max_logit"], process_group=process_group)
        for _ in range(2):
            with observer:
                model(tokens_of(distributed.get_rank()))
            with collectives() as called:
                found.append((heads(observer.snapshot().to_dict()), called))
        blind = AttentionObserver(nn.Identity(), process_group=process_group)
        with blind:
            blind.model(0)
        blind.snapshot()
    return [*found, said]


def in_two_groups() -> list[Any]:
    groups = [distributed.new_group(members) for members in ([0, 2], [3, 1])]
    return watched(groups[distributed.get_rank() % 2])


def test_a_group_joins_its_ranks_alone_and_its_first_one_speaks(ranks: RankPool) -> None:
    results = ranks(in_two_groups, ranks=4)
    for rank, (first, second, said) in enumerate(results):
        expected = alone_on(rank % 2, rank % 2 + 2)
        for (values, called), collectives_of_capture in zip((first, second), (FIRST, STEADY), strict=True):
            assert called == collectives_of_capture
            for of_ranks, of_one in zip(values, expected, strict=True):
                assert of_ranks == pytest.approx(of_one, rel=1e-6)
        assert len(said) == (rank in (0, 1))  # torch numbers the ranks of a group by their order in the default one


def alone() -> list[Any]:
    return watched("alone")


def in_groups_of_one() -> list[Any]:
    groups = [distributed.new_group([rank]) for rank in range(distributed.get_world_size())]
    return watched(groups[distributed.get_rank()])


@pytest.mark.parametrize("function", [alone, in_groups_of_one])
def test_a_process_alone_calls_no_collective_and_has_its_own_values(function: Any, ranks: RankPool) -> None:
    for rank, (first, second, said) in enumerate(ranks(function)):
        for values, called in (first, second):
            assert called == []
            for of_rank, expected in zip(values, alone_on(rank), strict=True):
                assert of_rank == pytest.approx(expected, rel=1e-6)
        assert len(said) == 1


def other_groups() -> list[list[str]]:
    """One reduction joins all ranks, two of them, none, and all again."""
    pair = distributed.new_group([0, 1])
    reduction, called = RankReduction(), []
    for process_group in (None, pair, "alone", None):
        if process_group is pair and distributed.get_rank() > 1:
            continue
        reduction.process_group = process_group
        with collectives() as of_capture:
            reduction({}, [], set(), torch.device("cpu"))
        called.append(of_capture)
    return called


def test_who_joins_may_be_replaced(ranks: RankPool) -> None:
    assert ranks(other_groups, ranks=3) == [[STEADY, STEADY, [], STEADY]] * 2 + [[STEADY, [], STEADY]]


def outside() -> Any:
    group = distributed.new_group([0])
    if distributed.get_rank() == 0:
        return JoinedRanks.of(group).are_several
    with pytest.raises(ValueError, match=r"`process_group` must be a process group .* that this rank is in"):
        AttentionObserver(Attends(), process_group=group)
    return None


def test_a_group_that_the_rank_is_not_in_is_refused(ranks: RankPool) -> None:
    assert ranks(outside) == [False, None]


@pytest.mark.parametrize("wrong", ["all", 0, [0, 1], ""])
def test_what_is_no_group_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"`process_group` must be .*'alone'.* got ") as raised:
        AttentionObserver(Attends(), process_group=wrong)
    assert repr(wrong) in str(raised.value)


# A group that is gone.


def outlived() -> Any:
    """Has something to say, and takes its snapshot when the group is destroyed."""
    model = Attends(times=2)
    observer = AttentionObserver(model, statistics=["entropy", "max_logit"])
    with hearing() as while_watching, observer:
        model(tokens_of(distributed.get_rank()))
    distributed.barrier()
    distributed.destroy_process_group()
    with hearing() as said:
        snapshot = observer.snapshot()
    return heads(snapshot.to_dict()), while_watching, said


def test_a_snapshot_after_the_end_of_the_group_is_of_the_process_alone(ranks: RankPool) -> None:
    for rank, (seen, while_watching, (said,)) in enumerate(ranks(outlived)):
        assert seen[1] == pytest.approx(alone_on(rank)[1])
        assert while_watching == []  # until then all ranks might have said it
        assert "computes attention several times in one forward pass" in said
