"""A module that was met computing attention, and what it was called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Met:
    """A module that was met computing attention.

    Args:
        site: its canonical name.
        module: the module.
        args: what it was called with by position, outside every graph.
        kwargs: and by name.
    """

    site: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, site: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Met:
        """The module with its arguments, which hold no graph any more."""
        known: dict[int, Tensor] = {}
        return cls(site, module, _detached(args, known), _detached(dict(kwargs), known))


def _detached(value: Any, known: dict[int, Tensor]) -> Any:
    """Values without a graph. What was one tensor stays one: attention to oneself is told by that."""
    if isinstance(value, Tensor):
        return known.setdefault(id(value), value.detach())
    if type(value) in (tuple, list):
        return type(value)(_detached(item, known) for item in value)
    if type(value) is dict:
        return {name: _detached(item, known) for name, item in value.items()}
    return value
