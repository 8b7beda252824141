"""Multiplying what leaves a module, channel by channel, by numbers that change while it trains.

The numbers are a tensor that is changed in place: a compiled model holds that tensor, and is not compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_attn.temperature.projection import QueryProjection, ScaledParameter, like


class Handle(Protocol):
    """Takes back what was done to a module."""

    def remove(self) -> None:
        """Take it back."""


class ChannelScale:
    """A forward hook that multiplies what its module gives.

    Args:
        multiplier_O: by what, per channel; or one number for all.
    """

    def __init__(self, multiplier_O: Tensor) -> None:
        self.multiplier_O = multiplier_O
        #: Whether all numbers are one, so that an eager module can do without.
        self.is_neutral = True

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """What the module gives, multiplied."""
        # What is compiled multiplies always: it would be compiled again when this changed.
        if self.is_neutral and not torch.compiler.is_compiling():
            return output
        return (output * like(self.multiplier_O, output)).to(output.dtype)


def scale(projection: QueryProjection, multiplier_O: Tensor) -> tuple[Handle, Callable[[bool], None]]:
    """Multiply the channels that leave a projection from now on.

    Args:
        projection: the projection.
        multiplier_O: by what; may be changed in place.

    Returns:
        What ends it, and a function that is to be told whether all numbers are one.
    """
    hook = ChannelScale(multiplier_O)
    if projection.kind == "packed":
        return _ScaledReading(projection, hook), lambda is_neutral: None
    # Ahead of the hooks of sharding strategies, which lay outputs out anew and take weights apart again.
    handle = projection.module.register_forward_hook(hook, prepend=True)

    def tell(is_neutral: bool) -> None:
        hook.is_neutral = is_neutral

    return handle, tell


class _ScaledReading:
    """Has a `torch.nn.MultiheadAttention` read its projection multiplied.

    It hands its parameters to a function, and its fused path in evaluation is taken by the layer around it, which reads
    them too, and which any hook would make take another path. So the module gets a class of its own in which the names
    of these parameters give what they are, multiplied; torch's parametrizations do the same. The parameters stay where
    they are, under their names, so that optimisers, strategies and state dicts find them.
    """

    def __init__(self, projection: QueryProjection, scale: ChannelScale) -> None:
        self._module: Any = projection.module
        self._kind = type(projection.module)
        self._module.__dict__["_scaled_parameters"] = {part.name: part for part in projection.parameters}
        self._module.__dict__["_channel_scale"] = scale
        self._module.__class__ = _with_scaled_reading(self._kind)

    def remove(self) -> None:
        """Give the module its class back."""
        self._module.__class__ = self._kind
        for name in ("_scaled_parameters", "_channel_scale"):
            self._module.__dict__.pop(name, None)


class ReadsScaled:
    """What the class of such a module has beside its own."""

    _parameters: dict[str, Tensor | None]
    _scaled_parameters: dict[str, ScaledParameter]
    _channel_scale: ChannelScale

    @property
    def in_proj_weight(self) -> Tensor | None:
        """The packed projection of queries, keys and values, its queries multiplied."""
        return self._read("in_proj_weight")

    @property
    def in_proj_bias(self) -> Tensor | None:
        """Its bias."""
        return self._read("in_proj_bias")

    @property
    def q_proj_weight(self) -> Tensor | None:
        """The projection of queries where keys or values have another width, multiplied."""
        return self._read("q_proj_weight")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A class that was made on the way cannot be found by name, as copies and pickles do.
        return _made_anew, (type(self).__bases__[-1],), self.__dict__

    def _read(self, name: str) -> Tensor | None:
        parameter, part = self._parameters[name], self._scaled_parameters.get(name)
        if parameter is None or part is None:
            return parameter
        return part.scaled(parameter, self._channel_scale.multiplier_O)


@cache
def _with_scaled_reading(kind: Any) -> Any:
    return type(f"Scaled{kind.__name__}", (ReadsScaled, kind), {})


def _made_anew(kind: type) -> Any:
    scaled = _with_scaled_reading(kind)
    return scaled.__new__(scaled)
