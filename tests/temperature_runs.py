"""Runs whose heads are hot, and the same models with temperatures written into their code by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from models import HEADS, LENGTH, VOCABULARY, WIDTH, Trained, batches, trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_attn import AdaptiveTemperature
from lightning_attn.temperature import HoldLogitScale

FILE = "attention_temperature.jsonl"
SITES = ("blocks.0", "blocks.1")


class HandWritten(nn.Module):
    """Attention whose queries can be divided by hand: what the callback is held against."""

    def __init__(self) -> None:
        super().__init__()
        self.by_hand = 1.0
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.out(self.mixed(self.norm(hidden)).transpose(1, 2).flatten(2))

    def mixed(self, normed: Tensor) -> Tensor:
        raise NotImplementedError


class Fused(HandWritten):
    dropout = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def mixed(self, normed: Tensor) -> Tensor:
        query, key, value = self.qkv(normed).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(
            query / self.by_hand, key, value, dropout_p=dropout, is_causal=True
        )


class Separate(HandWritten):
    """Fewer keys than queries, as in grouped-query attention."""

    key_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH // HEADS * self.key_heads) for _ in range(2))

    def projected(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = self.q_proj(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = (
            layer(normed).unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for layer in (self.k_proj, self.v_proj)
        )
        return query / self.by_hand, key, value

    def mixed(self, normed: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(*self.projected(normed), is_causal=True, enable_gqa=True)


class Grouped(Separate):
    key_heads = 2


class Explicit(Separate):
    """With a bias by position, which no temperature may touch."""

    def mixed(self, normed: Tensor) -> Tensor:
        query, key, value = self.projected(normed)
        place = torch.arange(normed.shape[1])
        distance = (place[:, None] - place).float()
        slopes = 2.0 ** -torch.arange(HEADS)[:, None, None]
        scores = query @ key.mT / (WIDTH // HEADS) ** 0.5 - slopes * distance.abs()
        return scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ value


class DropConnect(nn.Linear):
    """Drops weights, and remembers how large what enters it is."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("largest", torch.zeros(()))
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        self.largest = torch.maximum(self.largest, hidden.detach().abs().max())
        return functional.linear(hidden, functional.dropout(self.weight, 0.1, self.training), self.bias)


class Restless(Separate):
    """Draws random numbers and keeps averages wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.q_proj, self.k_proj, self.v_proj = (DropConnect(WIDTH, WIDTH) for _ in range(3))

    def mixed(self, normed: Tensor) -> Tensor:
        return super().mixed(functional.dropout(self.batch_norm(normed.mT).mT, 0.1, self.training))


class Decoder(Trained):
    """Trains on batches that the step tells, so that it trains alike from any checkpoint; dropout is off in that case.

    Args:
        kind: of attention.
        by_hand: a temperature that is written into it; may be a function of the step.
        scale: by what query projections are multiplied at first: what makes heads hot.
    """

    def __init__(self, kind: type[HandWritten] = Fused, by_hand: Any = 1.0, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.by_hand = by_hand
        self.validated: list[float] = []
        with torch.no_grad():
            for name, parameter in self.blocks.named_parameters():
                if "q_proj" in name or "qkv" in name:
                    parameter[:WIDTH] *= scale

    def forward(self, tokens: Tensor) -> Tensor:
        if self._trainer is not None:
            step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
            for block in self.blocks:
                block.by_hand = self.by_hand(step) if callable(self.by_hand) else self.by_hand
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        return functional.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(self.loss(batch).item())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(self.loss(batch).item())

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Hot(Decoder):
    """Heads of large logits, trained on the same batches from any checkpoint on."""

    def __init__(self, kind: type[HandWritten] = Separate, scale: float = 30.0) -> None:
        super().__init__(kind, scale=scale)


def awake(upper: float = 4.0, lower: float | None = None, gain: float = 0.8, max_change: float = 4.0) -> HoldLogitScale:
    """A loop that does not sleep."""
    return HoldLogitScale(upper, None, lower, gain, max_change)


def adaptive(control: Any = None, **arguments: Any) -> AdaptiveTemperature:
    """Measured at every second step, and quiet in the end."""
    return AdaptiveTemperature(control, **{"every_n_steps": 2, "print_summary": False, **arguments})


def run(model: pl.LightningModule, *callbacks: pl.Callback, steps: int = 6, path: Any = None, **arguments: Any) -> Any:
    """Train from a fixed seed, or go on from a checkpoint."""
    validation: DataLoader[Any] | None = batches(2) if arguments.pop("validation", False) else None
    pl.seed_everything(7, verbose=False)
    running = trainer(*callbacks, **arguments)
    running.fit(model, batches(steps), validation, ckpt_path=path)
    return running


def tokens() -> Tensor:
    """A batch that no run trains on."""
    return torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(9))


def lines(path: Path) -> list[dict[str, Any]]:
    """What a file of temperatures says, without what tells when it was written and in which run."""
    read = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("time", "run")} for line in read]
