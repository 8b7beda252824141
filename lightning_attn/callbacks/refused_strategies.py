"""Strategies whose parameters a callback cannot change by rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.fabric.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: By the names of their classes.
REFUSED_STRATEGIES = ("FSDPStrategy", "DeepSpeedStrategy")


def refuse_flat_shards(trainer: pl.Trainer, callback: str) -> None:
    """Refuse strategies that flatten parameters, or keep others in their place, by the names of their classes.

    Args:
        trainer: the Trainer.
        callback: who refuses.

    Raises:
        MisconfigurationException: if it has one of them.
    """
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in REFUSED_STRATEGIES:
            raise MisconfigurationException(
                f"{callback} cannot change the parameters that {kind.__name__} shards; use `ModelParallelStrategy` "
                "with `fully_shard` (FSDP2), or data parallelism."
            )
