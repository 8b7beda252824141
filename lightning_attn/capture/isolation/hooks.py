"""The one hook of the process, which sees every module return."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.module import register_module_forward_hook

#: What a compiled module has to say when any global hook is set.
_HOOK_COMPLAINT = re.compile(r"Using `torch\.compile\(module\)` when there are global hooks")


@contextmanager
def after_every_module(hook: Callable[..., None]) -> Iterator[None]:
    """Call a hook after the ``forward`` of every module while the block runs: one hook for the process, on no module.

    Args:
        hook: called with the module, its positional and its keyword arguments, and what it returned.
    """
    handle = register_module_forward_hook(hook, with_kwargs=True)
    try:
        with _without_complaint_of_compiled_modules():
            yield
    finally:
        handle.remove()
        # torch forgets to remove that this hook wanted keyword arguments, and the marks of all captures would pile up.
        getattr(torch.nn.modules.module, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)


@contextmanager
def _without_complaint_of_compiled_modules() -> Iterator[None]:
    """Keep modules that `torch.compile` made from warning of a hook that its owner never set.

    The filter is put into the list by hand, since `warnings.filterwarnings` has every warning of the program shown once
    more, again after each capture.
    """
    silence = ("ignore", _HOOK_COMPLAINT, UserWarning, None, 0)
    warnings.filters.insert(0, silence)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if silence in warnings.filters:
            warnings.filters.remove(silence)  # type: ignore[attr-defined]
