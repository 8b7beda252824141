"""Row sums, Dobrushin's coefficient and the leader: closed forms, bounds, and given weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import reference
import torch
from torch import Tensor

from lightning_attn import AttentionCall
from lightning_attn.capture import Visibility
from lightning_attn.statistics import Ratio, measure, resolve
from lightning_attn.statistics.algebra import row_distance
from lightning_attn.statistics.algebra.row_distance import ANCHORS

NAN = math.nan
LENGTHS = [5, 64, 200, 300]


def of_logits(logits: Tensor, mask: Tensor | None = None, causal: bool = False) -> AttentionCall:
    """Self-attention whose logits are these, (N, N) or (B, H, N, N)."""
    logits = logits if logits.dim() == 4 else logits[None, None]
    tokens = torch.zeros(*logits.shape[:3], 1)
    mask = mask if mask is None or mask.dim() == 4 else mask[None, None]
    return AttentionCall("site", tokens, tokens, None, 1.0, Visibility(0 if causal else None, mask, logits), True)


def of_weights(weights: Tensor, mask: Tensor | None = None) -> AttentionCall:
    """Given weights, (N, N) or (B, H, N, N), taken as they are: what is zero is visible, unless a mask hides it."""
    weights = weights if weights.dim() == 4 else weights[None, None]
    tokens = torch.zeros(*weights.shape[:3], 0)
    mask = mask if mask is None or mask.dim() == 4 else mask[None, None]
    return AttentionCall("site", tokens, tokens, None, 1.0, Visibility(mask=mask), True, weight_matrix=weights)


def statistic(name: str, call: AttentionCall) -> float:
    (value,) = measure(call, resolve(name))[name].or_nan.tolist()
    return float(value)


def causal_mask(n: int) -> Tensor:
    return torch.ones(n, n).tril().bool()


def uniform_causal(n: int) -> Tensor:
    return causal_mask(n) / torch.arange(1, n + 1)[:, None]


# Row sums.


@pytest.mark.parametrize("name", ["row_stochasticity_error", "sink_logit_mass"])
def test_a_softmax_lacks_nothing(name: str) -> None:
    assert statistic(name, of_logits(5 * torch.randn(20, 20), causal=True)) == 0


@pytest.mark.parametrize("over", [-200.0, -80.0, -20.0, 0.0, 20.0, 80.0, 200.0])
def test_a_learned_sink_is_told_however_little_or_much_it_takes(over: float) -> None:
    """n equal logits of zero beside one of s: the share is 1 / (1 + n e^-s)."""
    n = 8
    call = replace(of_logits(torch.zeros(n, n)), sink_logits=torch.tensor([over]))
    share = 1 / (1 + n * math.exp(-over))
    for name in ("row_stochasticity_error", "sink_logit_mass"):
        assert statistic(name, call) == pytest.approx(share, rel=1e-5, abs=1e-37)


def test_a_softmax_with_one_more_in_its_denominator() -> None:
    exponentials = torch.randn(1, 1, 6, 6).exp()
    total = exponentials.sum(-1)
    call = of_weights(exponentials / (1 + total)[..., None])
    expected = float((1 / (1 + total)).mean())
    assert statistic("sink_logit_mass", call) == pytest.approx(expected, rel=1e-6)
    assert statistic("row_stochasticity_error", call) == pytest.approx(expected, rel=1e-6)


def test_weights_behind_dropout_sum_to_more_and_to_less() -> None:
    weights = torch.tensor([[1.5, 0.0], [0.0, 0.5]])
    assert statistic("row_stochasticity_error", of_weights(weights)) == pytest.approx(0.5)
    assert statistic("sink_logit_mass", of_weights(weights)) == pytest.approx(0.25)


def test_given_weights_are_summed_as_they_are() -> None:
    weights = (3 * torch.randn(1, 2, 50, 50)).softmax(-1)
    exact = (weights.double().sum(-1) - 1).abs().mean(-1)[0].tolist()
    found = measure(of_weights(weights), resolve("row_stochasticity_error"))["row_stochasticity_error"]
    assert found.or_nan.tolist() == pytest.approx(exact, rel=1e-6)
    coarse = statistic("row_stochasticity_error", of_weights(weights[:, :1].bfloat16()))
    assert 1e-4 < coarse < 4e-3


def test_rows_that_see_nothing_lack_nothing() -> None:
    mask = causal_mask(6)
    mask[3] = False
    call = of_weights(uniform_causal(6), mask)
    assert statistic("row_stochasticity_error", call) == pytest.approx(0, abs=1e-7)


# Dobrushin's coefficient.


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", ["dobrushin", "dobrushin_bound"])
def test_contraction_in_closed_form(name: str, n: int) -> None:
    zeros = torch.zeros(n, n)
    assert statistic(name, of_logits(zeros)) == pytest.approx(0, abs=1e-6)
    assert statistic(name, of_logits(zeros, causal=True)) == pytest.approx(1 - 1 / n, abs=1e-6)
    assert statistic(name, of_logits(zeros, mask=torch.eye(n).bool())) == 1
    assert statistic(name, of_logits(200 * torch.eye(n))) == pytest.approx(1, abs=1e-6)
    assert statistic(name, of_weights(torch.eye(n))) == pytest.approx(1, abs=1e-6)
    assert statistic(name, of_logits(200.0 * (torch.arange(n) == 0).expand(n, n))) == pytest.approx(0, abs=1e-6)


def test_the_bound_is_not_the_coefficient() -> None:
    """Three rows of which each pair shares a key, and all three none."""
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]])
    assert statistic("dobrushin", of_weights(weights)) == pytest.approx(0.5)
    assert statistic("dobrushin_bound", of_weights(weights)) == pytest.approx(1)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("size", [0.1, 1, 5])
def test_one_step_contracts_by_no_less(n: int, size: float) -> None:
    """range(A X) <= tau range(X) for any X, and with equality for one: the sign of the difference of two rows."""
    call = of_logits(size * torch.randn(n, n))
    weights = call.weights()[0, 0].double()
    bound = statistic("dobrushin_bound", call)
    (exact,) = reference.head_values("dobrushin", reference.heads(call))
    coefficient = statistic("dobrushin", call)
    assert coefficient <= exact + 1e-6 <= bound + 2e-6
    tokens = torch.randn(n, 40).double()
    ranges = (weights @ tokens).aminmax(dim=0), tokens.aminmax(dim=0)
    image, before = (part.max - part.min for part in ranges)
    assert (image <= exact * before + 1e-9).all()
    if n <= ANCHORS:
        assert coefficient == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("n", [20, 128, 300])
@pytest.mark.parametrize("size", [0.0, 1.0, 4.0, 30.0])
def test_no_value_is_out_of_its_range(n: int, size: float) -> None:
    names = ["dobrushin", "dobrushin_bound", "leader_mass", "sink_logit_mass"]
    for causal in (False, True):
        call = of_logits(size * torch.randn(1, 6, n, n), causal=causal)
        for sink in (None, torch.randn(6)):
            found = measure(replace(call, sink_logits=sink), resolve(names))
            for name in names:
                ratio = found[name]
                assert isinstance(ratio, Ratio)
                assert ((ratio.numerator >= 0) & (ratio.numerator <= ratio.denominator)).all(), name


def test_given_rows_may_sum_to_more_than_one() -> None:
    """What a key gets from one row alone: three here, in rows that sum to four."""
    weights = torch.tensor([[3.0, 1.0, 0.0], [0.0, 1.0, 3.0], [0.0, 1.0, 3.0]])
    assert statistic("dobrushin", of_weights(weights)) == pytest.approx(3)
    assert statistic("dobrushin_bound", of_weights(weights)) == pytest.approx(3)


def two_outlying_rows(n: int) -> Tensor:
    """All rows are nearly uniform but two, which no evenly spaced row is."""
    logits = torch.randn(n, n) / 10
    logits[n // 2 - 1, 3] += 12
    logits[n // 3 + 1, 7] += 12
    return logits


PATTERNS: dict[str, Callable[[int], Tensor]] = {
    "random": lambda n: torch.randn(n, n),
    "sharp": lambda n: 4 * torch.randn(n, n),
    "low rank": lambda n: 3 * torch.randn(n, 2) @ torch.randn(2, n),
    "sink": lambda n: torch.randn(n, n) + 5 * (torch.arange(n) == 0),
    "local": lambda n: -0.1 * (torch.arange(n)[:, None] - torch.arange(n)).abs().float(),
    "two outlying rows": two_outlying_rows,
}


@pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])
@pytest.mark.parametrize("name", PATTERNS)
def test_the_lower_bound_of_long_heads_is_close(name: str, causal: bool) -> None:
    call = of_logits(PATTERNS[name](400), causal=causal)
    (exact,) = reference.head_values("dobrushin", reference.heads(call))
    found = statistic("dobrushin", call)
    assert 0.98 * exact <= found <= exact + 1e-6


@pytest.mark.parametrize("n", LENGTHS)
def test_no_row_of_a_causal_head_is_farther_from_another_than_from_the_first(n: int) -> None:
    call = of_logits(3 * torch.randn(n, n), causal=True)
    (exact,) = reference.head_values("dobrushin", reference.heads(call))
    assert exact == pytest.approx(1 - float(call.weights()[0, 0, :, 0].min()), rel=1e-6)
    assert statistic("dobrushin", call) == pytest.approx(exact, rel=1e-5)


def test_two_rows_that_are_compared_with_none_at_first() -> None:
    """Either is half as far from the others, which are uniform, as from the other one."""
    n = 400
    weights = torch.full((n, n), 1 / n)
    first_half = torch.arange(n) < n // 2
    weights[134], weights[199] = first_half / (n // 2), ~first_half / (n // 2)
    assert statistic("dobrushin", of_weights(weights)) == pytest.approx(1, abs=1e-6)


def test_keys_that_only_later_rows_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the first block, and a late row that is compared with all: what the block leaves out of it counts."""
    monkeypatch.setattr(row_distance, "_WALKS", 0)
    n, before = 400, 3
    weights = torch.zeros(n, n + before)
    weights[:, :4] = 0.25
    weights[1, :5] = torch.tensor([0, 0, 0, 0.5, 0.5])
    weights[-1, 3], weights[-1, -1] = 0, 0.25
    tokens = torch.zeros(1, 1, n, 0), torch.zeros(1, 1, n + before, 0)
    call = AttentionCall("s", *tokens, None, 1.0, Visibility(before), False, weight_matrix=weights[None, None])
    found = measure(call, resolve("dobrushin"), block_bytes=4 * 20 * (n + before))["dobrushin"]
    assert found.or_nan.tolist() == pytest.approx([1], abs=1e-6)


