"""Decoders of Hugging Face transformers that people train most, run in every way: padded, packed, with a cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cell import Cell, cells_of, check
from support.decoder import ALL_AT_ONCE, HEADS, Decoder, cell, projected, with_a_cache
from support.truth import Tape, rotated, split_heads
from torch import Tensor

FAMILY = "Hugging Face transformers, decoders"
#: Shorter than the sequences, and than what a cache holds.
WINDOW = 5


def projected_at_once(tape: Tape, site: str, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    query_BTX, key_BTX, _ = tape.gave(f"{site}.c_attn").chunk(3, dim=-1)
    return split_heads(query_BTX, HEADS), split_heads(key_BTX, HEADS)


def normalised(tape: Tape, site: str, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    query_BHTD, key_BKTD = (tape.gave(f"{site}.{name}_norm").double().transpose(1, 2) for name in ("q", "k"))
    return rotated(query_BHTD, positions_BT, 1e4), rotated(key_BKTD, positions_BT, 1e4)


GPT2 = Decoder(
    "GPT-2",
    "GPT2",
    projected_at_once,
    options={"n_positions": 20, "attn_pdrop": 0.0},
    site="transformer.h.{}.attn",
    out="c_proj",
)
LLAMA = Decoder("Llama", "Llama", projected(1e4))
MISTRAL = Decoder("Mistral", "Mistral", projected(1e4), options={"sliding_window": WINDOW}, windows=(WINDOW, WINDOW))
QWEN3 = Decoder("Qwen3", "Qwen3", normalised)
GEMMA2 = Decoder(
    "Gemma 2",
    "Gemma2",
    projected(1e4),
    ("eager",),
    {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 1.5,
        "query_pre_attn_scalar": 4,
    },
    windows=(WINDOW, None),
    scales=(0.5, 0.5),
    soft_cap=1.5,
)
GPT_OSS = Decoder(
    "gpt-oss",
    "GptOss",
    projected(150.0),
    ("eager",),
    {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150.0},
    },
    windows=(WINDOW, None),
    has_sinks=True,
    separates_documents=False,
)
MIXTRAL = Decoder("Mixtral", "Mixtral", projected(1e6), options={"num_local_experts": 3, "num_experts_per_tok": 2})


def cells() -> Iterator[Cell]:
    for decoder in (GPT2, LLAMA, MISTRAL, QWEN3, GEMMA2, GPT_OSS, MIXTRAL):
        for way in decoder.ways:
            for training in (True, False):
                yield from (cell(FAMILY, decoder, way, run, training) for run in ALL_AT_ONCE)
            for cache in ("dynamic", "static"):
                for padding in ("", "left"):
                    yield cell(FAMILY, decoder, way, with_a_cache("one token", cache, padding))
                    yield cell(FAMILY, decoder, way, with_a_cache("some tokens", cache, padding))
    for way in MISTRAL.ways:
        yield cell(FAMILY, MISTRAL, way, with_a_cache("one token", "plain", "left"))
        yield cell(FAMILY, MISTRAL, way, with_a_cache("some tokens", "plain", "left"))


CELLS = list(cells())


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
