"""The ways a model computes attention, each a function that reads one call of torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lightning_attn.capture.call import AttentionCall


@dataclass(frozen=True)
class Sampling:
    """How much of a call is wanted.

    Args:
        site: where the call happens.
        max_sequences: the first so many sequences; ``None`` for all.
        with_values: whether the values are wanted too.
        autocast_dtype: what the model computes products in at this point, ``None`` outside of autocast.
    """

    site: str
    max_sequences: int | None = None
    with_values: bool = False
    autocast_dtype: torch.dtype | None = None


def check_sequences(**numbers: int | None) -> None:
    """Refuse numbers of sequences that are not positive.

    Args:
        numbers: the numbers by the name of the argument they were given as; ``None`` means all sequences.

    Raises:
        ValueError: if one is not ``None`` and not a positive integer.
    """
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"`{name}` must be a positive integer, or None for all sequences, got {number!r}.")


class UnreadableError(Exception):
    """A call that is attention but cannot be read; the message says why and names a way out."""


#: Reads one call of a torch function: the arguments it got, by position and by name, and what is wanted of them.
Reader = Callable[[tuple[Any, ...], dict[str, Any], Sampling], AttentionCall]

_READERS: dict[Callable[..., Any], Reader] = {}


def reads(function: Callable[..., Any]) -> Callable[[Reader], Reader]:
    """Declare that the decorated reader understands calls of a torch function."""

    def declare(reader: Reader) -> Reader:
        _READERS[function] = reader
        return reader

    return declare


@cache
def readers() -> dict[Callable[..., Any], Reader]:
    """Every reader by the torch function it reads. Each file of this package may declare some."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    return dict(_READERS)
