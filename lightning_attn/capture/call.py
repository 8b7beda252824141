"""One evaluation of softmax attention, as the model made it.

Shape suffixes: B sequences, H query heads, K key heads, N queries, M keys, D width of a query or key, E width of a
value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lightning_attn.capture.head_share import HeadShare

#: An additive mask hides a key where it holds this or less. fp16 masks hold -65504, and Swin's -100 is a penalty, not a
#: mask.
HIDING_PENALTY = -1e4


def unhidden_by(bias: Tensor) -> Tensor:
    """Where an additive mask leaves keys visible; a NaN hides nothing, it spoils."""
    return (bias <= HIDING_PENALTY).logical_not()


#: What stands for the logarithm of a weight of zero: that of the smallest normal number.
LOG_OF_NO_WEIGHT = math.log(torch.finfo(torch.float32).tiny)


def log_of_weights(weights: Tensor) -> Tensor:
    """Logits whose exponentials are given weights."""
    return weights.log().clamp(min=LOG_OF_NO_WEIGHT)


class Rule(Protocol):
    """A function of the sequence, head, query and key that hides keys or changes logits, block by block."""

    def rows(self, start: int, stop: int, keys: int) -> Tensor:
        """Where the queries ``start:stop`` may see the first keys; broadcasts to (B, H, stop - start, keys)."""

    def change(self, logits_BHRM: Tensor, start: int) -> Tensor:
        """What becomes of the logits of some rows, of which the first is ``start``."""

    def select(self, sequences: slice, heads: slice) -> Rule:
        """The rule for some sequences and heads."""


@dataclass(frozen=True, repr=False)
class Visibility:
    """Which keys each query may see, and what is added to their logits.

    The parts hold together: a key is visible where none of them hides it. Tensors broadcast to (B, H, N, M).

    Args:
        causal_offset: query ``i`` sees the keys ``j <= i + causal_offset``; ``None`` where order does not matter.
        mask: boolean, true where a key may be seen.
        bias: added to the logits. It hides a key where it is -1e4 or less, and is part of the logit elsewhere (ALiBi,
            T5).
        rule: a function that says which keys may be seen, so that no mask is written down (flex_attention).
        padding: (B, N), true where a query is no token and sees nothing, where that is known of each. ``None`` where it
            is told from the rest: in self-attention, a token that nobody may see as a key is none.
    """

    causal_offset: int | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    rule: Rule | None = None
    padding: Tensor | None = None

    @property
    def is_causal_at_most(self) -> bool:
        """Whether causality is all that hides keys."""
        return self.mask is None and self.bias is None and self.rule is None and self.padding is None

    @property
    def is_alike_for_queries(self) -> bool:
        """Whether, causality aside, every query that is a token may see the same keys."""
        return self.rule is None and all(part is None or part.shape[2] == 1 for part in (self.mask, self.bias))

    def rows(self, start: int, stop: int, keys: int, device: torch.device) -> tuple[int, Tensor] | None:
        """The visibility of the first ``keys`` keys to the queries ``start:stop``.

        Returns:
            A number ``first`` and a boolean tensor that broadcasts to (B, H, stop - start, keys - first): the keys
            before ``first`` are all visible, and the tensor tells about the others. ``None`` where every key is
            visible.
        """
        first, visible = 0, None
        if self.mask is not None:
            visible = self._slice(self.mask, start, stop, keys)
        if self.bias is not None:
            unhidden = unhidden_by(self._slice(self.bias, start, stop, keys))
            visible = unhidden if visible is None else visible & unhidden
        if self.rule is not None:
            allowed = self.rule.rows(start, stop, keys)
            visible = allowed if visible is None else visible & allowed
        if self.padding is not None:
            is_token = ~self.padding[:, None, start:stop, None]
            visible = is_token if visible is None else visible & is_token
        if self.causal_offset is not None and start + self.causal_offset < keys - 1:
            last_R1 = torch.arange(start, stop, device=device)[:, None] + self.causal_offset
            first = 0 if visible is not None else max(0, start + self.causal_offset + 1)
            if 2 * first < keys:  # part of a tensor is slower to work on than the whole of it
                first = 0
            causal = (torch.arange(first, keys, device=device) <= last_R1)[None, None]
            visible = causal if visible is None else visible & causal
        return None if visible is None else (first, visible)

    def bias_rows(self, start: int, stop: int, keys: int) -> Tensor | None:
        """The part of the bias that belongs to the queries ``start:stop`` and the first ``keys`` keys."""
        return None if self.bias is None else self._slice(self.bias, start, stop, keys)

    def visible_keys(self, stop: int, keys: int) -> int:
        """How many leading keys hold everything that the queries before ``stop`` may see."""
        if self.causal_offset is None:
            return keys
        return max(0, min(keys, stop + self.causal_offset))

    def select(self, sequences: slice, heads: slice) -> Visibility:
        """The visibility of some sequences and heads."""

        def part(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            tensor = tensor if tensor.shape[0] == 1 else tensor[sequences]
            return tensor if tensor.shape[1] == 1 else tensor[:, heads]

        rule = None if self.rule is None else self.rule.select(sequences, heads)
        padding = None if self.padding is None else self.padding[sequences]
        return replace(self, mask=part(self.mask), bias=part(self.bias), rule=rule, padding=padding)

    @staticmethod
    def _slice(tensor: Tensor, start: int, stop: int, keys: int) -> Tensor:
        rows = tensor if tensor.shape[2] == 1 else tensor[:, :, start:stop]
        return rows if rows.shape[3] == 1 else rows[..., :keys]


@dataclass(frozen=True, repr=False)
class AttentionCall:
    """One evaluation of ``softmax(scale * Q K^T + bias) V`` at a site.

    Args:
        site: canonical name of the module that computes it.
        query: (B, H, N, D), in the dtype in which the model compares queries with keys.
        key: (B, K, M, D), where K divides H and query head ``h`` reads key head ``h // (H / K)``.
        value: (B, K, M, E), or ``None`` where nobody asked for it.
        scale: what the products are multiplied with.
        visibility: which keys each query may see, and the bias.
        self_attention: whether key ``i`` and query ``i`` are the same token. Told from the arguments where they show
            it, otherwise assumed where there are as many queries as keys.
        soft_cap: ``c`` of ``c * tanh(logit / c)``, applied before the bias.
        sink_logits: (H,), one more logit per head that takes weight and gives nothing (gpt-oss).
        logit_matrix: (B, H, N, M), what enters the softmax, where the model writes it down: scale, soft-cap and bias
            are in it. Queries and keys then have width 0, for what they were is not known, and the coarsest dtype that
            the logits are known to have had.
        weight_matrix: (B, H, N, M), the weights themselves, where nothing is known of the logits. They are taken as
            they are, whatever the sum of a row.
        score_rule: a function that changes logits after the scale (flex_attention).
        forward: a number that calls share if one forward pass of the site made them; ``None`` where that is not known.
        is_of_all_tokens: whether it has as many sequences and queries as the site was given, or that is not known. Only
            such calls can be those of a loop over heads.
        share: which of the site's heads these are, where ranks divide them; ``None`` where they are all.
    """

    site: str
    query: Tensor
    key: Tensor
    value: Tensor | None
    scale: float
    visibility: Visibility
    self_attention: bool
    soft_cap: float | None = None
    sink_logits: Tensor | None = None
    logit_matrix: Tensor | None = None
    weight_matrix: Tensor | None = None
    score_rule: Rule | None = None
    forward: int | None = None
    is_of_all_tokens: bool = True
    share: HeadShare | None = None

    def __repr__(self) -> str:
        is_written = self.logit_matrix is not None or self.weight_matrix is not None
        source = "written out" if is_written else f"width {self.query.shape[-1]}"
        return (
            f"AttentionCall({self.site!r}, {self.sequences} sequences, {self.heads} heads, {self.queries} queries, "
            f"{self.keys} keys, {source})"
        )

    @property
    def sequences(self) -> int:
        """Number of sequences, B."""
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        """Number of query heads, H."""
        return self.query.shape[1]

    @property
    def queries(self) -> int:
        """Number of queries, N."""
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        """Number of keys, M."""
        return self.key.shape[2]

    @property
    def group(self) -> int:
        """Number of query heads that share a key head, H / K."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def is_square(self) -> bool:
        """Whether row ``i`` and column ``i`` of the attention matrix are the same token."""
        return self.self_attention and self.queries == self.keys

    def seen_keys(self, rows: int) -> Tensor:
        """Whether any query may see a key; in self-attention, a token whose key no query may see is padding.

        Args:
            rows: how many queries are looked at together.

        Returns:
            A boolean tensor that broadcasts to (B, H, M).
        """
        visibility, device = self.visibility, self.query.device
        seen_M = torch.arange(self.keys, device=device) < visibility.visible_keys(self.queries, self.keys)
        if visibility.is_causal_at_most:
            return seen_M[None, None]
        if visibility.is_alike_for_queries:
            seen_BHM = seen_M[None, None]
            if visibility.mask is not None:
                seen_BHM = seen_BHM & visibility.mask[:, :, 0]
            if visibility.bias is not None:
                seen_BHM = seen_BHM & unhidden_by(visibility.bias[:, :, 0])
            return seen_BHM
        seen_BHM = torch.zeros_like(seen_M)[None, None]
        for start in range(0, self.queries, rows):
            stop = min(start + rows, self.queries)
            _, visible = visibility.rows(start, stop, self.keys, device) or (0, seen_M[None, None, None])
            seen_BHM = seen_BHM | visible.any(2)
        return seen_BHM

    def select(self, sequences: slice = slice(None), key_heads: slice = slice(None)) -> AttentionCall:
        """The call of some sequences and key heads with their query heads; views, no copies."""
        first, last, _ = key_heads.indices(self.key.shape[1])
        return self._select(sequences, slice(first * self.group, last * self.group), key_heads)

    def select_query_head(self, head: int) -> AttentionCall:
        """The call of a single query head; views, no copies."""
        key_head = head // self.group
        return self._select(slice(None), slice(head, head + 1), slice(key_head, key_head + 1))

    def _select(self, sequences: slice, heads: slice, key_heads: slice) -> AttentionCall:
        return replace(
            self,
            query=self.query[sequences, heads],
            key=self.key[sequences, key_heads],
            value=None if self.value is None else self._value_heads(self.value, heads)[sequences],
            visibility=self.visibility.select(sequences, heads),
            sink_logits=None if self.sink_logits is None else self.sink_logits[heads],
            logit_matrix=None if self.logit_matrix is None else self.logit_matrix[sequences, heads],
            weight_matrix=None if self.weight_matrix is None else self.weight_matrix[sequences, heads],
            score_rule=None if self.score_rule is None else self.score_rule.select(sequences, heads),
        )

    def _value_heads(self, value: Tensor, heads: slice) -> Tensor:
        """The values that some query heads read, of which each is read by as many of them."""
        group = self.heads // value.shape[1]
        first, last = heads.start // group, -(-heads.stop // group)
        if last - first == 1 or (heads.start % group == 0 and heads.stop % group == 0):
            return value[:, first:last]
        return value.repeat_interleave(group, dim=1)[:, heads]  # values that are shared in another way than keys

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> AttentionCall:
        """The call with every tensor replaced by what a function makes of it."""

        def mapped(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        return replace(
            self,
            query=function(self.query),
            key=function(self.key),
            value=mapped(self.value),
            visibility=replace(
                self.visibility,
                mask=mapped(self.visibility.mask),
                bias=mapped(self.visibility.bias),
                padding=mapped(self.visibility.padding),
            ),
            sink_logits=mapped(self.sink_logits),
            logit_matrix=mapped(self.logit_matrix),
            weight_matrix=mapped(self.weight_matrix),
        )

    def logits(self, start: int = 0) -> tuple[Tensor, Tensor]:
        """What enters the softmax: for looking at short sequences.

        Args:
            start: the first row that is wanted; the rows before it are left out.

        Returns:
            The logits (B, H, N, M) in float32, of given weights their logarithms, and a boolean tensor of the same
            shape, true where a key is visible.
        """
        if self.weight_matrix is not None:
            logits_BHNM = log_of_weights(self.weight_matrix[:, :, start:].float())
        elif self.logit_matrix is not None:
            logits_BHNM = self.logit_matrix[:, :, start:].float()
        else:
            key_BHMD = self.key.float().repeat_interleave(self.group, dim=1)
            logits_BHNM = self.query[:, :, start:].float() @ key_BHMD.transpose(-1, -2) * self.scale
        if self.score_rule is not None:
            logits_BHNM = self.score_rule.change(logits_BHNM, start)
        if self.soft_cap is not None:
            logits_BHNM = self.soft_cap * torch.tanh(logits_BHNM / self.soft_cap)
        bias = self.visibility.bias_rows(start, self.queries, self.keys)
        if bias is not None:
            logits_BHNM = logits_BHNM + bias.float()
        visible_BHNM = torch.ones_like(logits_BHNM, dtype=torch.bool)
        rows = self.visibility.rows(start, self.queries, self.keys, self.query.device)
        if rows is not None:
            first, visible = rows
            visible_BHNM[..., first:] = visible
        return logits_BHNM, visible_BHNM

    def weights(self, start: int = 0) -> Tensor:
        """The attention matrix before dropout: for looking at short sequences.

        Args:
            start: the first row that is wanted; the rows before it are left out.

        Returns:
            (B, H, N, M) in float32. Rows sum to one, to less with a learned sink, and to zero where no key is visible.
        """
        logits_BHNM, visible_BHNM = self.logits(start)
        if self.weight_matrix is not None:
            return torch.where(visible_BHNM, self.weight_matrix[:, :, start:].float(), 0.0)
        logits_BHNM = logits_BHNM.masked_fill(~visible_BHNM, torch.finfo(torch.float32).min)
        if self.sink_logits is not None:
            sink_BHN1 = self.sink_logits.float().view(1, -1, 1, 1).expand(*logits_BHNM.shape[:-1], 1)
            weights_BHNM = torch.cat([logits_BHNM, sink_BHN1], dim=-1).softmax(-1)[..., :-1]
        else:
            weights_BHNM = logits_BHNM.softmax(-1)
        return torch.where(visible_BHNM, weights_BHNM, 0.0)

    def output(self) -> Tensor:
        """What the call gives back without dropout, ``A V``: for comparing with the model's own.

        Returns:
            (B, H, N, E) in float32.

        Raises:
            ValueError: if the values were not kept.
        """
        if self.value is None:
            raise ValueError(f"The call at {self.site!r} holds no values; `record` keeps them.")
        return self.weights() @ self.value.float().repeat_interleave(self.heads // self.value.shape[1], dim=1)
