"""Measure the attention of a vision transformer over its whole test set, with metrics of torchmetrics.

``python examples/attention_metrics.py`` trains on handwritten digits for half a minute, logs a number for each layer
after every epoch, and prints what every head came to. Over several ranks numbers are joined as those of any metric are.
"""

from __future__ import annotations

from argparse import ArgumentParser

import lightning.pytorch as pl
import torch
from digits_vit import DigitsViT, digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_attn import record
from lightning_attn.metrics import AttentionEffectiveRank, AttentionEntropy, AttentionLogitStd

LAYERS, HEADS = 4, 4


class MeasuredViT(DigitsViT):
    """Metrics are parts of the model: they move with it, and start anew with every epoch."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__(learning_rate, layers=LAYERS, heads=HEADS)
        self.entropy = nn.ModuleList(AttentionEntropy(HEADS, over_heads="min") for _ in range(LAYERS))
        self.logit_std = nn.ModuleList(AttentionLogitStd(HEADS, over_heads="max") for _ in range(LAYERS))
        self.rank = nn.ModuleList(AttentionEffectiveRank(HEADS) for _ in range(LAYERS))

    def validation_step(self, batch: list[Tensor]) -> None:
        with record(self, max_sequences=None) as recording:
            self(batch[0])
        for layer, call in enumerate(recording.calls):
            for metric in (self.entropy[layer], self.logit_std[layer], self.rank[layer]):
                metric.update(call)
            self.log(f"entropy/layer_{layer}", self.entropy[layer])
            self.log(f"logit_std/layer_{layer}", self.logit_std[layer])

    def on_validation_epoch_end(self) -> None:
        self.ranks = torch.stack([metric.compute() for metric in self.rank])  # every rank of a distributed run computes
        for metric in self.rank:
            metric.reset()


def train(epochs: int, learning_rate: float) -> MeasuredViT:
    pl.seed_everything(0, verbose=False)
    train_set, test_set = digits()
    model = MeasuredViT(learning_rate)
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(model, DataLoader(train_set, 64, shuffle=True), DataLoader(test_set, 90))
    print("layer   least entropy   largest logit_std   effective rank of each head")
    for layer in range(LAYERS):
        entropy, spread = (trainer.callback_metrics[f"{name}/layer_{layer}"] for name in ("entropy", "logit_std"))
        ranks = "  ".join(f"{rank:5.2f}" for rank in model.ranks[layer].tolist())
        print(f"{layer:5}   {entropy:13.3f}   {spread:17.3f}   {ranks}")
    return model


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    train(**vars(parser.parse_args()))
