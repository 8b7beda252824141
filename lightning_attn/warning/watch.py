"""Rules held against one snapshot after another: what is new is warned of, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from lightning_attn.snapshot import Snapshot
from lightning_attn.warning.early_warning import EarlyWarning
from lightning_attn.warning.forecast import least_squares_slopes
from lightning_attn.warning.rule import Rule, Sign
from lightning_attn.warning.series import Place, Record, Scope

#: How fast something goes is told by so many of the newest snapshots.
_SLOPE_SNAPSHOTS = 5


class _Look(NamedTuple):
    """What a snapshot showed of a rule at a place."""

    grade: int
    limit: float | None = None


_NO_SIGN = _Look(-1)


@dataclass
class _Standing:
    """What is known of a rule at a place: the newest looks, and what was warned of."""

    looks: list[_Look] = field(default_factory=list)
    #: For each grade from 1 on, the first step from which it was there, or a worse one, without a break.
    since: list[int] = field(default_factory=list)
    warned_grade: int = 0

    #: The grade of all looks, once there are as many as patience asks for: another one like it changes nothing.
    settled_grade: int | None = None

    def add(self, look: _Look, step: int, patience: int) -> None:
        grade = max(look.grade, 0)
        self.since = [*self.since[:grade], *[step] * (grade - len(self.since))]
        self.looks = [*self.looks, look][-patience:]
        is_settled = len(self.looks) == patience and all(known.grade == look.grade for known in self.looks)
        self.settled_grade = look.grade if is_settled else None


class _Finding(NamedTuple):
    """A sign that counts: as what, and since when."""

    sign: Sign
    least: _Look
    since: int | None


class Watch:
    """Rules with a memory, which is the only one they have.

    A sign counts once it was there in as many snapshots in a row as its rule has patience, with the least of their
    grades. It is warned of if nothing as bad was warned of before at its place; and can be again when the place has
    shown no sign for as long.

    Snapshots that have no value of a place, or not its site, say nothing about it: they neither count nor interrupt.
    When the steps go back, what was warned of stays known, and what was counted is counted anew.

    Args:
        rules: the rules, of different names.
        report: told of a rule that failed, which is left out from then on; ``None`` raises what it raised.

    Raises:
        ValueError: if two rules have the same name.

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
        names = [rule.name for rule in self.rules]
        if len(set(names)) < len(names):
            raise ValueError(f"`rules` must have different names, got {names}.")
        self._report = report
        self._keep = max([_SLOPE_SNAPSHOTS, *(rule.snapshots for rule in self.rules)])
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self._failed: set[str] = set()
        self._first: Snapshot | None = None
        self._snapshots: list[Snapshot] = []
        self._standings: dict[str, dict[Place, _Standing]] = {}

    def look(self, snapshot: Snapshot) -> list[EarlyWarning]:
        """What the rules find new in a snapshot; it belongs behind those that were looked at before."""
        if self._snapshots and self._snapshots[-1].step >= snapshot.step:
            self._go_back(snapshot.step)
        self._remember(snapshot)

        @cache
        def newest(count: int) -> Record:
            return Record(self._snapshots[-count:], self._first)

        warnings: list[EarlyWarning] = []
        for rule in self.rules:
            if rule.name in self._failed:
                continue
            try:
                # No more than it asks for, so that what it finds does not depend on the other rules.
                new = self._judged(rule, newest(rule.snapshots))
                warnings += _warnings(rule, newest(_SLOPE_SNAPSHOTS), new)
            except Exception as error:
                if self._report is None:
                    raise
                self._failed.add(rule.name)
                self._standings.pop(rule.name, None)
                self._report(rule, error)
        return warnings

    def raised(self) -> dict[str, int]:
        """At how many places each rule has warned and still shows signs."""
        return {
            rule.name: sum(standing.warned_grade > 0 for standing in self._standings.get(rule.name, {}).values())
            for rule in self.rules
        }

    def _remember(self, snapshot: Snapshot) -> None:
        if self._snapshots and list(snapshot.heads.items()) == list(self._snapshots[-1].heads.items()):
            # Of one mapping it need not be found out for every statistic that it is the same.
            snapshot = replace(snapshot, heads=self._snapshots[-1].heads)
        self._first = self._first or snapshot
        self._snapshots = [*self._snapshots, snapshot][-self._keep :]

    def _go_back(self, step: int) -> None:
        """Forget what was seen from a step on, since it is done anew."""
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.step < step]
        for of_rule in self._standings.values():
            for standing in of_rule.values():
                standing.looks, standing.since, standing.settled_grade = [], [], None

    def _judged(self, rule: Rule, record: Record) -> list[_Finding]:
        """What counts and was not warned of yet."""
        signs = {sign.place: sign for sign in rule.signs(record)} if record.step >= rule.warmup_steps else {}
        standings = self._standings.setdefault(rule.name, {})
        new: list[_Finding] = []
        signed = 0
        for place, sign in signs.items():
            known = standings.get(place)
            if known is None:
                if sign.grade < 1:  # there is nothing to keep from being warned of anew
                    continue
                known = standings[_plain(place)] = _Standing()
            signed += 1
            if sign.grade == known.settled_grade:
                continue
            known.add(_Look(int(sign.grade), _number(sign.limit)), record.step, rule.patience)
            least = min(known.looks, key=_grade)
            if least.grade > known.warned_grade and len(known.looks) == rule.patience:
                known.warned_grade = least.grade
                new.append(_Finding(sign, least, known.since[least.grade - 1]))
        if len(standings) > signed:
            self._miss(rule, record, signs)
        return new

    def _miss(self, rule: Rule, record: Record, signs: Mapping[Place, Sign]) -> None:
        """Take note of the places that show no sign any more, of those of which the snapshot tells."""
        standings = self._standings[rule.name]
        for place in [place for place in standings if place not in signs]:
            if any(record.has_value(statistic, place) for statistic in rule.statistics):
                standing = standings[place]
                standing.add(_NO_SIGN, record.step, rule.patience)
                if standing.settled_grade == _NO_SIGN.grade:
                    del standings[place]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to repeat nothing and lose nothing, in plain values and tensors."""
        return {
            "first": None if self._first is None else _kept(self._first),
            "snapshots": [_kept(snapshot) for snapshot in self._snapshots],
            "standings": [
                [rule, *place, [list(look) for look in standing.looks], list(standing.since), standing.warned_grade]
                for rule, of_rule in self._standings.items()
                for place, standing in of_rule.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off; what it knows of rules that there are no more is left out."""
        self.clear()
        self._first = None if state["first"] is None else _restored(state["first"])
        for kept in state["snapshots"]:
            self._remember(_restored(kept))
        names = {rule.name for rule in self.rules}
        for rule, site, head, looks, since, warned_grade in state["standings"]:
            if rule in names:
                standing = _Standing([_Look(*look) for look in looks], list(since), warned_grade)
                self._standings.setdefault(rule, {})[Place(site, head)] = standing


