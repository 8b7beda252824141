"""Costs and free energies of rows whose plans are known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_attn import AttentionCall
from lightning_attn.capture import Visibility
from lightning_attn.statistics import measure, resolve

NAMES = ["transport_cost", "free_energy"]


def of_logits(logits: Tensor, causal: bool = False, mask: Tensor | None = None) -> AttentionCall:
    """A call whose logits are these, (N, M)."""
    visibility = Visibility(0 if causal else None, None if mask is None else mask[None, None])
    queries, keys = (torch.zeros(1, 1, tokens, 0) for tokens in logits.shape)
    square = logits.shape[0] == logits.shape[1]
    return AttentionCall("", queries, keys, None, 1.0, visibility, square, logit_matrix=logits[None, None])


def statistics(call: AttentionCall, *names: str) -> list[float]:
    sums = measure(call, resolve(names))
    return [float(sums[name].or_nan) for name in names]


@pytest.mark.parametrize("logit", [0.0, -3.0, 250.0])
@pytest.mark.parametrize("n", [2, 7, 64])
def test_uniform_rows_pay_one_price_and_gain_the_largest_entropy(n: int, logit: float) -> None:
    cost, energy = statistics(of_logits(torch.full((n, n), logit)), *NAMES)
    assert cost == pytest.approx(-logit)
    assert energy == pytest.approx(-logit - math.log(n), rel=1e-6)


def test_uniform_causal_rows_gain_the_entropy_of_what_they_see() -> None:
    n = 64
    cost, energy = statistics(of_logits(torch.zeros(n, n), causal=True), *NAMES)
    assert cost == 0
    assert energy == pytest.approx(-math.lgamma(n + 1) / (n - 1), rel=1e-6)  # the first row has no choice


@pytest.mark.parametrize("size", [0.0, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])
def test_free_energy_is_cost_minus_entropy(size: float, causal: bool) -> None:
    n = 24
    cost, energy, divergence = statistics(of_logits(size * torch.randn(n, n), causal), *NAMES, "kl_to_uniform")
    largest_entropy = math.lgamma(n + 1) / (n - 1) if causal else math.log(n)
    assert energy == pytest.approx(cost - (largest_entropy - divergence), abs=3e-7 * max(1, 4 * size))


def test_weights_are_the_cheapest_way_to_look() -> None:
    logits = 2 * torch.randn(9, 9)
    (energy,) = statistics(of_logits(logits), "free_energy")
    for other in (torch.randn(9, 9).softmax(-1), (1.1 * logits).softmax(-1), (0.9 * logits).softmax(-1)):
        assert energy < float((other * (other.log() - logits)).sum(-1).mean())


@pytest.mark.parametrize("level", [0.0, 1e3, -1e6, 1e8])
def test_large_logits_lose_their_own_last_digits_only(level: float) -> None:
    """Two keys whose logits differ by 64, which is a number of single precision at any of these levels."""
    cost, energy = statistics(of_logits(torch.tensor([[level, level - 64.0]])), *NAMES)
    assert (cost, energy) == pytest.approx((-level, -level), rel=1e-12, abs=1e-20)


def test_a_learned_sink_leaves_the_cost_of_the_row_beside_it() -> None:
    call = of_logits(torch.randn(8, 8))
    beside_sink = replace(call, sink_logits=torch.tensor([3.0]))
    assert statistics(beside_sink, *NAMES) == statistics(call, *NAMES)


def test_hidden_keys_cost_nothing() -> None:
    logits, mask = torch.randn(6, 9), torch.ones(6, 9, dtype=torch.bool)
    mask[:, [2, 8]] = False
    cheap = torch.where(mask, logits, 1e3)
    assert statistics(of_logits(cheap, mask=mask), *NAMES) == pytest.approx(
        statistics(of_logits(logits[:, mask[0]]), *NAMES)
    )


def test_rows_without_a_choice_are_in_no_mean() -> None:
    logits, mask = torch.randn(3, 4), torch.ones(3, 4, dtype=torch.bool)
    mask[1] = torch.tensor([True, False, False, False])
    mask[2] = False
    assert statistics(of_logits(logits, mask=mask), *NAMES) == pytest.approx(statistics(of_logits(logits[:1]), *NAMES))
    assert all(math.isnan(value) for value in statistics(of_logits(logits[:, :1]), *NAMES))
