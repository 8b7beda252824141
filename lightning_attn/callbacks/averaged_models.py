"""The averages of a model that other callbacks of a Trainer keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.optim.swa_utils import AveragedModel

if TYPE_CHECKING:
    import lightning.pytorch as pl


def averaged_models(trainer: pl.Trainer) -> list[nn.Module]:
    """The averages that callbacks hold, of whatever name: Lightning's `WeightAveraging` keeps its own in private.

    Their state dicts are saved in the place of the model's. One that is held in another way is not found; what is saved
    of it then lacks the temperatures.
    """
    held = (value for callback in trainer.callbacks for value in vars(callback).values())  # type: ignore[attr-defined]
    return [value.module for value in held if isinstance(value, AveragedModel)]