@pytest.mark.parametrize("n", [12, 300])
@pytest.mark.parametrize("name", ["dobrushin", "dobrushin_bound"])
def test_rows_that_see_nothing_are_far_from_none(name: str, n: int) -> None:
    mask = torch.ones(n, n, dtype=torch.bool)
    mask[1::3] = False
    assert statistic(name, of_logits(torch.zeros(n, n), mask)) == pytest.approx(0, abs=1e-6)


def test_long_heads_with_few_present_rows_are_exact() -> None:
    n = 300
    mask = (torch.arange(n) % 3 == 0).expand(n, n)
    call = of_logits(torch.randn(n, n), mask)
    (exact,) = reference.head_values("dobrushin", reference.heads(call))
    assert statistic("dobrushin", call) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("block_bytes", [4, 20_000, 2**30])
def test_long_heads_and_sequences_at_once(block_bytes: int) -> None:
    """Each has its own rows, also where they are cut into blocks."""
    n = 150
    mask = torch.rand(2, 2, n, n) < 0.8
    mask[0, 1, ::4] = False
    mask[1, :, :, :20] = False
    call = of_logits(torch.randn(2, 2, n, n), mask)
    names = ["dobrushin", "dobrushin_bound", "leader_mass", "leader_position"]
    for name, found in measure(call, resolve(names), block_bytes=block_bytes).items():
        expected = reference.head_values(name, reference.heads(call))
        assert found.or_nan.tolist() == pytest.approx(expected, rel=1e-3, nan_ok=True), name


