"""Balanced plans that are known, and masks under which there is none."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch
from scipy.special import softmax
from test_row_pass import allocations, long_attention
from test_transport_statistics import of_logits, statistics
from torch import Tensor

from lightning_attn.capture import Visibility
from lightning_attn.functional.balanced_transport import sinkhorn
from lightning_attn.statistics import known_statistics, measure, resolve
from lightning_attn.statistics.rows import row_pass


def distance(logits: Tensor, causal: bool = False, mask: Tensor | None = None) -> float:
    (value,) = statistics(of_logits(logits, causal, mask), "sinkhorn_distance")
    return value


def test_two_tokens() -> None:
    """The plan of [[1, 2], [3, 4]] has √(2/3) / (1 + √(2/3)) on its diagonal: the cross-ratio stays what it is."""
    on_diagonal = math.sqrt(2 / 3) / (1 + math.sqrt(2 / 3))
    assert on_diagonal == pytest.approx(0.4494897428, abs=1e-10)
    expected = (abs(on_diagonal - 1 / 3) + abs(1 - on_diagonal - 3 / 7)) / 2
    assert distance(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).log()) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    "weights",
    [
        torch.full((64, 64), 1 / 64),
        torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]]),
        torch.full((4, 7), 1 / 7),
    ],
    ids=["uniform", "circulant", "uniform over more keys"],
)
def test_balanced_attention_is_at_no_distance(weights: Tensor) -> None:
    assert distance(weights.log()) == pytest.approx(0, abs=1e-7)


def test_a_permutation_is_at_no_distance() -> None:
    assert distance(80.0 * torch.eye(8)[torch.randperm(8)]) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_all_on_one_key_is_as_far_as_can_be(n: int) -> None:
    """The key's logit is the same for all, so that the balanced plan is uniform."""
    logits = 20.0 * (torch.arange(n) == 1).float().expand(n, n)
    assert distance(logits) == pytest.approx(1 - 1 / n, abs=1e-6)


def test_a_single_query_is_compared_with_uniform_weights() -> None:
    logits = torch.randn(1, 12)
    expected = float((logits.softmax(-1) - 1 / 12).abs().sum() / 2)
    assert distance(logits) == pytest.approx(expected, abs=1e-6)


def balanced_by_newton(logits: np.ndarray) -> np.ndarray:
    """The plan as the solution of equations, which knows nothing of alternating steps."""
    n, m = logits.shape

    def lack(potentials: np.ndarray) -> np.ndarray:
        plan = softmax(logits + np.append(0, potentials), axis=1)
        return plan.sum(axis=0)[1:] - n / m

    found = scipy.optimize.root(lack, np.zeros(m - 1), tol=1e-12)
    assert found.success
    return softmax(logits + np.append(0, found.x), axis=1)


@pytest.mark.parametrize("shape", [(5, 5), (9, 9), (4, 7), (7, 4)])
@pytest.mark.parametrize("size", [0.3, 1.0, 2.0])
def test_distance_from_the_plan_that_equations_have(shape: tuple[int, int], size: float) -> None:
    logits = size * torch.randn(shape)
    of_plan = np.abs(softmax(logits.double().numpy(), axis=1) - balanced_by_newton(logits.double().numpy()))
    assert distance(logits) == pytest.approx(of_plan.sum() / (2 * shape[0]), abs=2e-6)


@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
def test_never_less_than_the_marginal_gap(size: float) -> None:
    """What keys receive differs by no more than rows do on the mean."""
    for _ in range(5):
        gap, of_plan = statistics(of_logits(size * torch.randn(10, 10)), "marginal_gap", "sinkhorn_distance")
        assert math.isnan(of_plan) or gap - 1e-6 <= of_plan <= 1


def test_constants_of_rows_change_nothing_and_constants_of_keys_leave_the_plan() -> None:
    logits, of_row, of_key = torch.randn(8, 8), torch.randn(8, 1), torch.randn(1, 8)
    assert distance(logits + 5 * of_row) == pytest.approx(distance(logits), abs=2e-6)
    expected = ((logits + of_key).softmax(-1) - sinkhorn(logits)).abs().sum() / 16
    assert distance(logits + of_key) == pytest.approx(float(expected), abs=2e-6)


def test_keys_that_hardly_receive_anything_are_balanced_too() -> None:
    """Weights that single precision takes for zero: those of all keys but one, whose logit is 200 above."""
    logits = torch.randn(8, 8)
    first = 200.0 * (torch.arange(8) == 0)
    expected = ((logits + first).softmax(-1) - sinkhorn(logits.double() + first)).abs().sum() / 16
    assert distance(logits + first) == pytest.approx(float(expected), abs=1e-5)
    assert distance(logits + first) == pytest.approx(7 / 8, abs=0.2)


# Visibility


