"""What every rule is: a pure function of the newest snapshots, and a few words for people."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lightning_attn.statistics.registry import resolve
from lightning_attn.warning.early_warning import SEVERITIES, Severity
from lightning_attn.warning.series import Place, Record


class Sign(NamedTuple):
    """That a rule's fault is there, at one place, in the last snapshot.

    Args:
        place: where.
        statistic: what tells it.
        value: of the statistic.
        limit: what it has gone beyond, or is about to; ``None`` where there is none.
        grade: which of the rule's limits, from 1 on; a higher one is worse. 0 where the value is back within the limit
            but not far: this keeps what was warned of from being warned of anew, and warns of nothing.
        slope: change of the value per step, where the rule knows it better than from the values alone; 0 for none.
        predicted_step: when the limit will be crossed.
        worst: the worst head, where the place is more than one head.
        heads: how many heads are alike, where heads are counted.
        of_heads: out of how many.
        since: the step at which it began, where the rule knows it better than from its own signs.
    """

    place: Place
    statistic: str
    value: float
    limit: float | None = None
    grade: int = 1
    slope: float | None = None
    predicted_step: int | None = None
    worst: Place | None = None
    heads: int | None = None
    of_heads: int | None = None
    since: int | None = None


class Rule(ABC):
    """Says of the newest snapshots where a fault is.

    A rule remembers nothing: how long a sign must last before it counts, and that each fault is warned of once, is
    seen to by `Watch`. It cannot be changed once it is made, and rules of equal arguments are equal.

    Write one of your own by giving it a name, the statistics it reads, and `signs`:

        >>> from lightning_attn.warning import Place, Rule, Sign
        >>> class DeafHead(Rule):
        ...     '''A head that looks at nothing but itself.'''
        ...
        ...     meaning = "The head passes its values on as if there were no attention."
        ...     remedy = "Look at its masks."
        ...
        ...     def __init__(self, limit: float = 0.95) -> None:
        ...         super().__init__("deaf_head", ["self_weight"], severity="info", patience=3)
        ...         self._keep(limit=limit)
        ...
        ...     def signs(self, record):
        ...         series = record.series("self_weight")
        ...         for place, value in zip(series.places, series.last_P):
        ...             if value > self.limit:
        ...                 yield Sign(place, "self_weight", value, self.limit)
        >>> DeafHead(limit=0.9)
        DeafHead(name='deaf_head', severities=('info',), warmup_steps=0, patience=3, snapshots=1, limit=0.9)

    Args:
        name: what it is called: by users, in tags and in files.
        statistics: names of the statistics that it reads, which are captured for it.
        severity: how bad its faults are; one for each grade where it has several.
        warmup_steps: signs before that step do not count.
        patience: so many snapshots in a row must show a sign before it counts.
        snapshots: so many of the newest it needs to see.

    Raises:
        ValueError: if one of them is not allowed.
    """

    #: What follows if nothing is done.
    meaning: str = ""
    #: What to try.
    remedy: str = ""

    name: str
    statistics: tuple[str, ...]
    severities: tuple[Severity, ...]
    warmup_steps: int
    patience: int
    snapshots: int

    def __init__(
        self,
        name: str,
        statistics: Sequence[str],
        severity: Severity | Sequence[Severity] = "warning",
        warmup_steps: int = 0,
        patience: int = 1,
        snapshots: int = 1,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"`name` must be a name, in which to speak of the rule, got {name!r}.")
        names = (statistics,) if isinstance(statistics, str) else tuple(statistics)
        resolve(names)
        severities = tuple(severity) if isinstance(severity, (list, tuple)) else (severity,)
        if not severities or not all(one in SEVERITIES for one in severities):
            raise ValueError(f"`severity` must be one of {list(SEVERITIES)}, or one for each limit, got {severity!r}.")
        check_count(warmup_steps, "warmup_steps", least=0)
        check_count(patience, "patience", least=1)
        check_count(snapshots, "snapshots", least=1)
        self._keep(
            name=name,
            statistics=names,
            severities=severities,
            warmup_steps=warmup_steps,
            patience=patience,
            snapshots=snapshots,
        )

    @abstractmethod
    def signs(self, record: Record) -> Iterable[Sign]:
        """Every place at which the last snapshot shows the fault.

        Args:
            record: the newest snapshots.
        """

    def severity(self, grade: int) -> Severity:
        """How bad a sign of some grade is."""
        return self.severities[min(grade, len(self.severities)) - 1]

    def _keep(self, **values: Any) -> None:
        """Take up arguments; lists become tuples, since a rule does not change."""
        vars(self).update({n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A {type(self).__name__} cannot be changed once it is made; make another one.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"A {type(self).__name__} cannot be changed once it is made; make another one.")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted((name, repr(value)) for name, value in vars(self).items()))))

    def __repr__(self) -> str:
        # The words say nothing about what it does, nor do the statistics that its arguments name.
        left_out = {"statistics", "meaning", "remedy"}
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name not in left_out)
        return f"{type(self).__name__}({settings})"


def check_count(value: object, name: str, least: int) -> None:
    """Refuse a number of things that is none.

    Raises:
        ValueError: if it is not an integer, or smaller than allowed.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")


def check_number(value: object, name: str, least: float = -math.inf, most: float = math.inf) -> None:
    """Refuse what is no number, or none of those that are allowed.

    Raises:
        ValueError: if it is not a finite number, or out of range.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most:  # type: ignore[operator]
        allowed = f" from {least:g} to {most:g}" if math.isfinite(least) else ""
        raise ValueError(f"`{name}` must be a finite number{allowed}, got {value!r}.")
