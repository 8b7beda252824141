"""Walking over an attention matrix in blocks of rows, so that it never exists as a whole.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`; P: products of sequences and key heads, G: query heads
per key head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall, log_of_weights
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.workspace import Workspace

#: Size of one of the three buffers of a pass. Small ones stay in a CPU's cache; large ones keep an accelerator busy.
BLOCK_BYTES = {"cpu": 4 * 2**20}
BLOCK_BYTES_ELSEWHERE = 32 * 2**20
#: Blocks of few rows suit causality, which shortens each block to what its last row sees; matrix products want some.
_MIN_ROWS = 32
#: Weights that are asked for again and again are written down where they take no more than this: one head of 2896
#: tokens. They are walked over in blocks of so many rows, which stay in a CPU's cache from one product to the next.
WRITTEN_BYTES = 32 * 2**20
_WRITTEN_ROWS = 128

_Result = TypeVar("_Result")


def default_block_bytes(device: torch.device) -> int:
    """The memory that a block should take on a device."""
    return BLOCK_BYTES.get(device.type, BLOCK_BYTES_ELSEWHERE)


@dataclass(frozen=True)
class RowPass:
    """Some sequences and heads of a call, small enough to be walked over in blocks of rows.

    Args:
        call: the sequences and heads.
        first_head: which head of the whole call the first one is.
        block_elements: how many entries of the attention matrices a block may hold.
        writes_down: whether the first walk keeps the weights for later ones.
    """

    call: AttentionCall
    first_head: int
    block_elements: int
    writes_down: bool = False
    _written: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)
    _results: dict[Callable[[RowPass], Any], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def shared(self, compute: Callable[[RowPass], _Result]) -> _Result:
        """What several statistics need of this pass, computed by the first that asks.

        The result must not hold the pass, which would keep the memory of both for longer than they are needed.
        """
        if compute not in self._results:
            self._results[compute] = compute(self)
        return cast("_Result", self._results[compute])

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
        call = self.call
        rows = min(call.queries, self.block_elements // (call.sequences * call.heads * call.keys))
        return max(1, min(rows, _WRITTEN_ROWS) if self.writes_down else rows)

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
    def first_key(self) -> int | Tensor:
        """The first key that any query may see: after left padding, the first token."""
        if self.call.visibility.is_causal_at_most:
            return 0
        return self.seen_BHM.int().argmax(-1, keepdim=True)

    @property
    def is_surely_causal(self) -> bool:
        """Whether causality alone keeps every query from seeing a later key; otherwise masks must be looked at."""
        offset = self.call.visibility.causal_offset
        return offset is not None and offset <= 0

    @property
    def is_without_unit_rows(self) -> bool:
        """Whether rows may sum to something else than one: beside a learned sink, or as given weights do."""
        return self.call.sink_logits is not None or self.call.weight_matrix is not None

    @cached_property
    def _padding_BHN(self) -> Tensor | None:
        """Queries that are no tokens: in self-attention, those that nobody may see as keys."""
        if self.call.visibility.padding is not None:
            return self.call.visibility.padding[:, None]
        if not self.call.self_attention or self.call.visibility.is_causal_at_most:
            return None
        return ~self.seen_BHM[..., : self.call.queries]

    def blocks(self, without_key_BH1: Tensor | None = None) -> Iterator[RowBlock]:
        """The rows from the first to the last. A block is spoilt by the next one.

        Args:
            without_key_BH1: a key of each sequence and head that is hidden from every query.
        """
        writing = self.writes_down and without_key_BH1 is None and not self._written
        written: list[Tensor] = []
        for start in range(0, self.call.queries, self._rows_per_block):
            stop = min(start + self._rows_per_block, self.call.queries)
            # A block in which no key is visible keeps one, hidden.
            keys = max(1, self.call.visibility.visible_keys(stop, self.call.keys))
            rows = self._block(start, stop, keys, without_key_BH1)
            yield rows
            if writing:
                written.append(rows.weights_BHRM.clone())
        self._written.extend(written)

    def weights(self) -> Iterator[Tensor]:
        """The attention weights in blocks of rows, (B, H, R, M): zero in absent rows.

        They are computed anew by each walk where they are too large to be written down, and a block is then spoilt by
        the next one. A block has the leading keys that any of its rows can see.
        """
        if not self.writes_down:
            yield from (rows.weights_BHRM for rows in self.blocks())
            return
        if not self._written:
            for _ in self.blocks():
                pass
        yield from self._written

    def _block(self, start: int, stop: int, keys: int, without_key_BH1: Tensor | None) -> RowBlock:
        call = self.call
        shape = (call.sequences, call.heads, stop - start, keys)
        logits_BHRM = self._workspace.buffer(0, shape)
        if call.weight_matrix is not None:
            logits_BHRM.copy_(log_of_weights(call.weight_matrix[:, :, start:stop, :keys].float()))
        elif call.logit_matrix is not None:
            logits_BHRM.copy_(call.logit_matrix[:, :, start:stop, :keys])
        else:
            torch.bmm(
                self._query_PGND[:, :, start:stop].flatten(1, 2),
                self._key_PDM[..., :keys],
                out=logits_BHRM.view(self._key_PDM.shape[0], -1, keys),
            )
        if call.score_rule is not None:
            logits_BHRM.copy_(call.score_rule.change(logits_BHRM, start))
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
            first_key=self.first_key,
            without_key_BH1=without_key_BH1,
            are_weights=call.weight_matrix is not None,
            workspace=self._workspace,
        )


def passes(
    call: AttentionCall,
    block_bytes: int | None = None,
    *,
    whole_matrices: bool = False,
    all_sequences: bool = False,
) -> Iterator[RowPass]:
    """Divide a call into passes over as many sequences and heads as fit a block of useful size.

    Args:
        call: the call.
        block_bytes: the memory that a block of logits may take; the default depends on the device. A single row of one
            group of heads is always allowed, and of all sequences where they must not be divided.
        whole_matrices: have few heads with all their rows rather than many heads with some of them, and write their
            weights down in the first walk, where they take no more than `WRITTEN_BYTES`.
        all_sequences: have few heads of all sequences rather than many heads of some of them.

    Yields:
        Passes that together cover every sequence and head once, ordered by sequence and then by head.
    """
    if block_bytes is None:
        block_bytes = default_block_bytes(call.query.device)
    elements = block_bytes // 4
    if whole_matrices and call.queries * call.keys <= WRITTEN_BYTES // 4:
        yield from _written_passes(call, elements)
        return
    key_heads = call.key.shape[1]
    rows = min(call.queries, _MIN_ROWS)
    sequences = call.sequences if all_sequences else max(1, elements // max(1, call.heads * rows * call.keys))
    of_key_head = call.group * rows * call.keys * (call.sequences if all_sequences else 1)
    heads = max(1, min(key_heads, elements // max(1, of_key_head)))
    for sequence in range(0, call.sequences, sequences):
        for head in range(0, key_heads, heads):
            part = call.select(slice(sequence, sequence + sequences), slice(head, head + heads))
            yield RowPass(part, head * call.group, elements)


def _written_passes(call: AttentionCall, elements: int) -> Iterator[RowPass]:
    """Passes over heads whose weights fit what may be written down: as many as fit a block, or one."""
    matrix = call.queries * call.keys
    sequences = max(1, elements // (call.heads * matrix))
    heads = max(1, elements // (call.group * matrix))
    for sequence in range(0, call.sequences, sequences):
        for head in range(0, call.key.shape[1], heads):
            part = call.select(slice(sequence, sequence + sequences), slice(head, head + heads))
            first = head * call.group
            if part.sequences * part.heads * matrix <= WRITTEN_BYTES // 4:
                yield RowPass(part, first, elements, writes_down=True)
            else:  # a group of heads that is too large together
                for number in range(part.heads):
                    yield RowPass(part.select_query_head(number), first + number, elements, writes_down=True)
