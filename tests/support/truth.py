"""What a model really computes, without a look at `lightning_attn`: its projections, seen by hooks on another run.

Shape suffixes: B sequences, N queries, M keys, H query heads, K key heads, D width of a head, X anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import reference
import torch
from torch import Tensor, nn


class Tape:
    """What went into and came out of every module of a model, call by call."""

    def __init__(self) -> None:
        self._given: dict[str, list[Tensor]] = defaultdict(list)
        self._gave: dict[str, list[Tensor]] = defaultdict(list)

    def given(self, module: str) -> Tensor:
        """The first tensor that went into a module; of several calls, one after the other along the tokens."""
        return torch.cat(self._given[module], dim=1)

    def gave(self, module: str, calls: slice = slice(None), tokens_axis: int = 1) -> Tensor:
        """What came out of a module (the first tensor of it); of several calls, joined along the axis of the tokens."""
        return torch.cat(self._gave[module][calls], dim=tokens_axis)

    def given_at(self, module: str, call: int) -> Tensor:
        """The first tensor that went into a module in one of its calls."""
        return self._given[module][call]

    def gave_at(self, module: str, call: int) -> Tensor:
        """What came out of a module in one of its calls."""
        return self._gave[module][call]

    def calls(self, module: str) -> int:
        """How many calls of a module there were."""
        return len(self._gave[module])

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """Listen to a model while the block runs."""

        def listen(name: str) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                for tensors, kept in ((_first(args, *kwargs.values()), self._given), (_first(output), self._gave)):
                    if tensors is not None:
                        kept[name].append(tensors.detach().clone())

            return hook

        handles = [
            module.register_forward_hook(listen(name), with_kwargs=True) for name, module in model.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _first(*values: Any) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
        if isinstance(value, (tuple, list)):
            found = _first(*value)
            if found is not None:
                return found
    return None


@dataclass(frozen=True)
class Attention:
    """One call of attention as it should be seen, computed in float64 from the model's own projections.

    Args:
        site: the name of its module in `named_modules()`.
        logits_BHNM: what enters the softmax, in float64: scaled, capped, with its biases, before anything is hidden.
        visible: which keys each query may see; broadcasts to (B, H, N, M).
        output_BNX: what the model computed, all heads of a token beside each other; ``None`` where it cannot be had.
        sink_logits_H: one logit more per head, which takes weight and gives nothing.
        self_attention: whether query ``i`` and key ``i`` are the same token.
        padding_BN: true where a query is no token, where visibility does not tell.
        is_of_loop: whether it is one head of a loop over the heads of its site.
    """

    site: str
    logits_BHNM: Tensor
    visible: Tensor
    output_BNX: Tensor | None = None
    sink_logits_H: Tensor | None = None
    self_attention: bool = True
    padding_BN: Tensor | None = None
    is_of_loop: bool = False

    @property
    def visible_BHNM(self) -> Tensor:
        return self.visible.expand(self.logits_BHNM.shape)

    def weights_BHNM(self) -> Tensor:
        """The weights before dropout: zero where a key is hidden, and in rows that see nothing."""
        logits_BHNM = self.logits_BHNM.masked_fill(~self.visible_BHNM, -torch.inf)
        if self.sink_logits_H is not None:
            sink_BHN1 = self.sink_logits_H.double().view(1, -1, 1, 1).expand(*logits_BHNM.shape[:-1], 1)
            logits_BHNM = torch.cat([logits_BHNM, sink_BHN1], dim=-1)
        return logits_BHNM.softmax(-1).nan_to_num(0.0)[..., : self.visible_BHNM.shape[-1]]

    def heads(self) -> list[list[reference.Head]]:
        """Every head of every sequence, as the references of the statistics take them."""
        logits, visible = self.logits_BHNM.numpy(), self.visible_BHNM.numpy()
        sinks = [None] * logits.shape[1] if self.sink_logits_H is None else self.sink_logits_H.tolist()
        return [
            [
                reference.Head(
                    logits[b, h],
                    visible[b, h],
                    self.self_attention,
                    sinks[h],
                    padding=None if self.padding_BN is None else self.padding_BN[b].numpy(),
                )
                for b in range(len(logits))
            ]
            for h in range(logits.shape[1])
        ]


def split_heads(tensor_BNX: Tensor, heads: int) -> Tensor:
    """A projection (B, N, H D) as heads (B, H, N, D), in float64."""
    return tensor_BNX.double().unflatten(-1, (heads, -1)).transpose(1, 2)


def products(query_BHND: Tensor, key_BKMD: Tensor, scale: float | None = None) -> Tensor:
    """Scaled products in float64, one dot product after the other: query head ``h`` reads key head ``h // (H / K)``."""
    group = query_BHND.shape[1] // key_BKMD.shape[1]
    scale = query_BHND.shape[-1] ** -0.5 if scale is None else scale
    key_of_head = [h // group for h in range(query_BHND.shape[1])]
    return torch.from_numpy(
        scale * np.einsum("bhnd,bhmd->bhnm", query_BHND.double().numpy(), key_BKMD[:, key_of_head].double().numpy())
    )


def rotated(tensor_BHND: Tensor, positions_BN: Tensor, base: float, interleaved: bool = False) -> Tensor:
    """Rotary embedding (Su et al. 2021): pair ``i`` of a head is turned by ``position * base^(-2 i / D)``.

    A pair is made of the elements ``i`` and ``i + D/2`` as in Llama, or of two neighbours.
    """
    half = tensor_BHND.shape[-1] // 2
    angles = positions_BN.double()[:, None, :, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    if interleaved:
        first, second = tensor_BHND[..., 0::2], tensor_BHND[..., 1::2]
    else:
        first, second = tensor_BHND[..., :half], tensor_BHND[..., half:]
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def causal(queries: int, keys: int, window: int | None = None) -> Tensor:
    """Which keys a query may see, the last query being the last key; (1, 1, N, M)."""
    distance_NM = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return ((distance_NM >= 0) & (distance_NM < (keys if window is None else window)))[None, None]


def tokens(mask_BM: Tensor) -> Tensor:
    """Which keys are no padding; (B, 1, 1, M)."""
    return mask_BM.bool()[:, None, None]
