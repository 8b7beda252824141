"""Where the early warnings of a Trainer hang out, for callbacks that act on them without knowing who warns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lightning_attn.warning.early_warning import EarlyWarning

if TYPE_CHECKING:
    import lightning.pytorch as pl


class WarningBoard:
    """The early warnings of the run that a Trainer is in; it lives as long as the Trainer does."""

    def __init__(self) -> None:
        self._warnings: dict[str, Sequence[EarlyWarning]] = {}
        self._rules: dict[str, Sequence[str]] = {}

    @classmethod
    def of(cls, trainer: pl.Trainer) -> WarningBoard:
        """The board of a Trainer."""
        board = _BOARDS.get(trainer)
        if board is None:
            board = _BOARDS[trainer] = cls()
        return board

    def hang(self, key: str, warnings: Sequence[EarlyWarning], rules: Sequence[str]) -> None:
        """Hang out a list of warnings, which may grow, in the place of what hung there under that key.

        Args:
            key: whose it is.
            warnings: the list.
            rules: the names of the rules that they may come from.
        """
        self._warnings[key], self._rules[key] = warnings, rules

    def __iter__(self) -> Iterator[EarlyWarning]:
        return (warning for warnings in self._warnings.values() for warning in warnings)

    @property
    def rules(self) -> list[str]:
        """The names of the rules that anybody holds against the run."""
        return list(dict.fromkeys(name for of_key in self._rules.values() for name in of_key))

    @property
    def has_owner(self) -> bool:
        """Whether anybody warns."""
        return bool(self._warnings)


_BOARDS: WeakKeyDictionary[Any, WarningBoard] = WeakKeyDictionary()
