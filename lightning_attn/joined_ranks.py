"""Who joins what they see: all ranks, those of a process group, or this process alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import distributed as dist

#: What a user says of it: ``None`` for all ranks there are, a process group for its ranks, "alone" for this process.
WhoJoins: TypeAlias = "dist.ProcessGroup | Literal['alone'] | None"


@dataclass(frozen=True)
class JoinedRanks:
    """The ranks whose sums become one snapshot, and which of them this one is.

    Attributes:
        group: their process group; ``None`` where this process has nobody to join with.
        size: how many they are.
        rank: the place of this one among them, from 0.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int

    @classmethod
    def of(cls, process_group: WhoJoins) -> JoinedRanks:
        """The ranks that are meant, at present: a default process group may come and go.

        Raises:
            ValueError: if it is none of what is allowed, or a group that this rank is not in.
        """
        if process_group is None:
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        elif isinstance(process_group, str) and process_group == "alone":
            group = None
        elif dist.is_available() and isinstance(process_group, dist.ProcessGroup):
            group = process_group
        else:
            raise ValueError(
                "`process_group` must be a process group of `torch.distributed` that this rank is in, 'alone' for this "
                f"process alone, or None for all ranks there are, got {process_group!r}."
            )
        if group is None or group.size() == 1:
            return cls(None, size=1, rank=0)
        return cls(group, group.size(), group.rank())

    @property
    def are_several(self) -> bool:
        """Whether there is anybody to join with."""
        return self.size > 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that speaks for all."""
        return self.rank == 0
