"""Attention patterns whose statistics are known in closed form or were published."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_attn import AttentionCall
from lightning_attn.capture import Visibility
from lightning_attn.statistics import measure, resolve, sink

N = 64


def harmonic(n: int) -> float:
    return math.fsum(1 / i for i in range(1, n + 1))


def of_logits(logits: Tensor, mask: Tensor | None = None, causal: bool = False) -> AttentionCall:
    """A call whose logits are these, (N, M), where the mask and causality let a key be seen."""
    visibility = Visibility(0 if causal else None, None if mask is None else mask[None, None], logits[None, None])
    queries, keys = (torch.zeros(1, 1, tokens, 1) for tokens in logits.shape)
    return AttentionCall("attention", queries, keys, None, 1.0, visibility, self_attention=True)


def of_weights(weights: Tensor) -> AttentionCall:
    """A call whose attention matrix is this; a key without weight is hidden."""
    return of_logits(weights.log().nan_to_num(neginf=0.0), mask=weights > 0)


def statistic(name: str, call: AttentionCall) -> float:
    (value,) = measure(call, resolve(name))[name].or_nan.tolist()
    return float(value)


def uniform(n: int = N) -> AttentionCall:
    return of_logits(torch.zeros(n, n))


def uniform_causal(n: int = N) -> AttentionCall:
    return of_logits(torch.zeros(n, n), causal=True)


def identity(n: int = N) -> AttentionCall:
    return of_weights(torch.eye(n))


# A token whose key is hidden from everybody would be padding, so these two let all keys be seen.


def all_on_the_first_key(n: int = N) -> AttentionCall:
    return of_logits(200.0 * (torch.arange(n) == 0).expand(n, n), causal=True)


def previous_token(n: int = N) -> AttentionCall:
    tokens = torch.arange(n)
    return of_logits(200.0 * (tokens == (tokens[:, None] - 1).clamp(min=0)), causal=True)


def windows(n: int = N, width: int = 4) -> AttentionCall:
    return of_logits(torch.zeros(n, n), mask=torch.ones(n, n).tril().triu(1 - width).bool())


def four_by_four() -> AttentionCall:
    """The example of Gu et al.'s sink metric, with and without self-queries: 0.7 and 0.6."""
    return of_weights(torch.tensor([[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.5, 0.3, 0.2, 0], [0.7, 0.1, 0.1, 0.1]]))


@pytest.mark.parametrize("call", [uniform(), uniform_causal(), windows()], ids=["everything", "causal", "window"])
def test_uniform_attention_has_full_entropy_under_any_mask(call: AttentionCall) -> None:
    for name in ("entropy", "entropy_without_sink"):
        assert statistic(name, call) == pytest.approx(1, abs=1e-7)
    for name in ("kl_to_uniform", "logit_std"):
        assert statistic(name, call) == pytest.approx(0, abs=1e-6)
    assert statistic("max_logit", call) == 0


@pytest.mark.parametrize(
    ("pattern", "n", "expected"),
    [
        (uniform, 64, 1),
        (all_on_the_first_key, 64, 1),
        (identity, 64, 64),
        (previous_token, 64, 32),
        (uniform_causal, 16, 1.56939),
        (uniform_causal, 64, 1.85806),
        (uniform_causal, 128, 2.00494),
        # Beyond the size up to which the spectrum is computed at once.
        (uniform_causal, 1024, 2.45475),
        (uniform, 300, 1),
        (all_on_the_first_key, 300, 1),
        (identity, 300, 300),
        (previous_token, 300, 150),
    ],
)
def test_stable_rank(pattern: Callable[[int], AttentionCall], n: int, expected: float) -> None:
    assert statistic("stable_rank", pattern(n)) == pytest.approx(expected, rel=1e-3 if n > 128 else 3e-6)


@pytest.mark.parametrize("size", [0.1, 0.5, 1.0])
def test_stable_rank_and_entropy_of_random_logits(size: float) -> None:
    """Logits of variance t²: stable rank e^(t²), entropy log n - t²/2 (Bordenave, Caputo, Chafaï)."""
    call = of_logits(size * torch.randn(1024, 1024))
    assert statistic("stable_rank", call) == pytest.approx(math.exp(size**2), rel=0.03)
    assert statistic("kl_to_uniform", call) == pytest.approx(size**2 / 2, rel=0.03)
    assert statistic("logit_std", call) == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize("n", [8, 64, 256])
def test_sink_strength_of_uniform_causal_attention(n: int) -> None:
    assert statistic("sink_strength", uniform_causal(n)) == pytest.approx((harmonic(n) - 1) / (n - 1), rel=1e-6)


