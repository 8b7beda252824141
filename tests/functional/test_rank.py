"""Ranks of any matrices, against singular values of numpy and what is known in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_attn.functional.ranks import effective_rank, participation_ratio, stable_rank

RANKS = [stable_rank, participation_ratio, effective_rank]
each_rank = pytest.mark.parametrize("rank", RANKS)


def of_numpy(matrix: np.ndarray) -> list[float]:
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    share = values[values > 0] / values.sum()
    squares = values**2
    return [
        squares.sum() / squares[0],
        squares.sum() ** 2 / (squares**2).sum(),
        float(np.exp(-(share * np.log(share)).sum())),
    ]


@pytest.mark.parametrize("turned", [False, True])
def test_three_and_one(turned: bool) -> None:
    matrix = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    if turned:
        matrix = torch.linalg.qr(torch.randn(5, 2, dtype=torch.float64)).Q @ matrix
    assert float(effective_rank(matrix)) == pytest.approx(1.7547653506, abs=1e-10)
    assert float(stable_rank(matrix)) == pytest.approx(10 / 9, abs=1e-12)
    assert float(participation_ratio(matrix)) == pytest.approx(100 / 82, abs=1e-12)


@each_rank
def test_identity_and_rank_one(rank: Callable[[Tensor], Tensor]) -> None:
    assert float(rank(torch.eye(64))) == pytest.approx(64)
    assert float(rank(torch.ones(20, 30))) == pytest.approx(1)
    assert float(rank(torch.randn(7, 1))) == pytest.approx(1)


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
@pytest.mark.parametrize("shape", [(6, 4), (3, 5, 9), (2, 2, 8, 8)])
def test_any_leading_dimensions_and_types(shape: tuple[int, ...], dtype: torch.dtype, relative: float) -> None:
    matrix = torch.randn(shape).to(dtype)
    expected = [of_numpy(one.double().numpy()) for one in matrix.reshape(-1, *shape[-2:])]
    for number, rank in enumerate(RANKS):
        found = rank(matrix)
        assert found.shape == shape[:-2]
        assert found.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        assert found.flatten().tolist() == pytest.approx([values[number] for values in expected], rel=relative)


@each_rank
@pytest.mark.parametrize("factor", [1e-30, 1e30, -1.0])
def test_scale_has_no_effect(rank: Callable[[Tensor], Tensor], factor: float) -> None:
    matrix = torch.randn(6, 9)
    assert float(rank(factor * matrix)) == pytest.approx(float(rank(matrix)), rel=1e-5)


def test_the_three_in_order() -> None:
    """The weaker a direction may be to count, the more there are."""
    for size in (0.01, 1.0, 5.0):
        matrix = torch.softmax(size * torch.randn(8, 40, 40), dim=-1)
        stable, participation, effective = (rank(matrix) for rank in RANKS)
        assert (stable >= 1).all() and (stable <= participation + 1e-5).all()
        assert (participation <= effective + 1e-5).all() and (effective <= 40).all()


@each_rank
def test_zeros_have_no_rank_and_faults_no_number(rank: Callable[[Tensor], Tensor]) -> None:
    matrices = torch.randn(4, 5, 5)
    matrices[1] = 0
    matrices[2, 3, 1] = math.nan
    matrices[3, 0, 0] = math.inf
    found = rank(matrices)
    assert found[:2].tolist() == [pytest.approx(float(rank(matrices[0]))), 0]
    assert found[2:].isnan().all()


@each_rank
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.randn(5), r"`matrix` must be floating-point, of shape \(…, N, M\), got torch.float32 of shape \(5,\)"),
        (torch.ones(3, 3).long(), r"`matrix` must be floating-point, .* got torch.int64 of shape \(3, 3\)"),
        (torch.randn(2, 0, 3), r"`matrix` must have a row and a column at least, got .* \(2, 0, 3\)"),
        (torch.randn(2, 3, 0), r"`matrix` must have a row and a column at least, got .* \(2, 3, 0\)"),
    ],
)
def test_what_is_no_matrix_is_refused(rank: Callable[[Tensor], Tensor], bad: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank(bad)


@each_rank
def test_no_matrices(rank: Callable[[Tensor], Tensor]) -> None:
    assert rank(torch.randn(0, 3, 3)).shape == (0,)
