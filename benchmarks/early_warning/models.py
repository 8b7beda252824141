"""Small transformers with the choices that decide whether a run goes well: where the norms stand, and q/k norm."""

from __future__ import annotations

from typing import Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Where a block has its norms: before each of its halves, or behind each residual sum.
Norms = Literal["pre", "post"]

LAYERS, HEADS, WIDTH = 3, 4, 64
IMAGE_SIZE, PATCH_SIZE, DIGITS = 8, 2, 10


class SelfAttention(nn.Module):
    def __init__(self, is_causal: bool, qk_norm: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.query_norm = nn.RMSNorm(WIDTH // HEADS) if qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(WIDTH // HEADS) if qk_norm else nn.Identity()
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        query, key = self.query_norm(query), self.key_norm(key)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.output(attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, norms: Norms, is_causal: bool, qk_norm: bool) -> None:
        super().__init__()
        self.norms = norms
        self.attention = SelfAttention(is_causal, qk_norm)
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.mlp_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.norms == "post":
            x = self.attention_norm(x + self.attention(x))
            return self.mlp_norm(x + self.mlp(x))
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Trained(pl.LightningModule):
    """How both models learn."""

    def __init__(self, learning_rate: float, warmup_steps: int) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.99))
        warmup = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / max(self.warmup_steps, 1))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class LanguageModel(Trained):
    """Predicts the next character.

    Its weights begin as GPT-2's do. That decides: with the larger ones that torch gives by default, the hot runs do not
    stall.
    """

    def __init__(
        self, characters: int, length: int, learning_rate: float, warmup_steps: int, norms: Norms, qk_norm: bool
    ) -> None:
        super().__init__(learning_rate, warmup_steps)
        self.character_embedding = nn.Embedding(characters, WIDTH)
        self.position_embedding = nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(*[Block(norms, is_causal=True, qk_norm=qk_norm) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH) if norms == "pre" else nn.Identity()
        self.next_character = nn.Linear(WIDTH, characters)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def training_step(self, passage: Tensor) -> Tensor:
        text = passage[:, :-1]
        x = self.character_embedding(text) + self.position_embedding.weight[: text.shape[1]]
        predictions = self.next_character(self.norm(self.blocks(x)))
        return F.cross_entropy(predictions.flatten(0, 1), passage[:, 1:].flatten())


class VisionTransformer(Trained):
    """Reads a handwritten digit. Its weights begin as torch has them."""

    def __init__(
        self, learning_rate: float, warmup_steps: int, norms: Norms, qk_norm: bool, layers: int = LAYERS + 1
    ) -> None:
        super().__init__(learning_rate, warmup_steps)
        patches = (IMAGE_SIZE // PATCH_SIZE) ** 2
        self.patch_embedding = nn.Conv2d(1, WIDTH, kernel_size=PATCH_SIZE, stride=PATCH_SIZE)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.position_embedding = nn.Parameter(0.02 * torch.randn(1, 1 + patches, WIDTH))
        self.blocks = nn.Sequential(*[Block(norms, is_causal=False, qk_norm=qk_norm) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH) if norms == "pre" else nn.Identity()
        self.digit = nn.Linear(WIDTH, DIGITS)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, digits = batch
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.position_embedding
        return F.cross_entropy(self.digit(self.norm(self.blocks(tokens))[:, 0]), digits)
