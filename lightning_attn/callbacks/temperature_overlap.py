"""Refusing several callbacks that would change the same temperatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_attn.capture.sites import SiteNames


class Governs(Protocol):
    """A callback that divides queries."""

    def governs(self, site: str) -> bool:
        """Whether it divides those of a site."""


def refuse_overlap(callbacks: Sequence[Governs], names: SiteNames) -> None:
    """Refuse several callbacks that would divide the same queries.

    Raises:
        MisconfigurationException: if two of them govern one module.
    """
    for name in names:
        if sum(callback.governs(name) for callback in callbacks) > 1:
            raise MisconfigurationException(
                f"Two AdaptiveTemperature callbacks would divide the queries of {name!r}; give each `sites` of its own."
            )
