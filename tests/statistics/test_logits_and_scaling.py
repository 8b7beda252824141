"""Spread and size of logits, saturation, and how attention keeps up with length."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.logits import KNOWN_FLOORS
from torch import Tensor

from lightning_attn import AttentionCall
from lightning_attn.capture import HiddenStates, Visibility
from lightning_attn.functional.critical_scaling import (
    critical_gamma,
    estimated_gamma,
    predicted_self_weight,
    predicted_similarity,
)
from lightning_attn.functional.floor import entropy_floor
from lightning_attn.statistics import RowBlock, RowMean, known_statistics, measure, measure_states, resolve
from lightning_attn.statistics.measure import Sums
from lightning_attn.statistics.rows.row_pass import passes

NAMES = (
    "entropy_floor",
    "selectivity",
    "large_logit_ratio",
    "softmax_sensitivity",
    "critical_scaling",
    "entropy_growth",
)


def of_logits(logits: Tensor, causal: bool = False, mask: Tensor | None = None) -> AttentionCall:
    """Self-attention with given logits, (N, N)."""
    tokens = torch.zeros(1, 1, len(logits), 1)
    visibility = Visibility(0 if causal else None, None if mask is None else mask[None, None], logits[None, None])
    return AttentionCall("attention", tokens, tokens, None, 1.0, visibility, self_attention=True)


def of_one_row(logits: Tensor) -> AttentionCall:
    call = of_logits(logits[None].float())
    return replace(call, key=torch.zeros(1, 1, len(logits), 1), self_attention=False)


def of_weights(weights: Tensor) -> AttentionCall:
    """Self-attention with given weights, (N, N)."""
    tokens = torch.zeros(1, 1, len(weights), 0)
    return AttentionCall(
        "attention", tokens, tokens, None, 1.0, Visibility(), True, weight_matrix=weights[None, None].float()
    )


def statistic(name: str, call: AttentionCall) -> float:
    (value,) = measure(call, resolve(name))[name].or_nan.tolist()
    return float(value)


def of_rows(name: str, call: AttentionCall) -> Tensor:
    """The value of each row, NaN where it does not count."""
    statistic = known_statistics()[name]
    assert issubclass(statistic, RowMean)
    (row_pass,) = passes(call, 2**30)
    mean = statistic(row_pass)
    (block,) = row_pass.blocks()
    return torch.where(mean.counted(block), mean.values(block), math.nan)[0, 0].clone()


MASKS = {
    "everything": (False, None),
    "causal": (True, None),
    "window": (False, torch.ones(64, 64).tril().triu(-3).bool()),
    "left padding, causal": (True, (torch.arange(64) >= 20).expand(64, 64)),
}


@pytest.mark.parametrize("mask", MASKS)
def test_uniform_attention_under_any_mask(mask: str) -> None:
    causal, visible = MASKS[mask]
    call = of_logits(torch.full((64, 64), 7.0), causal, visible)
    counts = of_rows_seen(causal, visible)
    assert statistic("entropy_floor", call) == pytest.approx(1, abs=1e-6)
    assert statistic("selectivity", call) == pytest.approx(0, abs=1e-6)
    assert statistic("large_logit_ratio", call) == 0
    assert statistic("softmax_sensitivity", call) == pytest.approx(
        (1 - 1 / counts[counts >= 2]).mean().item(), rel=1e-6
    )
    assert statistic("critical_scaling", call) == pytest.approx(0, abs=1e-6)
    if mask == "everything":
        assert math.isnan(statistic("entropy_growth", call))
    else:
        assert statistic("entropy_growth", call) == pytest.approx(1, rel=1e-6)


def of_rows_seen(causal: bool, visible: Tensor | None) -> Tensor:
    seen = torch.ones(64, 64).bool() if visible is None else visible
    return (seen.tril() if causal else seen).sum(1).double()


# Entropy floor.


@pytest.mark.parametrize(("keys", "spread", "expected"), KNOWN_FLOORS)
def test_the_row_with_one_peak_attains_the_floor(keys: int, spread: float, expected: float) -> None:
    logits = torch.zeros(keys)
    logits[keys // 2] = spread * math.sqrt(keys / (keys - 1))
    assert float((logits.double() - logits.double().mean()).norm()) == pytest.approx(spread, rel=1e-6)
    call = of_one_row(logits)
    assert statistic("entropy_floor", call) * math.log(keys) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert statistic("entropy", call) * math.log(keys) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(
    keys=st.sampled_from([2, 3, 8, 64]),
    size=st.floats(0, 500),
    peak=st.floats(0, 30),
    seed=st.integers(0, 2**32),
)
def test_the_floor_is_never_above_the_entropy(keys: int, size: float, peak: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(40, keys, generator=random) * torch.rand(40, 1, generator=random) ** 3
    logits[:, 0] += peak
    call = AttentionCall(
        "site",
        torch.zeros(1, 1, 40, 1),
        torch.zeros(1, 1, keys, 1),
        None,
        1.0,
        Visibility(bias=logits[None, None]),
        self_attention=False,
    )
    floor, entropy = of_rows("entropy_floor", call), of_rows("entropy", call)
    assert (floor <= entropy).all()
    assert (floor >= 0).all()
    if keys == 2:
        torch.testing.assert_close(floor, entropy, rtol=1e-4, atol=1e-7)
    # Not because it is cut off at the entropy: that moves it by rounding only.
    spread = torch.linalg.vector_norm(logits.double() - logits.double().mean(-1, keepdim=True), dim=-1)
    expected = entropy_floor(spread, keys) / math.log(keys)
    torch.testing.assert_close(floor.double(), expected, rtol=max(1e-5, 1e-7 * float(logits.abs().max())), atol=1e-7)


def test_logits_whose_squares_no_number_holds_have_a_floor_of_zero() -> None:
    assert statistic("entropy_floor", of_one_row(torch.tensor([0.0, 3e25, 1e24]))) == 0


# Selectivity and size of logits.


@pytest.mark.parametrize("name", ["logit_std", "selectivity"])
def test_the_spread_of_logits_is_exact_in_long_rows(name: str) -> None:
    logits = torch.full((50_000,), 0.1)
    logits[7] = 4
    expected = logits.double().std(correction=0).item()
    if name == "selectivity":
        expected /= math.sqrt(2 * math.log(50_000))
    assert statistic(name, of_one_row(logits)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [0.3, 1.0, 2.0])
def test_selectivity_of_gaussian_logits(size: float) -> None:
    call = of_logits(size * math.sqrt(2 * math.log(512)) * torch.randn(512, 512))
    assert statistic("selectivity", call) == pytest.approx(size, rel=0.01)


def test_gaussian_logits_freeze_at_a_selectivity_of_one() -> None:
    """Random energy model: the entropy is (1 - s²) log m below the transition, and hardly grows with m above it."""

    def entropy(selectivity: float, n: int) -> float:
        size = selectivity * math.sqrt(2 * math.log(n))
        return statistic("entropy", of_logits(size * torch.randn(n, n))) * math.log(n)

    below, above = ((entropy(s, 2048) - entropy(s, 128)) / math.log(16) for s in (0.5, 1.5))
    assert below == pytest.approx(0.75, abs=0.05)
    assert above < 0.15


def test_large_logits_are_counted_among_visible_ones() -> None:
    logits = torch.tensor([[101.0, 250.0, 500.0], [100.0, 99.0, 300.0], [-500.0, 100.5, 120.0]])
    assert statistic("large_logit_ratio", of_logits(logits)) == pytest.approx(6 / 9)
    # 101 | 100, 99 | -500, 100.5, 120
    assert statistic("large_logit_ratio", of_logits(logits, causal=True)) == pytest.approx(3 / 6)


def test_large_logits_are_pooled_over_sequences_by_the_number_of_logits() -> None:
    visible = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    visible[1, ..., 1:] = False
    logits = torch.zeros(2, 1, 4, 4)
    logits[1, ..., 0] = 200
    tokens = torch.zeros(2, 1, 4, 1)
    call = AttentionCall("site", tokens, tokens, None, 1.0, Visibility(None, visible, logits), self_attention=False)
    assert statistic("large_logit_ratio", call) == pytest.approx(4 / 20)


def test_rows_that_are_not_finite_have_no_large_logits() -> None:
    logits = torch.tensor([[101.0, 250.0], [math.inf, 101.0], [math.nan, 0.0], [7.0, 0.0]])
    call = replace(of_logits(logits), key=torch.zeros(1, 1, 2, 1), self_attention=False)
    (sums,) = measure(call, resolve("large_logit_ratio")).values()
    assert [part.item() for part in sums] == [2, 4]


@pytest.mark.parametrize(("limit", "expected"), [(0.0, 1.0), (4.5, 0.5), (9.0, 0.0)])
def test_the_limit_of_large_logits(limit: float, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ratio = known_statistics()["large_logit_ratio"]
    assert ratio.parameters == ("limit",)
    monkeypatch.setattr(ratio, "limit", limit)
    assert statistic("large_logit_ratio", of_one_row(torch.tensor([9.0, 4.0, 3.0, 7.0]))) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_half_precision_may_be_the_limit_exactly(dtype: torch.dtype) -> None:
    logits = torch.tensor([[100.0, 300.5, 100.5, 417.0]], dtype=dtype)[None, None]
    call = replace(of_one_row(torch.zeros(4)), visibility=Visibility(), logit_matrix=logits)
    assert statistic("large_logit_ratio", call) == pytest.approx(3 / 4)


# Saturation.


@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize("gap", [0.0, 1.0, 3.0, 10.0, 16.0, 28.0, 60.0])
def test_softmax_sensitivity_of_rows_that_are_all_but_locked(gap: float, others: int) -> None:
    logits = torch.tensor([0.0, *[-gap] * others])
    p = math.exp(-gap) / (1 + others * math.exp(-gap))  # of each other key
    expected = others * p * (2 * (1 - others * p) + (others - 1) * p)
    assert gap < 28 or expected < 1e-11
    assert statistic("softmax_sensitivity", of_one_row(logits)) == pytest.approx(expected, rel=1e-5, abs=0)


def test_softmax_sensitivity_is_the_trace_of_the_jacobian() -> None:
    logits = torch.randn(12, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda z: z.softmax(-1), logits)
    assert statistic("softmax_sensitivity", of_one_row(logits)) == pytest.approx(jacobian.trace().item(), rel=1e-6)


@pytest.mark.parametrize("largest", [1, 2])
@pytest.mark.parametrize("name", ["softmax_sensitivity", "critical_scaling", "selectivity", "entropy_floor"])
def test_a_learned_sink_and_a_constant_change_nothing(name: str, largest: int) -> None:
    logits = torch.randn(9, 9)
    logits[:, :largest] += 20
    plain = of_logits(logits)
    assert statistic(name, replace(plain, sink_logits=torch.tensor([25.0]))) == statistic(name, plain)
    assert statistic(name, of_logits(logits + 8)) == pytest.approx(statistic(name, plain), rel=1e-5)


# Entropy.


def test_the_divergence_is_what_the_entropy_lacks() -> None:
    call = of_logits(3 * torch.randn(50, 50), causal=True)
    log_counts = torch.arange(1, 51).log()
    lacking = log_counts - of_rows("entropy", call) * log_counts
    torch.testing.assert_close(of_rows("kl_to_uniform", call)[1:], lacking[1:], rtol=1e-5, atol=1e-6)


def test_the_entropy_has_no_bias_of_a_small_number_in_the_logarithm() -> None:
    """`log(A + 1e-6)` is wrong by -1.0e-3 nats over 1024 keys, and negative where a row is one-hot."""
    n = 1024

    def biased(weights: Tensor) -> float:
        return float(-(weights * (weights + 1e-6).log()).sum())

    uniform, one_hot = torch.full((n,), 1 / n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)[0]
    assert biased(uniform) - math.log(n) == pytest.approx(-1.0e-3, rel=0.03)
    assert biased(one_hot) == pytest.approx(-1e-6, rel=1e-5)
    assert statistic("entropy", of_one_row(torch.zeros(n))) * math.log(n) == pytest.approx(math.log(n), abs=1e-6)
    assert 0 <= statistic("entropy", of_one_row(200 * one_hot)) < 1e-30


@pytest.mark.parametrize("growth", [0.0, 0.5, 1.0])
def test_entropy_that_grows_as_told(growth: float) -> None:
    """Rows that are uniform over m^growth keys, and hide the others by a penalty of 60."""
    counts = torch.tensor([4, 16, 64, 256])
    logits, visible = torch.full((4, 256), -60.0), torch.arange(256) < counts[:, None]
    for row, count in enumerate(counts.tolist()):
        logits[row, : round(count**growth)] = 0
    call = replace(of_logits(logits, mask=visible), key=torch.zeros(1, 1, 256, 1), self_attention=False)
    assert statistic("entropy_growth", call) == pytest.approx(growth, abs=1e-6)


def test_logits_that_grow_with_the_log_of_the_length_keep_entropy_from_growing() -> None:
    """One key of an advantage of 2 log m has the weight m / (m + 1), at any length."""
    m = torch.arange(1, 513)
    logits = torch.zeros(512, 512)
    logits[:, 0] = 2 * m.log()
    scaled = statistic("entropy_growth", of_logits(logits, causal=True))
    logits[:, 0] = 2
    plain = statistic("entropy_growth", of_logits(logits, causal=True))
    assert scaled < 0 < 0.8 < plain


@pytest.mark.parametrize("n", [11, 12, 49, 93])
def test_entropy_growth_is_within_sequences(n: int) -> None:
    """Two sequences that each see as many keys everywhere differ in length: nothing is known of growth."""
    visible = torch.ones(2, 1, n, n, dtype=torch.bool)
    visible[1, ..., 5:] = False
    tokens = torch.randn(2, 1, n, 4)
    call = AttentionCall("site", tokens, tokens, None, 1.0, Visibility(mask=visible), self_attention=True)
    for block_bytes in (4, 200, 2**30):
        sums = measure(call, resolve("entropy_growth"), block_bytes=block_bytes)["entropy_growth"]
        assert math.isnan(sums.or_nan.item())
        assert [part.item() for part in sums] == [0, 0]


def test_entropy_growth_of_counts_that_hardly_differ() -> None:
    """Moments that were sums of squares would lose it: 20 000 keys, of which one row sees one less."""
    n = 20_000
    visible = torch.ones(8, n, dtype=torch.bool)
    visible[3, -1] = False
    logits = torch.zeros(8, n)
    call = replace(of_logits(logits, mask=visible), key=torch.zeros(1, 1, n, 1), self_attention=False)
    sums = measure(call, resolve("entropy_growth"), block_bytes=4 * 2 * n)["entropy_growth"]
    step = math.log(n) - math.log(n - 1)
    assert sums.denominator.item() == pytest.approx(7 / 8 * step**2, rel=1e-6)


# Critical scaling.


def alike(tokens: int, similarity: float) -> Tensor:
    """Unit tokens, any two of them with the same inner product; (tokens, tokens) in float64."""
    gram = np.full((tokens, tokens), similarity) + (1 - similarity) * np.eye(tokens)
    return torch.from_numpy(np.linalg.cholesky(gram))


def critical_call(tokens_ND: Tensor, gamma: float) -> AttentionCall:
    tokens = tokens_ND.float()[None, None]
    scale = gamma * math.log(len(tokens_ND))
    return AttentionCall("site", tokens, tokens, tokens, scale, Visibility(), self_attention=True)


def of_states(name: str, entering: Tensor, leaving: Tensor) -> float:
    sums = Sums.nothing(resolve(name), 1, torch.device("cpu"))
    measure_states(HiddenStates("site", entering[None], leaving[None], None), sums.statistics).add_to(sums)
    return float(sums[name].or_nan[0])


#: Of the inner product after the layer, for 1024 tokens.
TABLE = [
    (0.2, 0.5, 0.99657),
    (0.2, 0.8, 0.86325),
    (0.2, 1.0, 0.50098),
    (0.2, 1.2, 0.28120),
    (0.2, 2.0, 0.20031),
    (0.5, 0.5, 0.99914),
    (0.5, 0.8, 0.96180),
    (0.5, 1.0, 0.80027),
    (0.5, 1.2, 0.60986),
    (0.5, 2.0, 0.50049),
]


@pytest.mark.parametrize(("similarity", "relative_gamma", "expected"), TABLE)
def test_statistics_of_a_layer_recover_the_scaling_that_it_has(
    similarity: float, relative_gamma: float, expected: float
) -> None:
    n = 1024
    tokens = alike(n, similarity)
    gamma = relative_gamma * float(critical_gamma(similarity))
    call = critical_call(tokens, gamma)
    assert statistic("critical_scaling", call) == pytest.approx(relative_gamma, rel=1e-5)
    self_weight = float(predicted_self_weight(gamma, similarity, n))
    assert statistic("self_weight", call) == pytest.approx(self_weight, rel=1e-5)
    if relative_gamma == 1:
        assert self_weight == pytest.approx(n / (2 * n - 1)) == pytest.approx(0.500244, abs=1e-6)

    entering, leaving = tokens.float(), call.output()[0, 0]
    before = of_states("token_similarity", entering, leaving)
    after = before + of_states("similarity_contraction", entering, leaving)
    assert before == pytest.approx(similarity, rel=1e-5)
    assert after == pytest.approx(expected, abs=1e-5)
    assert float(predicted_similarity(gamma, similarity, n)) == pytest.approx(after, rel=1e-5)
    assert float(estimated_gamma(statistic("critical_scaling", call), before)) == pytest.approx(gamma, rel=1e-4)


def self_logits(logit: float, n: int = 6) -> AttentionCall:
    return of_logits(logit * torch.eye(n))


@pytest.mark.parametrize("logit", [-500.0, -88.0, -30.0, -1.0, 1.0, 10.0, 59.0, 61.0, 88.0, 500.0])
def test_critical_scaling_of_self_weights_that_no_number_holds(logit: float) -> None:
    assert statistic("critical_scaling", self_logits(logit)) == pytest.approx(logit / math.log(6), rel=1e-6)


@pytest.mark.parametrize("gap", [0.0, 40.0, 200.0])
def test_critical_scaling_of_sharp_rows_weighs_all_others(gap: float) -> None:
    """Others whose weights are all cut off at the smallest number still differ among themselves."""
    logits = torch.tensor([[300.0, 1.0, 2.0 - gap], [0.0, 200.0, -1.0], [-300.0, -302.0, -100.0]])
    others = [np.logaddexp(1, 2 - gap), np.logaddexp(0, -1), np.logaddexp(-300, -302)]
    expected = [(own - other + math.log(2)) / math.log(3) for own, other in zip((300, 200, -100), others, strict=True)]
    assert of_rows("critical_scaling", of_logits(logits)).tolist() == pytest.approx(expected, rel=1e-6)


def test_hidden_keys_are_no_others_of_a_sharp_row() -> None:
    logits = torch.tensor([[0.0, 900.0, 900.0], [-200.0, 0.0, 900.0], [-110.0, -100.0, 50.0]])
    rows = of_rows("critical_scaling", of_logits(logits, causal=True)).tolist()
    expected = [200 / math.log(2), (150 - math.log1p(math.exp(-10)) + math.log(2)) / math.log(3)]
    assert math.isnan(rows[0]) and rows[1:] == pytest.approx(expected, rel=1e-6)


def test_rows_that_do_not_see_themselves_are_in_no_critical_scaling() -> None:
    logits = torch.randn(5, 5)
    hidden = ~torch.eye(5).bool()
    assert math.isnan(statistic("critical_scaling", of_logits(logits, mask=hidden)))
    hidden[2, 2] = True
    one_row = of_rows("critical_scaling", of_logits(logits))[2].item()
    assert statistic("critical_scaling", of_logits(logits, mask=hidden)) == pytest.approx(one_row, rel=1e-6)
    strictly_causal = replace(of_logits(logits), visibility=Visibility(-1, bias=logits[None, None]))
    assert math.isnan(statistic("critical_scaling", strictly_causal))


def test_critical_scaling_needs_queries_and_keys_of_the_same_tokens() -> None:
    assert math.isnan(statistic("critical_scaling", replace(of_logits(torch.randn(5, 5)), self_attention=False)))
    assert math.isnan(statistic("critical_scaling", of_one_row(torch.randn(5))))


# Accelerators, which are not asked whether any row takes more work.


@pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0, 300.0])
def test_work_that_no_row_needs_changes_nothing(size: float, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = size * torch.randn(40, 40) + torch.where(torch.rand(40, 1) < 0.5, 0, 2 * size) * torch.eye(40)
    logits[3, 2] = math.nan
    call = of_logits(logits, causal)
    names = (*NAMES, "entropy", "logit_std")
    usual = measure(call, resolve(names))
    monkeypatch.setattr(RowBlock, "_has_any", staticmethod(lambda is_special: True))
    for name, sums in measure(call, resolve(names)).items():
        torch.testing.assert_close(tuple(sums), tuple(usual[name]), rtol=1e-6, atol=1e-6)


# Given weights.


def test_weights_tell_what_logits_tell_up_to_a_constant() -> None:
    logits = 2 * torch.randn(30, 30, dtype=torch.float64)
    plain, given_weights = of_logits(logits.float()), of_weights(logits.softmax(-1))
    for name in ("entropy_floor", "selectivity", "softmax_sensitivity", "critical_scaling"):
        assert statistic(name, given_weights) == pytest.approx(statistic(name, plain), rel=1e-5)


def test_rows_of_weights_are_renormalised() -> None:
    weights = torch.rand(8, 8) ** 4
    unit = weights / weights.sum(-1, keepdim=True)
    for name in ("entropy_floor", "selectivity", "softmax_sensitivity", "critical_scaling"):
        assert statistic(name, of_weights(weights)) == pytest.approx(statistic(name, of_weights(unit)), rel=1e-5)


def test_weights_of_zero() -> None:
    call = of_weights(torch.eye(4))
    assert statistic("softmax_sensitivity", call) < 1e-36
    smallest = math.log(torch.finfo(torch.float32).tiny)
    assert statistic("critical_scaling", call) == pytest.approx(-smallest / math.log(4), rel=1e-6)
    assert 0 <= statistic("entropy_floor", call) <= statistic("entropy", call) < 1e-35


@pytest.mark.parametrize("name", NAMES)
def test_they_are_computed_where_somebody_asks_for_them(name: str) -> None:
    assert not known_statistics()[name].by_default
    assert known_statistics()[name].needs_logits == (name == "large_logit_ratio")
