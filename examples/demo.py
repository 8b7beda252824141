"""Train two models twice, healthily and with too high a learning rate, and watch every attention head.

Run it with ``make demo``. It downloads nothing, takes about two minutes on two cores, and writes to ``demo_output/``.
"""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from pathlib import Path

import torch
from character_lm import CharacterLM, DocumentationText
from comparison import Comparison
from dashboard import draw
from digits_vit import DigitsViT, digits
from watched_run import Domain, train

OUTPUT = Path("demo_output")
SEED = 1


def language_model() -> Domain:
    text = DocumentationText(length=64)
    return Domain(
        name="language_model",
        title="A small language model on the text of Python's documentation",
        model=lambda learning_rate: CharacterLM(len(text.characters), learning_rate),
        data=text,
        batch_size=16,
        steps=500,
        loss_unit="nats per character",
    )


def vision_transformer() -> Domain:
    train_data, test_data = digits()
    return Domain(
        name="vision_transformer",
        title="A small vision transformer on scikit-learn's handwritten digits",
        model=DigitsViT,
        data=train_data,
        batch_size=32,
        steps=400,
        loss_unit="nats per image",
        test_data=test_data,
    )


def compare(domain: Domain, healthy_rate: float, hot_rate: float) -> None:
    """Train both runs, print what tells them apart, and draw it."""
    print(f"{domain.title}, trained twice for {domain.steps} steps with AttentionMonitor attached\n", flush=True)
    shutil.rmtree(OUTPUT / domain.name, ignore_errors=True)
    healthy = train(domain, "healthy", healthy_rate, SEED, OUTPUT / domain.name)
    hot = train(domain, "too hot", hot_rate, SEED, OUTPUT / domain.name)
    found = Comparison(healthy, hot)
    picture = OUTPUT / f"{domain.name}.png"
    draw((healthy, hot), found.headline(), found.panel_titles(), domain.loss_unit, picture)
    print(f"\n{found.table()}\n\n{found.conclusion()}\nEvery head over training: {picture}\n", flush=True)


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec")  # Lightning's, of its own code
    torch.set_num_threads(1)  # the models are too small for more: on a busy machine they cost far more than they gain

    compare(language_model(), healthy_rate=0.001, hot_rate=0.02)
    compare(vision_transformer(), healthy_rate=0.001, hot_rate=0.01)

    tensorboard = Path(sys.executable).with_name("tensorboard")
    if tensorboard.is_relative_to(Path.cwd()):
        tensorboard = tensorboard.relative_to(Path.cwd())
    print(f"Every curve: {tensorboard} --logdir {OUTPUT}")


if __name__ == "__main__":
    main()
