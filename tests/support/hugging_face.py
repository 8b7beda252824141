"""Small models of Hugging Face transformers with random weights, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cell import Arguments
from support.truth import Attention, Tape, products, split_heads
from torch import Tensor, nn

IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(0))

#: What all text models here have in common.
SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


def made(model: str, config: str, way: str, **settings: Any) -> nn.Module:
    """A model from its configuration, computing attention in one way."""
    transformers = pytest.importorskip("transformers")
    module: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings, attn_implementation=way))
    return module


def sharpened(model: nn.Module, *layers: str, factor: float = 5.0) -> nn.Module:
    """The same with larger weights in the layers of queries and keys, so that attention is not nearly uniform."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in layers:
            for parameter in module.parameters():
                parameter.data *= factor
    return model


def padding(side: str, tokens: int = 12) -> Tensor:
    """The mask of two sequences, of which a quarter of the second is padding, on one side."""
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[1, : tokens // 4] = 0
    return mask if side == "left" else mask.flip(1)


def padded(side: str, **more: Any) -> Callable[[nn.Module], Arguments]:
    """Two sentences, of which the second is shorter."""
    return lambda model: {"input_ids": IDS, "attention_mask": padding(side), **more}


def attention_of(
    tape: Tape,
    site: str,
    visible: Tensor,
    *,
    query: str,
    key: str,
    output: str | None,
    heads: int,
    key_heads: int | None = None,
    call: int = -1,
    key_calls: slice = slice(None),
    change: Callable[[Tensor], Tensor] = lambda projection_BHND: projection_BHND,
    scale: float | None = None,
    bias: Tensor | float = 0.0,
    self_attention: bool = True,
) -> Attention:
    """The attention of a module whose queries and keys are made by two layers.

    Args:
        tape: what went into and came out of the modules.
        site: the module.
        visible: which keys each query may see.
        query, key: the names of the layers.
        output: the name of the layer that takes what was computed; ``None`` where the module gives it as it is.
        heads, key_heads: how many there are.
        call: which of its calls this is.
        key_calls: the calls in which its keys were made: all that a cache holds.
        change: what becomes of queries and keys after the layers: an embedding of positions, a norm.
        scale: what products are multiplied with.
        bias: what is added to them.
        self_attention: whether queries and keys are made of the same tokens.
    """
    query_BHND = change(split_heads(tape.gave_at(f"{site}.{query}", call), heads))
    key_BKMD = change(split_heads(tape.gave(f"{site}.{key}", key_calls), key_heads or heads))
    given = tape.gave_at(site, call) if output is None else tape.given_at(f"{site}.{output}", call)
    logits_BHNM = products(query_BHND, key_BKMD, scale) + bias
    is_square = logits_BHNM.shape[-1] == logits_BHNM.shape[-2]  # with a cache the only query is no first key
    return Attention(site, logits_BHNM, visible, given, self_attention=self_attention and is_square)
