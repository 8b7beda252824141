"""Every statistic equals the dense float64 reference, for random shapes, types, logits and masks, and for bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import reference
import scipy.linalg
import torch
from hypothesis import HealthCheck, given, settings
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

exact_every_time = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow],
)


def values(call: AttentionCall, **options: int | None) -> dict[str, list[float]]:
    """Every statistic of every head, NaN where it is absent."""
    return {name: sums.or_nan.tolist() for name, sums in measure(call, tuple(OF_ROWS.values()), **options).items()}


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
            relative, absolute = tolerance.relative, tolerance.absolute
        elif name in ("max_logit", "logit_std"):
            # Logits are sums of products, which may cancel: they are as exact as the largest of them.
            absolute *= max(1, largest)
        elif name in ("spectral_gap", "consensus_rate"):
            absolute = relative  # differences of numbers near 1
        elif name == "value_contraction":
            absolute *= 10  # a sum of products, beside values whose spread is 1
        for number, sequences in enumerate(heads):
            if name in ("positional_share", "toeplitz_share"):
                # A difference of numbers near 1, of patterns that are as exact as weights are beside what they differ.
                absolute = relative + RESOLUTION / max(_contrast(name, sequences), 1e-6)
            if not _is_undecided(name, sequences):
                assert got[number] == pytest.approx(expected[number], rel=relative, abs=absolute, nan_ok=True), (
                    f"{name} of head {number}: {got} instead of {expected}, largest logit {largest:.4g}"
                )


def _contrast(name: str, sequences: list[reference.Head]) -> float:
    """How much the weights that are compared differ from uniform ones, relative to these."""
    if name == "toeplitz_share":
        sequences = [head.without_first_key for head in sequences]
    squares = uniform = 0.0
    for row in range(len(sequences[0].visible) if sequences else 0):
        present = [head for head in sequences if row in head.rows]
        if len(present) >= 2 or name == "toeplitz_share":
            squares += sum((reference.deviations(head)[row] ** 2).sum() for head in present)
            uniform += sum((head.uniform[row] ** 2).sum() for head in present)
    return float(np.sqrt(squares / max(1e-30, uniform)))


def _condition(matrix: np.ndarray) -> float:
    """By how much the second eigenvalue moves at most, relative to a change of the matrix."""
    values, left, right = scipy.linalg.eig(matrix, left=True)
    second = np.argsort(-np.abs(values))[1]
    return float(1 / max(1e-300, abs(left[:, second].conj() @ right[:, second])))


def _is_undecided(name: str, sequences: list[reference.Head]) -> bool:
    """Whether rounding decides: two keys that receive as much, a sink of exactly the threshold, eigenvalues that a
    change of the sixth digit moves."""
    if name == "entropy_without_sink":
        received = [sorted(head.received) for head in sequences]
        return any(len(r) > 1 and (r[-2] > r[-1] * (1 - 1e-4) or r[-1] < 1e-30) for r in received)
    if name == "consensus_rate":
        if any(head.is_square and len(head.weights) > 1 and _condition(head.weights) > 1e3 for head in sequences):
            return True
        noise = 1 + 1e-6 * np.random.default_rng(0).standard_normal(sequences[0].weights.shape) if sequences else 1
        return any(
            head.is_square
            and len(head.weights) > 1
            and abs(reference.second_eigenvalue(head.weights) - reference.second_eigenvalue(head.weights * noise))
            > 1e-4
            for head in sequences
        )
    if name in reference.TOLERANCES:
        return reference.TOLERANCES[name].is_undecided(sequences)
    # Beside a sink logit there may be weights, or squares of weights, that single precision does not hold.
    if name == "position_concentration":
        return sum(head.weights.sum() for head in sequences) < 1e-30
    if name in ("stable_rank", "spectral_gap"):
        return any(0 < head.weights.max(initial=0) < 1e-17 for head in sequences)
    if name in ("positional_share", "toeplitz_share"):  # a pattern that is hardly more than rounding
        return 0 < _contrast(name, sequences) < 1e-5
    if name == "sink_rate":
        first_key = [
            head.weights[head.visible[:, head.seen_keys[0]], head.seen_keys[0]] for head in sequences if head.rows
        ]
        return any(abs(weights.mean() - 0.3) < 1e-5 for weights in first_key)
    return False


# Visibility, by name. Each function gets a source of random numbers and (B, H, N, M).

Shape = tuple[int, int, int, int]
KINDS: dict[str, Callable[[torch.Generator, Shape], Visibility]] = {}


def kind(function: Callable[[torch.Generator, Shape], Visibility]) -> Callable[[torch.Generator, Shape], Visibility]:
    KINDS[function.__name__] = function
    return function


def _uniform(random: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=random)


def _distance(queries: int, keys: int) -> Tensor:
    return torch.arange(queries)[:, None] - torch.arange(keys)


@kind
def everything(random: torch.Generator, shape: Shape) -> Visibility:
    return Visibility()


@kind
def causal_from_the_first_key(random: torch.Generator, shape: Shape) -> Visibility:
    return Visibility(causal_offset=0)


@kind
def causal_to_the_last_key(random: torch.Generator, shape: Shape) -> Visibility:
    return Visibility(causal_offset=shape[3] - shape[2])


@kind
def boolean_with_hidden_rows(random: torch.Generator, shape: Shape) -> Visibility:
    per_sequence, per_head = _uniform(random, 2) < 0.5
    mask = _uniform(random, shape[0] if per_sequence else 1, shape[1] if per_head else 1, *shape[2:]) < 0.6
    mask[:, :, _uniform(random, shape[2]) < 0.2] = False
    return Visibility(mask=mask)


@kind
def boolean_and_causal(random: torch.Generator, shape: Shape) -> Visibility:
    return replace(boolean_with_hidden_rows(random, shape), causal_offset=0)


@kind
def left_padding(random: torch.Generator, shape: Shape) -> Visibility:
    first = torch.randint(shape[3], (shape[0], 1, 1, 1), generator=random)
    return Visibility(mask=torch.arange(shape[3]) >= first)


@kind
def right_padding(random: torch.Generator, shape: Shape) -> Visibility:
    last = torch.randint(shape[3], (shape[0], 1, 1, 1), generator=random)
    return Visibility(mask=torch.arange(shape[3]) <= last)


@kind
def left_padding_and_causal(random: torch.Generator, shape: Shape) -> Visibility:
    return replace(left_padding(random, shape), causal_offset=0)


@kind
def right_padding_and_causal(random: torch.Generator, shape: Shape) -> Visibility:
    return replace(right_padding(random, shape), causal_offset=0)


@kind
def hiding_penalties(random: torch.Generator, shape: Shape) -> Visibility:
    penalties = torch.tensor([-INF, torch.finfo(torch.float32).min, -65504.0, -1e4, -100.0, 0.0])
    return Visibility(bias=penalties[torch.randint(6, (shape[0], 1, *shape[2:]), generator=random)])


@kind
def half_precision_penalties(random: torch.Generator, shape: Shape) -> Visibility:
    dtype = torch.bfloat16 if _uniform(random, 1) < 0.5 else torch.float16
    hidden = _uniform(random, shape[0], 1, *shape[2:]) < 0.3
    return Visibility(bias=torch.where(hidden, torch.finfo(dtype).min, 0.0).to(dtype))


@kind
def alibi(random: torch.Generator, shape: Shape) -> Visibility:
    slopes = 2.0 ** -torch.arange(shape[1])[None, :, None, None]
    return Visibility(causal_offset=0, bias=-slopes * _distance(*shape[2:]))


@kind
def relative_positions(random: torch.Generator, shape: Shape) -> Visibility:
    return Visibility(bias=3 * torch.randn(1, *shape[1:], generator=random))


@kind
def sliding_window(random: torch.Generator, shape: Shape) -> Visibility:
    distance = _distance(*shape[2:])
    return Visibility(mask=((distance >= 0) & (distance < 4))[None, None])


@kind
def documents(random: torch.Generator, shape: Shape) -> Visibility:
    document = torch.randint(4, (shape[0], max(shape[2:])), generator=random).sort(dim=1).values
    mask = (document[:, : shape[2], None] == document[:, None, : shape[3]])[:, None]
    return Visibility(causal_offset=0 if _uniform(random, 1) < 0.5 else None, mask=mask)


@st.composite
def calls(draw: st.DrawFn, visibility: Callable[[torch.Generator, Shape], Visibility]) -> AttentionCall:
    """An attention call whose largest product is about a given number."""
    sequences, key_heads, group = (draw(st.integers(1, 3), label=name) for name in ("B", "key heads", "group"))
    queries, keys = draw(st.integers(1, 18), label="queries"), draw(st.integers(1, 18), label="keys")
    width = draw(st.integers(1, 16), label="width")
    self_attention = draw(st.booleans(), label="self-attention")
    keys = queries if self_attention else keys
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    largest = draw(st.sampled_from([0.0, 0.01, 1.0, 10.0, 100.0, 500.0]), label="largest product")
    # A sink logit far above all others leaves weights that float32 cannot square; that has a test of its own.
    has_sink_logits = largest <= 10 and draw(st.booleans(), label="sink logits")
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32), label="seed"))
    heads = key_heads * group
    query = torch.randn(sequences, heads, queries, width, generator=random)
    key = torch.randn(sequences, key_heads, keys, width, generator=random)
    products = query @ key.repeat_interleave(group, dim=1).mT / math.sqrt(width)
    return AttentionCall(
        site="attention",
        query=(query * largest / products.abs().max()).to(dtype),
        key=key.to(dtype),
        value=_values(draw, random, (sequences, key_heads, heads, keys), dtype, has_sink_logits),
        scale=1 / math.sqrt(width),
        visibility=visibility(random, (sequences, heads, queries, keys)),
        self_attention=self_attention,
        soft_cap=draw(st.sampled_from([None, None, 5.0, 50.0]), label="soft cap"),
        sink_logits=torch.randn(heads, generator=random) if has_sink_logits else None,
    )


def _values(
    draw: st.DrawFn,
    random: torch.Generator,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    has_sink_logits: bool,
) -> Tensor | None:
    """Values of as many heads as there are keys' or queries', or of one, far from zero or not; or none."""
    sequences, key_heads, heads, keys = shape
    count = draw(st.sampled_from([None, 1, key_heads, heads]), label="value heads")
    if count is None:
        return None
    # Rows that sum to less than one, by a number of single precision, give as much less of the mean.
    centre = draw(st.sampled_from([0.0, 1.0 if has_sink_logits else 100.0]), label="mean of values")
    return (torch.randn(sequences, count, keys, 3, generator=random) + centre).to(dtype)


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
        "uniform_position_concentration": 1,
        "stable_rank": pytest.approx(1),
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
    assert_stable_rank(of_logits(size * torch.randn(300, 300), causal, mask=_distance(300, 300).abs() < width))


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
    assert_stable_rank(of_logits(torch.zeros(n, n), mask=_distance(n, n).abs() < 3))
