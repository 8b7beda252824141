"""Running a module without changing what it holds."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_attn.capture.module_tree import buffers_of, modules_of, parameters_of

_CONTAINERS = (list, dict, set, deque)


@contextmanager
def without_trace(module: nn.Module) -> Iterator[None]:
    """Run a module, or try something with it, so that a training run goes on as if nothing had been.

    No gradient is asked for, and random numbers that are drawn in the block are drawn again after it, also by Python
    and NumPy. See `unchanged` for the rest. Two blocks that follow each other draw the same numbers.
    """
    tensors = (*parameters_of(module), *buffers_of(module))
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    numpy: Any = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(list(devices)), torch.no_grad(), unchanged(module):
            yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put back, after the block, what a module and those below it hold beside parameters.

    That are their buffers, their attributes, and what is in the lists, dictionaries and sets that are attributes:
    counters, averages, keys of earlier tokens.
    """
    buffers = [(buffer, buffer.clone()) for buffer in buffers_of(module)]
    held = [(part, dict(part.__dict__)) for part in modules_of(module)]
    contents = [
        (value, value.copy()) for _, attributes in held for value in attributes.values() if type(value) in _CONTAINERS
    ]
    try:
        yield
    finally:
        for part, attributes in held:
            for name in part.__dict__.keys() - attributes.keys():
                del part.__dict__[name]
            part.__dict__.update(attributes)
        for container, content in contents:
            _refill(container, content)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)
