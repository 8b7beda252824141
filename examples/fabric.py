"""Watch a small language model in a training loop of Lightning Fabric; scalars go to Fabric's logger.

``python examples/fabric.py`` takes twenty seconds. With ``--learning-rate 0.02`` a warning is printed.
"""

from __future__ import annotations

from argparse import ArgumentParser
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from character_lm import CharacterLM, DocumentationText
from lightning.fabric import Fabric
from lightning.fabric.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, RandomSampler

from lightning_attn import AttentionObserver

BATCH_SIZE = 16


def train(steps: int, learning_rate: float, watch_every: int = 50) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, loggers=TensorBoardLogger("lightning_logs", name="fabric"))
    fabric.launch()
    fabric.seed_everything(1)
    text = DocumentationText(length=64)
    passages = DataLoader(text, BATCH_SIZE, sampler=RandomSampler(text, num_samples=steps * BATCH_SIZE))
    passages = fabric.setup_dataloaders(passages)

    model = CharacterLM(len(text.characters), learning_rate)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), learning_rate))
    observer = AttentionObserver(model, max_sequences=4)
    limit = 15.0  # at the default learning rate no head comes near it
    for step, passage in enumerate(passages):
        is_watched = step % watch_every == 0
        with observer if is_watched else nullcontext():
            loss = F.cross_entropy(model(passage[:, :-1]).flatten(0, 1), passage[:, 1:].flatten())
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()

        if is_watched:
            snapshot = observer.snapshot(step)  # with several processes: all of them ask, and get the same
            fabric.log_dict(snapshot.scalars() | {"loss": loss.item()}, step)
            fabric.print(f"step {step:4}  loss {loss.item():.3f}")
            largest = snapshot.highest("logit_std")
            if largest is not None and largest.value > limit:
                fabric.print(
                    f"  warning: logit_std of head {largest.head} of {largest.site} has grown to {largest.value:.1f}"
                )
                limit = 2 * largest.value  # to be said again only when it has doubled
    fabric.print(snapshot.table())


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    train(**vars(parser.parse_args()))
