"""The memory in which blocks of rows are computed."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Memory that the blocks of a pass use one after the other; a block spoils the one before it."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self._buffers = [torch.empty(elements, device=device) for _ in range(3)]

    def buffer(self, index: int, shape: tuple[int, ...]) -> Tensor:
        """One of the buffers in a given shape, with anything in it."""
        elements = 1
        for size in shape:
            elements *= size
        return self._buffers[index][:elements].view(shape)
