"""Which of a site's heads this rank computes, where ranks divide them among each other."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from lightning_attn.capture.refusals import HEADS_IN_PIECES
from lightning_attn.capture.spread import Part


@dataclass(frozen=True)
class HeadShare:
    """The heads of a site that this rank computes, as a share of all: equal where the heads are.

    Args:
        start: what other ranks hold before it.
        held: what this rank holds.
        whole: what all ranks hold together.
    """

    start: int
    held: int
    whole: int

    @classmethod
    def of(cls, part: Part) -> HeadShare | None:
        """The share that a part of an axis, of heads or of channels, amounts to; ``None`` for all of it or nothing."""
        if not 0 < part.held < part.whole:
            return None
        unit = gcd(part.start, part.held, part.whole)
        return cls(part.start // unit, part.held // unit, part.whole // unit)

    def of_heads(self, heads: int) -> tuple[int, int]:
        """The number of the first of these heads among all, and how many there are in all.

        Raises:
            UnreadableError: if heads are divided within themselves.
        """
        if self.start * heads % self.held or self.whole * heads % self.held:
            raise HEADS_IN_PIECES.error()
        return self.start * heads // self.held, self.whole * heads // self.held
