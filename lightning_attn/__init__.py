"""Callbacks and metrics that watch attention while a transformer trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_attn._distribution import refuse_name_collision

refuse_name_collision()

from lightning_attn.capture import AttentionCall, AttentionWarning, Recording, observe, record  # noqa: E402
from lightning_attn.history import History  # noqa: E402
from lightning_attn.observer import AttentionObserver  # noqa: E402
from lightning_attn.snapshot import HeadValue, Snapshot, Summary  # noqa: E402
from lightning_attn.transition import Transition, find_transition  # noqa: E402
from lightning_attn.warning.early_warning import EarlyWarning  # noqa: E402

if TYPE_CHECKING:
    from lightning_attn.callbacks import (
        AdaptiveTemperature,
        AttentionEarlyWarning,
        AttentionMonitor,
        EarlyWarningError,
        QKClip,
    )

__version__ = "0.1.0"

__all__ = [
    "AdaptiveTemperature",
    "AttentionCall",
    "AttentionEarlyWarning",
    "AttentionMonitor",
    "AttentionObserver",
    "AttentionWarning",
    "EarlyWarning",
    "EarlyWarningError",
    "HeadValue",
    "History",
    "QKClip",
    "Recording",
    "Snapshot",
    "Summary",
    "Transition",
    "find_transition",
    "observe",
    "record",
]


def __getattr__(name: str) -> Any:
    # Lightning takes seconds to import, and who uses plain PyTorch has no need of it.
    if name in __all__:
        from lightning_attn import callbacks

        return getattr(callbacks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
