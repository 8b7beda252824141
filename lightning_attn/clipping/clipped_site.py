"""A site whose heads can be clipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_attn.clipping.head_clip import HeadClip
from lightning_attn.clipping.key_projection import KeyProjection
from lightning_attn.temperature.folding import fold
from lightning_attn.temperature.projection import QueryProjection, multiplier_dtype


@dataclass(frozen=True)
class ClippedSite:
    """Where the queries and keys of a site are made.

    Args:
        site: its name.
        queries: what makes its queries.
        keys: what makes its keys; ``None`` where the queries are clipped alone.
        reason: why that is so.
        largest_bias: of each head, the largest that was added to a logit when it was found, at least zero.
    """

    site: str
    queries: QueryProjection
    keys: KeyProjection | None
    reason: str
    largest_bias: tuple[float, ...]

    @property
    def heads(self) -> int:
        """How many heads it has."""
        return len(self.largest_bias)

    def clips(self, step: int, max_logits: Sequence[float | None], threshold: float, alpha: float) -> list[HeadClip]:
        """What is to be done: see `AttentionClip.clips`."""
        decided = []
        for head, largest in enumerate(max_logits):
            bias = self.largest_bias[head]
            if largest is not None and math.isfinite(largest) and largest > threshold > bias:
                # What a bias adds is not multiplied: with this factor no sum of product and bias exceeds the threshold.
                factor = (threshold - bias) / (largest - bias)
                of_queries, of_keys = (factor, 1.0) if self.keys is None else (factor**alpha, factor ** (1 - alpha))
                decided.append(HeadClip(step, self.site, head, largest, of_queries, of_keys))
        return decided

    def apply(self, clips: Sequence[HeadClip]) -> None:
        """Multiply the rows of heads, in place; those of others stay as they are to the last digit."""
        heads = [clip.head for clip in clips]
        of_queries = _multiplier(self.queries, heads, [clip.query_factor for clip in clips])
        if self.keys is None:
            fold(self.queries, of_queries)
            return
        of_keys = _multiplier(self.keys, self.keys.key_heads[heads].tolist(), [clip.key_factor for clip in clips])
        if self.keys.module is self.queries.module and self.keys.parameters == self.queries.parameters:
            fold(self.queries, of_queries * of_keys)  # at once: their channels are others
        else:
            fold(self.queries, of_queries)
            fold(self.keys, of_keys)

    def to_dict(self) -> dict[str, Any]:
        """All but the modules, in plain values and tensors."""
        keys = None if self.keys is None else self.keys.to_dict()
        return {
            "site": self.site,
            "queries": self.queries.to_dict(),
            "keys": keys,
            "reason": self.reason,
            "largest_bias": self.largest_bias,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], model: nn.Module) -> ClippedSite:
        """The site of a model.

        Raises:
            AttributeError: if the model has no such modules.
        """
        keys = None if values["keys"] is None else KeyProjection.from_dict(values["keys"], model)
        queries = QueryProjection.from_dict(values["queries"], model)
        return cls(values["site"], queries, keys, values["reason"], tuple(values["largest_bias"]))


def _multiplier(projection: QueryProjection, heads: list[int], factors: list[float]) -> Tensor:
    dtype = multiplier_dtype(projection.tensor(projection.parameters[0]))
    factors_H = torch.ones(projection.temperatures, dtype=dtype)
    factors_H[heads] = torch.tensor(factors, dtype=dtype)
    return projection.multiplier(factors_H)
