"""A small vision transformer that reads handwritten digits, and the digits of scikit-learn."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

IMAGE_SIZE, PATCH_SIZE, CLASSES = 8, 2, 10
TEST_IMAGES = 360


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images of 8 × 8 pixels from 0 to 1 with their digits: those to train on, and the last 360 to test on."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).unflatten(1, (1, IMAGE_SIZE, IMAGE_SIZE)) / 16
    digit = torch.tensor(labels)
    return (
        TensorDataset(pixels[:-TEST_IMAGES], digit[:-TEST_IMAGES]),
        TensorDataset(pixels[-TEST_IMAGES:], digit[-TEST_IMAGES:]),
    )


class DigitsViT(pl.LightningModule):
    def __init__(
        self, learning_rate: float, layers: int = 4, heads: int = 4, width: int = 64, warmup_steps: int = 20
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        patches = (IMAGE_SIZE // PATCH_SIZE) ** 2
        self.patch_embedding = nn.Conv2d(1, width, kernel_size=PATCH_SIZE, stride=PATCH_SIZE)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position_embedding = nn.Parameter(0.02 * torch.randn(1, 1 + patches, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.digit = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(len(images), -1, -1)
        tokens = torch.cat([class_token, patches], dim=1) + self.position_embedding
        return self.digit(self.encoder(tokens)[:, 0])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: list[Tensor]) -> None:
        images, labels = batch
        self.log("test_accuracy", (self(images).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.99))
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}
