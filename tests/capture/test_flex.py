"""flex_attention, whose scores and mask are functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightning_attn import AttentionObserver, record

SEQUENCES, HEADS, TOKENS, WIDTH = 3, 4, 20, 8
DOCUMENTS = torch.tensor([[0] * 12 + [1] * 8, [0] * 20, [0] * 5 + [1] * 15])


def unchanged(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score


def slope(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - torch.exp2(-(h + 1.0)) * (i - j).abs()


def soft_cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 2 * torch.tanh(score / 2)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 4 + h)


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & (i >= j)


class Flex(nn.Module):
    def __init__(
        self, change: Callable[..., Tensor] | None, allow: Callable[..., Tensor] | None, kv_heads: int
    ) -> None:
        super().__init__()
        self.change, self.kv_heads = change, kv_heads
        self.mask = None if allow is None else create_block_mask(allow, SEQUENCES, HEADS, TOKENS, TOKENS, device="cpu")
        self.project = nn.Linear(16, (HEADS + 2 * kv_heads) * WIDTH)

    def parts(self, tokens: Tensor) -> tuple[Tensor, ...]:
        heads = self.project(tokens).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        return heads.split([HEADS, self.kv_heads, self.kv_heads], dim=1)

    def forward(self, tokens: Tensor) -> Tensor:
        return flex_attention(
            *self.parts(tokens), score_mod=self.change, block_mask=self.mask, enable_gqa=self.kv_heads < HEADS
        )


def reference(model: Flex, tokens: Tensor, allow: Callable[..., Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, visibility and output in float64, index by index."""
    query, key, value = (part.double() for part in model.parts(tokens))
    key, value = (part.repeat_interleave(HEADS // model.kv_heads, dim=1) for part in (key, value))
    numbers = torch.meshgrid(*(torch.arange(n) for n in (SEQUENCES, HEADS, TOKENS, TOKENS)), indexing="ij")
    logits = query @ key.mT / math.sqrt(WIDTH)
    if model.change is not None:
        logits = model.change(logits, *numbers)
    visible = torch.ones_like(logits, dtype=torch.bool) if allow is None else allow(*numbers)
    return logits, visible, logits.masked_fill(~visible, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("allow", [None, causal, window, documents])
@pytest.mark.parametrize("change", [None, unchanged, slope, soft_cap])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_scores_mask_and_output(
    change: Callable[..., Tensor] | None, allow: Callable[..., Tensor] | None, kv_heads: int
) -> None:
    model, tokens = Flex(change, allow, kv_heads), torch.randn(SEQUENCES, TOKENS, 16)
    with torch.no_grad():
        with record(model, max_sequences=2) as recording:
            output = model(tokens)
        logits, visible, expected = (part[:2] for part in reference(model, tokens, allow))
    (call,) = recording.calls
    assert call.site == "(root)"
    seen_logits, seen = call.logits()
    assert torch.equal(seen, visible)
    torch.testing.assert_close(seen_logits.double()[visible], logits[visible], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(call.output().double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(call.output(), output[:2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("allow", [causal, window, documents])
@pytest.mark.parametrize("block_bytes", [None, 4 * TOKENS * 3])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_statistics_of_blocks_are_those_of_the_same_attention_with_a_mask(
    allow: Callable[..., Tensor], block_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithMask(nn.Module):
        def __init__(self, flex: Flex, visible: Tensor) -> None:
            super().__init__()
            self.flex, self.visible = flex, visible

        def forward(self, tokens: Tensor) -> Tensor:
            query, key, value = self.flex.parts(tokens)
            return nn.functional.scaled_dot_product_attention(query, key, value, self.visible, enable_gqa=True)

    if block_bytes is not None:
        monkeypatch.setattr("lightning_attn.statistics.rows.row_pass.BLOCK_BYTES", {"cpu": block_bytes})
    flex, tokens = Flex(None, allow, 2), torch.randn(SEQUENCES, TOKENS, 16)
    snapshots = []
    with torch.no_grad():
        for model in (flex, WithMask(flex, reference(flex, tokens, allow)[1])):
            observer = AttentionObserver(model, spectral_sequences=None)
            with observer:
                model(tokens)
            snapshots.append(observer.snapshot())
    torch.testing.assert_close(snapshots[0].values, snapshots[1].values, rtol=1e-4, atol=1e-5, equal_nan=True)