@pytest.mark.parametrize("left", [False, True])
def test_padding_is_left_out(left: bool) -> None:
    logits, padding = torch.randn(7, 7), 3
    n = 7 + padding
    tokens = slice(padding, None) if left else slice(None, 7)
    padded, sees = torch.randn(n, n), torch.zeros(n, dtype=torch.bool)
    padded[tokens, tokens], sees[tokens] = logits, True
    assert distance(padded, mask=sees.expand(n, n)) == pytest.approx(distance(logits), abs=1e-6)


def test_a_query_that_sees_nothing_leaves_more_keys_than_rows() -> None:
    logits, mask = torch.randn(6, 6), torch.ones(6, 6, dtype=torch.bool)
    mask[4] = False
    rows = torch.arange(6) != 4
    assert distance(logits, mask=mask) == pytest.approx(distance(logits[rows]), abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 6, 40])
def test_absent_in_causal_heads_however_they_are_hidden(n: int) -> None:
    logits = torch.randn(n, n)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    hiding = replace(of_logits(logits), visibility=Visibility(bias=torch.where(causal, 0.0, -math.inf)[None, None]))
    padded = Visibility(0, mask=(torch.arange(n) >= n // 3)[None, None, None])
    for call in (
        of_logits(logits, causal=True),
        of_logits(logits, mask=causal),
        of_logits(logits, mask=causal.triu(-3)),
        hiding,
        replace(of_logits(logits), visibility=padded),
    ):
        assert math.isnan(statistics(call, "sinkhorn_distance")[0])


ONE_LATER_KEY = torch.ones(6, 6).tril()
ONE_LATER_KEY[0, 1] = 1
NO_TOTAL_SUPPORT = {
    "later keys only": torch.ones(6, 6).triu(),
    "two queries that see one key alone": torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 1]]),
    "causal but for one key": ONE_LATER_KEY,
}


@pytest.mark.parametrize("name", NO_TOTAL_SUPPORT)
def test_absent_where_no_plan_has_weight_on_all_visible_keys(name: str) -> None:
    mask = NO_TOTAL_SUPPORT[name] > 0
    assert math.isnan(distance(torch.zeros(mask.shape), mask=mask))


def test_two_blocks_are_two_plans() -> None:
    logits = torch.randn(8, 8)
    mask = torch.block_diag(torch.ones(5, 5), torch.ones(3, 3)) > 0
    expected = (5 * distance(logits[:5, :5]) + 3 * distance(logits[5:, 5:])) / 8
    assert distance(logits, mask=mask) == pytest.approx(expected, abs=2e-6)


def test_a_learned_sink_changes_nothing() -> None:
    call = of_logits(torch.randn(8, 8))
    (alone,) = statistics(call, "sinkhorn_distance")
    for sink in (-5.0, 0.0, 60.0):
        beside = replace(call, sink_logits=torch.tensor([sink]))
        assert statistics(beside, "sinkhorn_distance") == [pytest.approx(alone, abs=1e-6)]


def test_given_weights_are_renormalised() -> None:
    call = of_logits(torch.randn(8, 8))
    given = replace(call, logit_matrix=None, weight_matrix=1.7 * call.weights())
    assert statistics(given, "sinkhorn_distance") == pytest.approx(statistics(call, "sinkhorn_distance"), abs=1e-6)


# The walk


def test_heads_rest_while_others_go_on() -> None:
    """A head has the value that it has alone, to the last digit, whatever the others need."""
    logits = torch.randn(1, 3, 12, 12) * torch.tensor([0.1, 1.0, 3.0])[:, None, None]
    call = replace(of_logits(logits[0, 0]), query=torch.zeros(1, 3, 12, 0), key=torch.zeros(1, 3, 12, 0))
    (together,) = measure(replace(call, logit_matrix=logits), resolve("sinkhorn_distance")).values()
    assert together.or_nan.tolist() == [distance(of_head) for of_head in logits[0]]


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_logits_that_are_not_written_down_give_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = of_logits(torch.randn(40, 40))
    (written,) = statistics(call, "sinkhorn_distance")
    monkeypatch.setattr(row_pass, "WRITTEN_BYTES", 0)
    (anew,) = measure(call, resolve("sinkhorn_distance"), block_bytes=4 * 40 * rows).values()
    assert anew.or_nan.tolist() == [pytest.approx(written, abs=1e-9)]


@pytest.mark.parametrize("n", [1500, 3000], ids=["written down", "walked over anew"])
def test_memory_is_bounded(n: int) -> None:
    call = long_attention(n, Visibility())
    call = replace(call, scale=0.05)  # a few sweeps suffice
    block_bytes = 2**20
    with allocations() as counted:
        (sums,) = measure(call, resolve("sinkhorn_distance"), block_bytes=block_bytes).values()
    assert 0 < float(sums.or_nan) < 0.1
    # The weights, as for all spectral statistics, and the logits; blocks, some of them in double precision.
    written = 2 * 4 * n * n if 4 * n * n <= row_pass.WRITTEN_BYTES else 0
    assert counted.most <= written + 16 * block_bytes


def test_it_is_named_as_not_computed_by_default() -> None:
    statistic = known_statistics()["sinkhorn_distance"]
    assert statistic not in resolve(None) and statistic.is_spectral
