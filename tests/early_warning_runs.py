"""Runs in which it is known what is warned of, and when."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from models import LanguageModel
from shared_batches import batch
from torch import Tensor
from torch.nn import functional

from lightning_attn.warning import Record, Rule, Severity, Sign

SITES = ("blocks.0.attention", "blocks.1.attention")


class SignsAt(Rule):
    """Shows signs at some steps, whatever the model does.

    Args:
        steps: the steps.
        name: what the rule is called.
        severity: how bad it is.
        heads: at so many of the first heads.
        statistic: what is captured for it, and told of.
    """

    meaning = "It was asked for."
    remedy = "ask for less"

    steps: tuple[int, ...]
    heads: int
    statistic: str

    def __init__(
        self,
        steps: list[int],
        name: str = "scripted",
        severity: Severity = "warning",
        heads: int = 1,
        statistic: str = "entropy",
        patience: int = 1,
    ) -> None:
        super().__init__(name, [statistic], severity, patience=patience)
        self._keep(steps=steps, heads=heads, statistic=statistic)

    def signs(self, record: Record) -> Iterable[Sign]:
        if record.step not in self.steps:
            return []
        series = record.series(self.statistic)
        found = zip(series.places[: self.heads], series.last_P, strict=False)
        return [Sign(place, self.statistic, value, limit=2.0) for place, value in found]


class Repeatable(LanguageModel):
    """Trains alike from any checkpoint: no dropout, and batches that the step tells. Its logits grow without end."""

    def loss(self, _: list[Tensor]) -> Tensor:
        self.blocks.eval()
        tokens = batch(self.trainer.global_step)[:4, :16]
        loss = functional.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss - sum(10 * block.attention.qkv.weight.square().mean() for block in self.blocks)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-2)


def lines(path: Path) -> list[dict[str, Any]]:
    """What a file of warnings says."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_origin(line: dict[str, Any]) -> dict[str, Any]:
    """A line without what tells when it was written, and in which run."""
    return {name: value for name, value in line.items() if name not in ("time", "run")}
