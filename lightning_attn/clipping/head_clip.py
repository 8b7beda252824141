"""What was done to one head, as a record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class HeadClip:
    """One clip of one head.

    Args:
        step: the optimiser step at whose end it was done.
        site: the site.
        head: the head.
        max_logit: its largest logit in the forward pass of that step.
        query_factor: by what the rows of its queries were multiplied.
        key_factor: by what those of its keys were; 1 where its queries were clipped alone.
    """

    step: int
    site: str
    head: int
    max_logit: float
    query_factor: float
    key_factor: float

    @property
    def factor(self) -> float:
        """By what its products of queries and keys are multiplied."""
        return self.query_factor * self.key_factor

    def to_dict(self) -> dict[str, Any]:
        """The values by their names, ready for JSON."""
        return asdict(self)
