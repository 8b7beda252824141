"""Heads that go over from attending by position to attending by content, or back: an event, not a fault."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lightning_attn.transition import MIN_SIDE, Transition, find_transition
from lightning_attn.warning.rule import Rule, Sign, check_count, check_number
from lightning_attn.warning.series import Array, Record

#: So many heads are looked at closely in one snapshot; where more have changed, they take turns.
_MOST_SEARCHES = 4


class PositionalTransition(Rule):
    """A head went over from attending by position to attending by content, or back.

    See `lightning_attn.find_transition`, which decides it.

    Args:
        min_change: of `positional_share`.
        min_certainty: how clear it must be.
        window: the newest snapshots that are looked at.
    """

    meaning = "The head has changed what it attends by, which is what learning looks like (1: position, 0: content)."
    remedy = "nothing: it is an event and not a fault"

    min_change: float
    min_certainty: float

    def __init__(self, min_change: float = 0.3, min_certainty: float = 0.99, window: int = 40) -> None:
        check_number(min_change, "min_change", least=0, most=1)
        check_number(min_certainty, "min_certainty", least=0, most=1)
        if min_change == 0 or min_certainty == 1:
            raise ValueError(
                f"`min_change` must be above 0 and `min_certainty` below 1, got {min_change!r} and {min_certainty!r}."
            )
        check_count(window, "window", least=2 * MIN_SIDE)
        super().__init__("positional_transition", ["positional_share"], severity="info", snapshots=window)
        self._keep(min_change=min_change, min_certainty=min_certainty)

    def signs(self, record: Record) -> Iterator[Sign]:
        """Every head that went over within the window."""
        if not record.has("positional_share"):
            return
        series = record.series("positional_share").last(self.snapshots)
        if len(series.steps_T) < 2 * MIN_SIDE:
            return
        steps_T = series.steps_T
        changed = self._changed(series.values_TP)
        turns = math.ceil(len(changed) / _MOST_SEARCHES)
        turn = round(steps_T[-1] / (steps_T[-1] - steps_T[-2]))
        for number, place in enumerate(changed):
            values_T = series.values_TP[:, place]
            found = self._transition(steps_T, values_T) if (number - turn) % turns == 0 else None
            if found:
                yield Sign(series.places[place], "positional_share", found.after, since=found.step, slope=0.0)
            else:
                yield Sign(series.places[place], "positional_share", float(values_T[-1]), grade=0)

    def _changed(self, values_TP: Array) -> list[int]:
        """Where the two ends of the series differ by half of what is asked for."""
        with np.errstate(over="ignore", invalid="ignore"):
            before_P, rest_P = _mean(values_TP[:MIN_SIDE]), _mean(values_TP[MIN_SIDE:-MIN_SIDE])
            before_P = np.where(np.isnan(before_P), rest_P, before_P)  # of sites that came later
            change_P = np.abs(_mean(values_TP[-MIN_SIDE:]) - before_P)
        changed: list[int] = np.flatnonzero((change_P > self.min_change / 2) & np.isfinite(values_TP[-1])).tolist()
        return changed

    def _transition(self, steps_T: Array, values_T: Array) -> Transition | None:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return find_transition(
                steps_T.astype(int).tolist(),
                values_T.tolist(),
                min_change=self.min_change,
                min_certainty=self.min_certainty,
            )


def _mean(values_TP: Array) -> Array:
    """The mean over the snapshots that have a value; NaN where none has one."""
    present_TP = np.isfinite(values_TP)
    count_P = present_TP.sum(axis=0)
    mean_P: Array = np.where(present_TP, values_TP, 0.0).sum(axis=0) / np.where(count_P > 0, count_P, np.nan)
    return mean_P
