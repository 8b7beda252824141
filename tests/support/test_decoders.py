"""Decoders of Hugging Face transformers, with random weights from small configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cell import Arguments, Cell, cells_of, check
from support.truth import Attention, Tape, causal, products, rotated, split_heads, tokens
from torch import nn

FAMILY = "Hugging Face transformers, decoders"
IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(0))


def llama(way: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=way,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def with_padding(model: nn.Module) -> Arguments:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return {"input_ids": IDS, "attention_mask": mask, "use_cache": False}


def truth_of_llama(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    found = []
    for layer in range(2):
        site = f"model.layers.{layer}.self_attn"
        positions = torch.arange(12)[None]
        query, key = (
            rotated(split_heads(tape.gave(f"{site}.{name}_proj"), h), positions, 1e4)
            for name, h in (("q", 4), ("k", 2))
        )
        found.append(
            Attention(
                site,
                products(query, key),
                causal(12, 12) & tokens(arguments["attention_mask"]),
                tape.given(f"{site}.o_proj"),
            )
        )
    return found


CELLS = [
    Cell(
        FAMILY,
        "Llama",
        way,
        f"{mode}, right padding",
        lambda way=way: llama(way),
        with_padding,
        truth_of_llama,
        ("model.layers.*.self_attn",),
        training=mode == "train",
    )
    for way in ("eager", "sdpa")
    for mode in ("train", "eval")
]


@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
