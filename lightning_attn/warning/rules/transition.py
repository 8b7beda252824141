"""Heads that go over from attending by position to attending by content, or back: an event, not a fault."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_attn.transition import MIN_SIDE, find_transition
from lightning_attn.warning.forecast import least_squares_slopes
from lightning_attn.warning.rule import Rule, Sign
from lightning_attn.warning.series import Record

#: Of the heads whose share changed most, so many are looked at closely in one snapshot.
_MOST_SEARCHES = 4


class PositionalTransition(Rule):
    """A head went over from attending by position to attending by content, or back.

    See `lightning_attn.find_transition`, which decides it.

    Args:
        min_change: of `positional_share`.
        min_certainty: how clear it must be.
        window: the newest snapshots that are looked at.
    """

    meaning = "The head has changed what it attends by, which is what learning looks like."
    remedy = "nothing: it is an event and not a fault"

    min_change: float
    min_certainty: float

    def __init__(self, min_change: float = 0.3, min_certainty: float = 0.99, window: int = 40) -> None:
        super().__init__("positional_transition", ["positional_share"], severity="info", snapshots=window)
        self._keep(min_change=min_change, min_certainty=min_certainty)

    def signs(self, record: Record) -> Iterator[Sign]:
        """Every head that went over within the window."""
        if not record.has("positional_share"):
            return
        series = record.series("positional_share").last(self.snapshots)
        if len(series.steps_T) < 2 * MIN_SIDE:
            return
        change_P = np.abs(least_squares_slopes(series.steps_T, series.values_TP)) * np.ptp(series.steps_T)
        changed = np.flatnonzero(change_P > self.min_change)
        most = changed[np.argsort(-change_P[changed], kind="stable")]
        for rank, place in enumerate(most.tolist()):
            values_T = series.values_TP[:, place]
            last = float(values_T[-1])
            if last != last:
                continue
            found = rank < _MOST_SEARCHES and find_transition(
                series.steps_T.astype(int).tolist(),
                values_T.tolist(),
                min_change=self.min_change,
                min_certainty=self.min_certainty,
            )
            grade = 1 if found else 0
            yield Sign(series.places[place], "positional_share", last, found.before if found else None, grade=grade)
