"""Sinks anywhere, their place, what they bring, what is left without them, and the activations that go with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_attn import AttentionCall
from lightning_attn.capture import HiddenStates, Visibility
from lightning_attn.functional.sinks import sink_importance
from lightning_attn.statistics import RowStatistic, known_statistics, measure, measure_states, resolve
from lightning_attn.statistics.activations import MassiveActivationRate
from lightning_attn.statistics.any_sink import AnySinkRate
from lightning_attn.statistics.rows.importance import OtherSeeingQueries, ReceivedFromOthers, SeeingQueries
from lightning_attn.statistics.rows.received import ReceivedWeight
from lightning_attn.statistics.rows.row_pass import passes
from lightning_attn.statistics.sink import SinkRate

N = 64
NAMES = ["any_sink_rate", "positional_share_without_sink", "sink_position", "value_weighted_sink"]


def harmonic(n: int) -> float:
    return math.fsum(1 / i for i in range(1, n + 1))


def of_logits(logits: Tensor, value: Tensor | None = None, **visibility: Any) -> AttentionCall:
    """A call of one head with these logits, (N, M) or (B, 1, N, M)."""
    bias = logits if logits.dim() == 4 else logits[None, None]
    query, key = (torch.zeros(len(bias), 1, n, 1) for n in bias.shape[2:])
    return AttentionCall("site", query, key, value, 1.0, Visibility(bias=bias, **visibility), True)


def statistic(name: str | type[RowStatistic], call: AttentionCall) -> float:
    of_name = resolve(name)[0] if isinstance(name, str) else name
    (value,) = measure(call, (of_name,))[of_name.name].or_nan.tolist()
    return float(value)


def sink_at(position: int, n: int = N, logit: float = 8.0) -> Tensor:
    return logit * (torch.arange(n) == position).float().expand(n, n)


def test_none_is_computed_by_default() -> None:
    assert not {*NAMES, "massive_activation_rate"} & {s.name for s in resolve(None)}


# Sinks anywhere.


@pytest.mark.parametrize("position", [0, 1, 17, 31])
@pytest.mark.parametrize("causal", [None, 0], ids=["everything", "causal"])
def test_a_sink_is_found_wherever_it_is(position: int, causal: int | None) -> None:
    call = of_logits(sink_at(position), causal_offset=causal)
    assert statistic("any_sink_rate", call) == 1
    assert statistic("sink_rate", call) == float(position == 0)
    assert statistic("sink_position", call) == position


def test_a_prefix_whose_sink_is_its_separator() -> None:
    """A prefix that all see, and causal attention after it."""
    prefix = 20
    mask = torch.ones(N, N).tril().bool()
    mask[:, :prefix] = True
    call = of_logits(sink_at(prefix - 1), mask=mask[None, None])
    assert statistic("sink_rate", call) == 0
    assert statistic("any_sink_rate", call) == 1
    assert statistic("sink_position", call) == prefix - 1


def test_positions_are_counted_from_the_first_token_after_left_padding() -> None:
    """Two sequences that are alike, but for padding; masked keys between tokens are no tokens either."""
    is_token = torch.arange(N) >= torch.tensor([[0], [15]])
    is_token[:, 20] = False
    bias = torch.stack([sink_at(5), sink_at(24)])[:, None]
    call = of_logits(bias, mask=is_token[:, None, None], causal_offset=0)
    assert statistic("sink_position", call) == (5 + (24 - 15 - 1)) / 2
    assert statistic("any_sink_rate", call) == 1


def test_each_document_has_a_sink_and_the_longest_tells() -> None:
    document = torch.tensor([0] * 10 + [1] * 40 + [2] * 14)
    logits = 8.0 * ((torch.arange(N) == 10) | (torch.arange(N) == 50)).float().expand(N, N)
    call = of_logits(logits, mask=(document[:, None] == document)[None, None], causal_offset=0)
    assert statistic("sink_position", call) == 10
    assert statistic("sink_rate", call) == 0  # that of the first document, which has none
    assert statistic("any_sink_rate", call) == 1


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(N, N).tril(),
        torch.ones(N, N),
        torch.ones(N, N).tril().triu(-15),
        torch.block_diag(*[torch.ones(16, 16).tril()] * 4),
    ],
    ids=["causal", "everything", "window", "documents"],
)
def test_uniform_attention_has_no_sink_and_its_most_important_key_is_the_first(mask: Tensor) -> None:
    call = of_logits(torch.zeros(N, N), mask=mask.bool()[None, None])
    assert statistic("any_sink_rate", call) == 0
    assert statistic("sink_position", call) == 0


@pytest.mark.parametrize(
    "mask",
    [torch.ones(N, N).tril().triu(-7), torch.block_diag(*[torch.ones(8, 8).tril()] * 8)],
    ids=["window", "documents"],
)
def test_absent_where_the_mask_alone_makes_a_sink(mask: Tensor) -> None:
    """Eight tokens see the first key of a window, or of each document, as in sequences of eight tokens."""
    assert harmonic(8) / 8 > 0.3
    assert math.isnan(statistic("any_sink_rate", of_logits(torch.zeros(N, N), mask=mask.bool()[None, None])))


@pytest.mark.parametrize("name", ["any_sink_rate", "sink_position"])
def test_absent_of_fewer_than_ten_keys(name: str) -> None:
    for causal in (None, 0):
        assert math.isnan(statistic(name, of_logits(sink_at(0, 9), causal_offset=causal)))
        assert not math.isnan(statistic(name, of_logits(sink_at(0, 10), causal_offset=causal)))


def test_late_keys_that_few_queries_see_are_not_looked_at() -> None:
    """Each token looks at the one before it, so that the last but one gets everything of the one that sees it."""
    tokens = torch.arange(N)
    call = of_logits(50.0 * (tokens == (tokens[:, None] - 1).clamp(min=0)), causal_offset=0)
    assert statistic("any_sink_rate", call) == 0
    assert statistic("sink_position", call) < N / 2


def test_a_token_that_looks_at_itself_is_no_sink() -> None:
    """All weight on the diagonal, and what is left on the fourth key."""
    logits = sink_at(3) + 60 * torch.eye(N)
    assert statistic("sink_position", of_logits(logits, causal_offset=0)) == 3
    assert math.isnan(statistic("sink_position", of_logits(200 * torch.eye(N), causal_offset=0)))


@pytest.mark.parametrize("of_rate", [SinkRate, AnySinkRate])
@pytest.mark.parametrize("weight", [0.2, 0.5])
def test_the_threshold_is_a_parameter(of_rate: type[SinkRate] | type[AnySinkRate], weight: float) -> None:
    logits = torch.zeros(N, N)
    logits[:, 0] = math.log(weight / (1 - weight) * (N - 1))
    assert of_rate.parameters == ("threshold",)
    for threshold, expected in ((weight - 1e-5, 1), (weight + 1e-5, 0)):
        changed = type("Changed", (of_rate,), {"threshold": threshold})
        assert statistic(changed, of_logits(logits)) == expected
    assert statistic(of_rate, of_logits(logits)) == float(weight > 0.3)


def test_rates_and_positions_are_means_over_sequences() -> None:
    call = of_logits(torch.stack([sink_at(0), sink_at(4), torch.zeros(N, N), sink_at(6)])[:, None])
    assert statistic("any_sink_rate", call) == 0.75
    assert statistic("sink_position", call) == (0 + 4 + 0 + 6) / 4


def test_one_query_beside_many_keys() -> None:
    """A step of generation: cross-shaped, and its query is none of the keys that are compared."""
    query, key = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, N, 1)
    call = AttentionCall("site", query, key, None, 1.0, Visibility(bias=sink_at(7)[None, None, :1]), False)
    assert statistic("sink_position", call) == 7
    assert statistic("any_sink_rate", call) == 1


# Repeated tokens (Gu et al., proposition 1): no sink can come of them.


def of_repeated_token(angle: float, size: float) -> AttentionCall:
    """One token many times, rotated by its position as by rotary embedding."""
    turn = angle * torch.arange(N, dtype=torch.float64)
    rotation = torch.stack([turn.cos(), turn.sin(), -turn.sin(), turn.cos()], -1).view(N, 2, 2)
    query, key = (size * torch.randn(2, dtype=torch.float64) for _ in range(2))
    rotated = [(rotation @ vector)[None, None].float() for vector in (query, key)]
    return AttentionCall("site", *rotated, None, 1.0, Visibility(0), True)


def test_repeated_tokens_without_positions_are_attended_to_alike() -> None:
    call = of_repeated_token(0.0, 3.0)
    expected = torch.ones(N, N).tril() / torch.arange(1, N + 1)[:, None]
    torch.testing.assert_close(call.weights()[0, 0], expected, rtol=1e-6, atol=0)
    assert statistic("sink_strength", call) == pytest.approx((harmonic(N) - 1) / (N - 1), rel=1e-5)
    assert statistic("sink_rate", call) == statistic("any_sink_rate", call) == statistic("sink_position", call) == 0


@pytest.mark.parametrize("size", [0.3, 1.0])
def test_repeated_tokens_with_rotary_positions_have_bounded_weights(size: float) -> None:
    call = of_repeated_token(0.7, size)
    largest = float(call.query[0, 0, 0].norm() * call.key[0, 0, 0].norm())
    seen = torch.arange(1, N + 1)
    bound = math.exp(2 * largest) / (math.exp(2 * largest) + seen - 1)
    assert (call.weights()[0, 0].amax(-1) <= bound + 1e-6).all()
    assert statistic("sink_strength", call) <= float(bound[1:].mean())


# What the sink brings.


def test_values_of_one_length_leave_the_mean_weight() -> None:
    value = torch.nn.functional.normalize(torch.randn(1, 1, N, 5), dim=-1)
    call = of_logits(torch.zeros(N, N), value, causal_offset=0)
    assert statistic("value_weighted_sink", call) == pytest.approx(harmonic(N) / N, rel=1e-6)


@pytest.mark.parametrize(("length", "expected"), [(0.0, 0), (0.01, 0.01 / 1.01), (1.0, 0.5), (100.0, 100 / 101)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_half_of_the_weight_on_a_value_of_some_length(length: float, expected: float, scale: float) -> None:
    """Whatever all values are multiplied by: their squares need not fit single precision."""
    logits = torch.zeros(N, N)
    logits[:, 0] = math.log(N - 1)
    value = torch.nn.functional.normalize(torch.randn(1, 1, N, 5), dim=-1)
    value[:, :, 0] *= length
    found = statistic("value_weighted_sink", of_logits(logits, scale * value))
    assert found == pytest.approx(expected, rel=1e-5)


def test_sequences_count_alike_however_long_their_values() -> None:
    logits = torch.stack([sink_at(0, logit=200.0), torch.zeros(N, N)])[:, None]
    value = torch.ones(2, 1, N, 3) * torch.tensor([1.0, 1000.0]).view(2, 1, 1, 1)
    assert statistic("value_weighted_sink", of_logits(logits, value)) == pytest.approx((1 + 1 / N) / 2)


@pytest.mark.parametrize("value_heads", [1, 2, 4])
def test_heads_share_values(value_heads: int) -> None:
    query, key, value = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, value_heads, 9, 5)
    call = AttentionCall("site", query, key, value, 0.3, Visibility(0), True)
    lengths = value.norm(dim=-1).repeat_interleave(4 // value_heads, dim=1)
    brought = call.weights().sum(2) * lengths
    expected = (brought[..., 0] / brought.sum(-1)).mean(0)
    found = measure(call, resolve("value_weighted_sink"))["value_weighted_sink"].or_nan
    torch.testing.assert_close(found.float(), expected)


@pytest.mark.parametrize("value", [None, torch.zeros(1, 1, 12, 3), torch.full((1, 1, 12, 3), math.nan)])
def test_absent_where_values_are_unknown_zero_or_not_finite(value: Tensor | None) -> None:
    sums = measure(of_logits(torch.zeros(12, 12), value), resolve("value_weighted_sink"))["value_weighted_sink"]
    assert sums.numerator.tolist() == sums.denominator.tolist() == [0]


def test_what_a_hidden_value_holds_has_no_effect_and_the_first_key_is_the_first_seen() -> None:
    mask = (torch.arange(12) >= 3)[None, None, None]
    value = torch.randn(1, 1, 12, 3)
    logits = torch.randn(12, 12)
    expected = statistic("value_weighted_sink", of_logits(logits[3:, 3:], value[:, :, 3:]))
    for bad in (math.nan, math.inf, 1e30):
        value[:, :, :3] = bad
        found = statistic("value_weighted_sink", of_logits(logits, value, mask=mask))
        assert found == pytest.approx(expected, rel=1e-6)


# What is left without the sink.


def share(name: str, call: AttentionCall) -> float:
    """Over all heads, which are so many draws of the same."""
    numerator, denominator = measure(call, resolve(name))[name]
    return float(numerator.sum() / denominator.sum())


def of_heads(logits: Tensor, causal: bool = False) -> AttentionCall:
    query, key = (torch.zeros(*logits.shape[:2], n, 1) for n in logits.shape[2:])
    return AttentionCall("site", query, key, None, 1.0, Visibility(0 if causal else None, bias=logits), False)


B, H, TOKENS = 8, 128, 16


@pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])
@pytest.mark.parametrize("sink", [0.0, 3.0, 30.0, 60.0])
def test_a_sink_does_not_change_the_share_of_position_without_it(sink: float, causal: bool) -> None:
    is_first = torch.arange(TOKENS) == 0
    position, content = torch.randn(1, H, TOKENS, TOKENS), torch.randn(B, H, TOKENS, TOKENS)
    both = position + content
    without = of_heads(torch.where(is_first, -torch.inf, both), causal)
    expected = share("positional_share", without)
    name = "positional_share_without_sink"
    assert share(name, of_heads(both + sink * is_first, causal)) == pytest.approx(expected, rel=1e-4)
    assert share(name, of_heads(content + sink * is_first, causal)) == pytest.approx(0, abs=0.02)
    by_position = (position + sink * is_first).expand(B, -1, -1, -1)
    assert share(name, of_heads(by_position, causal)) == pytest.approx(1, abs=1e-6)
    if sink >= 30:  # what all sequences have in common then is the sink
        assert share("positional_share", of_heads(content + sink * is_first)) > 0.99


@pytest.mark.parametrize("logits", [torch.randn(1, H, TOKENS, TOKENS), torch.zeros(B, H, TOKENS, TOKENS)])
def test_no_share_without_a_sink_of_one_sequence_or_of_uniform_attention(logits: Tensor) -> None:
    sums = measure(of_heads(logits), resolve("positional_share_without_sink"))["positional_share_without_sink"]
    assert sums.denominator.tolist() == [0] * H


@pytest.mark.parametrize(
    ("kind", "plain", "corrected"), [("position", 1, 1), ("both", 0.473, 0.398), ("content", 0.124, -0.001)]
)
def test_shares_of_eight_sequences_of_sixteen_tokens(kind: str, plain: float, corrected: float) -> None:
    """The share of the mean over sequences, R, is 1 / B of pure content; (B R - 1) / (B - 1) is not.

    The published half of each is of one draw, of which 0.04 is the standard deviation; this is the mean of many.
    """
    position, content = torch.randn(1, H, TOKENS, TOKENS), torch.randn(B, H, TOKENS, TOKENS)
    of_kind = {"position": position.expand(B, -1, -1, -1), "both": position + content, "content": content}
    logits = of_kind[kind]
    deviation = logits.double().softmax(-1).numpy() - 1 / TOKENS
    ratio = (deviation.mean(0) ** 2).sum() / (deviation**2).sum() * B
    found = share("positional_share", of_heads(logits))
    assert found == pytest.approx((B * ratio - 1) / (B - 1), abs=1e-6)
    assert (B * plain - 1) / (B - 1) == pytest.approx(corrected, abs=5e-4)
    assert (ratio, found) == (pytest.approx(plain, abs=0.02), pytest.approx(corrected, abs=0.02))


# Massive activations.


def rate(states: Tensor, of_rate: type[MassiveActivationRate] = MassiveActivationRate) -> float:
    (found,) = measure_states(HiddenStates("site", states, None, None), [of_rate]).values()
    numerator, denominator = (part.sum() for part in found)
    return float(numerator / denominator) if denominator else math.nan


@pytest.mark.parametrize(
    ("largest", "median", "expected"),
    [(3608.6, 0.6, 1), (100.0, 0.01, 0), (100.5, 0.01, 1), (600.5, 0.625, 0), (625.0, 0.625, 1), (624.9, 0.625, 0)],
)
def test_the_criterion_of_massive_activations(largest: float, median: float, expected: float) -> None:
    """More than 100, and a thousand times the median at least."""
    states = torch.full((1, 11, 8), median)
    states[:, :, ::2] *= -1
    states[0, 4, 3] = -largest
    assert rate(states) == expected
    assert rate(torch.cat([states, torch.ones_like(states)])) == expected / 2


def test_the_criterion_has_parameters() -> None:
    states = torch.ones(1, 11, 8)
    states[0, 4, 3] = 50
    assert MassiveActivationRate.parameters == ("magnitude", "ratio")
    for parameters, expected in (
        ({"magnitude": 49.0}, 0),
        ({"ratio": 50.0}, 0),
        ({"magnitude": 49.0, "ratio": 50.0}, 1),
    ):
        assert rate(states, type("Changed", (MassiveActivationRate,), parameters)) == expected


def test_massive_activations_beside_zeros() -> None:
    """A median of zero, and no activation at all."""
    states = torch.zeros(2, 5, 4)
    states[0, 1, 2] = 200
    assert rate(states) == 0.5
    assert math.isnan(rate(torch.full((1, 5, 4), math.nan)))


# The same importance as that of dense weights.


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("block_bytes", [4, 3000, None])
def test_importance_is_that_of_dense_weights(include_self: bool, block_bytes: int | None) -> None:
    mask = torch.rand(2, 1, 14, 14) < 0.8
    mask[0, :, :, :3] = False  # left padding
    mask[1, :, 6] = False
    call = AttentionCall("site", *torch.randn(2, 2, 3, 14, 8), None, 1.0, Visibility(0, mask=mask), True)
    expected = sink_importance(call.weights(), mask, is_causal=True, include_self=include_self)
    weight, count = (ReceivedWeight, SeeingQueries) if include_self else (ReceivedFromOthers, OtherSeeingQueries)
    found = []
    for row_pass in passes(call, block_bytes):
        received, queries = weight(row_pass), count(row_pass)
        for rows in row_pass.blocks():
            received.add(rows)
            queries.add(rows)
        found.append((received.sum_BHM / queries.sum_BHM).flatten(0, 1))
    torch.testing.assert_close(torch.cat(found), expected.flatten(0, 1), equal_nan=True, rtol=1e-5, atol=1e-7)


# Weights that are given as they are.


def test_given_weights_are_taken_as_they_are() -> None:
    """Rows that sum to more or less than one, keys of no weight, and a row of nothing, which is absent."""
    weights = torch.rand(2, 3, 14, 14) * torch.rand(2, 3, 14, 1) * (torch.rand(2, 3, 14, 14) < 0.7)
    weights[0, 0, 5] = 0
    weights[1, 1, :, 4] *= 8
    empty, value = torch.zeros(2, 3, 14, 0), torch.randn(2, 3, 14, 4)
    call = AttentionCall("site", empty, empty, value, 1.0, Visibility(0), True, weight_matrix=weights)
    seen = weights.double().tril()
    present = (seen.sum(-1, keepdim=True) > 0).double()
    received, queries = seen.sum(2), present.expand(-1, -1, -1, 14).tril().sum(2)
    others = queries - present[..., 0]
    of_others = (received - seen.diagonal(dim1=-2, dim2=-1)) / others.clamp(min=1)
    brought = received * value.double().norm(dim=-1)
    is_seen, is_seen_by_others = (2 * count >= count.amax(-1, keepdim=True) for count in (queries, others))
    expected = {
        "any_sink_rate": ((is_seen * received / queries).amax(-1) > 0.3).double(),
        "sink_position": (is_seen_by_others * of_others).argmax(-1).double(),
        "value_weighted_sink": brought[..., 0] / brought.sum(-1),
    }
    assert 0 < expected["any_sink_rate"].mean() < 1
    for name, of_heads in expected.items():
        found = measure(call, resolve(name))[name].or_nan
        torch.testing.assert_close(found, of_heads.mean(0), rtol=1e-6, atol=0, msg=lambda m, n=name: f"{n}: {m}")


# All of them.


@pytest.mark.parametrize("name", ["any_sink_rate", "sink_position", "value_weighted_sink"])
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
def test_values_keep_within_the_range(name: str, size: float) -> None:
    low, high = known_statistics()[name].range.numbers
    for causal in (None, 0):
        logits, value = size * torch.randn(20, 1, N, N), torch.randn(20, 1, N, 4)
        ratio = measure(of_logits(logits, value, causal_offset=causal), resolve(name))[name]
        assert np.isfinite(ratio.or_nan.numpy()).all()
        assert low is not None and low <= float(ratio.or_nan) <= (N - 1 if high is None else high)
