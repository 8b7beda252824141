"""Decoders of Hugging Face transformers whose attention `flex_attention` computes: in evaluation mode, as on a CPU."""

from __future__ import annotations

import pytest
import torch
from support.cell import Cell, cells_of, check
from support.decoder import LEFT_PADDING, PACKED, RIGHT_PADDING, cell, with_a_cache
from support.test_decoders import FAMILY, GEMMA2, LLAMA, MISTRAL

RUNS = (
    (LLAMA, (RIGHT_PADDING, LEFT_PADDING, with_a_cache("one token", "static", "left"))),
    (MISTRAL, (PACKED, with_a_cache("some tokens", "dynamic", "left"))),
    (GEMMA2, (RIGHT_PADDING, with_a_cache("one token", "dynamic", "left"))),
)
CELLS = [cell(FAMILY, decoder, "flex_attention", run) for decoder, runs in RUNS for run in runs]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    with torch.compiler.set_stance("force_eager"):  # transformers compiles the function, which takes a minute here
        check(cell)
