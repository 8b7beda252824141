"""What was measured on."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import lightning
import torch
from table import counted


def machine() -> str:
    """What it was measured on, in one line."""
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}"
    return f"{versions}; {_processor()}, {counted(torch.get_num_threads(), 'thread')}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
