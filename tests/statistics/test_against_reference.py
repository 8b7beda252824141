"""Every statistic equals the dense float64 reference, for random shapes, types, logits and masks, and for bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from drawn_calls import KINDS, calls, distance, exact_every_time
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_attn import AttentionCall
from lightning_attn.capture import Visibility
from lightning_attn.statistics import RowStatistic, known_statistics, measure, resolve

NAN, INF = math.nan, math.inf

OF_ROWS = {name: statistic for name, statistic in known_statistics().items() if issubclass(statistic, RowStatistic)}

#: The sums of float32 exponentials are near 1, where float32 has this resolution. A value near zero, such as the
#: entropy of a collapsed head, cannot be more exact than that.
RESOLUTION = 2 * torch.finfo(torch.float32).eps


def values(call: AttentionCall, **options: int | None) -> dict[str, list[float]]:
    """Every statistic of every head, NaN where it is absent; the sums that it is made of are numbers in any case."""
    found = measure(call, tuple(OF_ROWS.values()), **options)
    for name, sums in found.items():
        assert not any(tensor.isnan().any() for tensor in sums), name
    return {name: sums.or_nan.tolist() for name, sums in found.items()}


def assert_equals_reference(call: AttentionCall) -> None:
    heads = reference.heads(call)
    visible = np.concatenate([np.abs(head.logits[head.visible]) for of_head in heads for head in of_head] or [[]])
    largest = visible[np.isfinite(visible)].max(initial=0)
    for name, got in values(call).items():
        expected = reference.head_values(name, heads)
        tolerance = reference.TOLERANCES.get(name)
        relative = 1e-3 if OF_ROWS[name].is_spectral else max(1e-5, 1e-7 * largest)
        absolute = RESOLUTION
        if tolerance is not None:
            relative = tolerance.relative
        elif name in reference.AS_EXACT_AS_LOGITS:
            absolute *= max(1, largest)
        elif name in ("spectral_gap", "consensus_rate"):
            absolute = relative  # differences of numbers near 1
        elif name == "value_contraction":
            absolute *= 10  # a sum of products, beside values whose spread is 1
        for number, sequences in enumerate(heads):
            if name in reference.SHARES:
                # A difference of numbers near 1, of patterns that are as exact as weights are beside what they differ.
                absolute = relative + RESOLUTION / max(reference.contrast(name, sequences), 1e-6)
            if tolerance is not None:
                of_head = tolerance.absolute
                absolute = of_head(sequences) if callable(of_head) else of_head
            if not reference.is_undecided(name, sequences):
                assert got[number] == pytest.approx(expected[number], rel=relative, abs=absolute, nan_ok=True), (
                    f"{name} of head {number}: {got} instead of {expected}, largest logit {largest:.4g}"
                )


def test_every_statistic_has_a_reference() -> None:
    assert {*reference.STATISTICS, *reference.OF_SEQUENCES} == set(OF_ROWS)


@pytest.mark.parametrize("name", KINDS)
@exact_every_time
@given(data=st.data())
def test_every_statistic_equals_the_reference(name: str, data: st.DataObject) -> None:
    assert_equals_reference(data.draw(calls(KINDS[name])))


# Calls of a few tokens that are easy to spoil.


def a_call(
    queries: int = 12,
    keys: int | None = None,
    visibility: Visibility | None = None,
    sequences: int = 2,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    **fields: object,
) -> AttentionCall:
    keys = queries if keys is None else keys
    query = torch.randn(sequences, heads, queries, 4).to(dtype)
    key = torch.randn(sequences, heads, keys, 4).to(dtype)
    value = torch.randn(sequences, heads, keys, 4).to(dtype)
    return AttentionCall("attention", query, key, value, 0.5, visibility or Visibility(), queries == keys, **fields)


def assert_same(first: dict[str, list[float]], second: dict[str, list[float]]) -> None:
    torch.testing.assert_close(_tensors(first), _tensors(second), rtol=0, atol=0, equal_nan=True)


def _tensors(values: dict[str, list[float]]) -> dict[str, Tensor]:
    return {name: torch.tensor(of_heads) for name, of_heads in values.items()}


@pytest.mark.parametrize("sink_over_logits", [-10, 0, 10, 40, 45, 50, 60, 100])
def test_a_learned_sink_may_take_nearly_everything(sink_over_logits: float) -> None:
    """Weights whose squares float32 does not hold: the stable rank is right or absent."""
    call = a_call(heads=1, sink_logits=torch.tensor([float(sink_over_logits)]))
    (got,) = values(call)["stable_rank"]
    (expected,) = reference.head_values("stable_rank", reference.heads(call))
    assert math.isnan(got) or got == pytest.approx(expected, rel=1e-3)


def test_sharp_logits_with_a_learned_sink() -> None:
    call = a_call(sink_logits=torch.tensor([-50.0, 20.0]))
    assert_equals_reference(replace(call, query=call.query * 60))


def test_inputs_in_float64() -> None:
    assert_equals_reference(a_call(dtype=torch.float64, visibility=Visibility(0)))
    bias = torch.randn(1, 2, 12, 12, dtype=torch.float64)
    assert_equals_reference(a_call(dtype=torch.float64, visibility=Visibility(bias=bias)))


def test_spectral_statistics_of_the_first_sequences_alone() -> None:
    call = a_call(sequences=3)
    few, first, all_of_it = values(call, spectral_sequences=2), values(call.select(slice(2))), values(call)
    assert few["stable_rank"] == first["stable_rank"] != all_of_it["stable_rank"]
    assert few["entropy"] == all_of_it["entropy"]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("spoilt", ["query", "key"])
@pytest.mark.parametrize("visibility", [Visibility(), Visibility(0)], ids=["everything", "causal"])
def test_rows_that_are_not_finite_are_counted_and_in_nothing_else(
    visibility: Visibility, spoilt: str, bad: float
) -> None:
    call = a_call(visibility=visibility)
    healthy = values(call)
    getattr(call, spoilt)[1, 1, 7, 2] = bad
    got = values(call)
    assert_equals_reference(call)
    assert got["non_finite_share"][1] > 0
    assert_same({name: v[:1] for name, v in got.items()}, {name: v[:1] for name, v in healthy.items()})


def test_a_head_without_a_finite_row() -> None:
    call = a_call(sequences=1)
    call.query[:, 1] = NAN
    got = {name: of_heads[1] for name, of_heads in values(call).items()}
    assert (got.pop("non_finite_share"), got.pop("hidden_row_share")) == (1, 0)
    assert all(math.isnan(value) for value in got.values()), got
    assert_equals_reference(call)


def _hides_key_3(*, by_bias: float | None = None) -> Visibility:
    hidden = torch.arange(12)[None, None, None] == 3
    return Visibility(mask=~hidden) if by_bias is None else Visibility(bias=torch.where(hidden, by_bias, 0.0))


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize(
    "visibility",
    [_hides_key_3(), _hides_key_3(by_bias=-INF), _hides_key_3(by_bias=-1e4), replace(_hides_key_3(), causal_offset=0)],
    ids=["mask", "minus infinity", "penalty", "mask and causal"],
)
def test_what_a_hidden_token_holds_has_no_effect(visibility: Visibility, bad: float) -> None:
    """Nobody sees token 3, so that its query is padding."""
    call = a_call(visibility=visibility)
    healthy = values(call)
    call.key[:, :, 3] = bad
    call.query[:, :, 3] = bad
    assert_same(values(call), healthy)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_comes_later_has_no_effect_on_a_causal_row(bad: float) -> None:
    call = a_call(queries=6, keys=12, visibility=Visibility(0))
    healthy = values(call)
    call.key[:, :, 6:] = bad
    assert_same(values(call), healthy)


def test_an_infinite_bias_is_a_fault_and_minus_infinity_is_a_mask() -> None:
    bias = torch.zeros(1, 1, 12, 12)
    bias[..., 2, 5], bias[..., 3, 5], bias[..., 4, 5] = INF, NAN, -INF
    call = a_call(visibility=Visibility(bias=bias))
    assert values(call)["non_finite_share"] == pytest.approx([2 / 12] * 2)
    assert_equals_reference(call)


NO_NUMBERS = [
    pytest.param(a_call(sequences=0), id="no sequences"),
    pytest.param(a_call(queries=0, keys=0), id="no tokens"),
    pytest.param(a_call(queries=0, keys=3), id="no queries"),
    pytest.param(a_call(queries=3, keys=0), id="no keys"),
    pytest.param(a_call(visibility=Visibility(mask=torch.zeros(1, 1, 12, 12).bool())), id="only padding"),
    pytest.param(
        a_call(queries=3, keys=4, visibility=Visibility(mask=torch.zeros(1, 1, 3, 4).bool())), id="all hidden"
    ),
    pytest.param(a_call(queries=3, keys=4, visibility=Visibility(bias=torch.full((1, 1, 3, 4), -INF))), id="all -inf"),
    pytest.param(a_call(queries=3, keys=4, visibility=Visibility(-3)), id="causal before the first key"),
]


@pytest.mark.parametrize("call", NO_NUMBERS)
def test_where_nothing_is_seen_all_is_absent(call: AttentionCall) -> None:
    got = values(call)
    hidden = got.pop("hidden_row_share")
    assert all(math.isnan(value) for of_heads in got.values() for value in of_heads), got
    # Rows that see nothing are counted, unless there is no row or no key, or the row is padding.
    has_rows = call.sequences and call.queries and call.keys and not call.self_attention
    assert hidden == [1, 1] if has_rows else all(map(math.isnan, hidden))


def test_one_token() -> None:
    call = a_call(queries=1, sequences=1, heads=1)
    logit = float((call.query * call.key).sum() * call.scale)
    got = {name: value for name, (value,) in values(call).items() if not math.isnan(value)}
    assert got == {
        "max_logit": pytest.approx(logit),
        "self_weight": 1,
        "marginal_gap": 0,
        "position_concentration": 1,
        "large_logit_ratio": 0,
        "logit_spacing": float(np.spacing(np.float32(abs(logit)))),
        "uniform_position_concentration": 1,
        "value_weighted_sink": 1,
        "stable_rank": pytest.approx(1),
        "effective_rank": pytest.approx(1),
        "participation_ratio": pytest.approx(1),
        "row_stochasticity_error": 0,
        "sink_logit_mass": 0,
        "non_finite_share": 0,
        "hidden_row_share": 0,
    }


@pytest.mark.parametrize(("keys", "share"), [(12, 0.25), (13, 0.25)], ids=["self-attention", "cross-attention"])
def test_rows_that_see_nothing_are_counted(keys: int, share: float) -> None:
    mask = torch.ones(1, 1, 12, keys, dtype=torch.bool)
    mask[..., [2, 5, 11], :] = False
    call = a_call(keys=keys, visibility=Visibility(mask=mask))
    assert values(call)["hidden_row_share"] == [share, share]
    assert_equals_reference(call)


def test_a_padding_query_that_looks_ahead_does_not_hide_that_a_head_is_causal() -> None:
    """Left padding whose queries see everything, so that no row is empty: padding is in no statistic."""
    first = 3
    causal = torch.ones(12, 12).tril().bool()
    causal[:first] = True
    causal[:, :first] = False
    call = a_call(visibility=Visibility(mask=causal[None, None]))
    assert not math.isnan(values(call)["consensus_rate"][0])
    assert_equals_reference(call)


# Stable rank where the spectrum is not that of a small matrix.


def of_logits(logits: Tensor, causal: bool = False, mask: Tensor | None = None) -> AttentionCall:
    """A call with given logits, (N, M), and a mask of the same shape. Not self-attention, so that no row is padding."""
    queries, keys = logits.shape
    return AttentionCall(
        "attention",
        torch.zeros(1, 1, queries, 1),
        torch.zeros(1, 1, keys, 1),
        None,
        1.0,
        Visibility(0 if causal else None, None if mask is None else mask[None, None], logits.float()[None, None]),
        self_attention=False,
    )


def of_targets(targets: Tensor) -> AttentionCall:
    """A call in which each query sees one key only."""
    mask = torch.nn.functional.one_hot(targets, len(targets)).bool()
    return of_logits(torch.zeros(mask.shape), mask=mask)


def assert_stable_rank(call: AttentionCall) -> None:
    (got,) = measure(call, resolve("stable_rank"))["stable_rank"].or_nan.tolist()
    (expected,) = reference.head_values("stable_rank", reference.heads(call))
    assert got == pytest.approx(expected, rel=1e-3)


everything_or_causal = pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])


@everything_or_causal
@pytest.mark.parametrize("size", [0, 0.5, 1, 3, 10, 100])
def test_stable_rank_of_random_logits(size: float, causal: bool) -> None:
    assert_stable_rank(of_logits(size * torch.randn(300, 300), causal))


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("shape", [(150, 300), (300, 150), (20, 400), (400, 20)])
def test_stable_rank_of_rectangles(shape: tuple[int, int], size: float) -> None:
    assert_stable_rank(of_logits(size * torch.randn(shape)))


@pytest.mark.parametrize("peak", [3, 6, 12, 100])
@pytest.mark.parametrize("back", [0, 1, 5], ids=["itself", "the previous token", "five tokens back"])
def test_stable_rank_of_a_head_that_looks_at(back: int, peak: float) -> None:
    n = 300
    logits = torch.randn(n, n) / 2
    tokens = torch.arange(n)
    logits[tokens, (tokens - back).clamp(min=0)] += peak
    assert_stable_rank(of_logits(logits, causal=True))


@pytest.mark.parametrize("peak", [3, 6, 10])
def test_stable_rank_of_a_noisy_permutation(peak: float) -> None:
    n = 300
    assert_stable_rank(of_logits(torch.randn(n, n) / 2 + peak * torch.eye(n)[torch.randperm(n)]))


@everything_or_causal
@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("width", [2, 3, 16])
def test_stable_rank_of_a_window(width: int, size: float, causal: bool) -> None:
    assert_stable_rank(of_logits(size * torch.randn(300, 300), causal, mask=distance(300, 300).abs() < width))


@everything_or_causal
@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("count", [2, 40, 100])
def test_stable_rank_of_documents(count: int, size: float, causal: bool) -> None:
    """Many matrices in one, whose largest singular values are close to each other."""
    document = torch.randint(count, (400,)).sort().values
    assert_stable_rank(of_logits(size * torch.randn(400, 400), causal, mask=document[:, None] == document))


@everything_or_causal
@pytest.mark.parametrize("rank", [1, 2, 8])
def test_stable_rank_of_logits_of_low_rank(rank: int, causal: bool) -> None:
    assert_stable_rank(of_logits(3 * torch.randn(300, rank) @ torch.randn(rank, 300) / rank**0.5, causal))


@pytest.mark.parametrize("n", [150, 200, 300])
@pytest.mark.parametrize("keys", [1, 2, 4, 16, 100])
def test_stable_rank_where_all_queries_look_at_few_keys(keys: int, n: int) -> None:
    """Matrices of low rank: powers of them add nothing to the subspace."""
    assert_stable_rank(of_targets(torch.randint(keys, (n,))))


@pytest.mark.parametrize("n", [129, 200, 300, 400])
@pytest.mark.parametrize("order", [torch.arange, torch.randperm])
def test_stable_rank_of_a_permutation(order: Callable[[int], Tensor], n: int) -> None:
    """All singular values are one: so are all vectors singular."""
    assert_stable_rank(of_targets(order(n)))


@pytest.mark.parametrize("n", [129, 200, 300, 400])
def test_stable_rank_of_uniform_attention(n: int) -> None:
    call = of_logits(torch.zeros(n, n))
    (got,) = measure(call, resolve("stable_rank"))["stable_rank"].or_nan.tolist()
    assert got == pytest.approx(1, rel=1e-4)


def test_stable_rank_of_a_long_sequence() -> None:
    n = 700
    assert_stable_rank(of_logits(torch.randn(n, n), causal=True))
    assert_stable_rank(of_logits(torch.zeros(n, n), mask=distance(n, n).abs() < 3))
