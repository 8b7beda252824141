"""Statistics of attention: one file per lens, computed in blocks of rows, registered by name."""

from lightning_attn.statistics.measure import measure
from lightning_attn.statistics.registry import known_statistics, register, resolve
from lightning_attn.statistics.row_block import RowBlock
from lightning_attn.statistics.row_pass import RowPass
from lightning_attn.statistics.statistic import Maximum, Ratio, RowMean, RowStatistic, Statistic

__all__ = [
    "Maximum",
    "Ratio",
    "RowBlock",
    "RowMean",
    "RowPass",
    "RowStatistic",
    "Statistic",
    "known_statistics",
    "measure",
    "register",
    "resolve",
]
