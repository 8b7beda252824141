"""Who says what when, so that a run that goes wrong is no flood of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_attn.warning.early_warning import SEVERITIES, EarlyWarning, Severity
from lightning_attn.warning.message import message


class Announcer:
    """Turns warnings into messages: one for each rule, however many heads, and not one after every snapshot.

    When a rule has spoken it keeps quiet for a while; what it finds meanwhile is told together afterwards. What is more
    severe than anything it has told is told at once.

    Args:
        quiet_steps: how long a rule keeps quiet after it has spoken.

    Example:
        >>> announcer = Announcer(quiet_steps=100)
        >>> def found(step):
        ...     return [EarlyWarning(step, "sharp", "warning", "attention", step, "entropy", 0.0)]
        >>> [len(announcer.messages(step, found(step))) for step in (0, 10, 20, 110)]
        [1, 0, 0, 1]
    """

    def __init__(self, quiet_steps: int) -> None:
        self._quiet_steps = quiet_steps
        self.clear()

    def clear(self) -> None:
        """Forget what was said."""
        self._held: dict[str, list[EarlyWarning]] = {}
        self._told: dict[str, tuple[int, int]] = {}

    def messages(self, step: int, warnings: Sequence[EarlyWarning]) -> list[tuple[Severity, str]]:
        """What is to be said at a step, and how severe it is.

        Args:
            step: of the snapshot.
            warnings: what is new in it; may be nothing.
        """
        for warning in warnings:
            self._held.setdefault(warning.rule, []).append(warning)
        said: list[tuple[Severity, str]] = []
        for rule, held in list(self._held.items()):
            severity = max(SEVERITIES.index(warning.severity) for warning in held)
            last_step, last_severity = self._told.get(rule, (step - self._quiet_steps, -1))
            if last_step > step:  # the run went back
                last_step = step
                self._told[rule] = (last_step, last_severity)
            if step - last_step >= self._quiet_steps or severity > last_severity:
                is_first = severity > last_severity
                said.append((SEVERITIES[severity], message(held, is_first)))
                self._told[rule] = (step, max(severity, last_severity))
                del self._held[rule]
        return said

    def rest(self) -> list[tuple[Severity, str]]:
        """What is still held back, for there will be no other time to say it."""
        held, self._held = self._held, {}
        return [
            (max((warning.severity for warning in of_rule), key=SEVERITIES.index), message(of_rule, is_first=False))
            for of_rule in held.values()
        ]

    def state_dict(self) -> dict[str, Any]:
        """What was said and what is held back, in plain values."""
        return {
            "held": {rule: [warning.to_dict() for warning in held] for rule, held in self._held.items()},
            "told": {rule: list(told) for rule, told in self._told.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self._held = {rule: [EarlyWarning.from_dict(w) for w in held] for rule, held in state["held"].items()}
        self._told = {rule: (told[0], told[1]) for rule, told in state["told"].items()}
