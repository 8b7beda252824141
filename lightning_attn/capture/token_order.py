"""Which keys a kernel lets a query see by the order of tokens alone: causality, a window, sequences that are packed.

Nothing is written down: of sequences packed into one, a mask of all pairs would be the largest tensor of the model.
Shape suffixes as in `lightning_attn.capture.call`, and S: packed sequences, R: rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_attn.capture.call import Visibility


@dataclass(frozen=True)
class TokenOrder:
    """Where queries and keys stand in their sequences, and what that hides.

    Places are counted from the end of a sequence, for kernels line up its last query with its last key.

    Args:
        query_places, key_places: the place of each, (N,) and (M,); the last one of a sequence has -1.
        is_causal: whether a query sees no key after it.
        window: how many keys a causal query sees, itself among them; one that looks both ways sees so many to either
            side. ``None`` for all.
        query_sequences, key_sequences: the number of the packed sequence that each belongs to, (N,) and (M,); ``None``
            where nothing is packed.
    """

    query_places: Tensor
    key_places: Tensor
    is_causal: bool
    window: int | None
    query_sequences: Tensor | None = None
    key_sequences: Tensor | None = None

    def rows(self, start: int, stop: int, keys: int) -> Tensor:
        """Where the queries ``start:stop`` may see the first keys, (1, 1, stop - start, keys)."""
        distance_RM = self.query_places[start:stop, None] - self.key_places[:keys]
        visible_RM = distance_RM >= 0 if self.is_causal else torch.ones_like(distance_RM, dtype=torch.bool)
        if self.window is not None:
            visible_RM &= distance_RM.abs() < self.window
        if self.query_sequences is not None and self.key_sequences is not None:
            visible_RM &= self.query_sequences[start:stop, None] == self.key_sequences[:keys]
        return visible_RM[None, None]

    def change(self, logits_BHRM: Tensor, start: int) -> Tensor:
        """Order changes no logit."""
        return logits_BHRM

    def select(self, sequences: slice, heads: slice) -> TokenOrder:
        """It is the same for all sequences of a batch and all heads."""
        return self


def order_of_one_sequence(
    queries: int, keys: int, device: torch.device, *, is_causal: bool, window: int | None
) -> Visibility:
    """What is visible where each sequence of the batch is one."""
    causal_offset = keys - queries if is_causal else None
    if window is None or window >= keys:
        return Visibility(causal_offset)
    query_places, key_places = torch.arange(-queries, 0, device=device), torch.arange(-keys, 0, device=device)
    return Visibility(causal_offset, rule=TokenOrder(query_places, key_places, is_causal, window))


def order_of_packed_sequences(
    queries: int, query_ends: Tensor, keys: int, key_ends: Tensor, *, is_causal: bool, window: int | None
) -> Visibility:
    """What is visible where a sequence of the batch consists of several, one after the other.

    Args:
        queries: their number.
        query_ends: where the queries of each sequence end, after a zero, (1 + S,): flash-attn's ``cu_seqlens``. What
            comes after the last one belongs to no sequence: it sees nothing, and nothing sees it.
        keys: their number.
        key_ends: where the keys of each sequence end, likewise.
        is_causal: as in `TokenOrder`.
        window: as in `TokenOrder`.
    """
    query_sequences, query_places = _sequences_and_places(queries, query_ends, of_none=-1)
    key_sequences, key_places = _sequences_and_places(keys, key_ends, of_none=-2)
    order = TokenOrder(query_places, key_places, is_causal, window, query_sequences, key_sequences)
    is_square = queries == keys and torch.equal(query_ends, key_ends)
    return Visibility(causal_offset=0 if is_causal and is_square else None, rule=order)


def _sequences_and_places(tokens: int, ends: Tensor, of_none: int) -> tuple[Tensor, Tensor]:
    """The number of each token's sequence, and its place in it."""
    last, number = ends[1:].long(), torch.arange(tokens, device=ends.device)
    sequences = torch.searchsorted(last, number, right=True)
    is_in_one = sequences < len(last)
    places = number - last[sequences.clamp(max=len(last) - 1)]
    return torch.where(is_in_one, sequences, of_none), places
