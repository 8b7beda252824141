"""The ways a model computes attention: functions that read one call of torch, and interceptors of what is none."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

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
        heads_in_batch: how many heads a batch of such a size holds beside each other, of so many queries and keys.
    """

    site: str
    max_sequences: int | None = None
    with_values: bool = False
    autocast_dtype: torch.dtype | None = None
    heads_in_batch: Callable[[int, int, int], int] = lambda sequences, queries, keys: 1


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


class UnreadablePieceError(UnreadableError):
    """A call that cannot be read and is a piece of an attention, so that without it the others are of no use."""


#: Reads one call of a torch function: the arguments it got, by position and by name, and what is wanted of them.
Reader = Callable[[tuple[Any, ...], dict[str, Any], Sampling], AttentionCall]

_READERS: dict[Callable[..., Any], Reader] = {}


class Sightings(Protocol):
    """Where an interceptor tells of attention calls."""

    #: How many attention calls of the model were seen so far, by whatever way.
    count: int

    def take(self, read: Callable[[Sampling], AttentionCall], device: torch.device) -> None:
        """Tell of one call.

        Args:
            read: reads it.
            device: where it is computed.
        """


#: Sees attention that no torch function shows, for as long as the context lasts.
Interceptor = Callable[[Sightings], AbstractContextManager[object]]

_INTERCEPTORS: list[Interceptor] = []


def reads(function: Callable[..., Any]) -> Callable[[Reader], Reader]:
    """Declare that the decorated reader understands calls of a torch function."""

    def declare(reader: Reader) -> Reader:
        _READERS[function] = reader
        return reader

    return declare


def intercepts(interceptor: Interceptor) -> Interceptor:
    """Declare that the decorated function sees attention in a way of its own."""
    _INTERCEPTORS.append(interceptor)
    return interceptor


def readers() -> dict[Callable[..., Any], Reader]:
    """Every reader by the torch function it reads. Each file of this package may declare some."""
    _import_files()
    return _READERS


def interceptors() -> list[Interceptor]:
    """Every interceptor. Each file of this package may declare some."""
    _import_files()
    return _INTERCEPTORS


@cache
def _import_files() -> None:
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
