"""The statistics by what they cost. Every one that is computed by default is of exactly one kind."""

from __future__ import annotations

from unittest.mock import patch

from random_calls import random_call

from lightning_attn.statistics import RowPass, RowStatistic, Statistic, known_statistics, measure


def walks(statistic: type[RowStatistic]) -> int:
    """How often a statistic walks over the rows of a call that is small enough for one pass."""
    with patch.object(RowPass, "blocks", autospec=True, side_effect=RowPass.blocks) as blocks:
        measure(random_call(sequences=2, tokens=24, is_causal=True), [statistic])
    return blocks.call_count


def kind(statistic: type[Statistic]) -> str:
    """What makes a statistic cost what it costs."""
    if not issubclass(statistic, RowStatistic):
        return "of hidden states"
    if statistic.is_spectral:
        return "spectral"
    if walks(statistic) > 1:
        return "second walk"
    return "compares sequences" if statistic.compares_sequences else "one-pass"


KINDS = {name: kind(statistic) for name, statistic in known_statistics().items() if statistic.by_default}


def _of_kind(kind: str) -> list[str]:
    return [name for name, its_kind in KINDS.items() if its_kind == kind]


ALL = list(KINDS)
ONE_PASS = _of_kind("one-pass")
COMPARES_SEQUENCES = _of_kind("compares sequences")  # in one pass too, but over all sequences of a few heads at once
SECOND_WALK = _of_kind("second walk")
SPECTRAL = _of_kind("spectral")
OF_STATES = _of_kind("of hidden states")
NOT_SPECTRAL = [name for name in ALL if name not in SPECTRAL]

EIGENVALUE = [name for name in SPECTRAL if name == "consensus_rate"]  # of a causal head it is read off the diagonal
SINGULAR_VALUES = [name for name in SPECTRAL if name not in EIGENVALUE]
