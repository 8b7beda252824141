"""Whether what runs is written down as a graph, rather than computed: nothing may be done beside it then.

`torch.jit.trace` writes down whatever the thread does, also what we would do with the tensors, their shapes included,
and ends the process where that does not fit together. In the others tensors stand for numbers that are not there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

#: What is computed with, and has its numbers; results of these kinds need no closer look.
_WITH_NUMBERS = (Tensor, nn.Parameter)
#: Where the classes are whose objects have no numbers: `torch.fx` and fake, functional and unwrapped tensors.
_WITHOUT_NUMBERS = ("torch.fx", "torch._subclasses", "torch.jit")


def _none() -> None:
    return None


def _no_mode() -> int:
    return 0


_tracing_state: Callable[[], object] = getattr(torch._C, "_get_tracing_state", _none)
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _no_mode)


def is_written_down(result: object = None) -> bool:
    """Whether a graph is made of what runs: by `torch.jit.trace`, `torch.export`, `make_fx` or `torch.fx`.

    It is asked for every torch function that is seen. Most of the answers take two calls of C.

    Args:
        result: what a torch function gave.
    """
    if _tracing_state() is not None:
        return True
    kind = type(result)
    if kind not in _WITH_NUMBERS and kind.__module__.startswith(_WITHOUT_NUMBERS):
        return True
    if kind is tuple or kind is list:  # what a function gave several of
        assert isinstance(result, (tuple, list))
        if result and is_written_down(result[0]):
            return True
    return _dispatch_modes() > 0 and _has_mode_of_tracing()


def _has_mode_of_tracing() -> bool:
    kinds, mode_of = (getattr(torch._C, name, None) for name in ("_TorchDispatchModeKey", "_get_dispatch_mode"))
    if kinds is None or mode_of is None:
        return False
    keys = (getattr(kinds, name, None) for name in ("PROXY", "FAKE", "FUNCTIONAL"))
    return any(key is not None and mode_of(key) is not None for key in keys)
