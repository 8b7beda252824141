"""Walking over an attention matrix in blocks of rows, so that it never exists as a whole.

Shape suffixes as in `lightning_attn.statistics.row_block`; P: products of sequences and key heads, G: query heads per
key head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall
from lightning_attn.statistics.row_block import RowBlock, Workspace

#: Size of one of the three buffers of a pass. Small ones stay in a CPU's cache; large ones keep an accelerator busy.
BLOCK_BYTES = {"cpu": 4 * 2**20}
BLOCK_BYTES_ELSEWHERE = 32 * 2**20
#: Blocks of few rows suit causality, which shortens each block to what its last row sees; matrix products want some.
_MIN_ROWS = 32


@dataclass(frozen=True)
class RowPass:
    """Some sequences and heads of a call, small enough to be walked over in blocks of rows.

    Args:
        call: the sequences and heads.
        first_head: which head of the whole call the first one is.
        block_elements: how many entries of the attention matrices a block may hold.
    """

    call: AttentionCall
    first_head: int
    block_elements: int

    @cached_property
    def _query_PGND(self) -> Tensor:
        call = self.call
        shape = (-1, call.group, *call.query.shape[2:])
        return call.query.reshape(shape).float() * call.scale

    @cached_property
    def _key_PDM(self) -> Tensor:
        # Products with a transposed view take a CPU half as long again.
        return self.call.key.flatten(0, 1).float().transpose(-1, -2).contiguous()

    @cached_property
    def _rows_per_block(self) -> int:
        return max(
            1, min(self.call.queries, self.block_elements // (self.call.sequences * self.call.heads * self.call.keys))
        )

    @property
    def is_one_block(self) -> bool:
        """Whether one block holds all rows."""
        return self._rows_per_block >= self.call.queries

    @cached_property
    def _workspace(self) -> Workspace:
        call = self.call
        return Workspace(call.sequences * call.heads * self._rows_per_block * call.keys, call.query.device)

    @cached_property
    def seen_BHM(self) -> Tensor:
        """Whether any query may see a key; the key that no query sees is padding. Broadcasts to (B, H, M)."""
        return self.call.seen_keys(self._rows_per_block)

    @cached_property
    def _first_key(self) -> int | Tensor:
        """The first key that any query may see: after left padding, the first token."""
        visibility = self.call.visibility
        if visibility.mask is None and visibility.bias is None:
            return 0
        return self.seen_BHM.int().argmax(-1, keepdim=True)

    @property
    def is_surely_causal(self) -> bool:
        """Whether causality alone keeps every query from seeing a later key; otherwise masks must be looked at."""
        offset = self.call.visibility.causal_offset
        return offset is not None and offset <= 0

    @cached_property
    def _padding_BHN(self) -> Tensor | None:
        """Queries that are no tokens: in self-attention, those that nobody may see as keys."""
        visibility = self.call.visibility
        if not self.call.self_attention or (visibility.mask is None and visibility.bias is None):
            return None
        return ~self.seen_BHM[..., : self.call.queries]

    def blocks(self, without_key_BH1: Tensor | None = None) -> Iterator[RowBlock]:
        """The rows from the first to the last. A block is spoilt by the next one.

        Args:
            without_key_BH1: a key of each sequence and head that is hidden from every query.
        """
        for start in range(0, self.call.queries, self._rows_per_block):
            stop = min(start + self._rows_per_block, self.call.queries)
            # A block in which no key is visible keeps one, hidden.
            keys = max(1, self.call.visibility.visible_keys(stop, self.call.keys))
            yield self._block(start, stop, keys, without_key_BH1)

    def _block(self, start: int, stop: int, keys: int, without_key_BH1: Tensor | None) -> RowBlock:
        call = self.call
        shape = (call.sequences, call.heads, stop - start, keys)
        logits_BHRM = self._workspace.buffer(0, shape)
        torch.bmm(
            self._query_PGND[:, :, start:stop].flatten(1, 2),
            self._key_PDM[..., :keys],
            out=logits_BHRM.view(self._key_PDM.shape[0], -1, keys),
        )
        if call.soft_cap is not None:
            logits_BHRM.div_(call.soft_cap).tanh_().mul_(call.soft_cap)
        bias = call.visibility.bias_rows(start, stop, keys)
        if bias is not None:
            logits_BHRM.add_(bias)
        return RowBlock(
            logits_BHRM,
            call.visibility.rows(start, stop, keys, logits_BHRM.device),
            start,
            padding_BHR=None if self._padding_BHN is None else self._padding_BHN[..., start:stop],
            sink_logits_H1=None if call.sink_logits is None else call.sink_logits.float()[:, None],
            first_key=self._first_key,
            without_key_BH1=without_key_BH1,
            workspace=self._workspace,
        )


def passes(call: AttentionCall, block_bytes: int | None = None, *, whole_matrices: bool = False) -> Iterator[RowPass]:
    """Divide a call into passes over as many sequences and heads as fit a block of useful size.

    Args:
        call: the call.
        block_bytes: the memory that a block of logits may take; the default depends on the device. A single row of one
            group of heads is always allowed.
        whole_matrices: have few heads with all their rows in a block rather than many heads with some of them, where
            that fits.

    Yields:
        Passes that together cover every sequence and head once, ordered by sequence and then by head.
    """
    if block_bytes is None:
        block_bytes = BLOCK_BYTES.get(call.query.device.type, BLOCK_BYTES_ELSEWHERE)
    elements = block_bytes // 4
    key_heads = call.key.shape[1]
    rows = min(call.queries, _MIN_ROWS)
    if whole_matrices and call.group * call.queries * call.keys <= elements:
        rows = call.queries
    sequences = max(1, elements // max(1, call.heads * rows * call.keys))
    heads = max(1, min(key_heads, elements // max(1, call.group * rows * call.keys)))
    for sequence in range(0, call.sequences, sequences):
        for head in range(0, key_heads, heads):
            part = call.select(slice(sequence, sequence + sequences), slice(head, head + heads))
            yield RowPass(part, head * call.group, elements)
