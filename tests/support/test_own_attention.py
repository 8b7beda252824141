"""Attention as people write it themselves: fused, written out, in loops, with masks and biases of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.cell import Arguments, Cell, NoAttention, Refused, Seen, cells_of, check
from support.truth import Attention, Tape, causal, products, rotated, split_heads
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.functional import scaled_dot_product_attention as attention_by_another_name

FAMILY = "Models of one's own"
B, N, M, HEADS, WIDTH = 2, 6, 9, 4, 8
CHANNELS = HEADS * WIDTH

#: Computes (B, H, N, D) of a site and its tokens.
Attend = Callable[["Site", Tensor, Tensor], Tensor]
Truth = Callable[[Any, Tape, Arguments], list[Attention]]


class Site(nn.Module):
    """Projections, and a function that attends with them; what it gives goes through a gate and a projection."""

    def __init__(self, attend: Attend, key_heads: int = HEADS) -> None:
        super().__init__()
        self.attend, self.key_heads = attend, key_heads
        self.query = nn.Linear(CHANNELS, CHANNELS)
        self.key, self.value = (nn.Linear(CHANNELS, key_heads * WIDTH) for _ in range(2))
        for layer in (self.query, self.key):
            layer.weight.data.mul_(3)
        self.latents = nn.Parameter(torch.randn(5, CHANNELS))
        self.register_buffer("lower", torch.ones(1, 1, 16, 16).tril())
        self.attended, self.gate = nn.Identity(), nn.Linear(CHANNELS, CHANNELS)
        self.output, self.dropout = nn.Linear(CHANNELS, CHANNELS), nn.Dropout(0.2)

    def heads(self, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, H, N, D)."""
        query = self.query(tokens).unflatten(-1, (HEADS, WIDTH)).transpose(-2, -3)
        key, value = (
            layer(memory).unflatten(-1, (self.key_heads, WIDTH)).transpose(-2, -3) for layer in (self.key, self.value)
        )
        return query, key, value

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        mixed_BHND = self.attend(self, tokens, tokens if memory is None else memory)
        mixed = self.attended(mixed_BHND).transpose(1, 2).flatten(2)
        if mixed.shape[1] == tokens.shape[1]:
            mixed = mixed * self.gate(tokens).sigmoid()
        result: Tensor = self.dropout(self.output(mixed))
        return result


