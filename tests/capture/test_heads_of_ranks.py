"""Heads and tokens that ranks divide otherwise than torch divides heads: told by other marks, or refused by name."""

from __future__ import annotations

import re
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_attn import AttentionCall, AttentionObserver, AttentionWarning, observe
from lightning_attn.capture import Visibility
from lightning_attn.capture.head_share import HeadShare
from lightning_attn.capture.refusals import UnreadableError
from lightning_attn.statistics import measure, resolve
from lightning_attn.statistics.measure import Sums
from lightning_attn.statistics.statistic import Maximum, Ratio

WIDTH, HEADS, LENGTH = 16, 4, 6
HEAD = WIDTH // HEADS

Seen = tuple[dict[str, Any], list[str]]


def query_of_all() -> Tensor:
    return 2 * torch.randn(2, HEADS, LENGTH, HEAD, generator=torch.Generator().manual_seed(3))


def seen(model: nn.Module, *inputs: Tensor) -> Seen:
    """The snapshot of a forward pass, and what was said about it."""
    observer = AttentionObserver(model, statistics=["entropy", "max_logit"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with observer:
            model(*inputs)
        snapshot = observer.snapshot().to_dict()
    return snapshot, [str(warning.message) for warning in said if issubclass(warning.category, AttentionWarning)]


def said_of(results: list[Seen]) -> list[str]:
    """What was said where nothing was taken: by the first rank alone, since all have the same to say."""
    messages = [said for _, said in results]
    assert all(snapshot == {} for snapshot, _ in results)
    assert messages[0]
    assert not any(messages[1:])
    return messages[0]


class Attends(nn.Module):
    """Attention of a tensor to itself; the weight is there for the module to count as a site."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(query, query, query)


# Shares and their places.


@pytest.mark.parametrize(
    ("share", "heads", "expected"),
    [
        (HeadShare(0, 1, 2), 3, (0, 6)),
        (HeadShare(1, 1, 2), 3, (3, 6)),
        (HeadShare(32, 16, 64), 2, (4, 8)),
        (HeadShare(8, 1, 9), 1, (8, 9)),
        (HeadShare(12, 4, 16), 1, (3, 4)),
    ],
)
def test_a_share_of_channels_is_a_share_of_heads(share: HeadShare, heads: int, expected: tuple[int, int]) -> None:
    assert share.of_heads(heads) == expected


def test_a_share_that_cuts_heads_is_refused() -> None:
    with pytest.raises(UnreadableError, match="within a head"):
        HeadShare(3, 2, 8).of_heads(1)


def test_sums_among_more_heads() -> None:
    statistics = resolve(["entropy", "max_logit", "token_similarity"])
    found = Sums.nothing(statistics, 2, torch.device("cpu"))
    ones = torch.ones(1, 2)
    found.add({"entropy": Ratio(ones, 2 * ones), "max_logit": Maximum(torch.tensor([[3.0, 4.0]]))}, slice(None))
    found.add({"token_similarity": Ratio(ones[:, :1], ones[:, :1])}, slice(0, 1))
    among = found.among_heads(3, 6)
    assert among["entropy"].numerator.tolist() == [0, 0, 0, 1, 1, 0]
    assert among["entropy"].denominator.tolist() == [0, 0, 0, 2, 2, 0]
    assert among["max_logit"].value.tolist() == [-torch.inf] * 3 + [3, 4, -torch.inf]
    assert among["token_similarity"].denominator.tolist() == [1, 0, 0, 0, 0, 0]  # of the site, at its first head


# Told by the model, and by the marks of Megatron-LM.


class Tells(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def forward(self, query: Tensor) -> Tensor:
        observe(query, query, **self.arguments)
        return query


def told_of_half() -> Seen:
    rank, half = dist.get_rank(), HEADS // 2
    mine = query_of_all()[:, half * rank : half * (rank + 1)]
    return seen(Tells(first_head=half * rank, all_heads=HEADS), mine)


def test_a_model_may_tell_which_heads_it_has(ranks: RankPool) -> None:
    expected, _ = seen(Tells(), query_of_all())
    for snapshot, said in ranks(told_of_half):
        assert said == []
        for name, heads in expected["(root)"].items():
            assert snapshot["(root)"][name] == pytest.approx(heads)


@pytest.mark.parametrize(
    "arguments",
    [
        {"first_head": 0},
        {"all_heads": 8},
        {"first_head": 5, "all_heads": 8},
        {"first_head": -1, "all_heads": 8},
        {"first_head": 0, "all_heads": 3},
        {"first_head": 0.0, "all_heads": 8},
        {"first_head": True, "all_heads": 8},
    ],
)
def test_heads_that_cannot_be_are_said(arguments: dict[str, Any]) -> None:
    snapshot, said = seen(Tells(**arguments), query_of_all())
    assert snapshot == {}
    assert "`first_head` and `all_heads` given to `observe` must both be integers" in said[0]
    assert repr(arguments.get("all_heads")) in said[0]


class Marked(nn.Module):
    """A projection whose weights are marked as Megatron-LM marks those that it divides."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        half, rank = WIDTH // 2, dist.get_rank()
        weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4))
        self.weight = nn.Parameter(weight[half * rank : half * (rank + 1)])
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0
        self.casts = casts

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight.to(torch.float64).float() if self.casts else self.weight
        query = functional.linear(tokens, weight).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        return functional.scaled_dot_product_attention(query, query, query)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4)))

    def forward(self, tokens: Tensor) -> Tensor:
        query = functional.linear(tokens, self.weight).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        return functional.scaled_dot_product_attention(query, query, query)


