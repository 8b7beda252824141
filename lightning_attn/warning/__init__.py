"""What begins to go wrong: rules, held against one snapshot after another.

`Rule` is what all are, and a pure function of the newest snapshots (`Record`); `LimitRule` and `TrendRule` serve any
statistic, and `rules/` holds those that come with the package. `Watch` holds rules against snapshots and remembers
what was said; what it says is an `EarlyWarning`. Nothing here knows of a Trainer.
"""

from lightning_attn.warning.early_warning import EarlyWarning, Severity
from lightning_attn.warning.forecast import Forecast, forecast
from lightning_attn.warning.limit_rule import LimitRule
from lightning_attn.warning.message import message, summary
from lightning_attn.warning.rule import Rule, Sign
from lightning_attn.warning.rules import (
    EntropyCollapse,
    LogitGrowth,
    LogitLevel,
    LogitPrecision,
    LogitSpread,
    NonFiniteLogits,
    PositionalTransition,
    RankCollapse,
    Saturation,
    SharpHeads,
    SinkTakeover,
    UniformCollapse,
    built_in_rules,
)
from lightning_attn.warning.series import Place, Record, Series
from lightning_attn.warning.trend_rule import TrendRule
from lightning_attn.warning.watch import Watch

__all__ = [
    "EarlyWarning",
    "EntropyCollapse",
    "Forecast",
    "LimitRule",
    "LogitGrowth",
    "LogitLevel",
    "LogitPrecision",
    "LogitSpread",
    "NonFiniteLogits",
    "Place",
    "PositionalTransition",
    "RankCollapse",
    "Record",
    "Rule",
    "Saturation",
    "Series",
    "Severity",
    "SharpHeads",
    "Sign",
    "SinkTakeover",
    "TrendRule",
    "UniformCollapse",
    "Watch",
    "built_in_rules",
    "forecast",
    "message",
    "summary",
]
