"""The second largest eigenvalue of an attention matrix that need not be written down.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`, and S: vectors of a subspace. Vectors are rows here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lightning_attn.statistics.rows.row_pass import RowPass

#: Matrices of at most so many rows are decomposed.
_DECOMPOSED_SIZE = 128
#: Vectors of the subspace in which the eigenvalues of larger ones are sought.
_STEPS = 40
#: So many powers of the matrix are applied to a vector before a subspace is built on it; each number is one more try
#: for heads of which the one before did not tell enough. They damp what dies out soon, of which sharp heads are full.
_POWERS = (40, 80, 160)
#: A matrix that is computed anew for each product gets one try, of fewer powers.
_POWERS_UNWRITTEN = (10,)
#: An eigenvalue is settled if its vector is one up to a residual of this.
_RESIDUAL = 5e-4
#: An eigenvalue that may be wrong by more than this says nothing. By how much it may be is its condition number times
#: what the numbers may be wrong by: the weights by their rounding, a subspace by what it leaves out. It is large for
#: matrices that are far from normal, such as those that are nearly triangular.
_TOLERANCE = 5e-3
_ROUNDING_OF_WEIGHTS = 1e-7
_ERROR_OF_SUBSPACE = 1e-4
#: Beside an eigenvalue, where a system can be solved whose solution is next to its eigenvector.
_SHIFT = 1e-10
#: Rows that sum to one up to this have the constant vector for an eigenvector.
_ROUNDING = 1e-4


def second_eigenvalue(row_pass: RowPass) -> Tensor:
    r"""The second largest modulus of an eigenvalue, :math:`|\lambda_2|`, of each square matrix.

    Matrices of at most 128 rows are decomposed. For larger ones it is an eigenvalue of the matrix in a Krylov subspace
    of 40 vectors (Arnoldi), sought orthogonally to the constant vector on the tokens that are present. That vector
    belongs to the eigenvalue 1 where rows sum to one; with :math:`P = I - 1 1^\top / n`, :math:`P A` has the others.
    Where rows sum to less, as with a learned sink, the second one is taken of the whole space.

    What is found so is within 0.01 of the true value. Where the iteration does not settle, as for heads that are nearly
    a permutation, it is the larger of two estimates: the eigenvalue in the subspace, and the rate at which powers of
    the matrix shrink a vector.

    Heads that are nearly, but not quite, causal are far from normal: the eigenvalue of their matrix is ill-conditioned,
    and speaks of more steps than there are tokens. Where that shows, there is no value; where the iteration does not
    settle on them, it is the rate of the first hundred steps.

    Returns:
        (B, H) in double precision on the CPU. Absent rows count as zero. NaN where the eigenvalue is ill-conditioned: a
        change as small as rounding moves it.
    """
    if row_pass.call.queries <= _DECOMPOSED_SIZE:
        try:
            return _eigenvalue(_matrix(row_pass), torch.tensor(1), _ROUNDING_OF_WEIGHTS)[0]
        except RuntimeError:  # LAPACK does not converge for some collapsed heads
            pass
    return _arnoldi(row_pass)


def _matrix(row_pass: RowPass) -> Tensor:
    """The matrix as a whole."""
    keys = max(2, row_pass.call.keys)  # one row more, so that there is a second eigenvalue
    blocks = [functional.pad(weights, (0, keys - weights.shape[-1])) for weights in row_pass.weights()]
    matrix_BHNM = torch.cat(blocks, dim=-2).cpu().double()
    return functional.pad(matrix_BHNM, (0, 0, 0, keys - matrix_BHNM.shape[-2]))


def _eigenvalue(matrix_BHSS: Tensor, place: Tensor, error: float) -> tuple[Tensor, Tensor]:
    """The modulus of an eigenvalue, NaN where it may be wrong by more than the tolerance; and its vector of length 1.

    The condition number of an eigenvalue is 1 over the product of its two eigenvectors, from either side, of length 1.

    Args:
        matrix_BHSS: the matrices.
        place: its place in the order of moduli, 0 for the largest; broadcasts to (B, H).
        error: what the numbers of the matrix may be wrong by.
    """
    values_BHS, vectors_BHSS = torch.linalg.eig(matrix_BHSS)
    place_BH1 = place.expand(values_BHS.shape[:-1])[..., None]
    wanted_BH1 = values_BHS.abs().argsort(dim=-1, descending=True).gather(-1, place_BH1)
    value_BH1, vector_BHS = values_BHS.gather(-1, wanted_BH1), _column(vectors_BHSS, wanted_BH1)
    left_BHS = _left_vector(matrix_BHSS, value_BH1)
    is_uncertain_BH = error > _TOLERANCE * (left_BHS * vector_BHS).sum(-1).abs()
    # Of several equal eigenvalues, and of many that are next to nothing, it is the vectors that are open.
    is_one_of_several_BH = ((values_BHS - value_BH1).abs() < 1e-5).sum(-1) > 1
    modulus_BH = value_BH1[..., 0].abs()
    is_open_BH = is_one_of_several_BH | (modulus_BH <= _TOLERANCE)
    return torch.where(is_uncertain_BH & ~is_open_BH, torch.nan, modulus_BH), vector_BHS


def _left_vector(matrix_BHSS: Tensor, value_BH1: Tensor) -> Tensor:
    """The eigenvector from the left that belongs to an eigenvalue, by inverse iteration: cheaper than all of them."""
    size = matrix_BHSS.shape[-1]
    identity_SS = torch.eye(size, dtype=matrix_BHSS.dtype)
    shifted_BHSS = matrix_BHSS.mT - (value_BH1[..., None] + _SHIFT) * identity_SS
    generator = torch.Generator().manual_seed(0)
    start_S = torch.randn(size, generator=generator, dtype=matrix_BHSS.dtype).to(shifted_BHSS.dtype)
    left_BHS, _ = torch.linalg.solve_ex(shifted_BHSS, start_S.expand((*value_BH1.shape[:-1], size)))
    left_BHS = left_BHS.nan_to_num(nan=0.0)
    unit_BHS: Tensor = left_BHS / torch.linalg.vector_norm(left_BHS, dim=-1, keepdim=True).clamp(min=1e-300)
    return unit_BHS


def _column(matrix_BHSS: Tensor, number_BH1: Tensor) -> Tensor:
    column_BHS1 = matrix_BHSS.gather(-1, number_BH1[..., None, :].expand(*matrix_BHSS.shape[:-1], 1))
    return column_BHS1[..., 0]


def _arnoldi(row_pass: RowPass) -> Tensor:
    operator = _Deflated(row_pass)
    generator = torch.Generator().manual_seed(0)
    start_N = torch.randn(row_pass.call.queries, generator=generator).to(operator.device)
    start_BHN = operator.project(start_N.expand(operator.shape))
    is_deflated_BH = operator.is_deflated_BH.cpu()
    vector_BHN = start_BHN
    for powers in _POWERS if row_pass.writes_down else _POWERS_UNWRITTEN:
        vector_BHN, growth_BH = _powers(operator, vector_BHN, powers)
        # Where nothing is deflated, powers would leave nothing but the first eigenvector.
        vector_BHN = torch.where(operator.is_deflated_BH[..., None], vector_BHN, start_BHN)
        found_BH, residual_BH = _ritz(*_hessenberg(operator, vector_BHN), is_deflated_BH)
        is_settled_BH = (residual_BH <= _RESIDUAL) | ~is_deflated_BH
        if bool(is_settled_BH.all()):
            break
    growth_BH = torch.where(found_BH.isnan(), found_BH, growth_BH.cpu().double())
    return torch.where(is_settled_BH, found_BH, torch.maximum(found_BH, growth_BH))


class _Deflated:
    """The matrix, and what of its images is orthogonal to the constant vector, where that is an eigenvector."""

    def __init__(self, row_pass: RowPass) -> None:
        self._row_pass = row_pass
        call = row_pass.call
        self.shape = (call.sequences, call.heads, call.queries)
        self.device = call.query.device
        mass_BHN = torch.cat([weights_BHRM.sum(-1) for weights_BHRM in row_pass.weights()], dim=-1)
        present_BHN = (mass_BHN > 0).float()
        image_BHN = self._times(present_BHN)
        self.is_deflated_BH = ((image_BHN - present_BHN).abs() <= _ROUNDING).all(-1)
        constant_BHN = present_BHN / present_BHN.sum(-1, keepdim=True).clamp(min=1).sqrt()
        self._constant_BHN = constant_BHN * self.is_deflated_BH[..., None]

    def project(self, vector_BHN: Tensor) -> Tensor:
        """Without its part along the constant vector."""
        return vector_BHN - (vector_BHN * self._constant_BHN).sum(-1, keepdim=True) * self._constant_BHN

    def __call__(self, vector_BHN: Tensor) -> Tensor:
        """``P A x``."""
        return self.project(self._times(vector_BHN))

    def _times(self, vector_BHN: Tensor) -> Tensor:
        vector_BH1N = vector_BHN[:, :, None]
        parts = [vector_BH1N[..., : weights.shape[-1]] @ weights.mT for weights in self._row_pass.weights()]
        return torch.cat(parts, dim=-1)[:, :, 0]


def _powers(operator: _Deflated, vector_BHN: Tensor, powers: int) -> tuple[Tensor, Tensor]:
    """A power of the matrix applied to a vector, at length one; and its growth by a step, over the second half."""
    logarithms = []
    for _ in range(powers):
        vector_BHN = operator(vector_BHN)
        length_BH1 = vector_BHN.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        vector_BHN = vector_BHN / length_BH1
        logarithms.append(length_BH1[..., 0].log())
    return vector_BHN, torch.stack(logarithms[powers // 2 :]).mean(0).exp()


def _hessenberg(operator: _Deflated, vector_BHN: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix in the Krylov space of a vector, (B, H, S, S), and how much of its image is outside, (B, H).

    A direction that is nothing but rounding ends the space: what follows is zero, and adds zeros to the eigenvalues.
    """
    batch = operator.shape[:2]
    basis_BHSN = vector_BHN.new_zeros(*batch, _STEPS + 1, operator.shape[2])
    hessenberg_BHSS = vector_BHN.new_zeros(*batch, _STEPS + 1, _STEPS)
    basis_BHSN[:, :, 0] = vector_BHN / vector_BHN.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    for step in range(_STEPS):
        image_BHN = operator(basis_BHSN[:, :, step])
        longest_BH1 = image_BHN.norm(dim=-1, keepdim=True)
        known_BHSN = basis_BHSN[:, :, : step + 1]
        for _ in range(2):  # the second round removes the rounding of the first
            coefficients_BHS1 = known_BHSN @ image_BHN[..., None]
            image_BHN = image_BHN - (coefficients_BHS1.mT @ known_BHSN)[:, :, 0]
            hessenberg_BHSS[:, :, : step + 1, step] += coefficients_BHS1[..., 0]
        length_BH1 = image_BHN.norm(dim=-1, keepdim=True)
        length_BH1 = torch.where(length_BH1 > 1e-5 * longest_BH1, length_BH1, 0.0)
        hessenberg_BHSS[:, :, step + 1, step] = length_BH1[..., 0]
        basis_BHSN[:, :, step + 1] = torch.where(length_BH1 > 0, image_BHN / length_BH1, 0.0)
    return hessenberg_BHSS[:, :, :_STEPS], hessenberg_BHSS[:, :, _STEPS, _STEPS - 1]


def _ritz(hessenberg_BHSS: Tensor, outside_BH: Tensor, is_deflated_BH: Tensor) -> tuple[Tensor, Tensor]:
    """The wanted modulus of an eigenvalue, and the residual of its vector: (B, H) in double precision on the CPU."""
    try:
        modulus_BH, vector_BHS = _eigenvalue(
            hessenberg_BHSS.cpu().double(), (~is_deflated_BH).long(), _ERROR_OF_SUBSPACE
        )
        return modulus_BH, outside_BH.cpu().double() * vector_BHS[..., -1].abs()
    except RuntimeError:  # LAPACK does not converge: the growth of powers remains
        nothing_BH = torch.zeros_like(outside_BH.cpu(), dtype=torch.float64)
        return nothing_BH, nothing_BH + torch.inf
