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
        return cls(site, module, _detached(args), _detached(dict(kwargs)))


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(map(_detached, value))
    if type(value) is dict:
        return {name: _detached(item) for name, item in value.items()}
    return value
