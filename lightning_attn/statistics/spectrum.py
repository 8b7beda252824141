"""The largest singular value of an attention matrix that need not be written down.

Shape suffixes as in `lightning_attn.statistics.row_block`, and V: vectors of a block, S: vectors of a subspace.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_attn.statistics.row_pass import RowPass
from lightning_attn.statistics.statistic import wide

#: A^T A or A A^T is decomposed if it has at most so many rows: that costs less than an iteration.
_DECOMPOSED_SIZE = 128
#: The subspace is spanned by powers of A^T A applied to so many vectors: at most so many powers, and fewer where one
#: more raises the result by less than the tolerance.
_VECTORS = 8
_POWERS = 20
_TOLERANCE = 1e-5


def largest_singular_value_squared(row_pass: RowPass) -> Tensor:
    r"""The square of :math:`\|A\|_2` of each sequence and head; absent rows count as zero.

    Large matrices have the largest Ritz value of :math:`A^\top A` in the Krylov space of a block of vectors,
    :math:`\mathrm{span}(X, A^\top A X, (A^\top A)^2 X, \dots)`, which is never above the true value. Each power is one
    walk over the rows.

    Returns:
        (B, H) in float32.
    """
    weights = _Weights(row_pass)
    if row_pass.call.keys <= _DECOMPOSED_SIZE:
        return _largest_eigenvalue(weights.gram())
    if row_pass.call.queries <= _DECOMPOSED_SIZE and row_pass.is_one_block:
        (weights_BHRM,) = weights
        return _largest_eigenvalue(weights_BHRM @ weights_BHRM.transpose(-1, -2))
    return _krylov(weights)


class _Weights:
    """The attention matrix in blocks of rows, walked over again and again; written down where it is one block."""

    def __init__(self, row_pass: RowPass) -> None:
        self.call = row_pass.call
        self._row_pass = row_pass
        self._single: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        if not self._row_pass.is_one_block:
            yield from (rows.weights_BHRM for rows in self._row_pass.blocks())
            return
        if self._single is None:
            (self._single,) = (rows.weights_BHRM for rows in self._row_pass.blocks())
        yield self._single

    def gram(self) -> Tensor:
        """``A^T A``."""
        gram_BHMM = self._zeros(self.call.keys)
        for weights_BHRM in self:
            keys = weights_BHRM.shape[-1]
            gram_BHMM[..., :keys, :keys] += weights_BHRM.transpose(-1, -2) @ weights_BHRM
        return gram_BHMM

    def gram_times(self, vectors_BHMV: Tensor) -> Tensor:
        """``A^T A X``."""
        product_BHMV = self._zeros(vectors_BHMV.shape[-1])
        for weights_BHRM in self:
            keys = weights_BHRM.shape[-1]
            product_BHMV[..., :keys, :] += weights_BHRM.transpose(-1, -2) @ (weights_BHRM @ vectors_BHMV[..., :keys, :])
        return product_BHMV

    def _zeros(self, columns: int) -> Tensor:
        call = self.call
        return torch.zeros(call.sequences, call.heads, call.keys, columns, device=call.query.device)


def _krylov(weights: _Weights) -> Tensor:
    call = weights.call
    block_BHMV = _starting_vectors(call.keys, call.query.device).expand(call.sequences, call.heads, -1, -1)
    basis_BHMS = images_BHMS = block_BHMV[..., :0]
    largest_BH = torch.zeros(call.sequences, call.heads, device=call.query.device)
    for _ in range(_POWERS):
        block_BHMV = _orthonormal(block_BHMV, basis_BHMS)
        image_BHMV = weights.gram_times(block_BHMV)
        basis_BHMS = torch.cat([basis_BHMS, block_BHMV], dim=-1)
        images_BHMS = torch.cat([images_BHMS, image_BHMV], dim=-1)
        before_BH, largest_BH = largest_BH, _largest_eigenvalue(basis_BHMS.transpose(-1, -2) @ images_BHMS)
        if bool((largest_BH - before_BH <= _TOLERANCE * largest_BH).all()):
            break
        block_BHMV = image_BHMV
    return largest_BH


def _starting_vectors(keys: int, device: torch.device) -> Tensor:
    """Vectors that no matrix is likely to be blind to, always the same, without a draw from the global generator.

    The first is constant: weights are not negative, so their leading singular vector is not orthogonal to it.
    """
    generator = torch.Generator().manual_seed(0)
    vectors_MV = torch.randn(keys, _VECTORS, generator=generator)
    vectors_MV[:, 0] = 1.0
    return vectors_MV.to(device)


def _orthonormal(block_BHMV: Tensor, basis_BHMS: Tensor) -> Tensor:
    """An orthonormal basis of what a block adds to a subspace.

    Where it adds nothing, the decomposition of both together still gives directions outside the subspace; projecting
    the subspace out of the block alone would leave nothing but rounding. The second round removes the rounding of the
    first.
    """
    known = basis_BHMS.shape[-1]
    block_BHMV = torch.linalg.qr(torch.cat([basis_BHMS, block_BHMV], dim=-1)).Q[..., known:]
    block_BHMV = block_BHMV - basis_BHMS @ (basis_BHMS.transpose(-1, -2) @ block_BHMV)
    orthonormal_BHMV: Tensor = torch.linalg.qr(block_BHMV).Q
    return orthonormal_BHMV


def _largest_eigenvalue(positive_BHSS: Tensor) -> Tensor:
    """The largest eigenvalue of positive semidefinite matrices."""
    try:
        eigenvalues_BHS: Tensor = torch.linalg.eigvalsh(positive_BHSS.to(wide(positive_BHSS.device)))
        return eigenvalues_BHS[..., -1].to(positive_BHSS.dtype)
    except RuntimeError:  # LAPACK does not converge for some collapsed heads, whose rows are nearly all alike
        return _largest_eigenvalue_by_squaring(positive_BHSS)


def _largest_eigenvalue_by_squaring(positive_BHSS: Tensor) -> Tensor:
    """The same by powers of the matrix, of which only the leading direction remains: slower, but it never fails."""
    power_BHSS = positive_BHSS
    for _ in range(16):
        power_BHSS = power_BHSS / power_BHSS.amax((-2, -1), keepdim=True).clamp(min=1e-30)
        power_BHSS = power_BHSS @ power_BHSS
    strongest_BH11 = power_BHSS.norm(dim=-2, keepdim=True).argmax(-1, keepdim=True)
    leading_BHS1 = power_BHSS.gather(-1, strongest_BH11.expand(*power_BHSS.shape[:-1], 1))
    image_BHS1 = positive_BHSS @ leading_BHS1
    squared_BH = leading_BHS1.square().sum((-2, -1)).clamp(min=1e-30)
    return (leading_BHS1 * image_BHS1).sum((-2, -1)) / squared_BH
