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

    @classmethod
    def of(cls, trainer: pl.Trainer) -> WarningBoard:
        """The board of a Trainer."""
        board = _BOARDS.get(trainer)
        if board is None:
            board = _BOARDS[trainer] = cls()
        return board

    def hang(self, key: str, warnings: Sequence[EarlyWarning]) -> None:
        """Hang out a list of warnings, which may grow, in the place of what hung there under that key."""
        self._warnings[key] = warnings

    def __iter__(self) -> Iterator[EarlyWarning]:
        return (warning for warnings in self._warnings.values() for warning in warnings)

    @property
    def has_owner(self) -> bool:
        """Whether anybody warns."""
        return bool(self._warnings)


_BOARDS: WeakKeyDictionary[Any, WarningBoard] = WeakKeyDictionary()
