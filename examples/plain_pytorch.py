"""Watch a digit classifier in a training loop of plain PyTorch; scalars go to TensorBoard.

``python examples/plain_pytorch.py`` takes ten seconds. With ``--learning-rate 0.03`` a warning is printed.
"""

from __future__ import annotations

from argparse import ArgumentParser
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from lightning_attn import AttentionObserver

BATCH_SIZE = 32


class DigitClassifier(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.row_embedding = nn.Linear(8, width)
        self.position_embedding = nn.Parameter(torch.zeros(8, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classify = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.row_embedding(images) + self.position_embedding  # an image's eight rows are its tokens
        return self.classify(self.encoder(rows).mean(dim=1))


def train(steps: int, learning_rate: float, watch_every: int = 50) -> nn.Module:
    torch.manual_seed(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    data = TensorDataset(images, labels)
    batches = DataLoader(data, BATCH_SIZE, sampler=RandomSampler(data, num_samples=steps * BATCH_SIZE))

    model = DigitClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    observer = AttentionObserver(model, max_sequences=4)
    writer = SummaryWriter()
    limit = 5.0  # at the default learning rate no head reaches it
    for step, (image, label) in enumerate(batches):
        is_watched = step % watch_every == 0
        with observer if is_watched else nullcontext():
            loss = F.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if is_watched:
            snapshot = observer.snapshot(step)
            for tag, value in snapshot.scalars().items():
                writer.add_scalar(tag, value, step)
            writer.add_scalar("loss", loss.item(), step)
            print(f"step {step:4}  loss {loss.item():.3f}")
            largest = snapshot.highest("logit_std")
            if largest is not None and largest.value > limit:
                print(f"  warning: logit_std of head {largest.head} of {largest.site} has grown to {largest.value:.1f}")
                limit = 2 * largest.value  # to be said again only when it has doubled
    writer.close()
    print(snapshot.table())
    return model


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    train(**vars(parser.parse_args()))
