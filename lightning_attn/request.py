"""What somebody wants to know of a model's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_attn.capture.reader import check_sequences
from lightning_attn.capture.sites import SitePatterns
from lightning_attn.statistics.registry import resolve
from lightning_attn.statistics.state_statistic import StateStatistic
from lightning_attn.statistics.statistic import Statistic


@dataclass(frozen=True)
class Request:
    """Which sites, which statistics, and of how many sequences. Requests can be joined: ``first | second``.

    Args:
        sites: the sites.
        statistics: the statistics.
        max_sequences: the first so many sequences of each call; ``None`` for all.
        spectral_sequences: of those, the first so many for the spectral statistics; ``None`` for all.
        strict: whether a fault in a statistic is raised.
    """

    sites: SitePatterns
    statistics: tuple[type[Statistic], ...]
    max_sequences: int | None
    spectral_sequences: int | None
    strict: bool

    @classmethod
    def of(
        cls,
        sites: str | Sequence[str] | None,
        statistics: str | Sequence[str] | None,
        max_sequences: int | None,
        spectral_sequences: int | None,
        strict: bool,
    ) -> Request:
        """A request in the words of users.

        Raises:
            ValueError: if a statistic is unknown, or a number of sequences is not positive.
        """
        check_sequences(max_sequences=max_sequences, spectral_sequences=spectral_sequences)
        return cls(SitePatterns(sites), resolve(statistics), max_sequences, spectral_sequences, strict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the statistics."""
        return tuple(statistic.name for statistic in self.statistics)

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
        )


def _larger(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else max(first, second)
