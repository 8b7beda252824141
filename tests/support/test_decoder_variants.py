"""Decoders of Hugging Face transformers whose attention has something that the usual ones have not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cell import Cell, cells_of, check
from support.decoder import (
    HEADS,
    KEY_HEADS,
    NO_PADDING,
    PACKED,
    RIGHT_PADDING,
    WIDTH,
    Decoder,
    Run,
    Text,
    cell,
    with_a_cache,
)
from support.test_decoders import FAMILY, GPT2, WINDOW, normalised
from support.truth import Tape, rotated, split_heads
from torch import Tensor
from torch.nn import functional

#: For configurations that know of no such thing.
WITHOUT_KEY_HEADS: dict[str, Any] = {"head_dim": None, "num_key_value_heads": None}


def head_by_head(tape: Tape, site: str, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Query, key and value of a head beside each other, and half of each head rotated (GPT-NeoX)."""
    heads_BHTX = split_heads(tape.gave(f"{site}.query_key_value"), HEADS)
    query_BHTD, key_BHTD, _ = heads_BHTX.chunk(3, dim=-1)
    half = WIDTH // 2
    return (
        torch.cat([rotated(query_BHTD[..., :half], positions_BT, 1e4), query_BHTD[..., half:]], dim=-1),
        torch.cat([rotated(key_BHTD[..., :half], positions_BT, 1e4), key_BHTD[..., half:]], dim=-1),
    )


