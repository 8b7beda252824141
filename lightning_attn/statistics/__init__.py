"""Statistics of attention: one file per lens, computed in blocks of rows, registered by name."""

from lightning_attn.statistics.measure import measure
from lightning_attn.statistics.registry import known_statistics, register, resolve
from lightning_attn.statistics.row_block import RowBlock
from lightning_attn.statistics.row_pass import RowPass
from lightning_attn.statistics.state_statistic import StateStatistic, measure_states
from lightning_attn.statistics.statistic import Maximum, Range, Ratio, RowMean, RowStatistic, Statistic
from lightning_attn.statistics.tokens import Tokens

__all__ = [
    "Maximum",
    "Range",
    "Ratio",
    "RowBlock",
    "RowMean",
    "RowPass",
    "RowStatistic",
    "StateStatistic",
    "Statistic",
    "Tokens",
    "known_statistics",
    "measure",
    "measure_states",
    "register",
    "resolve",
]
