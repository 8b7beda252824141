"""Attention's statistics as functions of tensors, for people who have weights, or queries and keys.

Every statistic that is registered has a function here, also one of your own: `attention_entropy` for ``"entropy"``.
They are made from the statistics when they are first asked for; `docs/statistics.md` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_attn.functional.attention import attention_call
from lightning_attn.functional.statistic_function import attention_statistics, function_of
from lightning_attn.statistics.description import function_name
from lightning_attn.statistics.registry import known_statistics

_WRITTEN = [attention_call.__name__, attention_statistics.__name__]


def __getattr__(name: str) -> Callable[..., Any]:
    for statistic in known_statistics().values():
        if function_name(statistic) == name:
            return function_of(statistic)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*_WRITTEN, *map(function_name, known_statistics().values())})


__all__ = [*_WRITTEN, *map(function_name, known_statistics().values())]