def _kept(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "step": snapshot.step,
        "heads": dict(snapshot.heads),
        "statistics": list(snapshot.statistics),
        "values": snapshot.values,
    }


def _restored(kept: Mapping[str, Any]) -> Snapshot:
    return Snapshot(kept["step"], kept["heads"], tuple(kept["statistics"]), kept["values"].cpu())


def _grade(look: _Look) -> int:
    return look.grade


# Checkpoints and JSON have Python's own numbers alone, whatever a rule computes with.


def _plain(place: Place) -> Place:
    return Place(place.site, _count(place.head))


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _count(value: int | None) -> int | None:
    return None if value is None else int(value)


def _warnings(rule: Rule, record: Record, new: Iterable[_Finding]) -> list[EarlyWarning]:
    slopes: dict[tuple[str, Scope], dict[Place, float]] = {}
    warnings: list[EarlyWarning] = []
    for sign, least, since in new:
        place = _plain(sign.worst or sign.place)
        slope = _number(sign.slope)
        if slope is None:
            scope = _scope(place)
            if (sign.statistic, scope) not in slopes:
                slopes[sign.statistic, scope] = _slopes(record, sign.statistic, scope)
            slope = slopes[sign.statistic, scope].get(place)
        warnings.append(
            EarlyWarning(
                step=record.step,
                rule=rule.name,
                severity=rule.severity(least.grade),
                scope=_scope(sign.place),
                site=place.site,
                head=place.head,
                statistic=sign.statistic,
                value=float(sign.value),
                limit=least.limit,
                since=since if sign.since is None else int(sign.since),
                slope=slope,
                predicted_step=_count(sign.predicted_step),
                heads=_count(sign.heads),
                of_heads=_count(sign.of_heads),
                meaning=rule.meaning,
                remedy=rule.remedy,
            )
        )
    return warnings


def _scope(place: Place) -> Scope:
    return "model" if place.site is None else "site" if place.head is None else "head"


def _slopes(record: Record, statistic: str, scope: Scope) -> dict[Place, float]:
    """How fast a statistic goes at each place that has a slope."""
    if not record.has(statistic):
        return {}
    series = record.series(statistic).averaged(scope)
    slopes_P = least_squares_slopes(series.steps_T, series.values_TP)
    return {place: slope for place, slope in zip(series.places, slopes_P.tolist(), strict=True) if slope == slope}
