"""Text that decoders of Hugging Face transformers generate while they are watched, as in validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cell import Arguments, Cell, cells_of, check
from support.decoder import IDS, SEQUENCES, TOKENS, Decoder, Text
from support.test_decoders import GPT2, GPT_OSS, LLAMA, MISTRAL
from support.truth import Attention, Tape
from torch import Tensor, nn

FAMILY = "Hugging Face transformers, `generate`"
#: So many tokens are generated. The last one does not go into the model again.
STEPS = 3
SEEN = TOKENS + STEPS - 1


class Generating(nn.Module):
    """Generates, and gives the logits of what it drew."""

    def __init__(self, decoder: Any, **options: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.options = options

    def forward(self, **arguments: Tensor) -> tuple[Tensor, ...]:
        logits: tuple[Tensor, ...] = self.decoder.generate(
            **arguments,
            **self.options,
            do_sample=True,
            min_new_tokens=STEPS,
            max_new_tokens=STEPS,
            return_dict_in_generate=True,
            output_logits=True,
        ).logits
        return logits


def prompt(model: nn.Module) -> Arguments:
    mask = torch.ones(SEQUENCES, TOKENS, dtype=torch.long)
    mask[1, :3] = 0
    return {"input_ids": IDS, "attention_mask": mask}


def truth(decoder: Decoder, is_static: bool, model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    """First the prompt, then token by token."""
    real_BT = torch.cat([arguments["attention_mask"].bool(), torch.ones(SEQUENCES, STEPS - 1, dtype=torch.bool)], dim=1)
    text = Text(real_BT, (real_BT.cumsum(1) - 1).clamp(min=0), torch.zeros(SEQUENCES, SEEN, dtype=torch.long))
    found = []
    for step in range(STEPS):
        queries = range(TOKENS) if step == 0 else range(TOKENS + step - 1, TOKENS + step)
        for layer, window in enumerate(decoder.windows):
            columns = list(range(queries.stop))
            if window is not None and step > 0:
                columns = columns[-window:]
            elif window is None and is_static:
                columns += [-1] * (TOKENS + STEPS - len(columns) - 1)
            attention = decoder.attention(model, tape, text, layer, queries, columns, "decoder.")
            out = tape.given_at(f"{attention.site}.{decoder.out}", step)
            found.append(replace(attention, output_BNX=out))
    return found


def cell(decoder: Decoder, way: str, cache: str) -> Cell:
    return Cell(
        FAMILY,
        decoder.name,
        way,
        f"eval, left padding, {cache} cache",
        lambda: Generating(decoder.make(way), cache_implementation=cache),
        prompt,
        lambda model, tape, arguments: truth(decoder, cache == "static", model, tape, arguments),
        ("decoder." + decoder.site.format("*"),),
    )


def cells() -> Iterator[Cell]:
    for decoder in (GPT2, LLAMA, MISTRAL, GPT_OSS):
        for way in decoder.ways:
            for cache in ("dynamic", "static"):
                yield cell(decoder, way, cache)


CELLS = list(cells())


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
