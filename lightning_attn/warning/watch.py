"""Rules held against one snapshot after another: what is new is warned of, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_attn.snapshot import Snapshot
from lightning_attn.warning.early_warning import EarlyWarning
from lightning_attn.warning.forecast import least_squares_slopes
from lightning_attn.warning.rule import Rule, Sign
from lightning_attn.warning.series import Place, Record

#: How fast something goes is told by so many of the newest snapshots.
_SLOPE_SNAPSHOTS = 5


@dataclass
class _Standing:
    """What is known of a rule at a place: the grades of the newest snapshots, and what was warned of."""

    grades: list[int] = field(default_factory=list)
    since: int | None = None
    warned_grade: int = 0


class Watch:
    """Rules with a memory, which is the only one they have.

    A sign counts once it was there in as many snapshots in a row as its rule has patience, with the least of their
    grades. It is warned of if nothing as bad was warned of before at its place; and can be again when the place has
    shown no sign for as long.

    Args:
        rules: the rules, of different names.
        report: told of a rule that failed, which is left out from then on; ``None`` raises what it raised.

    Example:
        >>> import torch
        >>> from lightning_attn.warning import LimitRule
        >>> watch = Watch([LimitRule("wide", "logit_std", above=20, patience=2)])
        >>> for step, value in enumerate([5.0, 30.0, 30.0, 30.0]):
        ...     snapshot = Snapshot(step, {"attention": 1}, ("logit_std",), torch.tensor([[value]]).double())
        ...     print(step, [warning.place for warning in watch.look(snapshot)])
        0 []
        1 []
        2 ['attention #0']
        3 []
    """

    def __init__(self, rules: Sequence[Rule], report: Callable[[Rule, Exception], None] | None = None) -> None:
        self.rules = tuple(rules)
        self._report = report
        self._keep = max([_SLOPE_SNAPSHOTS, *(rule.snapshots for rule in self.rules)])
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self._failed: set[str] = set()
        self._snapshots: list[Snapshot] = []
        self._standings: dict[str, dict[Place, _Standing]] = {}

    def look(self, snapshot: Snapshot) -> list[EarlyWarning]:
        """What the rules find new in a snapshot; it belongs behind those that were looked at before."""
        while self._snapshots and self._snapshots[-1].step >= snapshot.step:  # the run went back
            self._snapshots.pop()
        self._snapshots = [*self._snapshots, snapshot][-self._keep :]
        record = Record(self._snapshots)
        return [warning for rule in self.rules for warning in self._judged(rule, record)]

    def raised(self) -> dict[str, int]:
        """At how many places each rule has warned and still shows signs."""
        return {
            rule.name: sum(standing.warned_grade > 0 for standing in self._standings.get(rule.name, {}).values())
            for rule in self.rules
        }

    def _judged(self, rule: Rule, record: Record) -> list[EarlyWarning]:
        signs = self._signs(rule, record)
        standings = self._standings.setdefault(rule.name, {})
        for place in list(standings):
            if place not in signs and (place.site is None or place.site in record.snapshots[-1].heads):
                standing = standings[place]
                standing.grades = [*standing.grades, -1][-rule.patience :]
                standing.since = None
                if set(standing.grades) == {-1}:
                    del standings[place]
        new: list[tuple[Sign, _Standing]] = []
        for place, sign in signs.items():
            standing = standings.setdefault(place, _Standing())
            standing.grades = [*standing.grades, sign.grade][-rule.patience :]
            standing.since = (standing.since if standing.since is not None else record.step) if sign.grade > 0 else None
            grade = min(standing.grades) if len(standing.grades) == rule.patience else 0
            if grade > standing.warned_grade:
                standing.warned_grade = grade
                new.append((sign, standing))
        return _warnings(rule, record, new)

    def _signs(self, rule: Rule, record: Record) -> dict[Place, Sign]:
        if record.step < rule.warmup_steps or rule.name in self._failed:
            return {}
        try:
            return {sign.place: sign for sign in map(_plain, rule.signs(record))}
        except Exception as error:
            if self._report is None:
                raise
            self._failed.add(rule.name)
            self._report(rule, error)
            return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to repeat nothing and lose nothing, in plain values and tensors."""
        return {
            "snapshots": [
                {
                    "step": snapshot.step,
                    "heads": dict(snapshot.heads),
                    "statistics": list(snapshot.statistics),
                    "values": snapshot.values,
                }
                for snapshot in self._snapshots
            ],
            "standings": [
                [rule, *place, list(standing.grades), standing.since, standing.warned_grade]
                for rule, of_rule in self._standings.items()
                for place, standing in of_rule.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self.clear()
        for kept in state["snapshots"]:
            snapshot = Snapshot(kept["step"], kept["heads"], tuple(kept["statistics"]), kept["values"])
            self._snapshots.append(snapshot)
        for rule, site, head, grades, since, warned_grade in state["standings"]:
            standing = _Standing(list(grades), since, warned_grade)
            self._standings.setdefault(rule, {})[Place(site, head)] = standing


def _plain(sign: Sign) -> Sign:
    """A sign in Python's own numbers, whatever its rule computes with: checkpoints and JSON have no others."""
    return Sign(
        place=_plain_place(sign.place),
        statistic=str(sign.statistic),
        value=float(sign.value),
        limit=None if sign.limit is None else float(sign.limit),
        grade=int(sign.grade),
        slope=None if sign.slope is None else float(sign.slope),
        predicted_step=None if sign.predicted_step is None else int(sign.predicted_step),
        worst=None if sign.worst is None else _plain_place(sign.worst),
        heads=None if sign.heads is None else int(sign.heads),
        of_heads=None if sign.of_heads is None else int(sign.of_heads),
    )


def _plain_place(place: Place) -> Place:
    return Place(place.site, None if place.head is None else int(place.head))


def _warnings(rule: Rule, record: Record, new: Iterable[tuple[Sign, _Standing]]) -> list[EarlyWarning]:
    slopes: dict[str, dict[Place, float]] = {}
    warnings: list[EarlyWarning] = []
    for sign, standing in new:
        place = sign.worst or sign.place
        if sign.slope is None and sign.statistic not in slopes:
            slopes[sign.statistic] = _slopes(record, sign.statistic)
        slope = sign.slope if sign.slope is not None else slopes[sign.statistic].get(place)
        warnings.append(
            EarlyWarning(
                step=record.step,
                rule=rule.name,
                severity=rule.severity(sign.grade),
                site=place.site,
                head=place.head,
                statistic=sign.statistic,
                value=sign.value,
                limit=sign.limit,
                since=standing.since,
                slope=slope,
                predicted_step=sign.predicted_step,
                heads=sign.heads,
                of_heads=sign.of_heads,
                meaning=rule.meaning,
                remedy=rule.remedy,
            )
        )
    return warnings


def _slopes(record: Record, statistic: str) -> dict[Place, float]:
    """How fast a statistic goes at each place that has a slope."""
    if not record.has(statistic):
        return {}
    series = record.series(statistic).last(_SLOPE_SNAPSHOTS)
    slopes_P = least_squares_slopes(series.steps_T, series.values_TP)
    return {place: slope for place, slope in zip(series.places, slopes_P.tolist(), strict=True) if slope == slope}
