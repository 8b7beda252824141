"""What makes the queries of a site: a module, and which of the channels that leave it belong to which head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lightning_attn.capture.spread import is_spread

if TYPE_CHECKING:
    from lightning_attn.capture.call import AttentionCall

#: ``"layer"``: channels leave it, of which some are queries. ``"shared"``: a norm of queries whose gain all heads
#: share, so that all have one temperature. ``"packed"``: `torch.nn.MultiheadAttention`, which projects by a function
#: and is a module to nobody.
Kind = Literal["layer", "shared", "packed"]


@dataclass(frozen=True)
class ScaledParameter:
    """A parameter into which a temperature can be written.

    Args:
        name: of the module's parameter.
        axis: the axis that holds the channels which leave the module.
        is_offset: whether the module adds one to it, as Gemma's norms do.
        first: the first of these channels, where it holds the last of them only.
    """

    name: str
    axis: int
    is_offset: bool = False
    first: int = 0

    def scaled(self, parameter: Tensor, multiplier_O: Tensor) -> Tensor:
        """The parameter of a module whose output is multiplied by something per channel."""
        size = parameter.shape[self.axis]
        multiplier = multiplier_O if len(multiplier_O) == 1 else multiplier_O[self.first : self.first + size]
        shape = [1] * parameter.dim()
        shape[self.axis] = -1
        scale = like(multiplier.view(shape), parameter)
        if self.is_offset:
            return ((parameter + 1) * scale - 1).to(parameter.dtype)
        return (parameter * scale).to(parameter.dtype)


@dataclass(frozen=True)
class QueryProjection:
    """Where a temperature enters a site.

    Args:
        module: the module that makes the queries, or the last one that changes their size.
        name: its name in the model.
        kind: how it makes them.
        rows: (H, D), the channels of each head's queries among those that leave the module; ``None`` where heads share.
        parameters: into which a temperature can be written; none where there is no such parameter.
    """

    module: nn.Module
    name: str
    kind: Kind
    rows: Tensor | None
    parameters: tuple[ScaledParameter, ...]

    @property
    def temperatures(self) -> int:
        """How many temperatures it can have: one for each head, or one for all."""
        return 1 if self.rows is None else len(self.rows)

    @property
    def channels(self) -> int:
        """How many channels a multiplier has: those that leave the module, or one for all."""
        if self.rows is None:
            return 1
        ends = (part.first + self.tensor(part).shape[part.axis] for part in self.parameters)
        return max(ends, default=int(self.rows.max()) + 1)

    def served_by(self, heads: int) -> Tensor | None:
        """Which of the temperatures each head of a site has; ``None`` where the site cannot have them.

        Args:
            heads: how many heads the site has.
        """
        if self.rows is None:
            return torch.zeros(heads, dtype=torch.long)
        return torch.arange(heads) if len(self.rows) == heads else None

    def made(self, call: AttentionCall) -> Tensor:
        """What the projection makes, as a call has it."""
        return call.query

    @property
    def makes_zeros(self) -> bool:
        """Whether its parameters are nothing but zeros, so that nothing tells what it makes."""
        return bool(self.parameters) and not any(bool(self.tensor(part).any()) for part in self.parameters)

    @property
    def is_broken(self) -> bool:
        """Whether its parameters are infinite or NaN; of those that ranks have divided this is not asked."""
        held = [self.tensor(part) for part in self.parameters]
        return any(not is_spread(parameter) and not bool(parameter.isfinite().all()) for parameter in held)

    def tensor(self, part: ScaledParameter) -> Tensor:
        """The parameter itself; while a sharded module computes, what stands in its place."""
        parameter = self.module._parameters[part.name]
        assert parameter is not None
        return parameter

    def multiplier(self, factors_H: Tensor) -> Tensor:
        """What channels are multiplied by where each head's queries are multiplied by a factor of its own.

        Args:
            factors_H: a factor for each temperature.
        """
        if self.rows is None:
            return factors_H
        multiplier_O = factors_H.new_ones(self.channels)
        multiplier_O[self.rows.to(factors_H.device)] = factors_H[:, None].expand(self.rows.shape)
        return multiplier_O

    def rows_of(self, heads: Tensor) -> Tensor | None:
        """The channels of some heads, flat; ``None`` for all where heads share."""
        return None if self.rows is None else self.rows[heads].flatten()

    def overlaps(self, other: QueryProjection) -> bool:
        """Whether some channels of the same module are in both."""
        if self.module is not other.module:
            return False
        return self.rows is None or other.rows is None or bool(torch.isin(self.rows, other.rows).any())

    def of(self, model: nn.Module) -> QueryProjection:
        """The same of another model that is built alike, such as an average of this one."""
        return QueryProjection(model.get_submodule(self.name), self.name, self.kind, self.rows, self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """All but the module, in plain values and tensors."""
        return {
            "name": self.name,
            "kind": self.kind,
            "rows": self.rows,
            "parameters": [(part.name, part.axis, part.is_offset, part.first) for part in self.parameters],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], model: nn.Module) -> QueryProjection:
        """The projection of a model.

        Raises:
            AttributeError: if the model has no such module, or it has other parameters.
        """
        parameters = tuple(ScaledParameter(*part) for part in values["parameters"])
        found = cls(model.get_submodule(values["name"]), values["name"], values["kind"], values["rows"], parameters)
        last = 0 if found.rows is None else int(found.rows.max())
        held = found.module._parameters
        if any(held.get(part.name) is None for part in parameters) or (parameters and found.channels <= last):
            raise AttributeError(f"{found.name!r} has no parameters with so many channels.")
        return found


def like(multiplier: Tensor, tensor: Tensor) -> Tensor:
    """A multiplier that can be multiplied with a tensor: on its device, and spread over ranks where that is."""
    multiplier = multiplier.to(tensor.device)
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return multiplier
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(multiplier, mesh, [Replicate()] * mesh.ndim, run_check=False)


def multiplier_dtype(tensor: Tensor) -> torch.dtype:
    """In which precision the multiplier of a tensor is kept: single at least, so that half keeps its digits."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else torch.float32
