"""The residual of rank collapse in the composite norm."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_attn.functional.composite_residual import rank_residual_composite


def composite(matrix: np.ndarray) -> float:
    return math.sqrt(np.linalg.norm(matrix, 1) * np.linalg.norm(matrix, np.inf))


def of_numpy(states: np.ndarray) -> float:
    return composite(states - states.mean(0)) / composite(states)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_equals_the_formula(dtype: torch.dtype) -> None:
    states = (torch.randn(2, 3, 9, 5) + torch.randn(2, 3, 1, 5)).to(dtype)
    found = rank_residual_composite(states)
    assert found.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    expected = [of_numpy(one.double().numpy()) for one in states.flatten(0, 1)]
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e6])
def test_it_has_the_root(factor: float) -> None:
    """The residual has the rows ±1/2, so that its largest column sum is 1 and its largest row sum 1/2; those of the
    states are 3 and 2. Without the root the ratio would be 1/12."""
    states = torch.tensor([[2.0, 0.0], [1.0, 0.0]])
    assert float(rank_residual_composite(factor * states)) == pytest.approx(math.sqrt(1 / 12))


def test_opposite_tokens_are_nothing_but_residual() -> None:
    assert float(rank_residual_composite(torch.tensor([[1.0, 2.0], [-1.0, -2.0]]))) == pytest.approx(1)


@pytest.mark.parametrize("spread", [1e-3, 1e-6])
def test_a_collapse_is_seen_down_to_the_resolution_of_the_states(spread: float) -> None:
    states = 1 + spread * torch.randn(40, 16)
    assert float(rank_residual_composite(states)) == pytest.approx(of_numpy(states.double().numpy()), rel=1e-6)
    assert float(rank_residual_composite(states)) < 10 * spread


def test_equal_tokens_leave_exactly_nothing() -> None:
    assert rank_residual_composite(torch.randn(1, 8).expand(13, 8)).item() == 0


def test_twice_as_large_as_the_smallest_at_most() -> None:
    for _ in range(50):
        states = torch.randn(6, 3, dtype=torch.float64).exp().numpy()
        other = states - states[np.random.default_rng(0).integers(6)]
        assert composite(states - states.mean(0)) <= 2 * composite(other)
        assert 0 <= float(rank_residual_composite(torch.from_numpy(states))) <= 2


def test_padding_is_in_nothing() -> None:
    states, mask = torch.randn(2, 7, 4), torch.arange(7) >= torch.tensor([[2], [3]])
    expected = [of_numpy(one[real].double().numpy()) for one, real in zip(states, mask, strict=True)]
    for filling in (0.0, math.nan, math.inf, 1e30):
        found = rank_residual_composite(torch.where(mask[..., None], states, filling), mask)
        assert found.tolist() == pytest.approx(expected, rel=1e-6)
    found = rank_residual_composite(states, torch.arange(7) < 5)
    assert found.tolist() == pytest.approx([of_numpy(one[:5].double().numpy()) for one in states], rel=1e-6)


def test_what_nothing_defines_is_not_a_number() -> None:
    states, mask = torch.randn(5, 4, 3), torch.ones(5, 4, dtype=torch.bool)
    states[0], states[1, 2, 1], states[2, 0, 0] = 0, math.nan, math.inf
    mask[3, 1:], mask[4] = False, False
    assert rank_residual_composite(states, mask).isnan().all()
    assert math.isnan(rank_residual_composite(torch.randn(1, 3)))


@pytest.mark.parametrize(
    ("states", "mask", "message"),
    [
        (torch.randn(5), None, r"`states` must be floating-point, .* got torch.float32 of shape \(5,\)"),
        (torch.ones(5, 3).long(), None, r"`states` must be floating-point, .* got torch.int64"),
        (torch.randn(2, 5, 3), torch.ones(2, 4).bool(), r"`mask` must be boolean .* \(2, 5\), got torch.bool of .*4"),
        (torch.randn(5, 3), torch.ones(2, 5).bool(), r"`mask` must be boolean"),
        (torch.randn(2, 5, 3), torch.ones(2, 5), r"`mask` must be boolean .* got torch.float32"),
    ],
)
def test_bad_input_is_refused(states: Tensor, mask: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_residual_composite(states, mask)
