"""Summaries of a snapshot by name, for other callbacks to monitor."""

from __future__ import annotations

from collections.abc import Sequence

from torchmetrics import MeanMetric

from lightning_attn.snapshot import Snapshot, Summary


def summary_value(snapshot: Snapshot, name: str) -> float | None:
    """The value of ``"<statistic>/<min, mean or max>"``; ``None`` where it is absent."""
    statistic, kind = name.rsplit("/", 1)
    summary = snapshot.summary(statistic)
    return None if summary is None else float(getattr(summary, kind))


def reduced_metric(value: float) -> MeanMetric:
    """A value that all ranks have alike, as Lightning takes one without another collective.

    Of a number it would say, with several ranks, that it should be reduced over them at the end of an epoch.
    """
    metric = MeanMetric(sync_on_compute=False)
    metric.update(value)
    return metric


def check_summary_names(names: Sequence[str], statistics: Sequence[str]) -> None:
    """Refuse names that `summary_value` cannot answer.

    Args:
        names: the names.
        statistics: the statistics that there will be.

    Raises:
        ValueError: if a name is not a statistic and a summary, joined by a slash.
    """
    for name in names:
        statistic, _, kind = str(name).rpartition("/")
        if statistic not in statistics or kind not in Summary._fields:
            raise ValueError(
                f"`callback_metrics` holds {name!r}; allowed is '<statistic>/<summary>' with a statistic of "
                f"{list(statistics)} and a summary of {list(Summary._fields)}, such as 'entropy/min'."
            )
