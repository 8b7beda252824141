"""How far attention is from giving every key as much as every other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from lightning_attn.statistics.algebra.sinkhorn_potentials import (
    LOG_ZERO,
    KernelRows,
    least_tolerance,
    sinkhorn_scaling,
)
from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.received import UniformReceivedWeight
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences, wide

#: A sweep is a walk over the matrix. Attention that is not sharp takes a few tens.
MAX_SWEEPS = 200
#: How far keys may be from receiving alike, in total variation; more where a device has no double precision.
TOLERANCE = 1e-7


@register
class SinkhornDistance(RowStatistic):
    r"""Mean over rows of the total variation :math:`\frac12 \sum_j |A_{ij} - P_{ij}|` to the balanced plan.

    :math:`P` is the matrix that scaling the rows and columns of :math:`A` gives, whose rows sum to one and whose
    columns to :math:`n / m`, with :math:`n` present rows and :math:`m` keys that any of them sees: doubly stochastic
    where they are as many. It is the plan of entropic transport with the same logits and both sides fixed. Rows that
    do not sum to one, as beside a learned sink, are renormalised.

    Each sweep of the iteration walks over the matrix once, in double precision; of heads up to 2896 tokens the logits
    are kept meanwhile. Absent where there are as many queries as keys and no query sees a later key: the identity is
    the only balanced plan then. Absent too where 200 sweeps do not suffice: under other masks that leave no plan with
    weight on all visible keys, and for logits so sharp that scaling hardly moves them.
    """

    name = "sinkhorn_distance"
    lens = "Transport"
    range = Range(0, 1)
    uniform = "0 without a mask"
    reading = (
        "0: doubly stochastic, as trained bidirectional heads tend to be; near 1: balancing the keys would change "
        "everything. Absent in causal heads and where 200 sweeps do not balance it."
    )
    source = "Sander et al. 2022, arXiv:2110.11773"
    by_default = False
    is_spectral = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._uniform = row_pass.shared(UniformReceivedWeight)
        self._present: list[Tensor] = []
        call = row_pass.call
        can_be_causal = call.queries == call.keys
        shape = (call.sequences, call.heads)
        self._looks_ahead_BH = torch.full(shape, not can_be_causal, device=call.query.device)
        self._has_to_look = can_be_causal and not row_pass.is_surely_causal

    def add(self, rows: RowBlock) -> None:
        """Find the rows and the keys, and whether a query sees a later one."""
        self._uniform.add(rows)
        self._present.append(rows.present_BHR)
        if self._has_to_look:
            self._looks_ahead_BH = self._looks_ahead_BH | rows.looks_ahead_BH

    def result(self) -> Ratio:
        """The distance of each sequence and head whose plan was found."""
        present_BHN = torch.cat(self._present, dim=-1)
        is_wanted_BH = self._looks_ahead_BH & present_BHN.any(-1)
        distance_BH = torch.zeros_like(is_wanted_BH, dtype=wide(is_wanted_BH.device))
        if not bool(is_wanted_BH.any()):
            return mean_over_sequences(distance_BH, is_wanted_BH)
        row_mass_BHN = (present_BHN & is_wanted_BH[..., None]).to(distance_BH.dtype)
        is_seen_BHM = (self._uniform.sum_BHM > 0).to(distance_BH.dtype)
        rows_BH = row_mass_BHN.sum(-1)
        key_mass_BHM = is_seen_BHM * (rows_BH / is_seen_BHM.sum(-1).clamp(min=1))[..., None]
        kernel = _kernel(self.row_pass)
        tolerance = max(TOLERANCE, least_tolerance(distance_BH.dtype))
        potential_BHM, gap_BH = sinkhorn_scaling(kernel, row_mass_BHN, key_mass_BHM, MAX_SWEEPS, tolerance)
        no_potential_BHM = torch.zeros_like(potential_BHM)
        for rows in kernel():
            difference_BHRM = rows.plan(row_mass_BHN, potential_BHM).sub_(rows.plan(row_mass_BHN, no_potential_BHM))
            distance_BH += difference_BHRM.abs_().sum((-2, -1))
        distance_BH = (distance_BH / (2 * rows_BH).clamp(min=1)).clamp(max=1)
        return mean_over_sequences(distance_BH, is_wanted_BH & (gap_BH <= tolerance))


def _kernel(row_pass: RowPass) -> Callable[[], Iterable[KernelRows]]:
    """The logits relative to the largest of their row, to be walked over again and again.

    Weights would not do: those below the smallest number of single precision matter, where nobody gives a key more.
    """

    def walk() -> Iterator[KernelRows]:
        for rows in row_pass.blocks():
            counts_BHRM = (rows.visible_BHRM > 0) & rows.present_BHR[..., None]
            yield KernelRows(rows.start, torch.where(counts_BHRM, rows.gap_BHRM, LOG_ZERO))

    if not row_pass.writes_down:
        return walk
    written = list(walk())
    return lambda: written
