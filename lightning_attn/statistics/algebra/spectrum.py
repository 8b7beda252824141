"""The leading singular values of an attention matrix that need not be written down.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`, and V: vectors of a block, S: vectors of a subspace.
Vectors are rows here: products of few rows with a large matrix are what a CPU does best.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall
from lightning_attn.statistics.statistic import wide

#: A^T A or A A^T is decomposed if it has at most so many rows: that costs less than an iteration.
_DECOMPOSED_SIZE = 128
#: The subspace is spanned by powers of A^T A applied to so many vectors: at most so many powers, and fewer where one
#: more changes neither the largest value nor the second beside it by more than the tolerance.
_VECTORS = 8
_POWERS = 30
_TOLERANCE = 2e-5
#: A direction that a power adds is rounding if it is shorter than this part of the longest that it could be.
_ROUNDING = 1e-6


class Matrices(Protocol):
    """A matrix for each sequence and head, in blocks of rows: the weights of a `RowPass`, or what is made of them."""

    @property
    def call(self) -> AttentionCall:
        """The call that they belong to."""

    @property
    def writes_down(self) -> bool:
        """Whether the blocks stay as they are after the next one."""

    @property
    def is_one_block(self) -> bool:
        """Whether one block holds all rows."""

    def weights(self) -> Iterator[Tensor]:
        """The blocks, (B, H, R, M), of leading columns; zero in absent rows."""


def leading_singular_values(matrices: Matrices) -> Tensor:
    r"""The largest singular value :math:`\sigma_1` and the second, :math:`\sigma_2`, of each sequence and head.

    Matrices with at most 128 rows or columns are decomposed. Larger ones have the largest Ritz values of
    :math:`A^\top A` in the Krylov space of a block of vectors, :math:`\mathrm{span}(X, A^\top A X, (A^\top A)^2 X,
    \dots)`, which are never above the true ones. Absent rows count as zero. Statistics get it from `RowPass.shared`,
    so that they share one iteration.

    Returns:
        (B, H, 2), the largest first; the second is zero where the matrix has a single row or column.
    """
    call = matrices.call
    if call.keys <= _DECOMPOSED_SIZE:
        return _leading(_gram(matrices)).sqrt()
    if call.queries <= _DECOMPOSED_SIZE:
        blocks = list(matrices.weights()) if matrices.writes_down or matrices.is_one_block else []
        if len(blocks) == 1:
            weights_BHNM = blocks[0].to(wide(blocks[0].device))
            return _leading(weights_BHNM @ weights_BHNM.mT).sqrt()
    return _krylov(matrices).sqrt()


def _gram(matrices: Matrices) -> Tensor:
    """``A^T A`` in double precision: single precision would leave nothing of a small second singular value."""
    call = matrices.call
    gram_BHMM = torch.zeros(
        call.sequences, call.heads, call.keys, call.keys, dtype=wide(call.query.device), device=call.query.device
    )
    for weights_BHRM in matrices.weights():
        keys = weights_BHRM.shape[-1]
        weights_BHRM = weights_BHRM.to(gram_BHMM.dtype)
        gram_BHMM[..., :keys, :keys] += weights_BHRM.mT @ weights_BHRM
    return gram_BHMM


def _times_gram(matrices: Matrices, vectors_BHVM: Tensor) -> Tensor:
    """``X A^T A``."""
    product_BHVM = torch.zeros_like(vectors_BHVM)
    for weights_BHRM in matrices.weights():
        keys = weights_BHRM.shape[-1]
        product_BHVM[..., :keys] += (vectors_BHVM[..., :keys] @ weights_BHRM.mT) @ weights_BHRM
    return product_BHVM


def _krylov(matrices: Matrices) -> Tensor:
    """The two largest eigenvalues of ``A^T A`` by a block Lanczos iteration with full reorthogonalisation."""
    call = matrices.call
    batch, device = (call.sequences, call.heads), call.query.device
    start_VM = _starting_vectors(call.keys, device)
    basis_BHSM = _orthonormal(start_VM.expand(*batch, -1, -1), start_VM.new_zeros(*batch, 0, call.keys), longest=0.0)
    block_BHVM = basis_BHSM
    ritz_BHSS = torch.zeros(*batch, 0, 0, dtype=wide(device), device=device)
    values_BH2 = torch.zeros(*batch, 2, dtype=wide(device), device=device)
    for _ in range(_POWERS):
        image_BHVM = _times_gram(matrices, block_BHVM)
        ritz_BHSS = _bordered(ritz_BHSS, (basis_BHSM @ image_BHVM.mT).to(ritz_BHSS.dtype))
        before_BH2, values_BH2 = values_BH2, _leading(ritz_BHSS)
        if _is_settled(before_BH2, values_BH2):
            break
        block_BHVM = _orthonormal(image_BHVM, basis_BHSM, longest=values_BH2[..., 0])
        basis_BHSM = torch.cat([basis_BHSM, block_BHVM], dim=-2)
    return values_BH2


def _is_settled(before_BH2: Tensor, values_BH2: Tensor) -> bool:
    """Whether the largest singular value and the second beside it have stopped growing, in every head."""
    largest_BH1 = values_BH2[..., :1].sqrt().clamp(min=1e-30)
    return bool(((values_BH2.sqrt() - before_BH2.sqrt()) <= _TOLERANCE * largest_BH1).all())


def _bordered(ritz_BHSS: Tensor, columns_BHSV: Tensor) -> Tensor:
    """A symmetric matrix with more columns at its end, and the same rows."""
    known, added = ritz_BHSS.shape[-1], columns_BHSV.shape[-1]
    bordered_BHSS = torch.nn.functional.pad(ritz_BHSS, (0, added, 0, added))
    bordered_BHSS[..., known:] = columns_BHSV
    bordered_BHSS[..., known:, :] = columns_BHSV.mT
    corner_BHVV = columns_BHSV[..., known:, :]
    bordered_BHSS[..., known:, known:] = (corner_BHVV + corner_BHVV.mT) / 2
    return bordered_BHSS


def _starting_vectors(keys: int, device: torch.device) -> Tensor:
    """Vectors that no matrix is likely to be blind to, always the same, without a draw from the global generator.

    The first is constant: weights are not negative, so their leading singular vector is not orthogonal to it.
    """
    generator = torch.Generator().manual_seed(0)
    vectors_VM = torch.randn(_VECTORS, keys, generator=generator)
    vectors_VM[0] = 1.0
    return vectors_VM.to(device)


def _orthonormal(block_BHVM: Tensor, basis_BHSM: Tensor, longest: Tensor | float) -> Tensor:
    """An orthonormal basis of what a block adds to a subspace, with zeros in the place of what it does not add.

    A direction that is nothing but rounding would be as good as any other, but for the time that it costs. The second
    round removes the rounding of the first.
    """
    for shortest in (_ROUNDING * longest, 0.5):
        block_BHVM = block_BHVM - (block_BHVM @ basis_BHSM.mT) @ basis_BHSM
        block_BHVM = _principal_directions(block_BHVM, shortest)
    return block_BHVM


def _principal_directions(block_BHVM: Tensor, shortest: Tensor | float) -> Tensor:
    """The principal directions of some vectors, of length one; zeros for those along which they are short."""
    wide_BHVM = block_BHVM.to(wide(block_BHVM.device))
    try:
        squares_BHV, directions_BHVV = torch.linalg.eigh(wide_BHVM @ wide_BHVM.mT)
    except RuntimeError:  # LAPACK does not converge: the subspace stays as it is
        return torch.zeros_like(block_BHVM)
    is_kept_BHV = squares_BHV > torch.as_tensor(shortest, device=block_BHVM.device)[..., None] ** 2
    scale_BHV = torch.where(is_kept_BHV, squares_BHV.clamp(min=1e-60).rsqrt(), 0.0)
    principal_BHVM: Tensor = (directions_BHVV * scale_BHV[..., None, :]).mT @ wide_BHVM
    return principal_BHVM.to(block_BHVM.dtype)


def _leading(positive_BHSS: Tensor) -> Tensor:
    """The two largest eigenvalues of positive semidefinite matrices, (B, H, 2); zero where there is none."""
    try:
        values_BHS = torch.linalg.eigvalsh(positive_BHSS).flip(-1)[..., :2]
    except RuntimeError:  # LAPACK does not converge for some collapsed heads, whose rows are nearly all alike
        values_BHS = _leading_by_squaring(positive_BHSS)
    return torch.nn.functional.pad(values_BHS, (0, 2 - values_BHS.shape[-1])).clamp(min=0)


def _leading_by_squaring(positive_BHSS: Tensor) -> Tensor:
    """The same by powers of the matrix, of which only the leading direction remains: slower, but it never fails."""
    values = []
    for _ in range(min(2, positive_BHSS.shape[-1])):
        power_BHSS = positive_BHSS
        for _ in range(16):
            power_BHSS = power_BHSS / power_BHSS.amax((-2, -1), keepdim=True).clamp(min=1e-30)
            power_BHSS = power_BHSS @ power_BHSS
        strongest_BH11 = power_BHSS.norm(dim=-2, keepdim=True).argmax(-1, keepdim=True)
        leading_BHS1 = power_BHSS.gather(-1, strongest_BH11.expand(*power_BHSS.shape[:-1], 1))
        leading_BHS1 = leading_BHS1 / leading_BHS1.norm(dim=-2, keepdim=True).clamp(min=1e-30)
        value_BH11 = leading_BHS1.mT @ positive_BHSS @ leading_BHS1
        positive_BHSS = positive_BHSS - value_BH11 * leading_BHS1 @ leading_BHS1.mT
        values.append(value_BH11[..., 0, 0])
    return torch.stack(values, dim=-1)