def with_one_key_head(layer: str) -> Any:
    """All queries, then one key and one value (GPT-BigCode, Falcon)."""

    def of(tape: Tape, site: str, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        heads_BHTD = split_heads(tape.gave(f"{site}.{layer}"), HEADS + 2)
        return heads_BHTD[:, :HEADS], heads_BHTD[:, HEADS : HEADS + 1]

    return of


def in_triples(tape: Tape, site: str, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Query, key and value of a head beside each other (Bloom)."""
    query_BHTD, key_BHTD, _ = split_heads(tape.gave(f"{site}.query_key_value"), HEADS).chunk(3, dim=-1)
    return query_BHTD, key_BHTD


def alibi(text: Text) -> Tensor:
    """Linear biases (Press et al. 2022), by the place of the key alone: a row's differences are the same."""
    slope_H = 2.0 ** (-8 * torch.arange(1, HEADS + 1, dtype=torch.float64) / HEADS)
    place_BT = text.real_BT.cumsum(1) - 1  # of documents that are packed, the places in all of them
    return slope_H[:, None, None] * place_BT[:, None, None]


def interleaved_and_normalised(tape: Tape, site: str, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    query_BHTD, key_BKTD = (tape.gave(f"{site}.{name}_norm").double().transpose(1, 2) for name in ("q", "k"))
    return rotated(query_BHTD, positions_BT, 1e4, True), rotated(key_BKTD, positions_BT, 1e4, True)


def with_a_temperature(tape: Tape, site: str, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The first layer rotates, then normalises; the second has no positions but a temperature that grows (Llama 4)."""
    query_BHTD = split_heads(tape.gave(f"{site}.q_proj"), HEADS)
    key_BKTD = split_heads(tape.gave(f"{site}.k_proj"), KEY_HEADS)
    if ".1." in site:
        number_T = torch.arange(query_BHTD.shape[2], dtype=torch.float64)
        return query_BHTD * (1 + 0.1 * torch.log1p(((number_T + 1) / 4).floor()))[:, None], key_BKTD

    def turned(tensor_BHTD: Tensor) -> Tensor:
        tensor_BHTD = rotated(tensor_BHTD, positions_BT, 500000.0, True)
        return tensor_BHTD / (tensor_BHTD.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    return turned(query_BHTD), turned(key_BKTD)


def normalised_with_two_bases(tape: Tape, site: str, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    base = 1e4 if ".0." in site else 1e6
    query_BHTD, key_BKTD = (tape.gave(f"{site}.{name}_norm", tokens_axis=2).double() for name in ("q", "k"))
    return rotated(query_BHTD, positions_BT, base), rotated(key_BKTD, positions_BT, base)


def dynamic_bias(attention: Any, tape: Tape, site: str, text: Text) -> Tensor:
    """What each head of the keys learned of each token (Doge)."""
    step_BTK = functional.softplus(tape.gave_at(f"{site}.dt_proj", -1).double())
    return (attention.A * step_BTK).exp().transpose(1, 2).repeat_interleave(HEADS // KEY_HEADS, 1)[:, :, None]


FALCON = Decoder(
    "Falcon with ALiBi and one key head",
    "Falcon",
    with_one_key_head("query_key_value"),
    ("sdpa",),
    {"alibi": True, "multi_query": True, "new_decoder_architecture": False, **WITHOUT_KEY_HEADS},
    bias=lambda attention, tape, site, text: WIDTH**-0.5 * alibi(text),
    site="transformer.h.{}.self_attention",
    out="dense",
)
GEMMA3_OPTIONS = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 4}
DECODERS = (
    replace(
        GPT2,
        name="GPT-2 with `scale_attn_by_inverse_layer_idx`",
        options={**GPT2.options, "scale_attn_by_inverse_layer_idx": True},
        scales=(WIDTH**-0.5, WIDTH**-0.5 / 2),
    ),
    replace(
        GPT2,
        name="GPT-2 with `reorder_and_upcast_attn`",
        ways=("eager",),
        options={**GPT2.options, "reorder_and_upcast_attn": True},
    ),
    Decoder(
        "GPT-NeoX",
        "GPTNeoX",
        head_by_head,
        options={
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            **WITHOUT_KEY_HEADS,
        },
        site="gpt_neox.layers.{}.attention",
        out="dense",
    ),
    Decoder(
        "GPT-BigCode (one key head)",
        "GPTBigCode",
        with_one_key_head("c_attn"),
        options={"n_positions": 20, "attn_pdrop": 0.0, **WITHOUT_KEY_HEADS},
        site="transformer.h.{}.attn",
        out="c_proj",
    ),
    Decoder(
        "Bloom (ALiBi)",
        "Bloom",
        in_triples,
        ("eager",),
        {"attention_dropout": 0.0, **WITHOUT_KEY_HEADS},
        bias=lambda attention, tape, site, text: alibi(text),
        site="transformer.h.{}.self_attention",
        out="dense",
    ),
    FALCON,
    replace(
        FALCON,
        ways=("eager",),
        bias=lambda attention, tape, site, text: 2 * WIDTH**-0.5 * alibi(text),
        note="transformers 5.24 adds the biases twice here, and that is seen",
    ),
    Decoder(
        "Cohere",
        "Cohere",
        interleaved_and_normalised,
        options={"use_qk_norm": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    Decoder(
        "Llama 4",
        "Llama4",
        with_a_temperature,
        options={
            **{"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0], "floor_scale": 4, "attn_scale": 0.1},
            **{"num_local_experts": 2, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
        },
        chunks=(WINDOW, None),
    ),
    Decoder(
        "Gemma 3",
        "Gemma3",
        normalised_with_two_bases,
        options={**GEMMA3_OPTIONS, "sliding_window": WINDOW},
        windows=(WINDOW, None),
        scales=(0.5, 0.5),
    ),
    Decoder(
        "Doge (a registry of its own)",
        "Doge",
        normalised,
        bias=dynamic_bias,
    ),
)
#: As in EmbeddingGemma. Its configuration is given the width of both sides together.
LOOKING_BOTH_WAYS = Decoder(
    "Gemma 3 that looks both ways",
    "Gemma3",
    normalised_with_two_bases,
    options={**GEMMA3_OPTIONS, "sliding_window": 4, "use_bidirectional_attention": True},
    windows=(3, None),
    scales=(0.5, 0.5),
    is_causal=False,
)


def runs(decoder: Decoder) -> Iterator[Run]:
    """The ways of running it in evaluation mode."""
    yield with_a_cache("one token", "dynamic", "left")
    yield with_a_cache("some tokens", "dynamic", "left")
    if decoder.bias is None:  # these make their biases for the tokens, not for the places in a cache
        yield with_a_cache("one token", "static", "left")


def cells() -> Iterator[Cell]:
    for decoder in DECODERS:
        for way in decoder.ways:
            yield cell(FAMILY, decoder, way, RIGHT_PADDING, training=True)
            if decoder.kind != "Bloom":  # takes no positions
                yield cell(FAMILY, decoder, way, PACKED, training=True)
            yield from (cell(FAMILY, decoder, way, run) for run in runs(decoder))
    for way in LOOKING_BOTH_WAYS.ways:
        for run in (NO_PADDING, RIGHT_PADDING, PACKED):
            yield cell(FAMILY, LOOKING_BOTH_WAYS, way, run, training=True)


CELLS = list(cells())


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
