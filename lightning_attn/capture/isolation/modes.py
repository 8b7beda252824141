"""Function and dispatch modes: hearing nothing of ours in those of others, and a mode of our own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Looked up once: it is entered for nearly every torch function that is seen.
_disable_function_modes: Callable[[], AbstractContextManager[object]] = getattr(
    torch._C, "DisableTorchFunction", nullcontext
)
#: What has no torch function of its own.
_PLAIN = (Tensor, nn.Parameter, type(None))


@contextmanager
def without_modes() -> Iterator[None]:
    """Disable the function and dispatch modes of the surrounding program.

    Under selective activation checkpointing a product computed by an observer would otherwise be stored in the place of
    one of the model's own, and the gradient would be wrong without any error. torch has no public switch for this;
    where the private one is missing, modes stay on, and the other guards still hold.
    """
    with without_function_modes(), _without_dispatch_modes():
        yield


def without_function_modes() -> AbstractContextManager[object]:
    """Let no function mode of the surrounding program hear what is done with its tensors."""
    return _disable_function_modes()


def _without_dispatch_modes() -> AbstractContextManager[object]:
    try:
        from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
    except ImportError:
        return nullcontext()
    before_dispatch = getattr(torch._ops, "_len_torch_dispatch_stack_pre_dispatch", None)
    if not _get_current_dispatch_mode_stack() and not (before_dispatch and before_dispatch()):
        return nullcontext()  # to disable none takes a tenth of a millisecond
    return cast(AbstractContextManager[object], _disable_current_modes())


def function_modes_hear() -> bool:
    """Whether a function mode of the surrounding program hears what is done with tensors at this point."""
    is_heard = getattr(torch._C, "_is_torch_function_mode_enabled", None)
    return is_heard is None or bool(is_heard())


class SeeingMode(TorchFunctionMode):
    """Lets every torch function run as it would, and shows what was called."""

    def __init__(self, see: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], object], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        result = func(*args, **kwargs)
        self._see(func, args, kwargs, result)
        return result


@contextmanager
def unnoticed_by_fast_paths() -> Iterator[None]:
    """Let modules of `torch.nn` take the fused functions that they take in evaluation, as if no mode of ours were on.

    They ask whether any mode is, and go the plain way then: which rounds otherwise, leaves no zeros in the place of
    padding, and fails for nested tensors. Modes of others are theirs: beside one, the answer stays what it is.
    """
    ask = torch.overrides.has_torch_function

    def ask_as_if_unwatched(arguments: Iterable[object]) -> bool:
        answer: bool = ask(arguments)
        if answer and sys._getframe(1).f_globals.get("__name__", "").startswith("torch.nn.modules."):
            is_ours = all(isinstance(mode, SeeingMode) for mode in _function_modes())
            return not (is_ours and all(type(argument) in _PLAIN for argument in arguments))
        return answer

    torch.overrides.has_torch_function = ask_as_if_unwatched  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.overrides.has_torch_function = ask


def _function_modes() -> list[object]:
    depth, at = (getattr(torch._C, name, None) for name in ("_len_torch_function_stack", "_get_function_stack_at"))
    return [None] if depth is None or at is None else [at(place) for place in range(depth())]
