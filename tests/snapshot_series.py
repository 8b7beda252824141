"""Snapshots made of numbers, as a run would have captured them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from lightning_attn import Snapshot
from lightning_attn.warning import EarlyWarning, Record, Rule, Watch

Number = float | Sequence[float]


def snapshot(step: int, heads: Mapping[str, int] | None = None, **values: Number) -> Snapshot:
    """A snapshot of some heads; each statistic has one value for all of them, or one for each."""
    heads = {"attention": 1} if heads is None else heads
    count = sum(heads.values())
    rows = [np.broadcast_to(np.asarray(value, dtype=np.float64), (count,)) for value in values.values()]
    return Snapshot(step, heads, tuple(values), torch.from_numpy(np.stack(rows) if rows else np.empty((0, count))))


def course(
    statistic: str, values: Iterable[Number], heads: Mapping[str, int] | None = None, first: int = 0, every: int = 10
) -> list[Snapshot]:
    """A snapshot for each of the values of a statistic."""
    return [snapshot(first + every * n, heads, **{statistic: value}) for n, value in enumerate(values)]


def record(*snapshots: Snapshot) -> Record:
    return Record(snapshots)


def warned(rules: Rule | Sequence[Rule], snapshots: Iterable[Snapshot]) -> list[EarlyWarning]:
    """All that rules warn of, one snapshot after another."""
    watch = Watch([rules] if isinstance(rules, Rule) else rules)
    return [warning for one in snapshots for warning in watch.look(one)]
