"""Heads that could be taken for queries, blocks of queries for heads, and several calls in one forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_attn import AttentionObserver, AttentionWarning, record

SEQUENCES, TOKENS, KEYS, HEADS, WIDTH = 2, 6, 9, 4, 8
CHANNELS = HEADS * WIDTH

Attend = Callable[["Site", Tensor, Tensor], Tensor]


class Site(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.query, self.key = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, WIDTH)

    def forward(self, tokens: Tensor, memory: Tensor) -> Tensor:
        return self.attend(self, tokens, memory)


def run(
    attend: Attend, *, queries: int = TOKENS, keys: int = KEYS
) -> tuple[list[tuple[int, ...]], list[int], set[str]]:
    """The shapes of the calls that are seen, the number of heads of the snapshot, and what is said."""
    model, tokens, memory = (
        Site(attend),
        torch.randn(SEQUENCES, queries, CHANNELS),
        torch.randn(SEQUENCES, keys, CHANNELS),
    )
    observer = AttentionObserver(model, statistics="entropy")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with record(model) as recording:
            model(tokens, memory)
        with observer:
            model(tokens, memory)
        heads = list(observer.snapshot().heads.values())
    shapes = [(call.sequences, call.heads, call.queries, call.keys) for call in recording.calls]
    return shapes, heads, {str(warning.message) for warning in said if warning.category is AttentionWarning}


def heads_after_tokens(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """(B, N, H, D) with (B, M, D), the product being (B, N, H, M)."""
    query, key = site.query(tokens).unflatten(-1, (HEADS, WIDTH)), site.key(memory)
    return torch.einsum("bnhm,bmd->bnhd", torch.einsum("bnhd,bmd->bnhm", query, key).softmax(-1), key)


def heads_before_tokens(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key = site.query(tokens).unflatten(-1, (HEADS, WIDTH)), site.key(memory)
    return torch.einsum("bhnm,bmd->bnhd", torch.einsum("bnhd,bmd->bhnm", query, key).softmax(-1), key)


@pytest.mark.parametrize("attend", [heads_after_tokens, heads_before_tokens])
@pytest.mark.parametrize("queries", [TOKENS, 1, KEYS])
def test_which_axis_holds_the_queries_is_told_by_what_the_module_was_given(attend: Attend, queries: int) -> None:
    shapes, heads, said = run(attend, queries=queries)
    assert shapes == [(SEQUENCES, HEADS, queries, KEYS)]
    assert heads == [HEADS]
    assert said == set()


@pytest.mark.parametrize("attend", [heads_after_tokens, heads_before_tokens])
def test_without_that_it_is_refused(attend: Attend) -> None:
    """Of an image nothing tells how many tokens are made of it."""

    class OfImages(Site):
        def forward(self, image: Tensor) -> Tensor:  # type: ignore[override]
            tokens = image.flatten(2).transpose(1, 2)
            return self.attend(self, tokens, torch.cat([tokens, tokens[:, :2]], dim=1))

    model = OfImages(attend)
    with (
        pytest.warns(AttentionWarning, match="several of its axes may be the one of the queries"),
        record(model) as found,
    ):
        model(torch.randn(SEQUENCES, CHANNELS, 2, 3))
    assert found.calls == []


def one_query_folded(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key = site.query(tokens).view(-1, HEADS, WIDTH), site.key(memory)
    return (query @ key.mT).softmax(-1) @ key


def one_query_folded_by_the_function(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    return scaled_dot_product_attention(site.query(tokens).view(-1, HEADS, WIDTH), site.key(memory), site.key(memory))


def one_query_changed_and_folded(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """As a rotary embedding does, after which nothing tells that heads lie within a token."""
    query, key = site.query(tokens).view(-1, HEADS, WIDTH) * 2, site.key(memory)
    return (key @ query.mT).softmax(-2).mT @ key


def queries_of_all_heads(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key = site.query(tokens).view(SEQUENCES, -1, WIDTH), site.key(memory)
    return torch.bmm(torch.bmm(query, key.mT).softmax(-1), key)


@pytest.mark.parametrize(
    ("attend", "queries", "keys", "message"),
    [
        (one_query_folded, 1, KEYS, "lie beside each other within one token"),
        (one_query_folded, 1, HEADS, "lie beside each other within one token"),
        (one_query_folded_by_the_function, 1, KEYS, "lie beside each other within one token"),
        (one_query_folded_by_the_function, 1, HEADS, "lie beside each other within one token"),
        (one_query_changed_and_folded, 1, KEYS, "was given one token of each sequence"),
        (queries_of_all_heads, TOKENS, KEYS, "lie beside each other within one token"),
    ],
)
def test_heads_are_not_taken_for_queries_of_one_head(attend: Attend, queries: int, keys: int, message: str) -> None:
    shapes, heads, said = run(attend, queries=queries, keys=keys)
    assert shapes == []
    assert heads == []
    assert len(said) == 1
    assert message in said.pop()


def windows_after_heads(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query = site.query(tokens).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2).unflatten(2, (-1, 2))
    return scaled_dot_product_attention(query, query, query)


def windows_of_pooled_queries(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """As Hiera pools them, so that the keys alone tell."""
    key = site.query(tokens).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2).unflatten(2, (-1, 2))
    return scaled_dot_product_attention(key.amax(-2, keepdim=True), key, key)


def windows_of_one_head(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query = site.query(tokens)[..., :WIDTH].unflatten(1, (-1, 2))
    return (query @ query.mT).softmax(-1) @ query


def windows_of_one_head_by_the_function(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query = site.query(tokens)[..., :WIDTH].unflatten(1, (-1, 2))
    return scaled_dot_product_attention(query, query, query)


def sequences_after_heads(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query = site.query(tokens).unflatten(-1, (HEADS, WIDTH))
    return torch.einsum("hbij,bjhd->bihd", torch.einsum("bihd,bjhd->hbij", query, query).softmax(-1), query)


@pytest.mark.parametrize("attend", [windows_after_heads, windows_of_pooled_queries, sequences_after_heads])
def test_windows_and_sequences_are_not_taken_for_heads(attend: Attend) -> None:
    """The channels of queries and keys tell the heads, so that the other axis is one of sequences."""
    shapes, heads, said = run(attend)
    assert [shape[1] for shape in shapes] == heads == [HEADS]
    assert not said


@pytest.mark.parametrize("attend", [windows_of_one_head, windows_of_one_head_by_the_function])
def test_windows_of_one_head_are_not_taken_for_heads(attend: Attend) -> None:
    shapes, heads, said = run(attend)
    assert shapes == []
    assert heads == []
    assert len(said) == 1
    assert "goes from token to token (windows, chunks, sequences); fold it into the sequences" in said.pop()


def a_projection_of_each_head(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """Queries and keys of a head are beside each other, and heads are an axis from the beginning."""
    weight = site.query.weight.view(HEADS, WIDTH, CHANNELS)
    query, key = torch.einsum("bnc,hdc->bhnd", tokens, torch.cat([weight, weight.flip(0)], dim=1)).chunk(2, dim=-1)
    return scaled_dot_product_attention(query, key, key) + (query @ key.mT).softmax(-1) @ key


def a_product_for_each_head(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    weight = site.query.weight.view(HEADS, WIDTH, CHANNELS)
    projected = torch.bmm(tokens.flatten(0, 1).expand(HEADS, -1, -1), torch.cat([weight, weight.flip(0)], dim=1).mT)
    query, key = projected.unflatten(1, (SEQUENCES, -1)).transpose(0, 1).chunk(2, dim=-1)
    return scaled_dot_product_attention(query, key, key) + (query @ key.mT).softmax(-1) @ key


@pytest.mark.parametrize("attend", [a_projection_of_each_head, a_product_for_each_head])
def test_heads_that_were_an_axis_from_the_beginning_are_heads(attend: Attend) -> None:
    shapes, heads, _ = run(attend)
    assert shapes == [(SEQUENCES, HEADS, TOKENS, TOKENS)] * 2
    assert heads == [HEADS]


def one_head(site: Site, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    return site.query(tokens)[..., :WIDTH], site.key(memory)


def a_query_of_one_head(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key = one_head(site, tokens, memory)
    return (query @ key.mT).softmax(-1) @ key


def tokens_beside_a_condition(site: Site, condition: Tensor, tokens: Tensor) -> Tensor:
    """The first thing that the module is given is one token, and is not what attends."""
    query, key = one_head(site, tokens, tokens)
    return (query @ key.mT).softmax(-1) @ key + site.query(condition)[..., :WIDTH]


@pytest.mark.parametrize(
    ("attend", "queries", "shape"),
    [
        (a_query_of_one_head, 1, (2, 1, 1, 9)),
        (a_query_of_one_head, 6, (2, 1, 6, 9)),
        (tokens_beside_a_condition, 1, (2, 1, 9, 9)),
    ],
)
def test_queries_of_one_head_are_queries(attend: Attend, queries: int, shape: tuple[int, ...]) -> None:
    shapes, heads, said = run(attend, queries=queries)
    assert shapes == [shape]
    assert heads == [1]
    assert said == set()


def loop_over_heads(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key = site.query(tokens).unflatten(-1, (HEADS, WIDTH)), site.key(memory)
    return torch.cat([scaled_dot_product_attention(query[:, :, head], key, key) for head in range(HEADS)], dim=-1)


def blocks_of_queries(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key = one_head(site, tokens, memory)
    return torch.cat([scaled_dot_product_attention(rows, key, key) for rows in query.split(2, dim=1)], dim=1)


def blocks_of_tokens(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key = one_head(site, tokens, tokens)
    parts = zip(query.split(2, dim=1), key.split(2, dim=1), strict=True)
    return torch.cat([(rows @ keys.mT).softmax(-1) @ keys for rows, keys in parts], dim=1)


def several_heads_twice(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query = site.query(tokens).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    keys = site.key(tokens)[:, None], site.key(memory)[:, None]
    return sum((scaled_dot_product_attention(query, key, key) for key in keys), torch.zeros(()))


@pytest.mark.parametrize(
    ("attend", "calls", "heads", "is_pooled"),
    [
        (loop_over_heads, 4, HEADS, False),
        (blocks_of_queries, 3, 1, True),
        (blocks_of_tokens, 3, 1, True),
        (several_heads_twice, 2, HEADS, True),
    ],
)
def test_calls_of_one_pass_are_heads_or_are_pooled_which_is_said(
    attend: Attend, calls: int, heads: int, is_pooled: bool
) -> None:
    shapes, found, said = run(attend)
    assert len(shapes) == calls
    assert found == [heads]
    assert len(said) == is_pooled
    assert all("'(root)' computes attention several times in one forward pass" in message for message in said)


@pytest.mark.parametrize(("attend", "is_pooled"), [(loop_over_heads, False), (blocks_of_queries, True)])
def test_a_recording_says_too_that_calls_are_pooled(attend: Attend, is_pooled: bool) -> None:
    model, tokens = Site(attend), torch.randn(SEQUENCES, TOKENS, CHANNELS)
    with warnings.catch_warnings(record=True) as said, record(model):
        warnings.simplefilter("always")
        for _ in range(2):
            model(tokens, tokens)
    messages = [str(warning.message) for warning in said]
    assert len(messages) == is_pooled
    assert all("'(root)' computes attention several times in one forward pass" in message for message in messages)


def test_pooled_statistics_are_those_of_all_calls() -> None:
    model, tokens = Site(blocks_of_queries), torch.randn(SEQUENCES, TOKENS, CHANNELS)
    whole = Site(a_query_of_one_head)
    whole.load_state_dict(model.state_dict())
    whole.query.weight.data /= WIDTH**0.5  # the function has a scale
    whole.query.bias.data /= WIDTH**0.5
    values = []
    for each in (model, whole):
        observer = AttentionObserver(each, statistics=["entropy", "max_weight", "max_logit", "logit_std"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttentionWarning)
            with observer:
                each(tokens, tokens[:, :5])
            values.append(observer.snapshot().values)
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error::lightning_attn.AttentionWarning")
def test_one_module_that_runs_several_times_is_not_told_off() -> None:
    """Shared layers, several micro-batches, and the same tensors again."""
    model = Site(heads_after_tokens)
    tokens, memory = torch.randn(SEQUENCES, TOKENS, CHANNELS), torch.randn(SEQUENCES, KEYS, CHANNELS)
    observer = AttentionObserver(model, statistics="entropy")
    for _ in range(2):
        with observer:
            for _ in range(3):
                model(tokens, memory)
    assert observer.snapshot().heads == {"(root)": HEADS}
