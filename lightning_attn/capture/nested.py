"""Sequences of different lengths in one nested tensor, strided or jagged, as sequences that are padded to one length.

Only the wanted sequences are padded, to the longest of them. Shape suffixes as in `lightning_attn.capture.call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_attn.capture.refusals import NESTED_DIFFERENTLY, NESTED_OTHERWISE


@dataclass(frozen=True)
class Padded:
    """Sequences of different lengths.

    Args:
        tensor: (B, H, N, D), zero behind the last token of a sequence.
        lengths: how many tokens each sequence has.
    """

    tensor: Tensor
    lengths: tuple[int, ...]

    @property
    def is_token_BN(self) -> Tensor:
        """True for tokens, false for padding."""
        lengths_B = torch.tensor(self.lengths, device=self.tensor.device)
        return torch.arange(self.tensor.shape[2], device=self.tensor.device) < lengths_B[:, None]


def first_of(tensor: Tensor, max_sequences: int | None) -> list[Tensor]:
    """The first sequences of a nested tensor, each a view of its memory; ``None`` for all."""
    return list(tensor.unbind()[:max_sequences])


def padded(sequences: Sequence[Tensor]) -> Padded:
    """Pad sequences, each (H, N, D), or (N, D) for a single head.

    Raises:
        UnreadableError: if they differ in more than the number of tokens, or have other axes.
    """
    sequences_HND = [sequence[None] if sequence.dim() == 2 else sequence for sequence in sequences]
    if not sequences_HND or any(sequence.dim() != 3 for sequence in sequences_HND):
        raise NESTED_OTHERWISE.error()
    if len({(heads, width) for heads, _, width in (sequence.shape for sequence in sequences_HND)}) > 1:
        raise NESTED_DIFFERENTLY.error()
    lengths = tuple(sequence.shape[1] for sequence in sequences_HND)
    heads, _, width = sequences_HND[0].shape
    tensor = sequences_HND[0].new_zeros(len(sequences_HND), heads, max(lengths), width)
    for row, sequence in zip(tensor, sequences_HND, strict=True):
        row[:, : sequence.shape[1]] = sequence
    return Padded(tensor, lengths)


def is_dense_inside(tensor: Tensor) -> bool:
    """Whether a nested tensor holds different numbers of sequences, each with all its heads and tokens.

    torch hands what is inside to its dense function then: (B, different numbers, …, N, D).
    """
    return (
        tensor.is_nested and tensor.layout == torch.jagged and tensor.dim() > 3 and not isinstance(tensor.shape[1], int)
    )
