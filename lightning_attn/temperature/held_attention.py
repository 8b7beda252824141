"""Holding the attention of a module still, to tell whether anything else in it reads the same channels.

The module runs with the channels that a projection makes as zeros, and again with them as they are while its attention
functions give what they gave before. Then everything behind the attention is the same both times, or something else
reads these channels: a residual connection, a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn.capture.call_stack import computing_modules
from lightning_attn.capture.isolation import SeeingMode
from lightning_attn.capture.reader import readers
from lightning_attn.capture.softmax import SOFTMAXES
from lightning_attn.capture.spread import held_by_rank

#: What else weights are made with, where no function of attention makes them.
_LOG_SOFTMAXES = {functional.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax}
_EXPONENTIALS = {torch.exp, Tensor.exp}
#: The same operations on the same numbers: more than the last digit is something else.
_TOLERANCE = 1e-5


class HeldAttention(SeeingMode):
    """Keeps what attention functions give while a module runs, or has them give what another one has kept.

    Args:
        keys: how many keys a query has at least: a softmax over fewer numbers is another one.
        other: whose results are given.
    """

    def __init__(self, keys: int, other: HeldAttention | None = None) -> None:
        super().__init__(lambda *call: None)
        self._keys = keys
        self._again = None if other is None else iter(other.results)
        #: What attention functions gave.
        self.results: list[Any] = []
        #: What entered and left the modules that ran when they were done, or left those within which they ran.
        self.behind: list[Tensor] = []
        self._around: list[nn.Module] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function, in any case: it may draw random numbers."""
        kwargs = {} if kwargs is None else kwargs
        result = func(*args, **kwargs)
        if not self._is_attention(func, args, kwargs):
            return result
        if self._again is not None:
            result = next(self._again, result)
        self.results.append(_copied(result))  # the module may go on in place
        self.behind.clear()
        self._around = computing_modules()
        return _copied(result)

    def see_return(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Look at a module that returns."""
        if not any(module is other for other in self._around):  # what entered those were queries
            self.behind += [*_alike(args), *_alike(kwargs)]
        self.behind += _alike(output)

    def is_same(self, other: HeldAttention) -> bool:
        """Whether everything behind the attention is."""
        return len(self.behind) == len(other.behind) and all(map(_is_same, self.behind, other.behind))

    def _is_attention(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if function in readers():
            return True
        tensor = args[0] if args else kwargs.get("input")
        if not isinstance(tensor, Tensor) or not tensor.dim():
            return False
        if function in SOFTMAXES or function in _LOG_SOFTMAXES:
            axis = args[1] if len(args) > 1 else kwargs.get("dim")
            return tensor.shape[-1 if axis is None else axis] >= self._keys
        return function in _EXPONENTIALS and max(tensor.shape) >= self._keys


def _alike(value: object) -> list[Tensor]:
    """The first of the tensors in something, and those of its shape: others may be logits, or keys for a cache."""
    tensors = list(_tensors(value))
    return [tensor for tensor in tensors if tensor.shape == tensors[0].shape]


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    return value


def _is_same(one: Tensor, other: Tensor) -> bool:
    one, other = held_by_rank(one, other)
    if one.is_nested:
        one, other = one.to_padded_tensor(0.0), other.to_padded_tensor(0.0)
    if one.shape != other.shape:
        return False
    tolerance = max(_TOLERANCE, torch.finfo(one.dtype).eps)
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    return not one.numel() or bool((one - other).abs().max() <= tolerance * one.abs().max())
