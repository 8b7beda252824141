"""The ways a model computes attention: functions that read one call of torch, and interceptors of what is none."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall
from lightning_attn.capture.channels import ChannelTrail
from lightning_attn.capture.refusals import OVER_CHANNELS
from lightning_attn.capture.states import HiddenStates


@dataclass(frozen=True)
class Sampling:
    """How much of a call is wanted.

    Args:
        site: where the call happens.
        max_sequences: the first so many sequences; ``None`` for all.
        with_values: whether the values are wanted too.
        autocast_dtype: what the model computes products in at this point, ``None`` outside of autocast.
        channels: what is known of the channels of the call's tensors.
        heads_in_batch: how many heads a batch of such a size holds beside each other, of so many queries and keys.
    """

    site: str
    max_sequences: int | None = None
    with_values: bool = False
    autocast_dtype: torch.dtype | None = None
    channels: ChannelTrail = field(default_factory=ChannelTrail, repr=False)
    heads_in_batch: Callable[[int, int, int], int] = lambda sequences, queries, keys: 1

    def check_tokens(self, query: Tensor, key: Tensor) -> None:
        """Refuse queries and keys (…, N, D), as a kernel was given them, that are not tokens.

        Raises:
            UnreadableError: if they are known to be channels.
        """
        if self.channels.are_compared(query, key):
            raise OVER_CHANNELS.error()


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


#: Reads one call of a torch function: the arguments it got, by position and by name, and what is wanted of them.
Reader = Callable[[tuple[Any, ...], dict[str, Any], Sampling], AttentionCall]

#: Tells the hidden states around one call, from what its reader gets.
StatesReader = Callable[[tuple[Any, ...], dict[str, Any], Sampling], HiddenStates]


@dataclass(frozen=True)
class Declared:
    """How calls of one torch function are read.

    Args:
        read: reads a call.
        weight: which argument is a parameter of the site, where a module calls the function in the place of one of its
            children; ``None`` where the site is the one that calls it.
        states: tells the hidden states around the site, which is not called then; ``None`` where it is.
    """

    read: Reader
    weight: int | None = None
    states: StatesReader | None = None


_READERS: dict[Callable[..., Any], Declared] = {}


class Sightings(Protocol):
    """Where an interceptor tells of attention calls."""

    #: How many attention calls of the model were seen so far, by whatever way.
    count: int

    def take(
        self, read: Callable[[Sampling], AttentionCall], device: torch.device, operands: Sequence[Tensor] = ()
    ) -> None:
        """Tell of one call.

        Args:
            read: reads it.
            device: where it is computed.
            operands: its queries, keys and values, as the model computes with them.
        """

    def laid_out_as(self, query: Tensor) -> AbstractContextManager[object]:
        """Tell how the model laid out the queries of the calls that are made inside the block.

        Args:
            query: (B, H, N, D), before a function may have folded heads into queries.
        """

    def tell(
        self, read: Callable[[Sampling], AttentionCall], device: torch.device, operands: Sequence[Tensor] = ()
    ) -> None:
        """Tell of one call in the words of the model, which may be seen in another way as well.

        Args:
            read: reads it.
            device: where it is computed.
            operands: its queries, keys and values, as the model computes with them.
        """


#: Sees attention that no torch function shows, for as long as the context lasts.
Interceptor = Callable[[Sightings], AbstractContextManager[object]]

_INTERCEPTORS: list[Interceptor] = []


def reads(
    function: Callable[..., Any] | None, weight: int | None = None, states: StatesReader | None = None
) -> Callable[[Reader], Reader]:
    """Declare that the decorated reader understands calls of a torch function.

    Args:
        function: the function; ``None`` where this version of torch has none.
        weight: see `Declared`.
        states: see `Declared`.
    """

    def declare(reader: Reader) -> Reader:
        if function is not None:
            _READERS[function] = Declared(reader, weight, states)
        return reader

    return declare


def intercepts(interceptor: Interceptor) -> Interceptor:
    """Declare that the decorated function sees attention in a way of its own."""
    _INTERCEPTORS.append(interceptor)
    return interceptor


def readers() -> dict[Callable[..., Any], Declared]:
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
