"""Running a part of a model whose weights ranks have divided among each other (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_attn.capture.module_tree import modules_of


@contextmanager
def unsharded(module: nn.Module, model: nn.Module) -> Iterator[None]:
    """Have the weights of a module whole while the block runs; every rank must come.

    They belong to the innermost module around it that ``fully_shard`` was applied to. It gathers them when it runs
    itself, which it does not when only a part of it is run.
    """
    around: Any = None
    for above in modules_of(model):  # from the outside inwards
        if callable(getattr(above, "unshard", None)) and any(part is module for part in modules_of(above)):
            around = above
    if around is None or around is module:
        yield
        return
    around.unshard()
    try:
        yield
    finally:
        around.reshard()
