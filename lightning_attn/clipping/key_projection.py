"""What makes the keys of a site: a module, and which of the channels that leave it belong to which key head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_attn.capture.call import AttentionCall
from lightning_attn.temperature.projection import QueryProjection


@dataclass(frozen=True)
class KeyProjection(QueryProjection):
    """Where keys can be made smaller: a projection of which each head is compared with the queries of one or more.

    Args:
        key_heads: (H,) the key head with which each head of the site compares its queries.
    """

    key_heads: Tensor

    @property
    def is_shared_by_heads(self) -> bool:
        """Whether several heads compare their queries with the same keys (grouped queries)."""
        return self.temperatures < len(self.key_heads)

    def served_by(self, heads: int) -> Tensor | None:
        """The key head of each head of a site; ``None`` for a site with another number of heads."""
        return self.key_heads if len(self.key_heads) == heads else None

    def made(self, call: AttentionCall) -> Tensor:
        """What the projection makes, as a call has it."""
        return call.key

    def to_dict(self) -> dict[str, Any]:
        """All but the module, in plain values and tensors."""
        return {**super().to_dict(), "key_heads": self.key_heads}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], model: nn.Module) -> KeyProjection:
        """The projection of a model.

        Raises:
            AttributeError: if the model has no such module.
        """
        plain = QueryProjection.from_dict(values, model)
        return cls(plain.module, plain.name, plain.kind, plain.rows, plain.parameters, values["key_heads"])


def pairings(heads: int, key_heads: int) -> list[Tensor]:
    """Which key head serves each head, where there are fewer: neighbours share one, or they are taken in turns.

    Example:
        >>> pairings(4, 2)
        [tensor([0, 0, 1, 1]), tensor([0, 1, 0, 1])]
    """
    number = torch.arange(heads)
    neighbours, turns = number // (heads // key_heads), number % key_heads
    return [neighbours] if torch.equal(neighbours, turns) else [neighbours, turns]
