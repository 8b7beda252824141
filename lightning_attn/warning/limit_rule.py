"""Rules that say where a statistic is beyond a limit.

Shape suffixes: P places, G places of one group, L levels that a value is held against.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise, repeat
from typing import Literal, get_args

import numpy as np

from lightning_attn.warning.early_warning import Severity
from lightning_attn.warning.forecast import least_squares_slopes
from lightning_attn.warning.rule import Rule, Sign, check_count, check_number
from lightning_attn.warning.series import Array, Record, Scope, Series

#: What is held against the limit: the statistic, or its change per 100 steps.
Quantity = Literal["value", "rate"]

#: What was there in the first snapshot counts from so large a share of the limit on.
LEAST_START = 0.1
#: A rate is the slope over so many snapshots.
_RATE_SNAPSHOTS = 5


class LimitRule(Rule):
    """A statistic is beyond a limit: at a head, in the mean of a site or of the model, or at many of the heads.

    Args:
        name: what the rule is called.
        statistic: name of the statistic.
        above: the limit from above, or several, increasing: the higher ones are told as well.
        below: the limit from below, or several, decreasing. Either ``above`` or ``below`` is given.
        quantity: ``"value"`` holds the statistic against the limit; ``"rate"`` its change per 100 steps, by least
            squares over the last five snapshots.
        scope: ``"head"`` for each head by itself, ``"site"`` or ``"model"`` for the heads of each site or of all sites
            together.
        share_of_heads: heads together are beyond the limit if so large a share of them is; ``None`` if their mean is.
        min_heads: heads together are none if there are fewer: one sharp head of two is not the sharpness of a model.
        without_start: take off twice what the statistic was in the first snapshot, where that was a tenth of the limit
            or more. A position bias spreads logits from the beginning, more in longer batches: that is no growth.
        hysteresis: how far within the (first) limit the value must come back to be warned of anew, as a share of the
            limit; of a limit of 0 there is no share, so that coming back is enough.
        severity: how bad it is; one for each limit where there are several.
        warmup_steps: nothing is said before that step.
        patience: so many snapshots in a row must be beyond the limit.
        meaning: what follows if nothing is done.
        remedy: what to try.

    Raises:
        ValueError: if an argument is not allowed, or the statistic is unknown.

    Example:
        >>> LimitRule("narrow_heads", "entropy_without_sink", below=0.1, scope="model", share_of_heads=0.5).name
        'narrow_heads'
    """

    statistic: str
    limits: tuple[float, ...]
    is_above: bool
    quantity: Quantity
    scope: Scope
    share_of_heads: float | None
    min_heads: int
    without_start: bool
    hysteresis: float

    def __init__(
        self,
        name: str,
        statistic: str,
        above: float | list[float] | None = None,
        below: float | list[float] | None = None,
        quantity: Quantity = "value",
        scope: Scope = "head",
        share_of_heads: float | None = None,
        min_heads: int = 1,
        without_start: bool = False,
        hysteresis: float = 0.1,
        severity: Severity | list[Severity] = "warning",
        warmup_steps: int = 0,
        patience: int = 2,
        meaning: str = "",
        remedy: str = "",
    ) -> None:
        if (above is None) == (below is None):
            raise ValueError(
                f"The limit, either `above` or `below`, must be given, got above={above!r} and below={below!r}."
            )
        limits = _limits(above, "above", 1) if below is None else _limits(below, "below", -1)
        if quantity not in get_args(Quantity):
            raise ValueError(f"`quantity` must be 'value' or 'rate', got {quantity!r}.")
        if scope not in get_args(Scope):
            raise ValueError(f"`scope` must be 'head', 'site' or 'model', got {scope!r}.")
        if share_of_heads is not None:
            check_share(share_of_heads, "share_of_heads")
            if scope == "head":
                raise ValueError("`share_of_heads` needs `scope` to be 'site' or 'model', got 'head'.")
        check_count(min_heads, "min_heads", least=1)
        check_number(hysteresis, "hysteresis", least=0, most=1)
        super().__init__(
            name,
            [statistic],
            severity,
            warmup_steps,
            patience,
            snapshots=_RATE_SNAPSHOTS if quantity == "rate" else 1,
        )
        if len(self.severities) not in (1, len(limits)):
            raise ValueError(f"`severity` must be one, or one for each of {len(limits)} limits, got {severity!r}.")
        self._keep(
            statistic=statistic,
            limits=limits,
            is_above=below is None,
            quantity=quantity,
            scope=scope,
            share_of_heads=share_of_heads,
            min_heads=min_heads,
            without_start=without_start,
            hysteresis=hysteresis,
            meaning=meaning or type(self).meaning,
            remedy=remedy or type(self).remedy,
        )

    def signs(self, record: Record) -> Iterable[Sign]:
        """Every place that is beyond the limit, and by a grade that says beyond how many of them."""
        if not record.has(self.statistic):
            return ()
        series = record.series(self.statistic).last(self.snapshots)
        if self.without_start:
            series = series.without(record.at_first(self.statistic), least=LEAST_START * self.limits[0])
        if self.share_of_heads is None:
            series = series.averaged(self.scope)
        if self.quantity == "rate":
            values_P = 100 * least_squares_slopes(series.steps_T, series.values_TP)
            enough_P = np.isfinite(series.values_TP).sum(axis=0) >= _RATE_SNAPSHOTS
            values_P = np.where(enough_P, values_P, np.nan)
        else:
            values_P = series.last_P
        if self.share_of_heads is None:
            told_P = values_P
            if self.without_start and self.quantity == "value":  # what was seen, not what is left of it
                told_P = record.series(self.statistic).averaged(self.scope).last_P
            return self._of_each(series, values_P, told_P)
        return self._of_many(series, values_P, self.share_of_heads)

    @property
    def _told(self) -> str:
        """What the values of the signs are."""
        return self.statistic if self.quantity == "value" else f"{self.statistic} per 100 steps"

    def _of_each(self, series: Series, values_P: Array, told_P: Array) -> Iterator[Sign]:
        beyond_LP = self._beyond(values_P)
        grades_P = beyond_LP[1:].sum(axis=0)
        beyond = np.flatnonzero(beyond_LP[0])
        places = [series.places[place] for place in beyond.tolist()]
        limits_P = np.array([self.limits[0], *self.limits])[grades_P[beyond]]
        return map(
            Sign,
            places,
            repeat(self._told),
            told_P[beyond].tolist(),
            limits_P.tolist(),
            grades_P[beyond].tolist(),
        )

    def _of_many(self, series: Series, values_P: Array, share: float) -> Iterator[Sign]:
        for place, columns in series.groups(self.scope).items():
            values_G = values_P[columns]
            present = int((~np.isnan(values_G)).sum())
            # The product of a share and a number is not always the integer it should be.
            needed = max(math.ceil(share * present - 1e-9), 1)
            counts_L = self._beyond(values_G).sum(axis=1)
            if counts_L[0] < needed or present < self.min_heads:
                continue
            grade = int((counts_L[1:] >= needed).sum())
            worst = int(np.nanargmax(values_G if self.is_above else -values_G))
            yield Sign(
                place,
                self._told,
                float(values_G[worst]),
                self.limits[max(grade - 1, 0)],
                grade,
                worst=series.places[columns[worst]],
                heads=int(counts_L[max(grade, 1)]),
                of_heads=present,
            )

    def _beyond(self, values_P: Array) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Whether a value is beyond where it begins to be warned of anew, and beyond each of the limits."""
        sense = 1 if self.is_above else -1
        first = self.limits[0]
        levels = [first - sense * self.hysteresis * abs(first), *self.limits]
        with np.errstate(invalid="ignore"):
            return np.stack([sense * values_P > sense * level for level in levels])


def check_share(value: object, name: str) -> None:
    """Refuse what is no share of something.

    Raises:
        ValueError: if it is not a number above 0 and up to 1.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
        raise ValueError(f"`{name}` must be above 0 and at most 1, got {value!r}.")


def _limits(given: float | list[float] | None, name: str, sense: int) -> tuple[float, ...]:
    limits = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    numbers = [limit for limit in limits if isinstance(limit, (int, float)) and not isinstance(limit, bool)]
    ordered = all(sense * a < sense * b for a, b in pairwise(numbers))
    if not limits or len(numbers) != len(limits) or not np.isfinite(numbers).all() or not ordered:
        order = "increasing" if sense > 0 else "decreasing"
        raise ValueError(f"The limit, `{name}`, must be a finite number or a list of {order} ones, got {given!r}.")
    return tuple(map(float, numbers))
