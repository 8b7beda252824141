r"""Scaling the rows and columns of a kernel to given sums, in the log domain and in blocks of rows (Sinkhorn).

A plan is :math:`P_{ij} = a_i \, \mathrm{softmax}_j(\log K_{ij} + g_j)`, which has exact rows whatever the potentials of
the keys :math:`g` are. They alone are kept, and each walk over the rows gives what keys receive, from which
:math:`g_j` moves by the logarithm of what is wanted over what was received. A walk is a full sweep: the potentials of
queries are the denominators of the softmax, which are never written down.

Shape suffixes: R rows of a block, N queries, M keys, K leading keys of a block; any dimensions may lead, written B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

#: The logarithm of zero: finite, so that sums of it are no NaN, and below every logarithm of a kernel.
LOG_ZERO = -1e30


class KernelRows(NamedTuple):
    """Some rows of a kernel."""

    #: Number of the first row.
    start: int
    #: Logarithm of the kernel, (B, R, K), of any floating type; `LOG_ZERO` where it is zero.
    log_kernel_BRK: Tensor

    def plan(self, row_mass_BN: Tensor, potential_BM: Tensor) -> Tensor:
        """What these rows give to the leading keys, (B, R, K), in the type of the potentials."""
        rows, keys = self.log_kernel_BRK.shape[-2:]
        exponent_BRK = self.log_kernel_BRK + potential_BM[..., None, :keys]
        return exponent_BRK.softmax(-1).mul_(row_mass_BN[..., self.start : self.start + rows, None])


class Scaling(NamedTuple):
    """The potentials of the keys, and how far what keys receive still is from what is wanted."""

    #: (B, M).
    potential_BM: Tensor
    #: Total variation distance of the two distributions over keys, (B,).
    gap_B: Tensor


def least_tolerance(dtype: torch.dtype) -> float:
    """The smallest gap that rounding lets the iteration reach in any case."""
    return 16 * torch.finfo(dtype).eps


def sinkhorn_scaling(
    kernel: Callable[[], Iterable[KernelRows]],
    row_mass_BN: Tensor,
    key_mass_BM: Tensor,
    max_sweeps: int,
    tolerance: float,
) -> Scaling:
    """Potentials of the keys with which they receive what is wanted.

    Args:
        kernel: gives the rows of the kernel, which are walked over once for each sweep and once more.
        row_mass_BN: what each row gives away; zero where it sees no key.
        key_mass_BM: what each key is to receive. The sum is that of the rows; where both are zero, nothing is done.
        max_sweeps: how many times potentials are moved at most.
        tolerance: a matrix is done when its gap is this or less, and rests while others go on.

    Returns:
        The potentials, in the type of ``key_mass_BM``, and the gap that they leave.
    """
    wanted_BM = key_mass_BM > 0
    total_B = key_mass_BM.sum(-1).clamp(min=torch.finfo(key_mass_BM.dtype).tiny)
    potential_BM = torch.where(wanted_BM, 0.0, LOG_ZERO).to(key_mass_BM.dtype)
    gap_B = torch.zeros_like(total_B)
    moving_B = torch.ones_like(total_B, dtype=torch.bool)
    for sweep in range(max_sweeps + 1):
        received_BM = _received(kernel(), row_mass_BN, potential_BM)
        gap_B = torch.where(moving_B, (received_BM - key_mass_BM).abs().sum(-1) / (2 * total_B), gap_B)
        moving_B = moving_B & (gap_B > tolerance)
        if sweep == max_sweeps or not bool(moving_B.any()):
            break
        # A key that receives less than numbers hold is moved by as much as they do, and by the rest in the next sweep.
        step_BM = key_mass_BM.log() - received_BM.clamp(min=torch.finfo(received_BM.dtype).tiny).log()
        potential_BM = torch.where(wanted_BM & moving_B[..., None], potential_BM + step_BM, potential_BM)
    return Scaling(potential_BM, gap_B)


def _received(kernel: Iterable[KernelRows], row_mass_BN: Tensor, potential_BM: Tensor) -> Tensor:
    """What each key receives from all rows."""
    received_BM = torch.zeros_like(potential_BM)
    for rows in kernel:
        of_rows_BK = rows.plan(row_mass_BN, potential_BM).sum(-2)
        received_BM[..., : of_rows_BK.shape[-1]] += of_rows_BK
    return received_BM
