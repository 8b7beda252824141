"""What is said while a block runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_attn import AttentionWarning


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