# The leader.


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("padding", [0, 2])
def test_a_causal_head_follows_its_first_token(n: int, padding: int) -> None:
    mask = (torch.arange(n) >= padding).expand(n, n)
    call = of_logits(torch.randn(n, n), mask, causal=True)
    assert statistic("leader_mass", call) == pytest.approx(1, abs=1e-12)
    assert statistic("leader_position", call) == 0
    by_mask = of_logits(torch.randn(n, n), mask & causal_mask(n))
    assert (statistic("leader_mass", by_mask), statistic("leader_position", by_mask)) == (1, 0)


@pytest.mark.parametrize("n", LENGTHS)
def test_uniform_attention_has_no_leader(n: int) -> None:
    call = of_logits(torch.zeros(n, n))
    assert statistic("leader_mass", call) == pytest.approx(1 / n, rel=1e-4)
    assert statistic("leader_position", call) == 0


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("leader", [0, 3])
@pytest.mark.parametrize("peak", [0.0, 2.0, 6.0])
def test_rows_that_are_alike_are_the_distribution(n: int, leader: int, peak: float) -> None:
    call = of_logits((peak * (torch.arange(n) == leader)).expand(n, n))
    assert statistic("leader_mass", call) == pytest.approx(math.exp(peak) / (math.exp(peak) + n - 1), rel=1e-4)
    assert statistic("leader_position", call) == (leader if peak else 0)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("padding", [0, 2])
