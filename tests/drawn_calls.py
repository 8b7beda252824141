"""Attention calls that hypothesis draws: shapes, types, logits, and every kind of mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_attn import AttentionCall
from lightning_attn.capture import Visibility

INF = math.inf

exact_every_time = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow],
)

# Visibility, by name. Each function gets a source of random numbers and (B, H, N, M).

Shape = tuple[int, int, int, int]
KINDS: dict[str, Callable[[torch.Generator, Shape], Visibility]] = {}


def kind(function: Callable[[torch.Generator, Shape], Visibility]) -> Callable[[torch.Generator, Shape], Visibility]:
    KINDS[function.__name__] = function
    return function


def _uniform(random: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=random)


def distance(queries: int, keys: int) -> Tensor:
    return torch.arange(queries)[:, None] - torch.arange(keys)


@kind
def everything(random: torch.Generator, shape: Shape) -> Visibility:
    return Visibility()


@kind
def causal_from_the_first_key(random: torch.Generator, shape: Shape) -> Visibility:
    return Visibility(causal_offset=0)


@kind
def causal_to_the_last_key(random: torch.Generator, shape: Shape) -> Visibility:
    return Visibility(causal_offset=shape[3] - shape[2])


@kind
def boolean_with_hidden_rows(random: torch.Generator, shape: Shape) -> Visibility:
    per_sequence, per_head = _uniform(random, 2) < 0.5
    mask = _uniform(random, shape[0] if per_sequence else 1, shape[1] if per_head else 1, *shape[2:]) < 0.6
    mask[:, :, _uniform(random, shape[2]) < 0.2] = False
    return Visibility(mask=mask)


@kind
def boolean_and_causal(random: torch.Generator, shape: Shape) -> Visibility:
    return replace(boolean_with_hidden_rows(random, shape), causal_offset=0)


@kind
def left_padding(random: torch.Generator, shape: Shape) -> Visibility:
    first = torch.randint(shape[3], (shape[0], 1, 1, 1), generator=random)
    return Visibility(mask=torch.arange(shape[3]) >= first)


@kind
def right_padding(random: torch.Generator, shape: Shape) -> Visibility:
    last = torch.randint(shape[3], (shape[0], 1, 1, 1), generator=random)
    return Visibility(mask=torch.arange(shape[3]) <= last)


@kind
def left_padding_and_causal(random: torch.Generator, shape: Shape) -> Visibility:
    return replace(left_padding(random, shape), causal_offset=0)


@kind
def right_padding_and_causal(random: torch.Generator, shape: Shape) -> Visibility:
    return replace(right_padding(random, shape), causal_offset=0)


@kind
def hiding_penalties(random: torch.Generator, shape: Shape) -> Visibility:
    penalties = torch.tensor([-INF, torch.finfo(torch.float32).min, -65504.0, -1e4, -100.0, 0.0])
    return Visibility(bias=penalties[torch.randint(6, (shape[0], 1, *shape[2:]), generator=random)])


@kind
def half_precision_penalties(random: torch.Generator, shape: Shape) -> Visibility:
    dtype = torch.bfloat16 if _uniform(random, 1) < 0.5 else torch.float16
    hidden = _uniform(random, shape[0], 1, *shape[2:]) < 0.3
    return Visibility(bias=torch.where(hidden, torch.finfo(dtype).min, 0.0).to(dtype))


@kind
def alibi(random: torch.Generator, shape: Shape) -> Visibility:
    slopes = 2.0 ** -torch.arange(shape[1])[None, :, None, None]
    return Visibility(causal_offset=0, bias=-slopes * distance(*shape[2:]))


@kind
def relative_positions(random: torch.Generator, shape: Shape) -> Visibility:
    return Visibility(bias=3 * torch.randn(1, *shape[1:], generator=random))


@kind
def sliding_window(random: torch.Generator, shape: Shape) -> Visibility:
    apart = distance(*shape[2:])
    return Visibility(mask=((apart >= 0) & (apart < 4))[None, None])


@kind
def documents(random: torch.Generator, shape: Shape) -> Visibility:
    document = torch.randint(4, (shape[0], max(shape[2:])), generator=random).sort(dim=1).values
    mask = (document[:, : shape[2], None] == document[:, None, : shape[3]])[:, None]
    return Visibility(causal_offset=0 if _uniform(random, 1) < 0.5 else None, mask=mask)


@st.composite
def calls(draw: st.DrawFn, visibility: Callable[[torch.Generator, Shape], Visibility]) -> AttentionCall:
    """An attention call whose largest product is about a given number."""
    sequences, key_heads, group = (draw(st.integers(1, 3), label=name) for name in ("B", "key heads", "group"))
    queries, keys = draw(st.integers(1, 18), label="queries"), draw(st.integers(1, 18), label="keys")
    width = draw(st.integers(1, 16), label="width")
    self_attention = draw(st.booleans(), label="self-attention")
    keys = queries if self_attention else keys
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    largest = draw(st.sampled_from([0.0, 0.01, 1.0, 10.0, 100.0, 500.0]), label="largest product")
    # A sink logit far above all others leaves weights that float32 cannot square; that has a test of its own.
    has_sink_logits = largest <= 10 and draw(st.booleans(), label="sink logits")
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32), label="seed"))
    heads = key_heads * group
    query = torch.randn(sequences, heads, queries, width, generator=random)
    key = torch.randn(sequences, key_heads, keys, width, generator=random)
    products = query @ key.repeat_interleave(group, dim=1).mT / math.sqrt(width)
    return AttentionCall(
        site="attention",
        query=(query * largest / products.abs().max()).to(dtype),
        key=key.to(dtype),
        value=_values(draw, random, (sequences, key_heads, heads, keys), dtype, has_sink_logits),
        scale=1 / math.sqrt(width),
        visibility=visibility(random, (sequences, heads, queries, keys)),
        self_attention=self_attention,
        soft_cap=draw(st.sampled_from([None, None, 5.0, 50.0]), label="soft cap"),
        sink_logits=torch.randn(heads, generator=random) if has_sink_logits else None,
    )


def _values(
    draw: st.DrawFn,
    random: torch.Generator,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    has_sink_logits: bool,
) -> Tensor | None:
    """Values of as many heads as there are keys' or queries', or of one, far from zero or not; or none."""
    sequences, key_heads, heads, keys = shape
    count = draw(st.sampled_from([None, 1, key_heads, heads]), label="value heads")
    if count is None:
        return None
    # Rows that sum to less than one, by a number of single precision, give as much less of the mean.
    centre = draw(st.sampled_from([0.0, 1.0 if has_sink_logits else 100.0]), label="mean of values")
    return (torch.randn(sequences, count, keys, 3, generator=random) + centre).to(dtype)


def real_tokens(draw: st.DrawFn, random: torch.Generator, sequences: int, tokens: int, share: float) -> Tensor | None:
    """Which tokens are no padding: on one side, or anywhere with a share that is real; ``None`` where all are."""
    padding = draw(st.sampled_from([None, "left", "right", "anywhere", "same for all"]))
    place, length = torch.arange(tokens), torch.randint(tokens + 1, (sequences, 1), generator=random)
    return {
        None: None,
        "left": place >= length,
        "right": place < length,
        "anywhere": torch.rand(sequences, tokens, generator=random) < share,
        "same for all": torch.rand(1, tokens, generator=random) < share,
    }[padding]
