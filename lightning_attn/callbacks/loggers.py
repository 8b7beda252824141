"""Writing to the Trainer's loggers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from lightning_attn.snapshot import Snapshot
from lightning_attn.statistics.registry import known_statistics
from lightning_attn.tensorboard import SummaryWriter, heat_map

if TYPE_CHECKING:
    import lightning.pytorch as pl


def log_scalars(trainer: pl.Trainer, tagged: Mapping[str, float], step: int) -> None:
    """Give scalars to every logger, which writes them on rank zero alone.

    Args:
        trainer: whose loggers.
        tagged: the scalars by their tags, whose parts are joined by slashes.
        step: the step they belong to.
    """
    for logger in trainer.loggers:
        separator = logger.group_separator
        metrics = {tag.replace("/", separator): value for tag, value in tagged.items()}
        logger.log_metrics(metrics, step=step)


def log_heat_maps(trainer: pl.Trainer, snapshot: Snapshot, prefix: str) -> None:
    """Draw every statistic of a snapshot in TensorBoard, as ``<prefix>_heads/<statistic>``; faults if there are any."""
    writers = list(_tensorboard_writers(trainer)) if trainer.is_global_zero else []
    if not writers:
        return
    known = known_statistics()
    for statistic in snapshot.statistics:
        summary = snapshot.summary(statistic)
        if summary is None or (known[statistic].is_fault and summary.max == 0):
            continue
        picture = heat_map(snapshot, statistic)
        for writer in writers:
            writer.add_image(f"{prefix}_heads/{statistic}", picture, snapshot.step, dataformats="HWC")


def _tensorboard_writers(trainer: pl.Trainer) -> Iterator[SummaryWriter]:
    """The writers of the TensorBoard loggers, told by name so that both of Lightning's packages are served."""
    for logger in trainer.loggers:
        if any(kind.__name__ == "TensorBoardLogger" for kind in type(logger).__mro__):
            yield logger.experiment  # type: ignore[attr-defined]
