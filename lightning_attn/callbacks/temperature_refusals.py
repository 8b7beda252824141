"""In which runs temperatures are not changed, told by name before training starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_attn.capture.sites import SiteNames

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: Strategies whose parameters cannot be changed by rows, by the names of their classes.
REFUSED_STRATEGIES = ("FSDPStrategy", "DeepSpeedStrategy")


class Governs(Protocol):
    """A callback that divides queries."""

    def governs(self, site: str) -> bool:
        """Whether it divides those of a site."""


def refuse_strategy(trainer: pl.Trainer) -> None:
    """Refuse a strategy that shards parameters in a way in which they cannot be changed by rows.

    Raises:
        MisconfigurationException: if the Trainer has such a strategy.
    """
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in REFUSED_STRATEGIES:
            raise MisconfigurationException(
                f"AdaptiveTemperature cannot change the parameters that {kind.__name__} shards; use "
                "`ModelParallelStrategy` with `fully_shard` (FSDP2), or data parallelism."
            )


def refuse_overlap(callbacks: Sequence[Governs], names: SiteNames) -> None:
    """Refuse several callbacks that would divide the same queries.

    Raises:
        MisconfigurationException: if two of them govern one module.
    """
    for name in names:
        if sum(callback.governs(name) for callback in callbacks) > 1:
            raise MisconfigurationException(
                f"Two AdaptiveTemperature callbacks would divide the queries of {name!r}; give each `sites` of its own."
            )
