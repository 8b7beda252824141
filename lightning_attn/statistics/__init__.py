"""Statistics of attention: one file per lens, computed in blocks of rows, registered by name."""

from lightning_attn.statistics.measure import measure
from lightning_attn.statistics.registry import known_statistics, register, resolve
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.state_statistic import StateStatistic, measure_states
from lightning_attn.statistics.states.tokens import Tokens
from lightning_attn.statistics.statistic import Maximum, Range, Ratio, RowMean, RowStatistic, Statistic

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