def test_symmetric_logits_give_masses_like_row_sums(n: int, padding: int) -> None:
    """exp(s_ij) with s symmetric is reversible: pi_i is its row sum over the sum of all."""
    logits = torch.randn(n, n)
    logits = (logits + logits.T) / 2
    logits[4] += 3.0 * (torch.arange(n) != 4)
    logits[:, 4] += 3.0 * (torch.arange(n) != 4)
    real = torch.arange(n) >= padding
    call = of_logits(logits, real.expand(n, n))
    sums = logits.double().exp()[real][:, real].sum(-1)
    assert statistic("leader_mass", call) == pytest.approx(float(sums.max() / sums.sum()), rel=1e-4)
    assert statistic("leader_position", call) == int(sums.argmax()) == 4 - padding


def test_rows_are_divided_by_their_sums() -> None:
    weights = torch.tensor([[0.9, 0.1], [0.3, 0.7]]) * torch.tensor([[0.2], [3.0]])
    assert statistic("leader_mass", of_weights(weights)) == pytest.approx(0.75)
    logits = torch.randn(5, 5)
    plain = statistic("leader_mass", of_logits(logits))
    beside_a_sink = replace(of_logits(logits), sink_logits=torch.tensor([60.0]))
    assert statistic("leader_mass", beside_a_sink) == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("n", [4, 300])
def test_two_closed_classes_have_no_leader(n: int) -> None:
    halves = torch.arange(n) < n // 2
    documents = halves[:, None] == halves
    zeros = torch.zeros(n, n)
    calls = [
        of_logits(zeros, torch.eye(n).bool()),
        of_weights(torch.eye(n)),
        of_logits(zeros, documents),
        of_logits(zeros, documents, causal=True),
        of_weights(documents / documents.sum(-1, keepdim=True)),
        # The first token goes to either class, which are alike.
        of_weights(torch.cat([torch.full((1, n), 1 / n), torch.eye(n)[1:]])),
    ]
    for call in calls:
        assert math.isnan(statistic("leader_mass", call)), call
        assert math.isnan(statistic("leader_position", call)), call