def tokens() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5))


def marked(casts: bool, has_state: bool) -> Seen:
    """With a stand-in for what Megatron-LM knows of its ranks."""
    state = ModuleType("megatron.core.parallel_state")
    state.get_tensor_model_parallel_rank = dist.get_rank
    state.get_tensor_model_parallel_world_size = dist.get_world_size
    if has_state:
        sys.modules[state.__name__] = state
    try:
        return seen(Marked(casts), tokens())
    finally:
        sys.modules.pop(state.__name__, None)


@pytest.mark.parametrize("casts", [False, True])
def test_heads_are_told_by_the_marks_of_megatron(ranks: RankPool, casts: bool) -> None:
    expected, _ = seen(Whole(), tokens())
    for snapshot, said in ranks(marked, casts, True):
        assert said == []
        for name, heads in expected["(root)"].items():
            assert snapshot["(root)"][name] == pytest.approx(heads, rel=1e-5)


def test_marks_that_nobody_explains_are_refused(ranks: RankPool) -> None:
    said = said_of(ranks(marked, False, False))
    assert "divided among ranks" in said[0]
    assert "`first_head` and `all_heads`" in said[0]


# Tokens that are spread over ranks.


def spread(placement: Any, dimension: int) -> Seen:
    """An attention of tensors that are divided along an axis, or not added up yet."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    query = query_of_all()
    part = query.chunk(2, dim=dimension)[dist.get_rank()] if isinstance(placement, Shard) else query
    return seen(Attends(), DTensor.from_local(part, mesh, [placement], run_check=False))


@pytest.mark.parametrize("axis", [2, 3])
def test_context_parallelism_is_refused_by_name(ranks: RankPool, axis: int) -> None:
    said = said_of(ranks(spread, Shard(axis), axis))
    assert "context parallelism, ring attention" in said[0]
    assert "'(root)'" in said[0]
    assert len(said) == 1


def test_what_is_not_added_up_yet_is_refused(ranks: RankPool) -> None:
    said = said_of(ranks(spread, Partial(), 0))
    assert "sums over ranks" in said[0]


@pytest.mark.parametrize(("placement", "axis"), [(Shard(0), 0), (Shard(1), 1), (Replicate(), 0)])
def test_what_divides_sequences_or_heads_is_read(ranks: RankPool, placement: Any, axis: int) -> None:
    expected, _ = seen(Attends(), query_of_all())
    for snapshot, said in ranks(spread, placement, axis):
        assert said == []
        for name, heads in expected["(root)"].items():
            assert snapshot["(root)"][name] == pytest.approx(heads, rel=1e-5)


class _SeqAllToAll(torch.autograd.Function):
    """As DeepSpeed-Ulysses calls its exchange of tokens for heads."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class RingFlashAttnFunc(_SeqAllToAll):
    """As ring-flash-attention calls its attention."""


