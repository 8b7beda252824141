"""A small language model that predicts the next character, and the text it learns from."""

from __future__ import annotations

from pydoc_data.topics import topics

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class DocumentationText(Dataset[Tensor]):
    """Every passage of a given length in the text that Python's own `help()` shows about the language."""

    def __init__(self, length: int) -> None:
        text = "\n\n".join(topics.values())
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        self.text = torch.tensor([number[character] for character in text])
        self.length = length

    def __len__(self) -> int:
        return len(self.text) - self.length

    def __getitem__(self, start: int) -> Tensor:
        # One character more than the model reads: each character's answer is the one after it.
        return self.text[start : start + self.length + 1]


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class CharacterLM(pl.LightningModule):
    def __init__(
        self,
        characters: int,
        learning_rate: float,
        length: int = 64,
        layers: int = 3,
        heads: int = 4,
        width: int = 64,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.character_embedding = nn.Embedding(characters, width)
        self.position_embedding = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.next_character = nn.Linear(width, characters)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.character_embedding(text) + self.position_embedding(positions)
        return self.next_character(self.norm(self.blocks(x)))

    def training_step(self, passage: Tensor) -> Tensor:
        predictions = self(passage[:, :-1])
        loss = F.cross_entropy(predictions.flatten(0, 1), passage[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.99))
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}
