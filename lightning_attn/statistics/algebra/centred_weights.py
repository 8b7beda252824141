"""What sets attention weights apart from uniform ones, as matrices whose singular values can be asked for."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lightning_attn.capture.call import AttentionCall
from lightning_attn.statistics.rows.row_pass import RowPass


class CentredWeights:
    """Weights minus those that are spread evenly and sum to the same, as `Matrices` of the spectrum.

    Shape suffixes as in `lightning_attn.statistics.rows.row_block`.

    Args:
        row_pass: the weights.
        written: the blocks of the differences, if the pass writes its weights down. They are scaled in place.
        scale_BH11: what the differences are multiplied by.
    """

    def __init__(self, row_pass: RowPass, written: list[Tensor], scale_BH11: Tensor) -> None:
        self._row_pass = row_pass
        self._scale_BH11 = scale_BH11
        self._written = [deviation_BHRM.mul_(scale_BH11) for deviation_BHRM in written]

    @property
    def call(self) -> AttentionCall:
        """The call that they belong to."""
        return self._row_pass.call

    @property
    def writes_down(self) -> bool:
        """Whether the blocks stay as they are after the next one."""
        return self._row_pass.writes_down

    @property
    def is_one_block(self) -> bool:
        """Whether one block holds all rows."""
        return self._row_pass.is_one_block

    def weights(self) -> Iterator[Tensor]:
        """The blocks, (B, H, R, M), of leading columns; zero in absent rows."""
        if self.writes_down:
            yield from self._written
            return
        for rows in self._row_pass.blocks():
            yield rows.deviation_at_equal_mass_BHRM.mul_(self._scale_BH11)
