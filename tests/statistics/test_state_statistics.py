"""Statistics of hidden states: equal to plain formulas in float64, and to what is known in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from drawn_calls import real_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AttentionObserver
from lightning_attn.capture import HiddenStates
from lightning_attn.statistics import StateStatistic, known_statistics, measure_states, resolve
from lightning_attn.statistics.measure import Sums
from lightning_attn.statistics.states.median import lower_median

STATISTICS = tuple(s for s in known_statistics().values() if issubclass(s, StateStatistic))
NAMES = [statistic.name for statistic in STATISTICS]
NAN, INF = math.nan, math.inf

exact_every_time = settings(derandomize=True, database=None, deadline=None, max_examples=60)


def values(
    entering: Tensor, leaving: Tensor | None = None, real: Tensor | None = None, block_bytes: int | None = None
) -> dict[str, float]:
    """Every statistic of a site with three heads; NaN where it is absent."""
    sums = Sums.nothing(STATISTICS, 3, torch.device("cpu"))
    measure_states(HiddenStates("site", entering, leaving, real), sums.statistics, block_bytes).add_to(sums)
    assert all(found.or_nan[1:].isnan().all() for found in sums.values()), "something stands at another head"
    return {name: float(found.or_nan[0]) for name, found in sums.items()}


# The formulas, for the tokens of one sequence that are no padding: (tokens, width) in float64, all finite.


def mean_cosine_of_pairs(states: np.ndarray) -> float:
    directed = [state for state in states if state.any()]
    cosines = [
        np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other)
        for number, one in enumerate(directed)
        for other in directed[number + 1 :]
    ]
    return float(np.mean(cosines)) if cosines else NAN


def contraction(entering: np.ndarray, leaving: np.ndarray) -> float:
    return mean_cosine_of_pairs(leaving) - mean_cosine_of_pairs(entering)


def distance_from_the_first(states: np.ndarray) -> float:
    directed = [state for state in states if state.any()]
    if len(directed) < 2 or not states[0].any():
        return NAN
    first = states[0] / np.linalg.norm(states[0])
    return 1 - float(np.mean([np.dot(first, state) / np.linalg.norm(state) for state in directed]))


def distance_of_others_from_the_first(states: np.ndarray) -> float:
    first, others = states[0], [state for state in states[1:] if state.any()]
    if not others or not first.any():
        return NAN
    cosines = [np.dot(first, other) / np.linalg.norm(first) / np.linalg.norm(other) for other in others]
    return 1 - float(np.mean(cosines))


def relative_residual(states: np.ndarray) -> float:
    if len(states) < 2 or not states.any():
        return NAN
    return float(np.linalg.norm(states - states.mean(0)) / np.linalg.norm(states))


def largest_over_median(states: np.ndarray) -> float:
    if not states.size:
        return NAN
    magnitudes = np.sort(np.abs(states).astype(np.float32), axis=None)
    median = float(magnitudes[(len(magnitudes) - 1) // 2])
    return float(np.abs(states).max()) / median if median else NAN


def is_massive(states: np.ndarray) -> float:
    magnitudes = np.sort(np.abs(states), axis=None)
    largest, median = magnitudes[-1], magnitudes[(len(magnitudes) - 1) // 2]
    return float(largest > 100 and largest >= 1000 * median)


def expected(entering: np.ndarray, leaving: np.ndarray, real: np.ndarray) -> dict[str, float]:
    """Means over the sequences that have a value; of `massive_activation` the largest."""
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for entered, left, is_real in zip(entering, leaving, real, strict=True):
        before, after = entered[is_real], left[is_real]
        if not np.isfinite(before).all() or not len(before):
            continue
        found["token_similarity"].append(mean_cosine_of_pairs(before))
        found["leader_distance"].append(distance_from_the_first(before))
        found["leader_distance_of_others"].append(distance_of_others_from_the_first(before))
        found["rank_residual"].append(relative_residual(before))
        found["massive_activation"].append(largest_over_median(before))
        found["massive_activation_rate"].append(is_massive(before))
        if np.isfinite(after).all():
            found["similarity_contraction"].append(contraction(before, after))
    present = {name: [value for value in of_name if not math.isnan(value)] for name, of_name in found.items()}
    return {
        name: (max(of_name) if name == "massive_activation" else float(np.mean(of_name))) if of_name else NAN
        for name, of_name in present.items()
    }


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None]:
    """States that enter and leave, and which are real: any shape, type and scale, zeros, outliers and faults."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    sequences, tokens, width, width_after = (draw(st.integers(1, most)) for most in (3, 9, 7, 7))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    common = draw(st.sampled_from([0.0, 1.0, 1000.0]))  # what all tokens share, beside what tells them apart

    def states(width: int) -> Tensor:
        apart = torch.randn(sequences, tokens, width, generator=random, dtype=torch.float64)
        return (apart + common * torch.randn(sequences, 1, width, generator=random)).to(dtype)

    entering, leaving = states(width), states(width_after)
    fault = draw(st.sampled_from([None, "zero", "outlier", "nan", "infinite"]))
    if fault:
        at = torch.rand(sequences, tokens, generator=random) < 0.2
        entering[at] = {"zero": 0.0, "outlier": 6e4, "nan": NAN, "infinite": INF}[fault]
    real = real_tokens(draw, random, sequences, tokens, share=0.6)
    return entering, leaving, real


