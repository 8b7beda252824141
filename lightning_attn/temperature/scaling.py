"""Multiplying what leaves a module, channel by channel, by numbers that change while it trains.

The numbers are a tensor that is changed in place: a compiled model holds that tensor, and is not compiled again. What
is put on a module for it are objects of classes of this package, so that the copies and pickles of a model have them
too, with numbers of their own, and so that they are found again and taken off (`release`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_attn.capture.spread import is_spread, part_of
from lightning_attn.temperature.projection import QueryProjection, ScaledParameter, like, multiplier_dtype


class Attachment:
    """What is put on a module, and taken off it by `release`."""


class ChannelScale(Attachment):
    """By what the channels that leave a projection are multiplied, and the forward hook that does it.

    Args:
        multiplier_O: by what, per channel; or one number for all.
        parameters: of the projection, into which the same can be written.
    """

    def __init__(self, multiplier_O: Tensor, parameters: tuple[ScaledParameter, ...]) -> None:
        self.multiplier_O = multiplier_O
        self.parameters = parameters
        #: Whether all numbers are one, so that an eager module can do without.
        self.is_neutral = True

    @classmethod
    def of(cls, projection: QueryProjection, multiplier_O: Tensor | None = None) -> ChannelScale:
        """A scale of a projection that multiplies by one, or by something else."""
        tensors = [projection.tensor(part) for part in projection.parameters]
        device = tensors[0].device if tensors else None
        dtype = multiplier_dtype(tensors[0]) if tensors else torch.float32
        scale = cls(torch.ones(projection.channels, dtype=dtype, device=device), projection.parameters)
        if multiplier_O is not None:
            scale.set(multiplier_O)
        return scale

    def set(self, multiplier_O: Tensor, is_neutral: bool = False) -> None:
        """Multiply by something else from now on.

        Args:
            multiplier_O: by what.
            is_neutral: whether all of it is one.
        """
        self.multiplier_O.copy_(multiplier_O)
        self.is_neutral = is_neutral

    def reset(self) -> None:
        """Multiply by one from now on."""
        self.multiplier_O.fill_(1)
        self.is_neutral = True

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        """What the module gives, multiplied."""
        # What is compiled multiplies always, and is not asked first: it would be compiled again when this changed.
        if not torch.compiler.is_compiling() and self.is_neutral:
            return output
        if type(output) is tuple:  # some layers give their bias, or a state, beside what they compute
            return (self(module, args, output[0]), *output[1:])
        return (output * like(self._held_multiplier(module, output), output)).to(output.dtype)

    def _held_multiplier(self, module: Any, output: Tensor) -> Tensor:
        """The part of the multiplier that belongs to the channels which this rank computes."""
        channels = len(self.multiplier_O)
        if channels in (1, output.shape[-1]) or not self.parameters:
            return self.multiplier_O
        part = self.parameters[0]
        weight = module._parameters[part.name]
        if not is_spread(weight):
            return self.multiplier_O
        share = part_of(weight, part.axis)
        return self.multiplier_O[share.start : share.start + share.held]


def scale_outputs(projection: QueryProjection, scale: ChannelScale) -> None:
    """Multiply the channels that leave a projection from now on."""
    if projection.kind == "packed":
        _read_scaled(projection.module, scale)
        return
    # Ahead of the hooks of sharding strategies, which lay outputs out anew and take weights apart again.
    projection.module.register_forward_hook(scale, prepend=True)


def release(module: Any, one: ChannelScale | None = None) -> None:
    """Take off a module what was put on it, or on what it is a copy of.

    Args:
        module: the module.
        one: take off this alone.
    """
    if isinstance(module, ReadsScaled) and one in (None, module._channel_scale):
        module.__class__ = _plain_kind(module)
        del module.__dict__["_channel_scale"]
    for hooks in (module._forward_hooks, module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for number, hook in list(hooks.items()):
            hook = getattr(hook, "hook", hook)  # some are wrapped
            if isinstance(hook, Attachment) and one in (None, hook):
                del hooks[number]


class ReadsScaled:
    """What the class of a `torch.nn.MultiheadAttention` has beside its own while its queries are multiplied.

    It hands its parameters to a function, and its fused path in evaluation is taken by the layer around it, which reads
    them too, and which any hook would make take another path. So the module gets a class of its own in which the names
    of these parameters give what they are, multiplied; torch's parametrizations do the same. The parameters stay where
    they are, under their names, so that optimisers, strategies and state dicts find them.
    """

    _parameters: dict[str, Tensor | None]
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

    @property
    def k_proj_weight(self) -> Tensor | None:
        """That of keys, which `lightning_attn.clipping` multiplies."""
        return self._read("k_proj_weight")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A class that was made on the way cannot be found by name, as copies and pickles do.
        return _made_anew, (_plain_kind(self),), self.__dict__

    def _read(self, name: str) -> Tensor | None:
        parameter = self._parameters[name]
        if parameter is None:
            return parameter
        part = next((part for part in self._channel_scale.parameters if part.name == name), None)
        return parameter if part is None else part.scaled(parameter, self._channel_scale.multiplier_O)


def _read_scaled(module: Any, scale: ChannelScale) -> None:
    kind: Any = type(module)
    module.__dict__["_channel_scale"] = scale
    module.__class__ = _with_scaled_reading(kind)


@cache
def _with_scaled_reading(kind: Any) -> Any:
    return type(f"Scaled{kind.__name__}", (ReadsScaled, kind), {})


def _plain_kind(module: object) -> Any:
    return type(module).__bases__[-1]


def _made_anew(kind: Any) -> Any:
    scaled = _with_scaled_reading(kind)
    return scaled.__new__(scaled)
