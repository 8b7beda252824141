"""The rules that come with the package; one file for each of what they look at."""

from __future__ import annotations

from lightning_attn.warning.rule import Rule
from lightning_attn.warning.rules.entropy import EntropyCollapse, Saturation, SharpHeads, UniformCollapse
from lightning_attn.warning.rules.logits import LogitGrowth, LogitLevel, LogitPrecision, LogitSpread, NonFiniteLogits
from lightning_attn.warning.rules.rank import RankCollapse
from lightning_attn.warning.rules.sink import SinkTakeover
from lightning_attn.warning.rules.transition import PositionalTransition

__all__ = [
    "EntropyCollapse",
    "LogitGrowth",
    "LogitLevel",
    "LogitPrecision",
    "LogitSpread",
    "NonFiniteLogits",
    "PositionalTransition",
    "RankCollapse",
    "Saturation",
    "SharpHeads",
    "SinkTakeover",
    "UniformCollapse",
    "built_in_rules",
]


def built_in_rules() -> tuple[Rule, ...]:
    """The rules that are held against a run where nobody says otherwise, the most telling first."""
    return (
        NonFiniteLogits(),
        LogitGrowth(),
        LogitSpread(),
        SharpHeads(),
        Saturation(),
        RankCollapse(),
        LogitLevel(),
        LogitPrecision(),
        EntropyCollapse(),
        UniformCollapse(),
        SinkTakeover(),
        PositionalTransition(),
    )