@given(batches(), st.sampled_from([None, 8, 200, 2000]))
@exact_every_time
def test_every_statistic_equals_its_formula(batch: tuple[Tensor, Tensor, Tensor | None], block: int | None) -> None:
    entering, leaving, real = batch
    is_real = np.ones(entering.shape[:2], bool) if real is None else real.expand(entering.shape[:2]).numpy()
    of_formulas = expected(entering.double().numpy(), leaving.double().numpy(), is_real)
    for name, got in values(entering, leaving, real, block).items():
        assert got == pytest.approx(of_formulas[name], rel=1e-7, abs=1e-12, nan_ok=True), name


# What is known in closed form.


@pytest.mark.parametrize("tokens", [2, 5, 64])
def test_orthonormal_tokens(tokens: int) -> None:
    found = values(torch.linalg.qr(torch.randn(tokens, tokens, dtype=torch.float64)).Q[None])
    assert found["leader_distance"] == pytest.approx(1 - 1 / tokens, abs=1e-12)
    assert found["leader_distance_of_others"] == pytest.approx(1, abs=1e-12)
    assert found["token_similarity"] == pytest.approx(0, abs=1e-12)
    assert found["rank_residual"] == pytest.approx(math.sqrt(1 - 1 / tokens), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [2, 3, 7, 1000])
def test_identical_tokens(tokens: int, dtype: torch.dtype) -> None:
    found = values(torch.randn(2, 1, 24).to(dtype).expand(-1, tokens, -1))
    assert found["rank_residual"] == pytest.approx(0, abs=1e-15)
    assert found["token_similarity"] == pytest.approx(1, abs=1e-12)
    assert found["leader_distance"] == pytest.approx(0, abs=1e-12)


def test_opposite_tokens() -> None:
    state = torch.randn(1, 1, 6)
    found = values(torch.cat([state, -state], dim=1), torch.cat([state, state], dim=1))
    assert found["token_similarity"] == pytest.approx(-1)
    assert found["similarity_contraction"] == pytest.approx(2)
    assert found["leader_distance"] == pytest.approx(1)
    assert found["leader_distance_of_others"] == pytest.approx(2)
    assert found["rank_residual"] == pytest.approx(1)


@pytest.mark.parametrize("tokens", [3, 10])
def test_the_least_similar_tokens_are_a_simplex(tokens: int) -> None:
    simplex = torch.eye(tokens, dtype=torch.float64) - 1 / tokens
    assert values(simplex[None])["token_similarity"] == pytest.approx(-1 / (tokens - 1), abs=1e-12)


