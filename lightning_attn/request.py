"""What somebody wants to know of a model's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from lightning_attn.capture.capture import Compiled
from lightning_attn.capture.reader import check_sequences
from lightning_attn.capture.sites import SitePatterns
from lightning_attn.statistics.registry import resolve
from lightning_attn.statistics.state_statistic import StateStatistic
from lightning_attn.statistics.statistic import RowStatistic, Statistic


@dataclass(frozen=True)
class Request:
    """Which sites, which statistics, and of how many sequences. Requests can be joined: ``first | second``.

    Args:
        sites: the sites.
        statistics: the statistics.
        max_sequences: the first so many sequences of each call; ``None`` for all.
        spectral_sequences: of those, the first so many for the spectral statistics; ``None`` for all.
        strict: whether a fault in a statistic is raised.
        compiled: what becomes of compiled modules.
    """

    sites: SitePatterns
    statistics: tuple[type[Statistic], ...]
    max_sequences: int | None
    spectral_sequences: int | None
    strict: bool
    compiled: Compiled = "eager"

    @classmethod
    def of(
        cls,
        sites: str | Sequence[str] | None,
        statistics: str | Sequence[str] | None,
        max_sequences: int | None,
        spectral_sequences: int | None,
        strict: bool,
        compiled: Compiled = "eager",
    ) -> Request:
        """A request in the words of users.

        Raises:
            ValueError: if a statistic is unknown, a number of sequences is not positive, or ``compiled`` is neither
                ``"eager"`` nor ``"skip"``.
        """
        if compiled not in get_args(Compiled):
            raise ValueError(f"`compiled` must be 'eager' or 'skip', got {compiled!r}.")
        check_sequences(max_sequences=max_sequences, spectral_sequences=spectral_sequences)
        return cls(SitePatterns(sites), resolve(statistics), max_sequences, spectral_sequences, strict, compiled)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the statistics."""
        return tuple(statistic.name for statistic in self.statistics)

    @property
    def needs_values(self) -> bool:
        """Whether one of the statistics needs the values of the attention calls."""
        return any(issubclass(statistic, RowStatistic) and statistic.needs_values for statistic in self.statistics)

    @property
    def needs_states(self) -> bool:
        """Whether a statistic is of the hidden states around the sites."""
        return any(issubclass(statistic, StateStatistic) for statistic in self.statistics)

    def __or__(self, other: Request) -> Request:
        return Request(
            SitePatterns([*self.sites.patterns, *other.sites.patterns]),
            tuple(dict.fromkeys(self.statistics + other.statistics)),
            _larger(self.max_sequences, other.max_sequences),
            _larger(self.spectral_sequences, other.spectral_sequences),
            self.strict or other.strict,
            "skip" if (self.compiled, other.compiled) == ("skip", "skip") else "eager",
        )


def _larger(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else max(first, second)
