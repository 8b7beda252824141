"""The exact median of numbers that come in blocks, and are never together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

#: The 31 bits of a float32 that is not negative, in three digits: few enough to be counted in small tables.
_DIGITS = (11, 10, 10)


def lower_median(blocks: Callable[[], Iterable[tuple[Tensor, Tensor]]], count_B: Tensor) -> Tensor:
    """The lower median of numbers that are not negative, in float32, for each sequence.

    Such floats are ordered as their bits are. The bits of the median are found digit by digit, from how often each
    digit occurs behind those already known: one walk over the numbers for each digit, and no number is moved.

    Args:
        blocks: walks over the numbers; each block is (B, K) in float32 with a boolean tensor that broadcasts to it,
            false where a number does not count.
        count_B: how many numbers count.

    Returns:
        (B,) in float32; anything where nothing counts.
    """
    rank_B = ((count_B - 1) // 2).clamp(min=0)
    known_B = torch.zeros_like(rank_B)
    shift = sum(_DIGITS)
    for width in _DIGITS:
        shift -= width
        size = 2**width
        # Numbers that do not count, or differ in a digit already known, fall into one more place at the end.
        first_B1 = torch.arange(len(rank_B), device=rank_B.device)[:, None] * (size + 1)
        table_BD = torch.zeros(len(rank_B), size + 1, dtype=torch.int64, device=rank_B.device)
        for number_BK, counted_BK in blocks():
            bits_BK = number_BK.contiguous().view(torch.int32) >> shift
            possible_BK = ((bits_BK >> width) == known_B[:, None]) & counted_BK
            place_BK = torch.where(possible_BK, bits_BK & (size - 1), size) + first_B1
            table_BD += torch.bincount(place_BK.flatten(), minlength=table_BD.numel()).view_as(table_BD)
        before_BD = table_BD[:, :-1].cumsum(1)
        digit_B = (before_BD <= rank_B[:, None]).sum(1).clamp(max=size - 1)
        rank_B = rank_B - (before_BD - table_BD[:, :-1]).gather(1, digit_B[:, None])[:, 0]
        known_B = known_B << width | digit_B
    return known_B.int().view(torch.float32)
