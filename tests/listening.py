"""What a rank does and says while a block runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist

from lightning_attn import AttentionWarning


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The collectives that are called inside the block."""
    called: list[str] = []
    all_reduce, gather = dist.all_reduce, dist.all_gather_object

    def seen_all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        called.append("MAX" if op == dist.ReduceOp.MAX else "SUM")
        return all_reduce(tensor, op=op, **options)

    def seen_gather(*arguments: Any, **options: Any) -> Any:
        called.append("gather")
        return gather(*arguments, **options)

    dist.all_reduce, dist.all_gather_object = seen_all_reduce, seen_gather
    try:
        yield called
    finally:
        dist.all_reduce, dist.all_gather_object = all_reduce, gather


@contextmanager
def hearing() -> Iterator[list[str]]:
    """The warnings of ours that are given inside the block."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield said
        finally:
            said += [str(warning.message) for warning in caught if issubclass(warning.category, AttentionWarning)]