@pytest.mark.parametrize("n", [6, 300])
def test_a_class_in_the_middle_that_all_others_reach(n: int) -> None:
    weights = torch.full((n, n), 0.8 / n)
    weights[:, 2:4] += 0.1
    weights[2:4] = 0
    weights[2, 2:4] = torch.tensor([0.25, 0.75])
    weights[3, 2:4] = torch.tensor([0.5, 0.5])
    assert statistic("leader_mass", of_weights(weights)) == pytest.approx(0.6, rel=1e-3)
    assert statistic("leader_position", of_weights(weights)) == 3


def test_a_token_without_a_row_of_its_own_that_others_see() -> None:
    n = 8
    mask = torch.ones(n, n, dtype=torch.bool)
    mask[5] = False
    call = of_logits(torch.randn(n, n), mask)
    assert math.isnan(statistic("leader_mass", call))
    mask[:, 5] = False
    assert not math.isnan(statistic("leader_mass", of_logits(torch.randn(n, n), mask)))


@pytest.mark.parametrize("n", [8, 300])
def test_a_given_row_of_zeros_is_none(n: int) -> None:
    """Left padding in given weights without a mask; and a token that others see."""
    weights = torch.zeros(n, n)
    weights[2:, 2:] = (torch.randn(n - 2, n - 2) + 4 * (torch.arange(n - 2) == 3)).softmax(-1)
    assert statistic("leader_position", of_weights(weights)) == 3
    weights[5:, 1] = 0.1
    assert math.isnan(statistic("leader_mass", of_weights(weights)))


@pytest.mark.parametrize("n", [12, 300])
def test_a_causal_head_with_a_row_that_is_not_finite(n: int) -> None:
    logits = torch.randn(n, n)
    logits[7, 2] = NAN
    assert math.isnan(statistic("leader_mass", of_logits(logits, causal=True)))
    logits = torch.randn(n, n)
    logits[n - 1, 2] = NAN  # nobody but itself sees the last token
    assert statistic("leader_mass", of_logits(logits, causal=True)) == 1


def test_a_slow_chain_is_exact_where_it_is_solved_and_absent_where_it_is_iterated() -> None:
    def two_groups(n: int) -> AttentionCall:
        group = torch.arange(n) < n // 4
        logits = torch.where(group[:, None] == group, 0.0, torch.where(group[:, None], -25.0, -24.0))
        logits[:, 0] += 1.0 * group
        return of_logits(logits)

    small = two_groups(16)
    (expected,) = reference.head_values("leader_mass", reference.heads(small))
    assert statistic("leader_mass", small) == pytest.approx(expected, rel=1e-5)
    assert expected > 1.2 / 16
    assert math.isnan(statistic("leader_mass", two_groups(300)))


@pytest.mark.parametrize("name", PATTERNS)
def test_the_leader_of_a_long_head(name: str) -> None:
    call = of_logits(PATTERNS[name](300))
    (expected,) = reference.head_values("leader_mass", reference.heads(call))
    found = statistic("leader_mass", call)
    assert math.isnan(found) == (name == "local")  # a band mixes slowly
    assert found == pytest.approx(expected, rel=1e-3) or name == "local"


def test_cross_attention_has_no_leader_and_does_contract() -> None:
    call = replace(of_logits(torch.randn(6, 6)), self_attention=False)
    assert math.isnan(statistic("leader_mass", call))
    assert 0 < statistic("dobrushin", call) < 1


def test_one_row_contracts_nothing() -> None:
    for name in ("dobrushin", "dobrushin_bound", "leader_mass"):
        assert math.isnan(statistic(name, of_logits(torch.zeros(1, 1)))), name
