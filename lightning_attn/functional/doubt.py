"""Doubts about what was given, said where it was given."""

from __future__ import annotations

import inspect
import warnings

#: Calls of these packages are on the way from the line that gave it to where it is looked at.
_ON_THE_WAY = ("lightning_attn", "torchmetrics", "torch")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the program that called a function or metric: Python shows a warning once for each line.

    Args:
        message: what is doubted, and what to do.
        category: the kind of warning.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _ON_THE_WAY:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
