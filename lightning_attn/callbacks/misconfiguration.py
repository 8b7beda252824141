"""Bad arguments, raised as Lightning's callbacks do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.exceptions import MisconfigurationException


@contextmanager
def misconfiguration() -> Iterator[None]:
    """Raise a `ValueError` as what Lightning calls a misconfiguration."""
    try:
        yield
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error
