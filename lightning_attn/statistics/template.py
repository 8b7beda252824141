"""How much of a pattern is a matter of position: the part that all sequences have in common.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`, and C: diagonals of the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, wide

#: A row that deviates from uniform weights by less than this part of them is uniform: the rest is rounding, which errs
#: in all sequences alike and so looks like a pattern of positions.
_ROUNDING = 3e-6
#: What the squares of all deviations sum to, at least: of smaller ones, beside a learned sink that takes nearly
#: everything, single precision holds too few digits.
_SMALLEST_TOTAL = 1e-38


class _Explained:
    """Sums over rows of what the patterns of different sequences have in common, and of what there is of them."""

    def __init__(self, row_pass: RowPass) -> None:
        call = row_pass.call
        self._sequences = call.sequences
        self._sums_2H = torch.zeros(2, call.heads, dtype=wide(call.query.device), device=call.query.device)

    def add(self, common_H: Tensor, total_H: Tensor) -> None:
        """Add the products of pairs of sequences, and the squares of each."""
        self._sums_2H += torch.stack([common_H, total_H])

    def result(self) -> Ratio:
        """The two sums, which belong to all sequences together, in equal parts."""
        common_H, total_H = self._sums_2H
        # No more is in common than there is; what rounding leaves of rows that are uniform is in the one sum alone.
        total_H = torch.where(total_H > _SMALLEST_TOTAL, total_H, 0.0)
        common_H = torch.where(total_H > 0, torch.minimum(common_H, total_H), 0.0)
        parts_2H = torch.stack([common_H, total_H]) / self._sequences
        return Ratio(*parts_2H[:, None].expand(-1, self._sequences, -1))


def _squares(deviation_BHRM: Tensor, uniform_BHR: Tensor) -> Tensor:
    """Squared length of what each row deviates from uniform, (B, H, R); zero where it is rounding."""
    squares_BHR = torch.linalg.vector_norm(deviation_BHRM, dim=-1).square()
    return torch.where(squares_BHR > _ROUNDING**2 * uniform_BHR, squares_BHR, 0.0)


@register
class PositionalShare(RowStatistic):
    r"""Share of the pattern that the mean over sequences explains, corrected for the number of sequences.

    With :math:`D^b = A^b - U^b`, where :math:`U` spreads the sum of the row evenly over its visible keys, so that what
    a learned sink takes is no pattern, it is the sum over rows of
    :math:`\sum_{b \ne b'} \langle D^b, D^{b'} \rangle / (B - 1)`, divided by that of :math:`\sum_b \|D^b\|^2`. Only the
    :math:`B \ge 2` sequences that have the row count. Taking pairs of different sequences is what makes it unbiased:
    pure content gives 0 however few sequences there are, where the plain share :math:`R` gives :math:`1 / B`; it is
    :math:`(B R - 1) / (B - 1)`. Pairs are of the sequences of one call on one rank.
    """

    name = "positional_share"
    lens = "Position"
    range = Range(None, 1)
    uniform = "absent"
    reading = "1: all sequences have the same pattern, by position; 0: it depends on content. Needs two sequences."
    source = "after Cui et al. 2024, arXiv:2402.03902"
    compares_sequences = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._explained = _Explained(row_pass)

    def deviation(self, rows: RowBlock) -> tuple[Tensor, Tensor]:
        """What each row has beside even weights, (B, H, R, M), and the square of these, (B, H, R): zero if absent."""
        even_BHR = (rows.uniform_share_BHR * rows.mass_BHR.square()).clamp(min=torch.finfo(torch.float32).tiny)
        return rows.deviation_at_equal_mass_BHRM, torch.where(rows.present_BHR, even_BHR, 0.0)

    def add(self, rows: RowBlock) -> None:
        """Compare the sequences of each row."""
        if self.row_pass.call.sequences == 1:
            return
        deviation_BHRM, uniform_BHR = self.deviation(rows)
        number_HR = (uniform_BHR > 0).sum(0)
        total_HR = _squares(deviation_BHRM, uniform_BHR).sum(0)
        of_sum_HR = torch.linalg.vector_norm(deviation_BHRM.sum(0), dim=-1).square()
        of_sum_HR = torch.minimum(of_sum_HR, number_HR * total_HR)  # as it is, but for rows of which nothing counts
        common_HR = (of_sum_HR - total_HR) / (number_HR - 1).clamp(min=1)
        both_2HR = torch.where(number_HR >= 2, torch.stack([common_HR, total_HR]), 0.0)
        self._explained.add(*both_2HR.sum(-1, dtype=wide(both_2HR.device)))

    def result(self) -> Ratio:
        """The two sums; nothing of one sequence."""
        return self._explained.result()


@register
class PositionalShareWithoutSink(PositionalShare):
    """`PositionalShare` of the matrix without the first visible key, whose rows are renormalised.

    A sink is a matter neither of position nor of content, and makes all sequences alike. Rows that give all other keys
    less than 1e-30 beside the first do not count.
    """

    name = "positional_share_without_sink"
    lens = "Position"
    range = Range(None, 1)
    uniform = "absent"
    reading = "As `positional_share`, of what a sink on the first key leaves. Needs two sequences."
    source = "after Cui et al. 2024, arXiv:2402.03902"
    by_default = False

    def deviation(self, rows: RowBlock) -> tuple[Tensor, Tensor]:
        """The same of the keys beside the first."""
        return rows.deviation_without_first_key()


@register
class ToeplitzShare(RowStatistic):
    r"""Share of the pattern that depends on :math:`i - j` alone, without the sink.

    Of the matrix without the first visible key, whose rows are renormalised, it compares :math:`D^b = A^b - U^b` with a
    template that is constant along diagonals. Diagonal :math:`k` of sequence :math:`b` has :math:`n^b_k` visible
    entries in present rows of at least two other keys; :math:`\bar D^b_k` is their mean and :math:`Q^b_k` their mean
    square. The share is :math:`\sum_k w_k \sum_{b \ne b'} \bar D^b_k \bar D^{b'}_k / (B_k - 1)` over
    :math:`\sum_k w_k \sum_b Q^b_k`, of the diagonals that :math:`B_k \ge 2` sequences have, which count by
    :math:`w_k`, the mean of :math:`n^b_k` over these.

    Sequences of unlike length count alike along a diagonal that they share, by which three things hold at once,
    whatever lengths and masks: pairs of different sequences give pure content 0 on average; no share exceeds 1, since
    :math:`(\bar D^b_k)^2 \le Q^b_k`; and it is 1 where :math:`D_{ij}` depends on :math:`i - j` alone. Of sequences with
    the same mask, the denominator is :math:`\sum_b \|D^b\|^2`.

    Uniform weights :math:`U_{ij} = 1/m_i` are no matter of distance themselves under causality, and depend on the
    length. So weights that are one have a share somewhat below 1, which it nears in long sequences: a causal
    previous-token head has 0.95 on two of 16 tokens, 0.99 on two of 256, and 0.85 on 16 and 4. Rows that give all other
    keys less than 1e-30 beside the first do not count. Absent where queries and keys are not the same tokens.
    """

    name = "toeplitz_share"
    lens = "Position"
    range = Range(None, 1)
    uniform = "absent"
    reading = (
        "1: the pattern is one of distances, as nearly that of a causal previous-token head; 0: it is not. "
        "Needs two sequences."
    )
    source = "after Cui et al. 2024, arXiv:2402.03902"
    compares_sequences = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        call = row_pass.call
        self._is_defined = call.is_square and call.sequences > 1
        self._diagonals: Diagonals | None = None
        if self._is_defined:
            size = (call.sequences, call.heads, 2 * call.queries)
            device, dtype = call.query.device, wide(call.query.device)
            # Sums of the deviation, of its square, and of the entries that count.
            self._sum_BHC, self._square_BHC, self._count_BHC = torch.zeros(3, *size, device=device, dtype=dtype)
            self._uniform_BH = torch.zeros(size[:2], device=device, dtype=dtype)

    def add(self, rows: RowBlock) -> None:
        """Add up the deviation, and its square, along each diagonal."""
        if not self._is_defined:
            return
        call, number = self.row_pass.call, rows.stop - rows.start
        if self._diagonals is None:
            self._diagonals = Diagonals((call.sequences, call.heads), number, call.keys, call.query.device)
        deviation_BHRM, uniform_BHR = rows.deviation_without_first_key(self._diagonals.matrix(number, rows.keys))
        self._uniform_BH += uniform_BHR.sum(-1, dtype=self._uniform_BH.dtype)
        # The last row of the block has its first diagonal where the first row of the matrix would have it.
        diagonals = slice(call.queries - rows.stop, call.queries - rows.stop + number + rows.keys - 1)
        self._sum_BHC[..., diagonals] += self._diagonals.sums(number, rows.keys)
        deviation_BHRM.square_()
        self._square_BHC[..., diagonals] += self._diagonals.sums(number, rows.keys)
        self._count_BHC[..., diagonals] += self._counts(rows, uniform_BHR)

    def _counts(self, rows: RowBlock, uniform_BHR: Tensor) -> Tensor:
        """How many entries of each diagonal count; broadcasts."""
        visible_BHRM = rows.visible_BHRM * rows.is_other_key_BHM[:, :, None]
        # A row that sees one other key gives all to it: it has no pattern, and does not speak against one.
        has_choice_BHR = visible_BHRM.sum(-1) >= 2
        visible_BHRM = visible_BHRM * has_choice_BHR[..., None]
        counted_BHR = uniform_BHR > 0
        # Others that do not count are few. Without any, one matrix will do for all heads.
        if counted_BHR.device.type != "cpu" or not bool((counted_BHR | ~has_choice_BHR).all()):
            visible_BHRM = visible_BHRM * counted_BHR[..., None]
        batch, (number, keys) = visible_BHRM.shape[:2], (rows.stop - rows.start, rows.keys)
        diagonals = Diagonals(batch, number, keys, visible_BHRM.device)
        diagonals.matrix(number, keys).copy_(visible_BHRM)
        return diagonals.sums(number, keys)

    def result(self) -> Ratio:
        """The two sums, of the diagonals that two sequences have."""
        explained = _Explained(self.row_pass)
        if self._is_defined:
            # A sequence without anything but rounding has no pattern, as `_squares` has it for rows.
            has_pattern_BH = self._square_BHC.sum(-1) > _ROUNDING**2 * self._uniform_BH
            share_BHC = has_pattern_BH[..., None] / self._count_BHC.clamp(min=1)
            mean_BHC, square_BHC = self._sum_BHC * share_BHC, self._square_BHC * share_BHC
            sequences_HC = (self._count_BHC > 0).sum(0)
            pairs_HC = mean_BHC.sum(0).square() - mean_BHC.square().sum(0)
            both_2HC = torch.stack([pairs_HC / (sequences_HC - 1).clamp(min=1), square_BHC.sum(0)])
            weight_HC = torch.where(sequences_HC >= 2, self._count_BHC.sum(0) / sequences_HC.clamp(min=1), 0.0)
            explained.add(*(both_2HC * weight_HC).sum(-1))
        return explained.result()


class Diagonals:
    """Memory for blocks of rows, such that their diagonals can be added up.

    To the left of each row are as many zeros as there are rows. Read back in rows that are longer by one, each row is
    shifted by one against the next, so that diagonals become columns.

    Args:
        batch: numbers of sequences and heads.
        rows: the most rows that a block has.
        keys: the most keys; no block may have fewer than the one before.
        device: where.
    """

    def __init__(self, batch: Sequence[int], rows: int, keys: int, device: torch.device) -> None:
        self._rows = rows
        self._length = rows + keys
        self._memory = torch.zeros(*batch, (rows + 1) * self._length, device=device)

    def matrix(self, rows: int, keys: int) -> Tensor:
        """Where to write a block, (B, H, R, M)."""
        padded: Tensor = self._memory.unflatten(-1, (-1, self._length))
        return padded[:, :, :rows, self._rows : self._rows + keys]

    def sums(self, rows: int, keys: int) -> Tensor:
        """Sums along the diagonals of the block, (B, H, R + M - 1), from the lowest on the left to the highest."""
        shifted: Tensor = self._memory[..., : rows * (self._length + 1)].unflatten(-1, (rows, self._length + 1))
        return shifted[..., self._rows - rows + 1 : self._rows + keys].sum(-2)
