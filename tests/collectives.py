"""The collectives that Python code calls, by name and in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import distributed as dist

from lightning_attn.distributed import RankReduction

_OTHERS = {
    "all_gather_object": "gather",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather_into_tensor",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "broadcast": "broadcast",
    "broadcast_object_list": "broadcast_object_list",
    "barrier": "barrier",
}


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The collectives that are called inside the block: ``all_reduce`` by its operation, the others by their name.

    What DistributedDataParallel does with gradients is not among them: it happens in C++.
    """
    called: list[str] = []
    all_reduce = dist.all_reduce
    originals = {name: getattr(dist, name) for name in _OTHERS}

    def seen_all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, *arguments: Any, **options: Any) -> Any:
        called.append("MAX" if op == dist.ReduceOp.MAX else "SUM")
        return all_reduce(tensor, op, *arguments, **options)

    def seen(name: str) -> Callable[..., Any]:
        def function(*arguments: Any, **options: Any) -> Any:
            called.append(_OTHERS[name])
            return originals[name](*arguments, **options)

        return function

    dist.all_reduce = seen_all_reduce
    for name in _OTHERS:
        setattr(dist, name, seen(name))
    try:
        yield called
    finally:
        dist.all_reduce = all_reduce
        for name, original in originals.items():
            setattr(dist, name, original)


@contextmanager
def counted_captures() -> Iterator[list[list[str]]]:
    """The collectives of each capture that is made inside the block."""
    captures: list[list[str]] = []
    join = RankReduction.__call__

    def counted(self: RankReduction, *arguments: Any) -> Any:
        with collectives() as called:
            captures.append(called)
            return join(self, *arguments)

    with patch.object(RankReduction, "__call__", counted):
        yield captures
