"""The softmax as a transport plan: what its rows cost, and that nothing is cheaper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_attn.functional.transport import free_energy, transport_cost, transport_plan

everywhere = pytest.mark.parametrize("epsilon", [0.1, 1.0, 7.0])


def entropy(plan: Tensor) -> Tensor:
    return torch.special.entr(plan).sum(-1)


def test_softmax_of_two_tokens() -> None:
    plan = transport_plan(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).log())
    assert plan.sum(0).tolist() == pytest.approx([16 / 21, 26 / 21])


@everywhere
def test_free_energy_is_cost_minus_entropy(epsilon: float) -> None:
    scores, mask = 3 * torch.randn(2, 3, 5, 8).double(), torch.rand(5, 8) < 0.8
    mask[:, 0] = True
    expected = transport_cost(scores, epsilon, mask) - epsilon * entropy(transport_plan(scores, epsilon, mask))
    torch.testing.assert_close(free_energy(scores, epsilon, mask), expected)


@everywhere
def test_no_distribution_is_cheaper_and_what_is_too_dear_is_a_divergence(epsilon: float) -> None:
    """⟨q, −z⟩ − εH(q) is the free energy plus ε KL(q ‖ p)."""
    scores = torch.randn(6, 9).double()
    plan, other = transport_plan(scores, epsilon), torch.randn(6, 9).double().softmax(-1)
    price = -(other * scores).sum(-1) - epsilon * entropy(other)
    divergence = (other * (other / plan).log()).sum(-1)
    torch.testing.assert_close(price, free_energy(scores, epsilon) + epsilon * divergence)
    assert bool((divergence > 0).all())


def test_it_moves_with_a_constant() -> None:
    scores, constant = torch.randn(4, 5), torch.tensor([[3.0], [-8.0], [0.0], [100.0]])
    torch.testing.assert_close(transport_plan(scores + constant), transport_plan(scores), rtol=2e-5, atol=0)
    for function in (transport_cost, free_energy):
        torch.testing.assert_close(function(scores + constant), function(scores) - constant[:, 0])


def test_sharp_rows_cost_what_the_best_key_costs() -> None:
    scores = torch.tensor([[1e6, 1e6 - 400, 0.0]])
    assert transport_cost(scores).tolist() == free_energy(scores).tolist() == [-1e6]


def test_uniform_rows() -> None:
    assert transport_cost(torch.full((2, 8), 2.0)).tolist() == [-2, -2]
    assert free_energy(torch.full((2, 8), 2.0), 0.5).tolist() == pytest.approx([-2 - 0.5 * math.log(8)] * 2)


def test_hidden_keys_and_rows_that_see_none() -> None:
    scores = torch.randn(3, 4)
    mask = torch.tensor([[True, True, False, True], [False] * 4, [True] * 4])
    scores[0, 2] = math.nan
    plan = transport_plan(scores, mask=mask)
    assert plan[1].tolist() == [0] * 4 and plan[0, 2] == 0
    for function in (transport_cost, free_energy):
        of_rows = function(scores, mask=mask)
        assert of_rows.isnan().tolist() == [False, True, False]
        torch.testing.assert_close(of_rows[0], function(scores[:1, [0, 1, 3]])[0])
    hidden = scores.nan_to_num(nan=1.0).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(transport_plan(hidden), plan)
    torch.testing.assert_close(transport_cost(hidden), transport_cost(scores, mask=mask), equal_nan=True)
    torch.testing.assert_close(free_energy(hidden), free_energy(scores, mask=mask), equal_nan=True)


@pytest.mark.parametrize("function", [transport_plan, transport_cost, free_energy])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precision(function: object, dtype: torch.dtype) -> None:
    assert callable(function)
    scores = (4 * torch.randn(2, 5, 6)).to(dtype)
    got = function(scores, 0.7)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), function(scores.double(), 0.7), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("function", [transport_plan, transport_cost, free_energy])
def test_bad_input_is_named(function: object) -> None:
    assert callable(function)
    scores = torch.randn(3, 3)
    with pytest.raises(ValueError, match="`scores` must be floating"):
        function(scores.long())
    with pytest.raises(ValueError, match="`epsilon` must be finite and above zero, got -2"):
        function(scores, -2)
    with pytest.raises(ValueError, match=r"`mask` must be boolean .* got torch.int64"):
        function(scores, 1.0, torch.ones(3, 3).long())


@pytest.mark.parametrize("epsilon", ["1", None, True])
def test_a_weight_of_entropy_that_is_no_number_is_refused(epsilon: Any) -> None:
    with pytest.raises(ValueError, match=f"`epsilon` must be finite and above zero, got {epsilon!r}"):
        transport_plan(torch.zeros(2, 2), epsilon)