def test_sink_strength_without_the_self_query() -> None:
    assert statistic("sink_strength", four_by_four()) == pytest.approx(0.6, rel=1e-6)


@pytest.mark.parametrize(("call", "importance"), [(uniform_causal(), 0.0741233), (four_by_four(), 0.7)])
def test_sink_rate_compares_the_importance_with_the_self_query(
    call: AttentionCall, importance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "MIN_KEYS", 1)
    rates = []
    for threshold in (importance - 1e-6, importance + 1e-6):
        monkeypatch.setattr(sink.SinkRate, "threshold", threshold)
        rates.append(statistic("sink_rate", call))
    assert rates == [1, 0]


def test_sink_rate_of_short_sequences_is_absent() -> None:
    """Uniform causal attention over nine keys is above the threshold of 0.3, which tells nothing."""
    assert harmonic(9) / 9 > sink.SinkRate.threshold > harmonic(10) / 10
    assert math.isnan(statistic("sink_rate", uniform_causal(9)))
    assert statistic("sink_rate", uniform_causal(10)) == 0
    assert statistic("sink_rate", all_on_the_first_key(10)) == 1


def test_sinks_are_found_sequence_by_sequence() -> None:
    """One sequence of two has a sink: the rate is a half, though the mean matrix has one too."""
    bias = torch.zeros(2, 1, N, N)
    bias[0, ..., 0] = 50
    call = of_logits(torch.zeros(N, N))
    call = AttentionCall(
        "attention",
        call.query.expand(2, -1, -1, -1),
        call.key.expand(2, -1, -1, -1),
        None,
        1.0,
        Visibility(bias=bias),
        True,
    )
    assert statistic("sink_rate", call) == 0.5


def test_consensus_rate() -> None:
    assert statistic("consensus_rate", uniform_causal()) == pytest.approx(0.5)
    assert statistic("consensus_rate", identity()) == 0
    assert statistic("consensus_rate", all_on_the_first_key()) == 1
    assert statistic("consensus_rate", four_by_four()) == pytest.approx(0.6, rel=1e-6)
    assert statistic("consensus_rate", uniform()) == pytest.approx(1, abs=1e-6)


def test_self_weight() -> None:
    assert statistic("self_weight", identity()) == 1
    assert statistic("self_weight", previous_token()) == pytest.approx(1 / N)
    assert statistic("self_weight", uniform_causal()) == pytest.approx(harmonic(N) / N, rel=1e-6)


def test_max_weight() -> None:
    assert statistic("max_weight", uniform()) == pytest.approx(1 / N)
    assert statistic("max_weight", uniform_causal()) == pytest.approx((harmonic(N) - 1) / (N - 1), rel=1e-6)
    assert math.isnan(statistic("max_weight", identity()))  # rows without a choice tell nothing
    assert statistic("max_weight", all_on_the_first_key()) == 1


def test_the_sink_is_left_out_of_the_entropy_without_it() -> None:
    """A sink that takes all but a thousandth, and uniform weights beside it."""
    logits = torch.zeros(N, N)
    logits[:, 0] = math.log(999 * (N - 1))
    call = of_logits(logits)
    assert statistic("entropy", call) < 0.01
    assert statistic("entropy_without_sink", call) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])
@pytest.mark.parametrize("size", [1.0, 100.0, 500.0])
@pytest.mark.parametrize("name", ["entropy", "entropy_without_sink", "kl_to_uniform", "logit_std"])
def test_never_negative_where_logits_are_sharp(name: str, size: float, causal: bool) -> None:
    logits = torch.randn(N, N)
    for sharp in (size * logits / logits.max(), size * torch.eye(N), size * (logits > 2)):
        assert statistic(name, of_logits(sharp, causal=causal)) >= 0


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("entropy", 0, 1),
        ("entropy_without_sink", 0, 1),
        ("kl_to_uniform", 0, math.inf),
        ("logit_std", 0, math.inf),
        ("max_weight", 0, 1),
        ("stable_rank", 1, math.inf),
    ],
)
def test_nearly_uniform_attention_keeps_within_the_stated_range(name: str, lowest: float, highest: float) -> None:
    """Heads begin like this, and rounding must not give a divergence below 0 or a rank below 1."""
    for n in range(3, 70):
        for size in (0, 1e-4, 1e-3):
            assert lowest <= statistic(name, of_logits(size * torch.randn(n, n))) <= highest, f"{n} keys, logits {size}"


@pytest.mark.parametrize("gap", [1, 10, 20, 50, 500])
def test_entropy_of_two_keys(gap: float) -> None:
    """Sharp rows, whose entropy `lse - p z` would lose to cancellation."""
    rest = 1 / (1 + math.exp(gap))
    expected = -(1 - rest) * math.log1p(-rest) - rest * math.log(rest or 1)
    call = of_logits(torch.tensor([[500.0, 500.0 - gap]]))
    assert statistic("entropy", call) == pytest.approx(expected / math.log(2), rel=1e-5, abs=2.4e-7)


