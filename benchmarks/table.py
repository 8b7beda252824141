"""The table that a benchmark makes: its rows, and how a result stands to its goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEADER = """\
| measured | setting | over | result | middle half of the rounds | goal |
|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    measured: str
    setting: str
    baseline: str
    result: str
    spread: str
    goal: str

    def __str__(self) -> str:
        return f"| {self.measured} | {self.setting} | {self.baseline} | {self.result} | {self.spread} | {self.goal} |"


def header(*columns: str) -> str:
    """The first two lines of a table."""
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def judged(value: float, *limits: tuple[str, float]) -> str:
    """A value beside its goals: ``≤ 1.01 ✗, at most 1.03 ✓``."""
    return ", ".join(f"{words} {limit:g} {'✓' if value <= limit else '✗'}" for words, limit in limits)


def goal(limit: float) -> tuple[str, float]:
    return "≤", limit


def at_most(limit: float) -> tuple[str, float]:
    return "at most", limit


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
