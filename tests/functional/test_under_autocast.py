"""Functions of dense weights are as exact inside a program that computes in half precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_attn.functional import (
    attention_call,
    attention_rollout,
    attention_statistics,
    free_energy,
    key_marginal,
    rollout_first_token_mass,
    sink_importance,
    sinkhorn,
    stationary_distribution,
    transport_plan,
)

#: Long enough that the stationary distribution is iterated.
WEIGHTS = (0.3 * torch.randn(1, 2, 300, 300, generator=torch.Generator().manual_seed(0))).softmax(-1)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention_rollout": lambda weights: attention_rollout([weights, weights]),
    "rollout_first_token_mass": lambda weights: rollout_first_token_mass([weights, weights]),
    "rollout_first_token_mass of calls": lambda weights: rollout_first_token_mass([attention_call(weights)] * 2),
    "stationary_distribution": stationary_distribution,
    "sink_importance": sink_importance,
    "key_marginal": key_marginal,
    "sinkhorn": lambda weights: sinkhorn(weights),
    "transport_plan": lambda weights: transport_plan(weights),
    "free_energy": lambda weights: free_energy(weights),
    "statistics": lambda weights: torch.stack([*attention_statistics(weights).values()]).nan_to_num(),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_nothing_is_rounded_by_autocast(function: Callable[[Tensor], Tensor]) -> None:
    expected = function(WEIGHTS)
    assert expected.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        found = function(WEIGHTS)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
