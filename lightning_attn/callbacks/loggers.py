"""Writing to the Trainer's loggers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from lightning_attn.snapshot import Snapshot
from lightning_attn.statistics.registry import known_statistics
from lightning_attn.tensorboard import Layout, SummaryWriter, heat_map

if TYPE_CHECKING:
    import lightning.pytorch as pl


def output_folder(trainer: pl.Trainer) -> str:
    """The directory of the first logger's run, or the Trainer's own; all ranks must ask, since one tells the others."""
    folder = trainer.log_dir
    return str(folder if isinstance(folder, (str, os.PathLike)) else trainer.default_root_dir)


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


def log_heat_maps(
    trainer: pl.Trainer, snapshot: Snapshot, prefix: str, spans: tuple[float, float] | None = None
) -> None:
    """Draw every statistic of a snapshot in TensorBoard, as ``<prefix>_heads/<statistic>``; faults if there are any.

    Args:
        trainer: whose loggers.
        snapshot: the snapshot.
        prefix: what all tags begin with.
        spans: see `heat_map`.
    """
    writers = _tensorboard_writers(trainer)
    if not writers:
        return
    known = known_statistics()
    for statistic in snapshot.statistics:
        summary = snapshot.summary(statistic)
        is_fault = statistic in known and known[statistic].is_fault
        if summary is None or (is_fault and summary.max == 0):
            continue
        picture = heat_map(snapshot, statistic, spans)
        for writer in writers:
            writer.add_image(f"{prefix}_heads/{statistic}", picture, snapshot.step, dataformats="HWC")


def log_layout(trainer: pl.Trainer, layout: Layout) -> None:
    """Lay out TensorBoard's custom scalars; written where there is something new in it.

    TensorBoard takes the last layout of a run for the whole, so each one written has to hold those before it, of other
    monitors and of statistics that have no value today.
    """
    for writer in _tensorboard_writers(trainer):
        before = _LAYOUTS.get(writer, {})
        whole = before | {category: before.get(category, {}) | charts for category, charts in layout.items()}
        if whole != before:
            _LAYOUTS[writer] = whole
            writer.add_custom_scalars(whole)


def log_text(trainer: pl.Trainer, tag: str, markdown: str, step: int) -> None:
    """Write a text in TensorBoard."""
    for writer in _tensorboard_writers(trainer):
        writer.add_text(tag, markdown, step)


def has_tensorboard(trainer: pl.Trainer) -> bool:
    """Whether this process writes to TensorBoard."""
    return bool(_tensorboard_writers(trainer))


def _tensorboard_writers(trainer: pl.Trainer) -> list[SummaryWriter]:
    """The writers of the TensorBoard loggers, told by name so that both of Lightning's packages are served.

    Only rank zero has any.
    """
    return [
        logger.experiment  # type: ignore[attr-defined]
        for logger in (trainer.loggers if trainer.is_global_zero else [])
        if any(kind.__name__ == "TensorBoardLogger" for kind in type(logger).__mro__)
    ]


_LAYOUTS: WeakKeyDictionary[SummaryWriter, Layout] = WeakKeyDictionary()
