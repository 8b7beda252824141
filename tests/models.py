"""Small Lightning modules of the kinds that people train, with dropout on."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 32, 4, 16


class Attention(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.attention = Attention(is_causal)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norm(tokens))
        return tokens + self.feed_forward(tokens)


class Trained(pl.LightningModule):
    """Keeps its losses, and the sum of each step's gradients by parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.gradients: list[list[Tensor]] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_after_backward(self) -> None:
        self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class LanguageModel(Trained):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(is_causal=True) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        return functional.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class VisionTransformer(Trained):
    """Patches of tokens seen as pixels, a class token, bidirectional attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(4, WIDTH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.blocks = nn.Sequential(Block(is_causal=False), Block(is_causal=False))
        self.head = nn.Linear(WIDTH, 10)

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        patches = self.patches(tokens.float().unflatten(1, (-1, 4)) / VOCABULARY)
        patches = torch.cat([self.class_token.expand(len(patches), -1, -1), patches], dim=1)
        return functional.cross_entropy(self.head(self.blocks(patches)[:, 0]), tokens[:, 0] % 10)


class Encoder(Trained):
    """`nn.TransformerEncoder`, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 2)

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        padding = torch.arange(tokens.shape[1]) >= 8 + tokens[:, :1] % 8
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        return functional.cross_entropy(self.head(hidden[:, 0]), tokens[:, 1] % 2)


def batches(count: int, size: int = 4) -> DataLoader[tuple[Tensor, ...]]:
    """The same random tokens every time."""
    tokens = torch.randint(VOCABULARY, (count * size, LENGTH), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens), batch_size=size)


def trainer(*callbacks: pl.Callback, **arguments: object) -> pl.Trainer:
    """A quiet Trainer on the CPU."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **arguments})  # type: ignore[arg-type]


def fit(
    model: pl.LightningModule, *callbacks: pl.Callback, steps: int = 6, validation: int = 0, **arguments: object
) -> pl.Trainer:
    """Train a model for some batches."""
    running = trainer(*callbacks, **arguments)
    running.fit(model, batches(steps), batches(validation) if validation else None)
    return running