class Block(nn.Module):
    """A residual block around a site."""

    def __init__(self, site: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(CHANNELS), site

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        mixed = self.attention(self.norm(tokens), memory)
        return tokens + mixed if mixed.shape == tokens.shape else mixed


def block(attend: Attend, **options: Any) -> Callable[[], nn.Module]:
    return lambda: Block(Site(attend, **options))


def of_tokens(*shape: int) -> Callable[[nn.Module], Arguments]:
    return lambda model: {"tokens": torch.randn(*shape, CHANNELS)}


def of_tokens_and_memory(queries: int = N, keys: int = M) -> Callable[[nn.Module], Arguments]:
    return lambda model: {"tokens": torch.randn(B, queries, CHANNELS), "memory": torch.randn(B, keys, CHANNELS)}


TOKENS, WITH_MEMORY, ONE_TOKEN = of_tokens(B, N), of_tokens_and_memory(), of_tokens_and_memory(1)


def everything(queries: int, keys: int) -> Tensor:
    return torch.ones(1, 1, queries, keys, dtype=torch.bool)


def truth(
    visible: Callable[[int, int], Tensor] = everything,
    bias: Callable[[int, int], Tensor] | None = None,
    turned: bool = False,
    scale: float | None = None,
    site: str = "attention",
) -> Truth:
    """One call of all heads, from what the projections gave; query heads share key heads in groups."""

    def of(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
        prefix = f"{site}." if site != "(root)" else ""
        query = split_heads(tape.gave(f"{prefix}query"), HEADS)
        keys = tape.gave(f"{prefix}key")
        key = split_heads(keys, keys.shape[-1] // WIDTH)
        if turned:
            query, key = (rotated(part, torch.arange(part.shape[2])[None], 100.0) for part in (query, key))
        logits = products(query.expand(len(key), -1, -1, -1), key, scale)
        if bias is not None:
            logits = logits + bias(*logits.shape[2:]).double()
        output = tape.given_at(f"{prefix}attended", 0).transpose(1, 2)
        is_self = logits.shape[2] == logits.shape[3]
        return [Attention(site, logits, visible(*logits.shape[2:]), output.flatten(2), self_attention=is_self)]

    return of


# Plainly


def softmax_of(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.transpose(-1, -2) / math.sqrt(WIDTH)).softmax(-1)


def written_out(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, memory)
    return softmax_of(query, key) @ value


def fused(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(*site.heads(tokens, memory))


def imported_by_name(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    return scaled_dot_product_attention(*site.heads(tokens, memory))


def imported_by_another_name(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    return attention_by_another_name(*site.heads(tokens, memory))


def as_a_default(
    site: Site, tokens: Tensor, memory: Tensor, function: Callable[..., Tensor] = scaled_dot_product_attention
) -> Tensor:
    return function(*site.heads(tokens, memory))


CAUSAL_PART = partial(functional.scaled_dot_product_attention, is_causal=True)


def as_a_partial(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    return CAUSAL_PART(*site.heads(tokens, memory))


def masked_by_a_buffer(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, memory)
    scores = (query @ key.transpose(-2, -1)) * (1.0 / math.sqrt(key.size(-1)))
    scores = scores.masked_fill(site.lower[:, :, : scores.shape[-2], : scores.shape[-1]] == 0, float("-inf"))
    return functional.dropout(functional.softmax(scores, dim=-1), 0.0, site.training) @ value


def heads_last(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in site.heads(tokens, memory))
    weights = (torch.einsum("bqhd,bkhd->bqkh", query, key) / math.sqrt(WIDTH)).softmax(dim=2)
    return torch.einsum("bqkh,bkhd->bhqd", weights, value)


def heads_between(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in site.heads(tokens, memory))
    weights = (torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(WIDTH)).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value).transpose(1, 2)


def sequences_in_the_middle(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = (part.permute(2, 0, 1, 3) for part in site.heads(tokens, memory))
    weights = (torch.einsum("ibnd,jbnd->ijbn", query, key) / math.sqrt(WIDTH)).softmax(dim=1)
    return torch.einsum("ijbn,jbnd->bnid", weights, value)


def slopes() -> Tensor:
    return 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]


def alibi_bias(queries: int, keys: int) -> Tensor:
    return -slopes() * (torch.arange(queries)[:, None] - torch.arange(keys)).abs()


def alibi(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, memory)
    scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH) + alibi_bias(tokens.shape[1], memory.shape[1])
    return scores.masked_fill(site.lower[..., :N, :N] == 0, -math.inf).softmax(-1) @ value


def turn(tensor: Tensor) -> Tensor:
    angles = torch.arange(tensor.shape[2])[:, None] * 100.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))
    first, second = tensor.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def rotary(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, memory)
    return CAUSAL_PART(turn(query), turn(key), value)


def through_a_method(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    return (
        functional.multi_head_attention_forward(  # type: ignore[no-any-return]
            *(part.transpose(0, 1) for part in (tokens, memory, memory)),
            CHANNELS,
            HEADS,
            torch.cat([site.query.weight, site.key.weight, site.value.weight]),
            torch.cat([site.query.bias, site.key.bias, site.value.bias]),
            None,
            None,
            False,
            0.0,
            torch.eye(CHANNELS),
            torch.zeros(CHANNELS),
            need_weights=False,
        )[0]
        .unflatten(-1, (HEADS, WIDTH))
        .permute(1, 2, 0, 3)
    )


def truth_of_the_method(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    """Its projections are no modules there."""
    site, tokens = model.attention, tape.given("attention").double()
    query, key = (
        split_heads(tokens @ layer.weight.double().T + layer.bias.double(), HEADS) for layer in (site.query, site.key)
    )
    output = tape.given("attention.attended").transpose(1, 2).flatten(2)
    # The function is given another tensor for the keys, so that nothing tells that they are the same tokens.
    return [Attention("attention", products(query, key), everything(N, N), output, self_attention=False)]


PLAIN: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Arguments], Truth]] = {
    "written out": (block(written_out), TOKENS, truth()),
    "written out, cross attention": (block(written_out), WITH_MEMORY, truth()),
    "written out, causal mask in a buffer": (block(masked_by_a_buffer), TOKENS, truth(causal)),
    "einsum, heads last": (block(heads_last), WITH_MEMORY, truth()),
    "einsum, heads between": (block(heads_between), TOKENS, truth()),
    "einsum, sequences in the middle": (block(sequences_in_the_middle), WITH_MEMORY, truth()),
    "ALiBi": (block(alibi), TOKENS, truth(causal, alibi_bias)),
    "rotary embedding": (block(rotary), TOKENS, truth(causal, turned=True)),
    "the function imported by name": (block(imported_by_name), TOKENS, truth()),
    "the function by another name": (block(imported_by_another_name), TOKENS, truth()),
    "the function as a default argument": (block(as_a_default), WITH_MEMORY, truth()),
    "the function in a `partial`": (block(as_a_partial), TOKENS, truth(causal)),
    "the model is the site": (lambda: Site(written_out), TOKENS, truth(site="(root)")),
    "`multi_head_attention_forward`": (block(through_a_method), TOKENS, truth_of_the_method),
}


# Grouped heads


def expanded(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, memory)
    group = HEADS // site.key_heads
    key, value = (part[:, :, None].expand(-1, -1, group, -1, -1).reshape(B, HEADS, -1, WIDTH) for part in (key, value))
    return softmax_of(query, key) @ value


def repeated(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, memory)
    key, value = (part.repeat_interleave(HEADS // site.key_heads, dim=1) for part in (key, value))
    return functional.scaled_dot_product_attention(query, key, value)


def in_five_dimensions(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, memory)
    query = query.unflatten(1, (site.key_heads, -1))
    return (softmax_of(query, key[:, :, None]) @ value[:, :, None]).flatten(1, 2)


def one_key_head(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """(B, H, N, D) with (B, 1, M, D); the query axis stays beside the heads where it has one token."""
    query, key, value = site.heads(tokens, memory)
    return softmax_of(query, key) @ value


def heads_among_queries(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """All queries of all heads are one axis in both products, and two between them."""
    query, key, value = site.query(tokens).view(B, -1, WIDTH), site.key(memory), site.value(memory)
    scores = (torch.bmm(query, key.mT) / math.sqrt(WIDTH)).view(B, -1, HEADS, memory.shape[1])
    mixed = torch.bmm(scores.softmax(-1).flatten(1, 2), value)
    return mixed.view(B, -1, HEADS, WIDTH).transpose(1, 2)


def heads_taken_for_queries(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """One query of several heads, (B, H, D), with the keys of one head, (B, M, D)."""
    query = site.query(tokens).view(B, 1, HEADS, WIDTH).transpose(1, 2).squeeze(2)
    return (softmax_of(query, site.key(memory)) @ site.value(memory))[:, :, None]


def turned_heads_taken_for_queries(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query = turn(site.query(tokens).view(B, 1, HEADS, WIDTH).transpose(1, 2)).squeeze(2)
    return (softmax_of(query, site.key(memory)) @ site.value(memory))[:, :, None]


def heads_taken_for_queries_by_the_function(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query = turn(site.query(tokens).view(B, 1, HEADS, WIDTH).transpose(1, 2)).squeeze(2)
    return scaled_dot_product_attention(query, site.key(memory), site.value(memory))[:, :, None]


def groups_taken_for_queries(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """One query of several heads, (B, K, H / K, D), with the keys of K heads."""
    _, key, value = site.heads(tokens, memory)
    query = site.query(tokens).view(B, site.key_heads, -1, WIDTH)
    return (softmax_of(query, key) @ value).flatten(1, 2)[:, :, None]


PLAIN |= {
    "grouped heads, expanded": (block(expanded, key_heads=2), TOKENS, truth()),
    "grouped heads, repeated": (block(repeated, key_heads=2), WITH_MEMORY, truth()),
    "grouped heads, five dimensions": (block(in_five_dimensions, key_heads=2), TOKENS, truth()),
    "grouped heads, five dimensions, one query": (block(in_five_dimensions, key_heads=2), ONE_TOKEN, truth()),
    "one key head": (block(one_key_head, key_heads=1), TOKENS, truth()),
    "one key head, one query": (block(one_key_head, key_heads=1), ONE_TOKEN, truth()),
    "one key head, heads among the queries": (block(heads_among_queries, key_heads=1), WITH_MEMORY, truth()),
}
FOLDED: dict[str, tuple[Attend, int, str]] = {
    "one key head, one query folded": (heads_taken_for_queries, 1, "lie beside each other within one token"),
    "one key head, one query turned and folded": (turned_heads_taken_for_queries, 1, "was given one token"),
    "one key head, one query folded, fused": (heads_taken_for_queries_by_the_function, 1, "was given one token"),
    "grouped heads, one query folded": (groups_taken_for_queries, 2, "lie beside each other within one token"),
}


# Latents, a cache, loops, windows


def learned_queries(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """Perceiver: what is learned goes through the projection of the queries."""
    query, key, value = site.heads(site.latents, memory)
    return softmax_of(query, key) @ value


def latents_for_each_sequence(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(site.latents.expand(B, -1, -1), memory)
    return scaled_dot_product_attention(query, key, value)


def truth_of_latents(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    query, key = (split_heads(part.view(-1, part.shape[-2], CHANNELS), HEADS) for part in _gave(tape, "query", "key"))
    output = tape.given("attention.attended").transpose(1, 2).flatten(2)
    logits = products(query.expand(B, -1, -1, -1), key)
    return [Attention("attention", logits, everything(5, N), output, self_attention=False)]


def _gave(tape: Tape, *names: str) -> list[Tensor]:
    return [tape.gave_at(f"attention.{name}", 0) for name in names]


class Cached(Site):
    """Keeps keys and values of the tokens before."""

    def forward(  # type: ignore[override]
        self, tokens: Tensor, cache: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        query, key, value = self.heads(tokens, tokens)
        if cache is not None:
            key, value = torch.cat([cache[0], key], dim=2), torch.cat([cache[1], value], dim=2)
        mixed = softmax_of(query, key) @ value
        return self.output(self.attended(mixed).transpose(1, 2).flatten(2)), (key, value)


def one_more_token(model: Any) -> Arguments:
    _, cache = model(torch.randn(B, N, CHANNELS))
    return {"tokens": torch.randn(B, 1, CHANNELS), "cache": cache}


def truth_of_cached(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    query, own = (split_heads(tape.gave_at(name, -1), HEADS) for name in ("query", "key"))
    key = torch.cat([arguments["cache"][0].double(), own], dim=2)
    output = tape.given_at("attended", -1).transpose(1, 2).flatten(2)
    return [Attention("(root)", products(query, key), everything(1, N + 1), output, self_attention=False)]


def loop_over_heads(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    heads = zip(*(part.unbind(1) for part in site.heads(tokens, memory)), strict=True)
    return torch.stack([softmax_of(query, key) @ value for query, key, value in heads], dim=1)


def loop_over_heads_fused(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    heads = zip(*(part.unbind(1) for part in site.heads(tokens, memory)), strict=True)
    return torch.stack([CAUSAL_PART(query, key, value) for query, key, value in heads], dim=1)


def each_head_of(whole: Truth) -> Truth:
    def of(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
        (attention,) = whole(model, tape, arguments)
        assert attention.output_BNX is not None
        output_BNHD = attention.output_BNX.unflatten(-1, (HEADS, WIDTH))
        return [
            Attention(
                attention.site,
                attention.logits_BHNM[:, head : head + 1],
                attention.visible,
                output_BNHD[:, :, head],
                self_attention=attention.self_attention,
                is_of_loop=True,
            )
            for head in range(HEADS)
        ]

    return of


def in_blocks_of_queries(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, memory)
    return torch.cat([softmax_of(rows, key) @ value for rows in query.split(2, dim=2)], dim=2)


def one_head_in_blocks_of_queries(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = (layer(given) for layer, given in _layers(site, tokens, memory))
    mixed = [scaled_dot_product_attention(rows, key, value) for rows in query.split(2, dim=1)]
    return torch.cat(mixed, dim=1)[:, None]


def _layers(site: Site, tokens: Tensor, memory: Tensor) -> list[tuple[nn.Module, Tensor]]:
    return [(site.query, tokens), (site.key, memory), (site.value, memory)]


def each_block_of(heads: int) -> Truth:
    def of(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
        query, key = (split_heads(tape.gave(f"attention.{name}"), heads) for name in ("query", "key"))
        output_BNX = tape.given_at("attention.attended", 0).transpose(1, 2).flatten(2)
        logits = products(query, key)
        return [
            Attention(
                "attention",
                logits[:, :, first : first + 2],
                everything(2, N),
                output_BNX[:, first : first + 2],
                self_attention=False,
            )
            for first in range(0, N, 2)
        ]

    return of


def itself_and_others(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, tokens)
    mixed = site.attended(softmax_of(query, key) @ value)
    _, key, value = site.heads(tokens, memory)
    result: Tensor = mixed + site.attended(scaled_dot_product_attention(query, key, value))
    return result


def truth_of_both(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    query = split_heads(tape.gave_at("attention.query", 0), HEADS)
    found = []
    for number in range(2):
        key = split_heads(tape.gave_at("attention.key", number), HEADS)
        output = tape.given_at("attention.attended", number).transpose(1, 2).flatten(2)
        visible = everything(N, key.shape[2])
        found.append(Attention("attention", products(query, key), visible, output, self_attention=number == 0))
    return found


def softmax_attention(site: Site, tokens: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, tokens)
    mixed: Tensor = site.attended(softmax_of(query, key) @ value)
    return mixed


def rows_then_columns(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """Axial attention over an image of 3 x 3 tokens: the other axis goes to the sequences."""
    image = tokens.unflatten(1, (3, 3))
    over_rows = softmax_attention(site, image.flatten(0, 1)).unflatten(0, (-1, 3))
    over_columns = softmax_attention(site, image.transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, 3))
    return (over_rows.permute(0, 2, 1, 3, 4) + over_columns.permute(0, 2, 3, 1, 4)).flatten(2, 3)


def truth_of_axial(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    calls = []
    for number in range(2):
        query, key = (split_heads(tape.gave_at(f"attention.{name}", number), HEADS) for name in ("query", "key"))
        output = tape.given_at("attention.attended", number).transpose(1, 2).flatten(2)
        calls.append(Attention("attention", products(query, key), everything(3, 3), output))
    return calls


def windows_among_sequences(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """As Swin does."""
    query, key, value = site.heads(*[tokens.unflatten(1, (-1, 2)).flatten(0, 1)] * 2)
    return (softmax_of(query, key) @ value).unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)


def truth_of_windows(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    query, key = (split_heads(tape.gave(f"attention.{name}"), HEADS) for name in ("query", "key"))
    output = tape.given("attention.attended").unflatten(2, (-1, 2)).transpose(1, 2).flatten(0, 1)
    return [Attention("attention", products(query, key), everything(2, 2), output.transpose(1, 2).flatten(2))]


POOLED = Seen("several calls of one site, whose statistics are pooled, which is said")
PLAIN |= {
    "learned queries": (block(learned_queries), TOKENS, truth_of_latents),
    "learned queries for each sequence, fused": (block(latents_for_each_sequence), TOKENS, truth_of_latents),
    "a loop over heads": (block(loop_over_heads), WITH_MEMORY, each_head_of(truth())),
    "a loop over heads, fused": (block(loop_over_heads_fused), TOKENS, each_head_of(truth(causal))),
    "windows among the sequences": (block(windows_among_sequences), TOKENS, truth_of_windows),
}
SEVERAL: dict[str, tuple[Attend, Callable[[nn.Module], Arguments], Truth]] = {
    "blocks of queries": (in_blocks_of_queries, TOKENS, each_block_of(HEADS)),
    "blocks of queries, one head": (one_head_in_blocks_of_queries, TOKENS, each_block_of(1)),
    "itself and others in one module": (itself_and_others, WITH_MEMORY, truth_of_both),
    "rows, then columns": (rows_then_columns, of_tokens(B, 9), truth_of_axial),
}


# In another precision


def in_half(dtype: torch.dtype, attend: Attend) -> Attend:
    def attend_in_half(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return attend(site, tokens, memory)

    return attend_in_half


# What is not read, or is no attention


def windows_by_unfold(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """Each query has keys of its own: its neighbours."""
    query, key, value = site.heads(tokens, memory)
    key, value = (functional.pad(part, (0, 0, 1, 1)).unfold(2, 3, 1) for part in (key, value))
    return ((query[..., None, :] @ key / math.sqrt(WIDTH)).softmax(-1) @ value.mT).squeeze(-2)


def block_by_block(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """The softmax is computed online, as FlashAttention does (Dao et al. 2022)."""
    query, key, value = site.heads(tokens, memory)
    largest = torch.full((B, HEADS, N, 1), -math.inf)
    total, mixed = torch.zeros(B, HEADS, N, 1), torch.zeros(B, HEADS, N, WIDTH)
    for keys, values in zip(key.split(3, dim=2), value.split(3, dim=2), strict=True):
        scores = query @ keys.mT / math.sqrt(WIDTH)
        larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
        exponentials, kept = (scores - larger).exp(), (largest - larger).exp()
        total, mixed = total * kept + exponentials.sum(-1, keepdim=True), mixed * kept + exponentials @ values
        largest = larger
    return mixed / total


def sigmoids(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, memory)
    return (query @ key.mT / math.sqrt(WIDTH) - math.log(N)).sigmoid() @ value


def squared_relu(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, memory)
    return (query @ key.mT).relu().square() / N @ value


def linear_attention(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    query, key, value = site.heads(tokens, memory)
    query, key = functional.elu(query) + 1, functional.elu(key) + 1
    return query @ (key.mT @ value) / (query @ key.sum(2, keepdim=True).mT)


def efficient_attention(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """Queries and keys have a softmax each (Shen et al. 2021)."""
    query, key, value = site.heads(tokens, memory)
    return query.softmax(-1) @ (key.softmax(-2).mT @ value)


def parameters_as_queries(site: Site, tokens: Tensor, memory: Tensor) -> Tensor:
    """Without a layer between; such a product is also that of a soft mixture of experts."""
    _, key, value = site.heads(tokens, memory)
    return softmax_of(site.latents.unflatten(-1, (HEADS, WIDTH)).transpose(0, 1), key) @ value


OF_ITS_OWN = {
    "windows by unfold": (
        windows_by_unfold,
        Refused(
            "each query has keys of its own.*`lightning_attn.observe",
            "there is no matrix of all queries and keys; tell of it by `observe`, with all keys and a mask",
        ),
    ),
    "block by block (online softmax)": (
        block_by_block,
        Refused(
            "exponentials multiply the values before they are divided.*`lightning_attn.observe",
            "call `scaled_dot_product_attention`, or tell of it by `observe`",
        ),
    ),
    "sigmoids": (sigmoids, NoAttention("no softmax, so that rows are no distributions")),
    "squared ReLU": (squared_relu, NoAttention("no softmax")),
    "linear attention": (linear_attention, NoAttention("no softmax over keys")),
    "a softmax of queries and one of keys": (efficient_attention, NoAttention("no matrix of queries and keys")),
    "parameters as queries": (
        parameters_as_queries,
        NoAttention(
            "queries that are parameters themselves are a router's; those that a layer projects are seen, and all that "
            "enter the fused function. Keys and values made of parameters alone are a codebook"
        ),
    ),
}


def nothing(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    return []


# nanoGPT


class CausalSelfAttention(nn.Module):
    """Queries, keys and values come from one projection."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.c_attn.weight.data.mul_(3)
        self.resid_dropout, self.flash = nn.Dropout(0.2), flash
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (part.view(b, t, HEADS, WIDTH).transpose(1, 2) for part in self.c_attn(x).split(CHANNELS, dim=2))
        if self.flash:
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            y = functional.dropout(functional.softmax(scores, dim=-1), p=0.0) @ v
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        result: Tensor = self.resid_dropout(self.c_proj(y))
        return result


class SmallGPT(nn.Module):
    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, CHANNELS), nn.Linear(CHANNELS, 30, bias=False)
        self.head.weight = self.embed.weight
        self.h = nn.ModuleList(
            nn.ModuleDict({"ln": nn.LayerNorm(CHANNELS), "attn": CausalSelfAttention(flash)}) for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.h:
            x = x + layer["attn"](layer["ln"](x))
        logits: Tensor = self.head(x)
        return logits


def truth_of_gpt(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    found = []
    for site in ("h.0.attn", "h.1.attn"):
        query, key, _ = (split_heads(part, HEADS) for part in tape.gave(f"{site}.c_attn").chunk(3, dim=-1))
        found.append(Attention(site, products(query, key), causal(N, N), tape.given(f"{site}.c_proj")))
    return found


# A function that belongs to no module


def attention_of(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", query, key).softmax(-1), value)


class Stepping(Site):
    """As a LightningModule whose step calls a function of its own."""

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        return self.training_step((tokens,), 0)

    def training_step(self, batch: tuple[Tensor, ...], batch_index: int) -> Tensor:
        (tokens,) = batch
        mixed = self.attended(attention_of(*self.heads(tokens, tokens)))
        return self.output(mixed.transpose(1, 2).flatten(2)).square().mean()[None]


class Core(nn.Module):
    """What attends has no parameters, and stands for the module that called it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return softmax_of(query, key) @ value


def through_a_core(site: Any, tokens: Tensor, memory: Tensor) -> Tensor:
    result: Tensor = site.core(*site.heads(tokens, memory))
    return result


def with_core() -> nn.Module:
    model = Block(Site(through_a_core))
    model.attention.core = Core()
    return model


PLAIN |= {
    "a function called from `training_step`": (
        lambda: Stepping(fused),
        TOKENS,
        truth(site="(root)", scale=1.0),
    ),
    "a child without parameters": (with_core, TOKENS, truth()),
    "a cache of keys, one more token": (lambda: Cached(fused), one_more_token, truth_of_cached),
}


# Pixels, whose rows and columns stay in axes of their own


class AttentionBlock(nn.Module):
    """As in DDPM: keys are put into one axis for the softmax alone."""

    def __init__(self, merge: Callable[[Tensor], Tensor], divide: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.output = nn.GroupNorm(2, CHANNELS), nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.query, self.key, self.value = (nn.Conv2d(CHANNELS, CHANNELS, 1) for _ in range(3))
        self.query.weight.data.mul_(3)
        self.merge, self.divide, self.dropout = merge, divide, nn.Dropout(0.2)

    def forward(self, image: Tensor) -> Tensor:
        normed = self.norm(image)
        scores = torch.einsum("bchw,bcHW->bhwHW", self.query(normed), self.key(normed)) * CHANNELS**-0.5
        weights = self.divide(self.merge(scores).softmax(-1), image)
        mixed = torch.einsum("bhwHW,bcHW->bchw", weights, self.value(normed))
        return image + self.dropout(self.output(mixed))


def of_image(rows: int, columns: int) -> Callable[[nn.Module], Arguments]:
    return lambda model: {"image": torch.randn(B, CHANNELS, rows, columns)}


def truth_of_pixels(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    query, key = (tape.gave(name).flatten(2).mT[:, None] for name in ("query", "key"))
    output = tape.given("output").flatten(2).mT
    return [Attention("(root)", products(query, key), torch.ones((), dtype=torch.bool), output)]


PIXELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Arguments]]] = {
    f"{rows} x {columns} pixels, {name}": (lambda ways=ways: AttentionBlock(*ways), of_image(rows, columns))
    for rows, columns in ((3, 4), (3, 3))
    for name, ways in {
        "reshaped": (
            lambda scores: scores.reshape(*scores.shape[:3], -1),
            lambda weights, image: weights.reshape(*weights.shape[:3], *image.shape[2:]),
        ),
        "flattened": (
            lambda scores: scores.flatten(3),
            lambda weights, image: weights.unflatten(3, image.shape[2:]),
        ),
    }.items()
}


def cell(
    case: str,
    make: Callable[[], nn.Module],
    arguments: Callable[[nn.Module], Arguments],
    truth: Truth,
    mode: str,
    outcome: Seen | Refused | NoAttention = Seen(),  # noqa: B008
    **more: Any,
) -> Cell:
    site = "(root)" if make().__class__ in (Site, Stepping, Cached) else "attention"
    sites = (site,) if isinstance(outcome, Seen) else ()
    return Cell(
        FAMILY,
        "a module of one's own",
        case,
        mode,
        make,
        arguments,
        truth,
        sites,
        outcome,
        training=mode == "train",
        **more,
    )


MODES = ("train", "eval")
CELLS = [
    *(
        Cell(
            FAMILY,
            "nanoGPT",
            "fused" if flash else "written out",
            mode,
            lambda flash=flash: SmallGPT(flash),
            lambda model: {"ids": torch.randint(30, (B, N))},
            truth_of_gpt,
            ("h.*.attn",),
            training=mode == "train",
        )
        for flash in (True, False)
        for mode in MODES
    ),
    *(cell(name, *parts, mode) for name, parts in PLAIN.items() for mode in MODES),
    *(
        Cell(
            FAMILY,
            "DDPM, keys of an image in two axes",
            name,
            mode,
            make,
            arguments,
            truth_of_pixels,
            ("(root)",),
            training=mode == "train",
        )
        for name, (make, arguments) in PIXELS.items()
        for mode in MODES
    ),
    *(
        cell(name, block(attend), arguments, of, mode, POOLED)
        for name, (attend, arguments, of) in SEVERAL.items()
        for mode in MODES
    ),
    *(
        cell(
            name,
            block(attend, key_heads=key_heads),
            ONE_TOKEN,
            nothing,
            mode,
            Refused(f"is not watched: .*{message}", "keep an axis for the query beside the heads, (B, H, 1, D)"),
        )
        for name, (attend, key_heads, message) in FOLDED.items()
        for mode in MODES
    ),
    *(
        cell(
            f"in {str(dtype).removeprefix('torch.')} by autocast, {name}",
            block(in_half(dtype, attend)),
            TOKENS,
            truth(),
            mode,
            precision=dtype,
        )
        for name, attend in {"written out": written_out, "fused": fused}.items()
        for dtype in (torch.bfloat16, torch.float16)
        for mode in MODES
    ),
    *(
        cell(name, block(attend), TOKENS, nothing, mode, outcome)
        for name, (attend, outcome) in OF_ITS_OWN.items()
        for mode in MODES
    ),
]


@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
