"""What is trained: two families of models, each in settings that end well and settings that do not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import LanguageModel, Norms, Trained, VisionTransformer
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # the demo's data: text and digits that need no download
from character_lm import DocumentationText
from digits_vit import digits


@dataclass(frozen=True)
class Setting:
    """A model and how it is trained.

    Args:
        learning_rate: of AdamW, after the warm-up.
        warmup_steps: over which it rises linearly.
        norms: where the blocks have theirs.
        qk_norm: whether queries and keys are normalised.
        is_reference: whether it is healthy by its making, so that others of its family are held against it.
    """

    learning_rate: float
    warmup_steps: int
    norms: Norms = "pre"
    qk_norm: bool = False
    is_reference: bool = False


@dataclass(frozen=True)
class Family:
    """Settings of one kind of model that are trained alike and can be compared by their losses.

    Args:
        name: what it is called in file names and tables.
        steps: the optimiser steps of a run.
        batch_size: so many examples in each.
        settings: by what they are called.
        data: makes what is learnt from.
        model: makes a model, of its data and a setting.
    """

    name: str
    steps: int
    batch_size: int
    settings: dict[str, Setting]
    data: Callable[[], Dataset[Any]]
    model: Callable[[Any, Setting], Trained]


def _language_model(text: DocumentationText, setting: Setting) -> LanguageModel:
    return LanguageModel(
        len(text.characters), text.length, setting.learning_rate, setting.warmup_steps, setting.norms, setting.qk_norm
    )


def _vision_transformer(_: object, setting: Setting) -> VisionTransformer:
    return VisionTransformer(setting.learning_rate, setting.warmup_steps, setting.norms, setting.qk_norm)


FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="language model",
            steps=500,
            batch_size=16,
            settings={
                "post-norm, lr .01": Setting(0.01, 50, "post"),
                "post-norm, lr .002": Setting(0.002, 50, "post", is_reference=True),
                "lr .001": Setting(0.001, 50, is_reference=True),
                "lr .002": Setting(0.002, 50, is_reference=True),
                "lr .002, no warm-up": Setting(0.002, 0, is_reference=True),
                "lr .005": Setting(0.005, 50, is_reference=True),
                "lr .01": Setting(0.01, 50),
                "lr .01, no warm-up": Setting(0.01, 0),
                "lr .01, q/k norm": Setting(0.01, 50, qk_norm=True),
                "lr .02": Setting(0.02, 50),
            },
            data=lambda: DocumentationText(length=64),
            model=_language_model,
        ),
        Family(
            name="vision transformer",
            steps=400,
            batch_size=32,
            settings={
                "lr .001": Setting(0.001, 20, is_reference=True),
                "lr .003": Setting(0.003, 20, is_reference=True),
                "lr .01": Setting(0.01, 20),
                "lr .01, q/k norm": Setting(0.01, 20, qk_norm=True),
                "lr .03": Setting(0.03, 20),
                "lr .03, q/k norm": Setting(0.03, 20, qk_norm=True),
            },
            data=lambda: digits()[0],
            model=_vision_transformer,
        ),
    )
}
