"""When temperatures are switched on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from lightning_attn.warning.early_warning import SEVERITIES, EarlyWarning
from lightning_attn.warning.rules import built_in_rules

#: A warning of this severity, or a worse one.
_AT_LEAST: dict[str, tuple[str, ...]] = {severity: SEVERITIES[SEVERITIES.index(severity) :] for severity in SEVERITIES}


class TemperatureStart:
    """At an optimiser step, or as soon as an early warning of some kind is given.

    Args:
        when: the step; or the least severity of a warning, or names of rules.

    Raises:
        ValueError: if it is neither.
    """

    def __init__(self, when: int | str | Sequence[str]) -> None:
        self._step: int | None = None
        self._kinds: tuple[str, ...] = ()
        if isinstance(when, int) and not isinstance(when, bool) and when >= 0:
            self._step = when
        else:
            self._kinds = (when,) if isinstance(when, str) else tuple(when) if isinstance(when, Iterable) else ()
            if not self._kinds or not all(isinstance(kind, str) and kind for kind in self._kinds):
                raise ValueError(
                    f"`start` must be a step from 0 on, a severity of {list(SEVERITIES)}, or names of rules such as "
                    f"{[rule.name for rule in built_in_rules()][:3]}, got {when!r}."
                )

    @property
    def waits_for_warnings(self) -> bool:
        """Whether it depends on early warnings."""
        return self._step is None

    def check(self, rules: Sequence[str]) -> None:
        """Refuse to wait for what never comes.

        Args:
            rules: the names of the rules that are held against the run.

        Raises:
            ValueError: if it waits for warnings of a kind that there is not.
        """
        known = [*SEVERITIES, *rules]
        for kind in self._kinds:
            if kind not in known:
                near = get_close_matches(kind.lower(), known, n=1)
                meant = f"; did you mean {near[0]!r}?" if near else "."
                raise ValueError(
                    f"`start` must be a step from 0 on, a severity of {list(SEVERITIES)}, or names of rules that are "
                    f"held against the run, {list(rules)}, got {kind!r}{meant}"
                )

    def has_come(self, step: int, warnings: Iterable[EarlyWarning]) -> bool:
        """Whether it is time.

        Args:
            step: the optimiser step that begins.
            warnings: what was found in this run so far.
        """
        if self._step is not None:
            return step >= self._step
        return any(
            warning.rule == kind or warning.severity in _AT_LEAST.get(kind, ())
            for warning in warnings
            for kind in self._kinds
        )
