"""The exact median of numbers that come in blocks, and are never together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

#: The 31 bits of a float32 that is not negative, in three digits: few enough to be counted in small tables.
_DIGITS = (11, 10, 10)
#: How many places the largest of these tables has for each sequence.
TABLE_SIZE = 2 ** max(_DIGITS) + 2


def lower_median(blocks: Callable[[], Iterable[Tensor]], count_B: Tensor) -> Tensor:
    """The lower median of numbers that are not negative, for each sequence.

    Such floats are ordered as their bits are. The bits of the median are found digit by digit, from how often each
    digit occurs behind those already known: one walk over the numbers for each digit, and no number is moved.

    Args:
        blocks: walks over the numbers; each block is (B, K) in float32, contiguous, and is overwritten. A number that
            does not count is infinite.
        count_B: how many numbers count.

    Returns:
        (B,) in float32; anything where nothing counts.
    """
    rank_B = (count_B - 1) // 2  # so many numbers are before it
    known_B = torch.zeros_like(rank_B, dtype=torch.int32)
    shift = sum(_DIGITS)
    for width in _DIGITS:
        shift -= width
        # A table has a place for each digit, and one on either side for numbers that differ in a digit already known.
        size = 2**width + 2
        first_B1 = torch.arange(1, len(rank_B) * size, size, dtype=torch.int32, device=rank_B.device)[:, None]
        table_BD = torch.zeros(len(rank_B), size, dtype=torch.int64, device=rank_B.device)
        for number_BK in blocks():
            place_BK = number_BK.view(torch.int32).sub_(known_B[:, None])
            place_BK.bitwise_right_shift_(shift).clamp_(-1, 2**width).add_(first_B1)
            table_BD += place_BK.flatten().bincount(minlength=table_BD.numel()).view_as(table_BD)
        place_B = (table_BD.cumsum(1) <= rank_B[:, None]).sum(1).clamp(1, 2**width)
        known_B = known_B + ((place_B - 1) << shift).int()
    return known_B.view(torch.float32)
