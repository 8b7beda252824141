"""Attention's statistics as metrics of torchmetrics.

Every statistic that is registered has a metric here, also one of your own: `AttentionEntropy` for ``"entropy"``. They
are made from the statistics when they are first asked for; `docs/statistics.md` lists them. What is of several
layers, or of two runs, is written out in the files of this folder.
"""

from __future__ import annotations

from torchmetrics import Metric

from lightning_attn.metrics.permutation import PermutationResponse
from lightning_attn.metrics.rollout import RolloutFirstTokenMass
from lightning_attn.metrics.statistic_metric import AttentionStatistics, metric_of
from lightning_attn.statistics.description import metric_name
from lightning_attn.statistics.registry import known_statistics

WRITTEN: tuple[type[Metric], ...] = (AttentionStatistics, PermutationResponse, RolloutFirstTokenMass)


def __getattr__(name: str) -> type[Metric]:
    for statistic in known_statistics().values():
        if metric_name(statistic) == name:
            return metric_of(statistic)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_names())


def _names() -> list[str]:
    return [*(metric.__name__ for metric in WRITTEN), *map(metric_name, known_statistics().values())]


__all__ = _names()
