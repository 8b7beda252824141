"""Hearing of calls into which nothing can see: scripted functions, and operations that bring their own gradient.

torch shows a function mode neither the call of what `torch.jit` has compiled nor that of a `torch.autograd.Function`.
An attention that goes through one of them between its two products would be lost there, so that for as long as
something listens, the methods by which they are called tell of it. What such a call gives is what it would have given.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_attn.capture.isolation import apply_of_functions, call_of_scripts, function_modes_hear

#: Called with what was called, its arguments and its result.
Hear = Callable[[Any, tuple[Any, ...], dict[str, Any], object], None]

#: What a script calls that is an attention, whole.
_WHOLE_ATTENTION = re.compile(
    r"aten::(scaled_dot_product_attention|_native_multi_head_attention|_transformer_encoder_layer_fwd)\("
)
#: And the products of one that is written out; layers are `aten::linear`.
_PRODUCTS = re.compile(r"aten::(matmul|bmm|baddbmm|einsum)\(")

_LISTENING: list[tuple[int, Hear]] = []
_RESTORE: list[Callable[[], None]] = []
_LOCK = threading.Lock()


@contextmanager
def opaque_calls(hear: Hear) -> Iterator[None]:
    """Hear of every such call that this thread makes where its function modes are on, while the block runs."""
    listener = (threading.get_ident(), hear)
    with _LOCK:
        if not _LISTENING:
            _replace_methods()
        _LISTENING.append(listener)
    try:
        yield
    finally:
        with _LOCK:
            _LISTENING.remove(listener)
            if not _LISTENING:
                while _RESTORE:
                    _RESTORE.pop()()


def _replace_methods() -> None:
    for script in call_of_scripts():
        _replace_call(script)
    for base in apply_of_functions():
        _replace_apply(base)


def _replace_call(script: Any) -> None:
    call: Any = script.__dict__["__call__"]

    def heard(self: Any, *args: Any, **kwargs: Any) -> object:
        result = call(self, *args, **kwargs)
        _tell(self, args, kwargs, result)
        return result

    script.__call__ = heard
    _RESTORE.append(lambda: setattr(script, "__call__", call))


def _replace_apply(base: Any) -> None:
    """Put a method before the one that is inherited, so that an ``apply`` that was bound earlier finds it too."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> object:
        result = super(base, cls).apply(*args, **kwargs)
        _tell(cls, args, kwargs, result)
        return result

    base.apply = classmethod(apply)
    _RESTORE.append(lambda: delattr(base, "apply"))


def _tell(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
    if function_modes_hear():
        for thread, hear in tuple(_LISTENING):
            if thread == threading.get_ident():
                hear(called, args, kwargs, result)


def name_of_opaque(called: Any) -> str:
    """What a script, or an operation with a gradient of its own, is called."""
    return str(called.__name__ if isinstance(called, type) else called.name)


def is_opaque(function: Callable[..., Any]) -> bool:
    """Whether a function is an operator of somebody's own (`torch.library`), of which nothing is known but its name."""
    return type(function).__module__ == "torch._ops" and not str(function).startswith("aten.")


class Scripts:
    """What is known of scripts by what they were compiled from."""

    def __init__(self) -> None:
        self._attend: dict[str, bool] = {}

    def attends(self, called: Any) -> bool:
        """Whether a whole attention is computed within a script; of what is no script nothing is known."""
        if isinstance(called, type):
            return False
        try:
            owner = getattr(called, "owner", None)
            name = called.qualified_name if owner is None else f"{owner._type().qualified_name()}.{called.name}"
            graph = "" if name in self._attend else str(called.inlined_graph)
        except (AttributeError, RuntimeError):  # another torch, that tells less of its scripts
            return False
        if name not in self._attend:
            is_written_out = "aten::softmax(" in graph and len(_PRODUCTS.findall(graph)) > 1
            self._attend[name] = is_written_out or bool(_WHOLE_ATTENTION.search(graph))
        return self._attend[name]
