"""How far apart the numbers are that logits can be, in the type in which the model has its queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Maximum, Range, RowStatistic

#: The bits of a float32 that are its exponent: alone they are the power of two at or below it.
_EXPONENT_BITS = 0x7F800000


@register
class LogitSpacing(RowStatistic):
    r"""The distance between neighbouring numbers of the dtype of queries and keys, where the largest logits are.

    :math:`\epsilon \cdot 2^{\lfloor \log_2 |z| \rfloor}`, with :math:`z` the number of that dtype nearest to the
    largest visible logit of a row (after scale, soft-cap and bias), of the row where that is furthest from zero, and
    :math:`\epsilon` the distance from 1 to the dtype's next number. 0 where these logits are zero, infinite where one
    exceeds the dtype's largest number. Logits far below the largest of their row are no matter, since they get no
    weight: those of far keys under ALiBi, or of keys that a penalty all but hides.

    Where logits are computed in that dtype, two of them that differ by less than this may be rounded to one number; at
    1 or more these may be keys whose weights should differ by a factor of e. Kernels that accumulate in float32, such
    as FlashAttention, do not round logits like this. The entries of queries and keys are rounded there too, and move
    each product by a relative error of the same order: for such kernels read it as a measure of that, not as the
    error itself.
    """

    name = "logit_spacing"
    lens = "Entropy and logits"
    range = Range(0, None)
    uniform = "any"
    example = 0.0
    reading = (
        "At 1, logits that differ by 1 may be rounded to one number: in bf16 from logits of 128 on, in fp16 from 1024."
    )
    source = "IEEE 754 (unit in the last place), of logits: a definition of this package"
    by_default = False
    over_heads = "max"
    joined_by = "max"
    needs_logits = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._largest: Tensor | None = None

    def add(self, rows: RowBlock) -> None:
        """Look at the largest logit of each row."""
        largest_BH = torch.where(rows.present_BHR, rows.row_max_BHR.abs(), -torch.inf).amax(-1)
        self._largest = largest_BH if self._largest is None else torch.maximum(self._largest, largest_BH)

    def result(self) -> Maximum:
        """The spacing where the largest of all rows is."""
        assert self._largest is not None
        spacing_BH = spacing_at(self._largest, self.row_pass.call.query.dtype)
        return Maximum(torch.where(self._largest.isneginf(), -torch.inf, spacing_BH))


def spacing_at(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from numbers that are not negative to the next larger one of a floating type.

    Args:
        sizes: the numbers, in float32; they are rounded to the type first.
        dtype: the type.

    Returns:
        The distances in float32: 0 at 0, infinite where the type has no such number.

    Example:
        >>> spacing_at(torch.tensor([0.0, 1.0, 127.0, 128.0]), torch.bfloat16)
        tensor([0.0000, 0.0078, 0.5000, 1.0000])
        >>> spacing_at(torch.tensor([1024.0, 65504.0, 65536.0]), torch.float16)
        tensor([ 1., 32., inf])
    """
    kind = torch.finfo(dtype)
    rounded = sizes.to(dtype).float()
    powers = (rounded.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return torch.where(rounded > 0, powers.clamp(min=kind.tiny) * kind.eps, 0.0)