@pytest.mark.parametrize("gap", [5.0, 12.0, 20.0, 40.0])
@pytest.mark.parametrize("largest", [1, 2])
def test_entropy_of_sharp_rows_is_exact_to_five_digits(gap: float, largest: int) -> None:
    """Nearly all weight on one or two keys: the entropy is all in what the others get."""
    keys = 30
    logits = torch.full((keys,), -gap)
    logits[:largest] = 0.0
    weights = torch.softmax(logits.double(), -1)
    expected = float(-(weights * torch.log_softmax(logits.double(), -1)).sum() / math.log(keys))
    query, key = torch.ones(1, 1, 4, 1), logits.view(1, 1, keys, 1)
    call = AttentionCall("site", query, key, None, 1.0, Visibility(), self_attention=False)
    (found,) = measure(call, resolve("entropy"))["entropy"].or_nan.tolist()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("pattern", "n", "expected"),
    [
        (uniform, 64, 1),
        (all_on_the_first_key, 64, 1),
        (identity, 64, 0),
        (uniform_causal, 16, 0.4414),
        (uniform_causal, 64, 0.3656),
        (uniform_causal, 128, 0.3346),
        (uniform_causal, 1024, 0.2612),
        (uniform, 300, 1),
        (identity, 300, 0),
        (previous_token, 300, 1 - math.sqrt(1 / 2)),
    ],
)
def test_spectral_gap(pattern: Callable[[int], AttentionCall], n: int, expected: float) -> None:
    assert statistic("spectral_gap", pattern(n)) == pytest.approx(expected, abs=1e-3 if n > 128 else 1e-4)


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 300), (300, 1)])
def test_a_single_row_or_column_has_no_spectral_gap(shape: tuple[int, int]) -> None:
    call = AttentionCall("site", *(torch.randn(1, 1, n, 4) for n in shape), None, 1.0, Visibility(), False)
    assert math.isnan(statistic("spectral_gap", call))
    assert statistic("stable_rank", call) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(("n", "expected"), [(16, 0.6554), (32, 0.4336), (64, 0.2704)])
def test_position_concentration_of_uniform_causal_attention(n: int, expected: float) -> None:
    assert statistic("position_concentration", uniform_causal(n)) == pytest.approx(expected, abs=5e-5)
    assert statistic("uniform_position_concentration", all_on_the_first_key(n)) == pytest.approx(expected, abs=5e-5)
    assert statistic("position_concentration", all_on_the_first_key(n)) == 1


def test_attention_distance() -> None:
    for call in (uniform(), uniform_causal(), windows()):
        assert statistic("attention_distance", call) == pytest.approx(1, rel=1e-6)
    assert math.isnan(statistic("attention_distance", identity()))  # nothing else can be seen
    # Uniform causal attention has i / 2 in row i.
    assert statistic("attention_distance", all_on_the_first_key()) == pytest.approx(2, rel=1e-6)
    assert statistic("attention_distance", previous_token()) == pytest.approx((N - 1) / (N * (N - 1) / 4), rel=1e-6)


@pytest.mark.parametrize("call", [uniform(), uniform_causal(), windows()], ids=["everything", "causal", "window"])
def test_uniform_attention_is_balanced_under_any_mask(call: AttentionCall) -> None:
    assert statistic("marginal_gap", call) == pytest.approx(0, abs=1e-6)


def test_marginal_gap_of_a_sink() -> None:
    """All weight on a key that would receive 1 / n, or H_n / n where causality gives it more already."""
    full = of_logits(200.0 * (torch.arange(N) == 0).expand(N, N))
    assert statistic("marginal_gap", full) == pytest.approx(1 - 1 / N, rel=1e-6)
    assert statistic("marginal_gap", all_on_the_first_key()) == pytest.approx(1 - harmonic(N) / N, rel=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_beside_a_learned_sink_uniform_attention_is_in_balance(causal: bool) -> None:
    call = replace(of_logits(torch.zeros(24, 24), causal=causal), sink_logits=torch.tensor([6.0]))
    assert statistic("marginal_gap", call) == pytest.approx(0, abs=1e-6)


def test_beside_a_learned_sink_the_rate_of_a_causal_head_is_that_of_its_eigenvalues() -> None:
    """Of uniform causal attention with a sink logit of 0 the diagonal is 1 / (i + 1)."""
    call = replace(uniform_causal(8), sink_logits=torch.zeros(1))
    assert statistic("consensus_rate", call) == pytest.approx(1 - 1 / 3)
