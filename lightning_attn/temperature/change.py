"""What was done to the temperatures of a site, as a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TemperatureChange:
    """One move of the temperatures of a site.

    Args:
        step: the first optimiser step that has them.
        site: the site.
        before: the temperature of each head.
        after: the same afterwards.
        scale: the deviation of each head's products of queries and keys before the temperature, where that is held;
            ``None`` for a head without one.
        limited: the heads that would go beyond a limit, and stay there.
    """

    step: int
    site: str
    before: list[float]
    after: list[float]
    scale: list[float | None] | None = None
    limited: tuple[int, ...] = ()

    @property
    def heads(self) -> list[int]:
        """The heads whose temperature has changed."""
        return [head for head, (old, new) in enumerate(zip(self.before, self.after, strict=True)) if old != new]

    def to_dict(self) -> dict[str, Any]:
        """The values by their names, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TemperatureChange:
        """The record of what `to_dict` gave."""
        return cls(**{**values, "limited": tuple(values["limited"])})
