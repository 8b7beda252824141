"""Reading an attention that a model has written out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from lightning_attn.capture.axes import KEY, LEFT, QUERY, RIGHT, SHARED, Axes, arranged
from lightning_attn.capture.call import HIDING_PENALTY, AttentionCall, Visibility
from lightning_attn.capture.composition import divided
from lightning_attn.capture.isolation import written_to
from lightning_attn.capture.reader import Sampling
from lightning_attn.capture.refusals import (
    KEYS_OF_EACH_QUERY,
    NESTED,
    NO_LEARNED_SINK,
    OVERWRITTEN_LOGITS,
    UNKNOWN_HEADS,
)
from lightning_attn.capture.softmax.trail import Logits, Softmax

#: A logit this low belongs to a hidden key where no mask was seen: fp16 masks hold -65504.
_HIDDEN_BELOW = -3e4
#: And this low it does in any case.
_SURELY_HIDDEN_BELOW = -1e30
#: And this low it is hidden where something was seen that may have been a mask, but not which keys that hides.
_PROBABLY_HIDDEN_BELOW = HIDING_PENALTY / 2
#: A mask hides nothing whose logit is above this: logits were moved, or overwritten, after it was applied.
_NOT_HIDDEN_ABOVE = -20.0
#: How far apart the logits of a learned sink may be from row to row.
_TOLERANCE = 1e-2


@dataclass(frozen=True)
class WrittenAttention:
    """An attention that was found.

    Args:
        softmax: its softmax.
        modules: the modules that computed all of it, from the innermost outwards.
        value: what was multiplied, (shared axes as in the logits, M, E); ``None`` where it cannot be told.
        is_grouped: whether query heads of one group multiply the same values.
        columns: the columns of the softmax that multiplied values.
    """

    softmax: Softmax
    modules: tuple[nn.Module, ...]
    value: Tensor | None
    is_grouped: bool
    columns: slice

    @classmethod
    def of_nested_tensors(cls, device: torch.device, modules: tuple[nn.Module, ...]) -> WrittenAttention:
        """An attention that is computed with nested tensors, of which nothing more is known."""
        softmax = Softmax(
            torch.empty(0, 0, device=device),
            (QUERY, KEY),
            Logits((LEFT, RIGHT)),
            modules,
            version=0,
            refusal=NESTED,
        )
        return cls(softmax, modules, None, False, slice(0, 0))

    @property
    def device(self) -> torch.device:
        """Where it was computed."""
        return self.softmax.logits.device

    @property
    def rows(self) -> int | None:
        """How many rows its softmax has, whatever they are; ``None`` where it was put together of pieces."""
        logits = self.softmax.logits
        if logits.dim() < len(self.softmax.axes):
            return None
        return logits.numel() // max(1, logits.shape[self.softmax.axes.index(KEY)])

    @property
    def _queries(self) -> int:
        """How many queries a sequence has."""
        sizes = zip(self.softmax.logits.shape, self.softmax.axes, strict=True)
        return prod(size for size, axis in sizes if axis == QUERY)

    @property
    def _heads(self) -> Collection[int]:
        """Which parts of the shared axes are heads. A single axis holds sequences, of one head each."""
        if self.softmax.heads is not None:
            return self.softmax.heads.heads
        shared = self.softmax.axes.count(SHARED)
        return range(shared - 2 if self.is_grouped else 1, shared)

    @property
    def _axes_of_sequences(self) -> int:
        """How many axes hold sequences."""
        known = self.softmax.heads
        return self.softmax.axes.count(SHARED) - len(self._heads) if known is None else known.axes_of_sequences

    def read(self, sampling: Sampling) -> AttentionCall:
        """The call, with its logits as they entered the softmax and the masks that were seen entering.

        Raises:
            UnreadableError: if what was computed is not the softmax of its logits, or what it means cannot be told.
        """
        softmax, history = self.softmax, self.softmax.history
        if softmax.refusal is not None:
            raise softmax.refusal.error()
        if softmax.axes.count(SHARED) > 2 and not self.is_grouped and softmax.heads is None:
            raise UNKNOWN_HEADS.error()
        if self._queries == 1 and self._axes_of_sequences > 1:
            raise KEYS_OF_EACH_QUERY.error()
        if softmax.version != written_to(softmax.logits):
            raise OVERWRITTEN_LOGITS.error()

        def arrange(tensor: Tensor) -> Tensor:
            return self._arranged(tensor, softmax.axes, sampling)

        all_columns_BHNM = arrange(softmax.logits)
        if history.shift is not None:
            all_columns_BHNM = all_columns_BHNM + arrange(history.shift)
        logits_BHNM = all_columns_BHNM[..., self.columns]
        sequences, heads, queries, keys = logits_BHNM.shape
        return AttentionCall(
            site=sampling.site,
            query=logits_BHNM.new_empty(sequences, heads, queries, 0, dtype=self._dtype),
            key=logits_BHNM.new_empty(sequences, heads, keys, 0, dtype=self._dtype),
            value=self._value(sampling) if sampling.with_values else None,
            scale=1.0,
            visibility=Visibility(mask=~self._hidden(logits_BHNM, arrange)),
            self_attention=queries == keys and not history.is_reordered,
            sink_logits=self._sink_logits(all_columns_BHNM),
            logit_matrix=logits_BHNM,
        )

    def _hidden(self, logits_BHNM: Tensor, arrange: Callable[[Tensor], Tensor]) -> Tensor:
        """Which keys are hidden: by the masks that were seen where the logits bear them out, and by their logits."""
        history = self.softmax.history
        hidden_BHNM = torch.zeros_like(logits_BHNM, dtype=torch.bool)
        has_unseen_mask = history.has_unseen_mask
        for mask in history.masks:
            if mask.shape == self._shape:
                hidden_BHNM |= arrange(mask.hidden())
            else:  # the logits were cut since
                has_unseen_mask = True
        if bool((hidden_BHNM & (logits_BHNM > _NOT_HIDDEN_ABOVE)).any()):
            hidden_BHNM, has_unseen_mask = torch.zeros_like(hidden_BHNM), True
        if has_unseen_mask:
            hidden_BHNM |= logits_BHNM <= _PROBABLY_HIDDEN_BELOW
        else:
            hidden_BHNM |= logits_BHNM <= (_SURELY_HIDDEN_BELOW if bool(hidden_BHNM.any()) else _HIDDEN_BELOW)
        return hidden_BHNM

    @property
    def _dtype(self) -> torch.dtype:
        """What logits were rounded to: models often have those of a product in half precision in float32 afterwards."""
        entered, product = self.softmax.logits.dtype, self.softmax.history.dtype
        if product is None:
            return entered
        return max(product, entered, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def _shape(self) -> torch.Size:
        """The shape of the logits without the columns that have no value."""
        shape = list(self.softmax.logits.shape)
        shape[self.softmax.axes.index(KEY)] = self.columns.stop - self.columns.start
        return torch.Size(shape)

    def _value(self, sampling: Sampling) -> Tensor | None:
        if self.value is None or self.softmax.changed_by is not None:
            return None
        return self._arranged(self.value, (SHARED,) * (self.value.dim() - 2) + (QUERY, KEY), sampling)

    def _arranged(self, tensor: Tensor, axes: Axes, sampling: Sampling) -> Tensor:
        """A tensor with such axes as (B, H, rows, columns)."""
        heads = 1
        if self.softmax.axes.count(SHARED) == 1 and not self.is_grouped and self.softmax.heads is None:
            sizes = dict(zip(self.softmax.axes, self.softmax.logits.shape, strict=True))
            heads = sampling.heads_in_batch(sizes[SHARED], self._queries, sizes[KEY])
        rows = None if sampling.max_sequences is None else sampling.max_sequences * heads
        tensor, axes = self._divided(tensor, axes)
        arranged_S1NM = arranged(tensor, axes, self._heads, rows)
        return arranged_S1NM if heads == 1 else arranged_S1NM.unflatten(0, (-1, heads)).flatten(1, 2)

    def _divided(self, tensor: Tensor, axes: Axes) -> tuple[Tensor, Axes]:
        """A tensor with such axes, where sequences and heads that share one have axes of their own."""
        if self.softmax.heads is None:
            return tensor, axes
        shared = [i for i, axis in enumerate(axes) if axis == SHARED]
        for i, sizes in reversed(list(zip(shared, self.softmax.heads.sizes, strict=True))):
            tensor = divided(tensor, i, sizes)
            axes = (*axes[:i], *(SHARED,) * len(sizes), *axes[i + 1 :])
        return tensor, axes

    def _sink_logits(self, all_columns_BHNM: Tensor) -> Tensor | None:
        """What the columns without a value amount to, as one logit per head."""
        without_value_M = torch.ones(all_columns_BHNM.shape[-1], dtype=torch.bool, device=self.device)
        without_value_M[self.columns] = False
        if not bool(without_value_M.any()):
            return None
        sink_BHN = all_columns_BHNM[..., without_value_M].float().logsumexp(-1)
        sink_H = sink_BHN[0, :, 0]
        if not torch.allclose(sink_BHN, sink_H[:, None].expand_as(sink_BHN), rtol=_TOLERANCE, atol=_TOLERANCE):
            raise NO_LEARNED_SINK.error()
        return sink_H