class Exchanges(Attends):
    def forward(self, query: Tensor) -> Tensor:
        return super().forward(_SeqAllToAll.apply(query) * 1.0)


class Travels(Attends):
    def forward(self, query: Tensor) -> Tensor:
        return RingFlashAttnFunc.apply(query)


def exchanged(kind: type[nn.Module]) -> Seen:
    return seen(kind(), query_of_all())


def test_heads_that_are_exchanged_for_tokens_are_refused(ranks: RankPool) -> None:
    said = said_of(ranks(exchanged, Exchanges))
    assert "divided among ranks" in said[0]


def test_ring_attention_is_refused_by_name(ranks: RankPool) -> None:
    said = said_of(ranks(exchanged, Travels))
    assert "ring attention" in said[0]


def test_alone_an_exchange_is_none() -> None:
    snapshot, said = seen(Exchanges(), query_of_all())
    assert list(snapshot) == ["(root)"]
    assert said == []


# One site, several shares.


class OtherHeads(nn.Module):
    def forward(self, query: Tensor) -> Tensor:
        observe(query, query, first_head=0, all_heads=2 * HEADS)
        observe(query * 1.5, query, first_head=HEADS, all_heads=2 * HEADS)
        return query


def test_a_site_with_other_heads_in_the_next_call_is_said(ranks: RankPool) -> None:
    first, second = ranks(exchanged, OtherHeads)
    assert len(first[0]["(root)"]["entropy"]) == 2 * HEADS
    assert any("other heads of it in one call than in another" in message for message in first[1])
    assert second == (first[0], [])


# Data parallelism costs nothing of this.


def looked_at() -> tuple[int, int]:
    """How often the trail of heads follows a function of a model that every rank has whole."""
    from lightning_attn.capture.head_trail import HeadTrail

    followed = 0
    made = HeadTrail._made

    def counted(*arguments: Any) -> Any:
        nonlocal followed
        followed += 1
        return made(*arguments)

    HeadTrail._made = counted
    try:
        snapshot, _ = seen(Whole(), tokens())
    finally:
        HeadTrail._made = made
    return followed, len(snapshot)


def test_a_model_that_is_not_divided_is_not_followed_for_it(ranks: RankPool) -> None:
    assert ranks(looked_at) == [(0, 1), (0, 1)]


# A fault in following.


def faulty() -> Seen:
    from lightning_attn.capture import holding

    def fails(*_: Any) -> Any:
        raise RuntimeError("no such mesh")

    part_of, holding.part_of = holding.part_of, fails
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    half = query_of_all().chunk(2, dim=1)[dist.get_rank()]
    try:
        return seen(Attends(), DTensor.from_local(half, mesh, [Shard(1)], run_check=False))
    finally:
        holding.part_of = part_of


def test_heads_whose_share_cannot_be_found_are_not_taken_for_all(ranks: RankPool) -> None:
    said = said_of(ranks(faulty))
    assert re.search("failed and is given up for this site; .*no such mesh", said[0])


def test_statistics_of_all_heads_come_from_the_parts() -> None:
    """Every statistic: a part among all heads has its own values at its place, and nothing elsewhere."""
    statistics, query = resolve("all"), query_of_all()[:, :2]
    part = measure(AttentionCall("site", query, query, query, 1.0, Visibility(0), self_attention=True), statistics)
    among = part.among_heads(1, 4)
    names = [statistic.name for statistic in statistics if statistic.per == "head"]
    torch.testing.assert_close(among.head_values(names)[:, 1:3], part.head_values(names), equal_nan=True)
    assert bool(among.head_values(names)[:, [0, 3]].isnan().all())
