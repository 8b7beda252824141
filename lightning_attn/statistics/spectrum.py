"""The largest singular value of an attention matrix that is never written down.

Shape suffixes as in `lightning_attn.statistics.row_block`, and V: vectors of a block, S: vectors of a subspace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.row_pass import RowPass

#: Matrices with at most so many rows or columns are written down: their spectrum costs less than an iteration.
DENSE_SIZE = 128
#: The subspace is spanned by so many powers of A^T A, applied to so many vectors.
_POWERS = 6
_VECTORS = 12


def largest_singular_value_squared(row_pass: RowPass) -> Tensor:
    r"""The square of :math:`\|A\|_2` of each sequence and head; absent rows count as zero.

    Small matrices are written down. Otherwise it is the largest Ritz value of :math:`A^\top A` in the Krylov space of a
    block of vectors, :math:`\mathrm{span}(X, A^\top A X, (A^\top A)^2 X, \dots)`, where each power is one more walk
    over the rows. It is never above the true value, and is below it by less than 1e-3 of it.

    Returns:
        (B, H) in float32.
    """
    call = row_pass.call
    if min(call.queries, call.keys) <= DENSE_SIZE:
        return _of_dense(row_pass)
    block_BHMV = _starting_vectors(call.keys, call.query.device).expand(call.sequences, call.heads, -1, -1)
    basis: list[Tensor] = []
    for _ in range(_POWERS):
        block_BHMV = _orthonormal_to(basis, block_BHMV)
        basis.append(block_BHMV)
        block_BHMV = _gram_times(row_pass, block_BHMV)
    return _largest_eigenvalue(_projected_gram(row_pass, torch.cat(basis, dim=-1)))


def _of_dense(row_pass: RowPass) -> Tensor:
    call = row_pass.call
    weights_BHNM = call.query.new_zeros(call.sequences, call.heads, call.queries, call.keys, dtype=torch.float32)
    for rows in row_pass.blocks():
        weights_BHRM = rows.weights_BHRM
        weights_BHNM[:, :, rows.start : rows.stop, : weights_BHRM.shape[-1]] = weights_BHRM
    if call.queries < call.keys:
        weights_BHNM = weights_BHNM.transpose(-1, -2)
    return _largest_eigenvalue(weights_BHNM.transpose(-1, -2) @ weights_BHNM)


def _largest_eigenvalue(symmetric_BHSS: Tensor) -> Tensor:
    eigenvalues_BHS: Tensor = torch.linalg.eigvalsh(symmetric_BHSS)
    return eigenvalues_BHS[..., -1]


def _starting_vectors(keys: int, device: torch.device) -> Tensor:
    """Vectors that no matrix is likely to be blind to, the same every time and without touching the global generator.

    The first is constant: weights are not negative, so their leading singular vector is not orthogonal to it.
    """
    generator = torch.Generator().manual_seed(0)
    vectors_MV = torch.randn(keys, _VECTORS, generator=generator)
    vectors_MV[:, 0] = 1.0
    return vectors_MV.to(device)


def _orthonormal_to(basis: list[Tensor], block_BHMV: Tensor) -> Tensor:
    """An orthonormal basis of what a block adds to the blocks before it; twice, as once leaves rounding behind."""
    for _ in range(2):
        for known_BHMV in basis:
            block_BHMV = block_BHMV - known_BHMV @ (known_BHMV.transpose(-1, -2) @ block_BHMV)
        block_BHMV = torch.linalg.qr(block_BHMV).Q
    return block_BHMV


def _gram_times(row_pass: RowPass, vectors_BHMV: Tensor) -> Tensor:
    """``A^T A X`` in one walk over the rows."""
    product_BHMV = torch.zeros_like(vectors_BHMV, memory_format=torch.contiguous_format)
    for rows in row_pass.blocks():
        weights_BHRM = rows.weights_BHRM
        keys = weights_BHRM.shape[-1]
        product_BHMV[:, :, :keys] += weights_BHRM.transpose(-1, -2) @ (weights_BHRM @ vectors_BHMV[:, :, :keys])
    return product_BHMV


def _projected_gram(row_pass: RowPass, vectors_BHMS: Tensor) -> Tensor:
    """``(A X)^T (A X)`` in one walk over the rows."""
    size = vectors_BHMS.shape[-1]
    gram_BHSS = vectors_BHMS.new_zeros(*vectors_BHMS.shape[:2], size, size)
    for rows in row_pass.blocks():
        weights_BHRM = rows.weights_BHRM
        image_BHRS = weights_BHRM @ vectors_BHMS[:, :, : weights_BHRM.shape[-1]]
        gram_BHSS += image_BHRS.transpose(-1, -2) @ image_BHRS
    return gram_BHSS
