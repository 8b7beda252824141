"""When to capture."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil


class Cadence:
    """Every so many optimiser steps, or differently often in different parts of a run.

    Args:
        every_n_steps: a number of steps; or a mapping from the first step of each part of the run, of which one is 0,
            to the number of steps in it.

    Raises:
        ValueError: if a number is not a positive integer, or no part begins at step 0.

    Example:
        >>> cadence = Cadence({0: 10, 500: 50})
        >>> [step for step in range(480, 700) if cadence.is_due(step)]
        [480, 490, 500, 550, 600, 650]
    """

    def __init__(self, every_n_steps: int | Mapping[int, int]) -> None:
        parts = dict(every_n_steps) if isinstance(every_n_steps, Mapping) else {0: every_n_steps}
        if 0 not in parts or not all(_is_count(start, 0) and _is_count(steps, 1) for start, steps in parts.items()):
            raise ValueError(
                f"`every_n_steps` must be a positive integer, or a mapping such as {{0: 10, 500: 50}} from the first "
                f"step of each part of the run (one of them 0) to a positive integer, got {every_n_steps!r}."
            )
        self._parts = sorted(parts.items())

    def is_due(self, step: int) -> bool:
        """Whether a step is one to capture at."""
        start, steps = self._part(step)
        return (step - start) % steps == 0

    def interval(self, step: int, fewest_steps: int = 1) -> int:
        """The steps from one capture to the next at some step, if at least so many must lie between them."""
        _, steps = self._part(step)
        return steps * max(ceil(fewest_steps / steps), 1)

    def _part(self, step: int) -> tuple[int, int]:
        return max(part for part in self._parts if part[0] <= step)


def check_positive(value: object, name: str, otherwise: str = "") -> None:
    """Refuse a number that is not a positive integer.

    Args:
        value: the number.
        name: what the user calls the argument.
        otherwise: what else is allowed, in words.

    Raises:
        ValueError: if it is not.
    """
    if not _is_count(value, 1):
        raise ValueError(f"`{name}` must be a positive integer{' ' * bool(otherwise)}{otherwise}, got {value!r}.")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
