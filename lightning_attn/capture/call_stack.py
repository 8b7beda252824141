"""What the call stack tells: which modules are computing, and what they were called with.

A hook would have to be put on every module and taken off again whatever happens, would switch off the fast path of
`torch.nn.TransformerEncoder`, and would miss modules whose `forward` is called by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch import Tensor, nn


def frames() -> Iterator[FrameType]:
    """The frames that are running around the caller, from the innermost outwards; for as long as the caller runs."""
    return _outwards(sys._getframe(1).f_back)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> nn.Module | None:
    """The module whose method runs in a frame."""
    code = frame.f_code
    if code.co_argcount and code.co_varnames[0] == "self":
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return module
    return None


def computing_modules() -> list[nn.Module]:
    """The modules whose methods are running, from the innermost outwards; one may come several times."""
    modules = [module_of(frame) for frame in frames()]
    return [module for module in modules if module is not None]


def innermost_module() -> nn.Module | None:
    """The innermost module whose method is running."""
    modules = (module_of(frame) for frame in frames())
    return next((module for module in modules if module is not None), None)


def frames_of(module: nn.Module) -> list[FrameType]:
    """The frames in which methods of a module run, from the innermost outwards."""
    return [frame for frame in frames() if module_of(frame) is module]


def innermost_forward(module: nn.Module) -> FrameType | None:
    """The innermost frame in which a module's ``forward`` runs, or what stands for it."""
    of_module = frames_of(module)
    forwards = [frame for frame in of_module if frame.f_code.co_name == "forward"]
    return next(iter(forwards + of_module[-1:]), None)


def argument_tensors(frame: FrameType) -> list[Tensor]:
    """The tensors that a function was called with, also where it collects its arguments."""
    code = frame.f_code
    number = code.co_argcount + code.co_kwonlyargcount + 2  # and what *args and **kwargs are called
    found: list[Tensor] = []
    for name in code.co_varnames[:number]:
        argument = frame.f_locals.get(name)
        parts = (
            argument.values()
            if isinstance(argument, dict)
            else argument
            if isinstance(argument, tuple)
            else (argument,)
        )
        found += [part for part in parts if isinstance(part, Tensor)]
    return found
