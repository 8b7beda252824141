"""A language model that generates text while it is validated, watched by AttentionMonitor."""

from __future__ import annotations

import math
import warnings

import lightning.pytorch as pl
import pytest
import torch
from models import trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_attn import AttentionMonitor, AttentionWarning

transformers = pytest.importorskip("transformers")


class Writer(pl.LightningModule):
    """Validates by what it writes after a prompt, of which the second is padded on the left."""

    def __init__(self, way: str) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation=way,
        )
        self.model = transformers.LlamaForCausalLM(config)
        self.written: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        mask = torch.ones_like(batch)
        mask[1, :3] = 0
        self.written.append(
            self.model.generate(
                input_ids=batch, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False
            )
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.arange(48).view(4, 12) % 40, batch_size=2)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_heads_are_heads_at_every_step(way: str) -> None:
    written = []
    for monitors in ([], [AttentionMonitor(stage="validate", strict=True)]):
        torch.manual_seed(0)
        writer = Writer(way)
        with warnings.catch_warnings():
            warnings.simplefilter("error", AttentionWarning)
            trainer(*monitors).fit(writer)
        written.append(torch.stack(writer.written))
    assert torch.equal(*written)
    snapshot = monitors[0].snapshot
    assert snapshot is not None
    assert snapshot.sites == tuple(f"model.model.layers.{layer}.self_attn" for layer in range(2))
    for site in snapshot.sites:
        for statistic in ("entropy", "sink_strength", "self_weight", "max_weight"):
            values = snapshot[site, statistic]
            assert len(values) == 4
            assert all(value is not None and math.isfinite(value) for value in values), statistic