def test_lengths_count_for_the_residual_alone() -> None:
    state, lengths = torch.randn(1, 1, 8), torch.tensor([1.0, 2.0, 3.0, 4.0])[None, :, None]
    found = values(state * lengths)
    assert found["token_similarity"] == pytest.approx(1)
    assert found["leader_distance"] == pytest.approx(0, abs=1e-7)
    assert found["rank_residual"] == pytest.approx(math.sqrt(5 / 30))  # deviations 1.5, 0.5, 0.5, 1.5 of 1, 2, 3, 4


@pytest.mark.parametrize("spread", [1e-2, 1e-4, 1e-6])
def test_a_collapse_is_seen_down_to_the_resolution_of_the_states(spread: float) -> None:
    states = 1 + spread * torch.randn(1, 200, 32)
    exact = states.double().numpy()[0]
    assert values(states)["rank_residual"] == pytest.approx(relative_residual(exact), rel=1e-9)
    assert relative_residual(exact) < 2 * spread


def test_a_first_token_that_outweighs_all_others_hides_no_collapse() -> None:
    states = 1 + 1e-6 * torch.randn(1, 50, 16)
    states[0, 0] = 3e4
    exact = states.double().numpy()[0]
    assert values(states)["rank_residual"] == pytest.approx(relative_residual(exact), rel=1e-12)


@pytest.mark.parametrize("largest", [1e-3, 1.0, 5e4])
def test_a_massive_activation(largest: float) -> None:
    states = torch.full((3, 11, 8), 0.6)
    states[:, :, ::2] *= -1
    states[1, 4, 3] = -3608.6
    assert values(states)["massive_activation"] == pytest.approx(3608.6 / 0.6)
    assert values(states * largest)["massive_activation"] == pytest.approx(3608.6 / 0.6)


@pytest.mark.parametrize(
    "states",
    [
        torch.zeros(2, 5, 4),
        torch.randn(2, 1, 4),
        torch.full((2, 5, 4), NAN),
        torch.full((2, 5, 4), INF),
        torch.randn(0, 5, 4),
        torch.randn(2, 5, 0),
    ],
    ids=["zero", "one token", "NaN", "infinite", "no sequence", "no width"],
)
def test_what_nothing_defines_is_absent(states: Tensor) -> None:
    found = values(states, states)
    present = {name for name, value in found.items() if not math.isnan(value)}
    if states.numel() and states.isfinite().all():
        present.remove("massive_activation_rate")  # the criterion is not met
    assert present <= ({"massive_activation"} if states.shape[1] == 1 else set())


def test_a_sequence_with_a_fault_is_left_out() -> None:
    states, others = torch.randn(3, 70, 4), torch.randn(3, 70, 4)
    healthy = values(states[[0, 2]], others[[0, 2]])
    states[1, 3, 2] = NAN
    assert values(states, others) == pytest.approx(healthy, rel=1e-12)


def test_padding_may_hold_anything() -> None:
    states, real = torch.randn(2, 70, 4), torch.arange(70) >= torch.tensor([[2], [3]])
    found = values(states, states, real)
    for filling in (NAN, INF, 1e30):
        filled = torch.where(real[..., None], states, filling)
        assert values(filled, filled, real) == found


def test_no_states_that_leave_no_contraction() -> None:
    found = values(torch.randn(2, 70, 4))
    assert {name for name, value in found.items() if math.isnan(value)} == {"similarity_contraction"}


def test_sequences_add_up() -> None:
    """Ratios are the mean of all sequences, whether they came together or one after the other."""
    entering, leaving = torch.randn(3, 70, 4), torch.randn(3, 70, 5)
    sums = Sums.nothing(STATISTICS, 2, torch.device("cpu"))
    for one in range(3):
        measure_states(
            HiddenStates("site", entering[one : one + 1], leaving[one : one + 1], None), sums.statistics
        ).add_to(sums)
    found = {name: float(sums[name].or_nan[0]) for name in NAMES}
    assert found == pytest.approx(values(entering, leaving), rel=1e-12)


