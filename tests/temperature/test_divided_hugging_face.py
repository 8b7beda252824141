"""Models of Hugging Face transformers and x-transformers, with biases, soft-caps, norms, gates and sinks."""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import Any

import pytest
import support.test_decoder_variants
import support.test_decoders
import support.test_encoder_decoders
import support.test_encoders
import support.test_hybrids
import support.test_vision
import support.test_x_transformers
import torch
from support.cell import Cell, Seen, _arguments
from temperature.exactness import check, found
from temperature.hot_queries import hot_queries
from torch import nn

MODULES: tuple[Any, ...] = (
    *(support.test_decoders, support.test_decoder_variants, support.test_encoders, support.test_encoder_decoders),
    *(support.test_hybrids, support.test_vision, support.test_x_transformers),
)


def cells(*models: str, ways: Container[str] = ("eager", "sdpa"), training: bool = True) -> list[Cell]:
    """The first cell of each model and way, all tokens at once."""
    first: dict[tuple[str, str], Cell] = {}
    for cell in (cell for module in MODULES for cell in module.CELLS):
        is_wanted = cell.model in models and cell.way in ways and cell.training == training
        if is_wanted and isinstance(cell.outcome, Seen) and "cache" not in cell.case:
            first.setdefault((cell.model, cell.way), cell)
    assert {cell.model for cell in first.values()} == set(models)
    return list(first.values())


#: One temperature for all heads, since they share the gain of a norm of their queries.
SHARED = ("Qwen3", "Gemma 3", "Qwen3-Next")
DECODERS = (
    *("GPT-2", "Llama", "GPT-NeoX", "Falcon with ALiBi and one key head", "GPT-BigCode (one key head)", "DeepSeek-V3"),
)
OTHERS = ("BERT", "ALBERT", "ModernBERT", "T5", "Whisper", "ViT")
WRITTEN_OUT = (
    *("Gemma 2", "gpt-oss", "Bloom (ALiBi)", "GPT-2 with `reorder_and_upcast_attn`", "DeBERTa-v2", "DeBERTa-v3"),
    *("GPT-2", "T5", "Qwen3", "DeepSeek-V3", "GPT-BigCode (one key head)"),
)
X_TRANSFORMERS = (
    *("no options", "`attn_kv_heads=2`, `attn_flash=True`", "`alibi_pos_bias=True`", "`rel_pos_bias=True`"),
    *("`attn_softclamp_logits=True`, `attn_logit_softclamp_value=5.0`", "`attn_num_mem_kv=3`", "`residual_attn=True`"),
)
ANY = {cell.way for cell in support.test_x_transformers.CELLS}
#: One of each kind; the others are among the slow tests.
QUICK = ("GPT-2", "Llama", "Qwen3", "Gemma 3", "Gemma 2", "T5", "BERT", "no options")
#: Their experts or masks know single precision alone.
SINGLE = ("gpt-oss", "DeepSeek-V3", "Qwen3-Next", "GPT-2 with `reorder_and_upcast_attn`", "ModernBERT")


def quick_first(of_all: list[Cell]) -> list[Any]:
    """The cells, of which all but those of some models are slow."""
    return [cell if cell.model in QUICK else pytest.param(cell, marks=pytest.mark.slow) for cell in of_all]


def of(cell: Cell) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    dtype = torch.float32 if cell.model in SINGLE else torch.float64
    model = cell.make().to(dtype).train(cell.training)
    given = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in _arguments(model, cell).items()
    }
    return model, lambda model: model(**given)


@pytest.mark.parametrize(
    "cell",
    quick_first(
        [
            *cells(*DECODERS, *OTHERS, *SHARED, ways=("sdpa",)),
            *cells(*WRITTEN_OUT, ways=("eager",)),
            *cells(*X_TRANSFORMERS, ways=ANY),
            *cells("GPT-2", "T5", ways=("sdpa",), training=False),
        ]
    ),
    ids=str,
)
def test_outputs_and_gradients_are_those_of_divided_queries(cell: Cell) -> None:
    model, run = of(cell)
    untouched = copy.deepcopy(model)
    # DeBERTa compares queries with keys and with positions. Positions as queries are made by a layer of their own in
    # version 2, so that what they add is a bias; and by that of the queries in version 3.
    products = {"DeBERTa-v2": 2, "DeBERTa-v3": 3}.get(cell.model, 1)
    check(
        model,
        run,
        lambda temperature: (untouched, hot_queries(untouched, temperature, products)),
        5e-6 if cell.model in SINGLE else 1e-6,
    )


@pytest.mark.parametrize("cell", cells(*SHARED, ways=("sdpa",)), ids=str)
def test_heads_of_a_shared_norm_have_one_temperature(cell: Cell) -> None:
    model, run = of(cell)
    temperature = found(model, run)
    assert all(held.is_shared and held.is_foldable and held.heads == 4 for held in temperature.sites.values())
