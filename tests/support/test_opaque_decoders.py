"""Decoders of Hugging Face transformers with a kernel that nothing can see into, called as flash-attn is.

It takes padding in two dimensions, makes causality, windows and the borders of packed documents itself, and gives zeros
for padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cell import Arguments, Cell, Seen, cells_of, check
from support.decoder import (
    LEFT_PADDING_WITH_POSITIONS,
    NO_PADDING,
    RIGHT_PADDING,
    TOKENS,
    Decoder,
    Run,
    cell,
    text,
    with_a_cache,
)
from support.test_decoders import GEMMA2, GPT_OSS, LLAMA, MISTRAL
from support.truth import Attention, Tape
from torch import Tensor, nn

FAMILY = "Hugging Face transformers, a kernel that nothing can see into"
WAY = "as flash-attn"
STAND_IN = "tested with a stand-in that is called in the same way"
NAME = "opaque_kernel"
#: Kernels tell packed documents in a batch of one.
PACKED = Run("packed documents, told from `position_ids`", text(documents=(3, 7, 2), sequences=1), ("position_ids",))


class PackedByLengths(Run):
    """Documents that the kernel is told of by their ends, as a collator for training without padding does."""

    def arguments(self, model: Any) -> Arguments:
        ends = torch.tensor([0, 3, 10, 12], dtype=torch.int32)
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
        return {**super().arguments(model), **lengths}


#: The positions do not tell of them here, so that nothing else does.
PACKED_BY_LENGTHS = PackedByLengths(
    "packed documents, told from `cu_seq_lens_q`", replace(PACKED.text, positions_BT=torch.arange(TOKENS)[None])
)


def kernel(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    queries, keys, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    with torch._C.DisableTorchFunction():
        back = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        visible = (back >= 0) & (back < (sliding_window or keys))
        if attention_mask is not None:
            real = attention_mask[:, None, -keys:].bool()
            visible = visible & real[..., None, :] & real[..., -queries:, None]
        elif cu_seq_lens_q is not None:
            document = torch.cat([torch.full((length,), number) for number, length in enumerate(cu_seq_lens_q.diff())])
            visible = visible & (document[:, None] == document)
        elif position_ids is not None and len(query) == 1 and queries == keys:
            document = (position_ids[0] == 0).cumsum(0)
            visible = visible & (document[:, None] == document)
        logits = query @ key.repeat_interleave(group, 1).mT * scaling
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
        if s_aux is not None:
            logits = torch.cat([logits, s_aux.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], dim=-1)
        weights = torch.where(visible, logits.softmax(-1)[..., :keys], 0.0)
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


def opaque(decoder: Decoder, run: Run, training: bool = False) -> Cell:
    """A cell whose model calls the kernel, which separates documents whatever the model's mask does."""
    decoder = replace(decoder, separates_documents=True)

    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        masking = pytest.importorskip("transformers.masking_utils")
        transformers.AttentionInterface.register(NAME, kernel)
        masking.AttentionMaskInterface.register(NAME, masking.flash_attention_mask)
        return decoder.make(NAME)

    def truth(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
        real_BN = run.text.real_BT[:, run.cached :]
        return [
            replace(attention, visible=attention.visible & real_BN[:, None, :, None])
            for attention in run.truth(decoder, model, tape)
        ]

    return replace(cell(FAMILY, decoder, WAY, run, training), make=make, truth=truth, outcome=Seen(STAND_IN))


def cells() -> Iterator[Cell]:
    for decoder in (LLAMA, MISTRAL, GEMMA2, GPT_OSS):
        for run in (NO_PADDING, RIGHT_PADDING, LEFT_PADDING_WITH_POSITIONS, PACKED, PACKED_BY_LENGTHS):
            yield opaque(decoder, run, training=True)
        for padding in ("", "left"):
            yield opaque(decoder, with_a_cache("one token", "dynamic", padding))
            yield opaque(decoder, with_a_cache("some tokens", "dynamic", padding))


CELLS = list(cells())


@pytest.fixture(autouse=True)
def _registered_no_longer() -> Iterator[None]:
    yield
    transformers = pytest.importorskip("transformers")
    masking = pytest.importorskip("transformers.masking_utils")
    for registry in (transformers.AttentionInterface, masking.AttentionMaskInterface):
        registry._global_mapping.pop(NAME, None)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