# What attention makes of them.


class PlainAttention(nn.Module):
    """Softmax attention of one head in which queries, keys and values are the tokens themselves."""

    def __init__(self, scale: float, is_causal: bool = False) -> None:
        super().__init__()
        self.scale, self.is_causal = scale, is_causal

    def forward(self, tokens: Tensor) -> Tensor:
        heads = tokens[:, None]
        return functional.scaled_dot_product_attention(
            heads, heads, heads, scale=self.scale, is_causal=self.is_causal
        ).squeeze(1)


def of_attention(attention: nn.Module, tokens: Tensor) -> Callable[[str], float]:
    observer = AttentionObserver(attention, statistics=NAMES)
    with observer:
        attention(tokens)
    snapshot = observer.snapshot()
    return lambda name: snapshot["(root)", name][0]  # type: ignore[return-value]


def test_uniform_attention_makes_all_tokens_one() -> None:
    value = of_attention(PlainAttention(0.0), torch.randn(3, 20, 16))
    assert value("similarity_contraction") == pytest.approx(1 - value("token_similarity"), abs=1e-6)


def test_uniform_causal_attention_over_orthonormal_tokens() -> None:
    """Row i is the mean of the first i tokens, so that the cosine of rows i < j is the root of i / j."""
    n = 12
    value = of_attention(PlainAttention(1e-9, is_causal=True), torch.eye(n)[None])
    cosines = [math.sqrt(i / j) for j in range(1, n + 1) for i in range(1, j)]
    assert value("token_similarity") == pytest.approx(0, abs=1e-7)
    assert value("similarity_contraction") == pytest.approx(np.mean(cosines), rel=1e-6)


@pytest.mark.parametrize(
    ("relative", "after"), [(0.5, 0.99914), (0.8, 0.96180), (1.0, 0.80027), (1.2, 0.60986), (2.0, 0.50049)]
)
def test_critical_scaling(relative: float, after: float) -> None:
    """The exact values at n = 1024 and an inner product of 0.5 (Chen et al. 2026): contraction below the critical
    temperature, none above."""
    n, inner_product = 1024, 0.5
    tokens = torch.cat([torch.full((n, 1), math.sqrt(inner_product)), math.sqrt(1 - inner_product) * torch.eye(n)], 1)
    value = of_attention(PlainAttention(relative / (1 - inner_product) * math.log(n)), tokens[None])
    assert value("token_similarity") == pytest.approx(inner_product, abs=1e-6)
    assert value("similarity_contraction") == pytest.approx(after - inner_product, abs=1e-5)


# The median.


@given(
    st.lists(
        st.lists(st.floats(0, 2.0**127, width=32) | st.sampled_from([0.0, 1.0, 1e-45, 1e-38]), min_size=1, max_size=25),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 30),
)
@exact_every_time
def test_the_median_is_one_of_the_numbers(rows: list[list[float]], block: int) -> None:
    longest = max(map(len, rows))
    numbers = torch.tensor([row + [7.0] * (longest - len(row)) for row in rows], dtype=torch.float32)
    counted = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])

    def blocks() -> list[Tensor]:
        return [part.clone() for part in torch.where(counted, numbers, INF).split(block, dim=1)]

    medians = [float(np.sort(np.float32(row))[(len(row) - 1) // 2]) for row in rows]
    assert lower_median(blocks, counted.sum(1)).tolist() == medians


def test_memory_is_that_of_a_block() -> None:
    """However many tokens there are, no more of them is copied at once than fits a block."""
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not func.is_view:
                sizes.append(result.untyped_storage().nbytes())
            return result

    sums = Sums.nothing(resolve(NAMES), 1, torch.device("cpu"))
    states = torch.randn(2, 4096, 64)
    block_bytes = 2**17
    with Sizes():
        measure_states(HiddenStates("site", states, states, None), sums.statistics, block_bytes).add_to(sums)
    assert max(sizes) <= block_bytes < states.untyped_storage().nbytes() / 8
