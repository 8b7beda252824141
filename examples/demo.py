"""Train two models healthily, with too high a learning rate, and rescued from it when they are warned of.

Run it with ``make demo``. It downloads nothing, takes about three minutes on two cores, and writes to ``demo_output/``.
"""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from pathlib import Path
from textwrap import indent

import torch
from character_lm import CharacterLM, DocumentationText
from comparison import Comparison
from dashboard import draw
from digits_vit import DigitsViT, digits
from watched_run import Domain, Run, train

from lightning_attn.warning import message, summary

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
    """Train three runs, print what tells them apart, and draw it."""
    print(f"{domain.title}, trained three times for {domain.steps} steps and watched\n", flush=True)
    shutil.rmtree(OUTPUT / domain.name, ignore_errors=True)
    healthy = train(domain, "healthy", healthy_rate, SEED, OUTPUT / domain.name)
    hot = train(domain, "too hot", hot_rate, SEED, OUTPUT / domain.name)
    rescued = train(domain, "rescued", hot_rate, SEED, OUTPUT / domain.name, is_rescued=True)
    found = Comparison(healthy, hot, rescued)
    picture = OUTPUT / f"{domain.name}.png"
    draw((healthy, hot, rescued), found.headline(), found.panel_titles(), domain.loss_unit, picture)
    print(f"\n{found.table()}\n\n{found.conclusion()}\nEvery head over training: {picture}\n", flush=True)
    print(f"{warnings_of(healthy)}\n\n{warnings_of(hot)}\n\n{found.rescue()}\n", flush=True)


def warnings_of(run: Run) -> str:
    """What AttentionEarlyWarning said of a run, the first of it in full."""
    if not run.faults:
        return f"AttentionEarlyWarning in the {run.title} run: no warnings."
    first = [warning for warning in run.faults if warning.step == run.faults[0].step]
    of_first_rule = [warning for warning in first if warning.rule == first[0].rule]
    share = f"{run.faults[0].step / len(run.losses):.0%}"
    return (
        f"AttentionEarlyWarning in the {run.title} run, first at {share} of it:\n\n"
        f"{indent(message(of_first_rule), '  ')}\n\n{indent(summary(run.faults), '  ')}"
    )


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings(
        "ignore", "AttentionEarlyWarning|AdaptiveTemperature"
    )  # said below, and not in between progress bars
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec")  # Lightning's, of its own code
    torch.set_num_threads(1)  # the models are too small for more: on a busy machine they cost far more than they gain

    compare(language_model(), healthy_rate=0.001, hot_rate=0.02)
    compare(vision_transformer(), healthy_rate=0.001, hot_rate=0.03)

    tensorboard = Path(sys.executable).with_name("tensorboard")
    if tensorboard.is_relative_to(Path.cwd()):
        tensorboard = tensorboard.relative_to(Path.cwd())
    print(f"Every curve: {tensorboard} --logdir {OUTPUT}")


if __name__ == "__main__":
    main()
