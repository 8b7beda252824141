"""The language models whose training steps are timed.

They know nothing of the monitor. Shape suffixes as in the package: B sequences, H heads, N tokens, D width of a head, L
width of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """How large a language model and its batches are."""

    layers: int
    heads: int
    width: int
    tokens: int
    batch: int
    vocabulary: int = 100

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.heads} heads, d = {self.width}, n = {self.tokens}, batch {self.batch}"

    def random_batch(self) -> Tensor:
        """Tokens to predict; what they say makes no difference to the time a step takes."""
        return torch.randint(self.vocabulary, (self.batch, self.tokens + 1))


SIZES = {
    "demo": Size(layers=3, heads=4, width=64, tokens=64, batch=16),
    "larger": Size(layers=4, heads=8, width=256, tokens=256, batch=8),
}


class Attention(nn.Module):
    """Causal attention of several heads by torch's fused function.

    It has no dropout: with dropout torch does not take the fused kernel on a CPU, and a slower model would flatter the
    monitor.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, tokens_BNL: Tensor) -> Tensor:
        query_BHND, key_BHND, value_BHND = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.project_in(tokens_BNL).chunk(3, dim=-1)
        )
        mixed_BHND = self.attend(query_BHND, key_BHND, value_BHND)
        return self.project_out(mixed_BHND.transpose(1, 2).flatten(-2))

    def attend(self, query_BHND: Tensor, key_BHND: Tensor, value_BHND: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query_BHND, key_BHND, value_BHND, is_causal=True)


class WrittenOutAttention(Attention):
    """The same attention, written out with a softmax."""

    def attend(self, query_BHND: Tensor, key_BHND: Tensor, value_BHND: Tensor) -> Tensor:
        logits_BHNN = query_BHND @ key_BHND.transpose(-1, -2) / math.sqrt(query_BHND.shape[-1])
        hidden_NN = torch.ones(logits_BHNN.shape[-2:], dtype=torch.bool, device=logits_BHNN.device).triu(1)
        return logits_BHNN.masked_fill(hidden_NN, -torch.inf).softmax(-1) @ value_BHND


class Block(nn.Module):
    """Attention and a perceptron, each on normalised tokens and added to them."""

    def __init__(self, size: Size, attention: type[Attention]) -> None:
        super().__init__()
        width = size.width
        self.attention = nn.Sequential(nn.LayerNorm(width), attention(width, size.heads))
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens_BNL: Tensor) -> Tensor:
        tokens_BNL = tokens_BNL + self.attention(tokens_BNL)
        return tokens_BNL + self.perceptron(tokens_BNL)


class LanguageModel(LightningModule):
    """A causal pre-norm transformer with learned positions, which returns its loss.

    Args:
        size: of the model.
        attention: how its blocks compute attention.
    """

    def __init__(self, size: Size, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.zeros(size.tokens, size.width))
        self.blocks = nn.Sequential(*(Block(size, attention) for _ in range(size.layers)))
        self.head = nn.Sequential(nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BN: Tensor) -> Tensor:
        scores_BNV = self.head(self.blocks(self.tokens(tokens_BN[:, :-1]) + self.positions))
        return functional.cross_entropy(scores_BNV.flatten(0, 1), tokens_BN[:, 1:].flatten())

    def training_step(self, tokens_BN: Tensor, batch_idx: int) -> Tensor:
        return self(tokens_BN)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
