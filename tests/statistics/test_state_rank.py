"""Ranks of hidden states: equal to the singular values of numpy, and what random and collapsed states have."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from drawn_calls import real_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_attn import AttentionObserver
from lightning_attn.capture import HiddenStates
from lightning_attn.statistics import StateStatistic, measure_states, resolve
from lightning_attn.statistics.state_rank import StateEffectiveRank, StateParticipationRatio, StateStableRank
from lightning_attn.statistics.states import state_spectrum

RANKS = (StateStableRank, StateParticipationRatio, StateEffectiveRank)
NAMES = [statistic.name for statistic in RANKS]
NAN, INF = math.nan, math.inf


def of_number(tokens: int) -> tuple[type[StateStatistic], ...]:
    """The statistics of another number of tokens."""
    return tuple(type(rank.__name__, (rank,), {"tokens": tokens}) for rank in RANKS)


def values(
    states: Tensor, real: Tensor | None = None, tokens: int = 64, block_bytes: int | None = None
) -> dict[str, list[float]]:
    """The ranks of each sequence, NaN where they are absent."""
    found = measure_states(HiddenStates("site", states, None, real), of_number(tokens), block_bytes)
    return {name: sums.or_nan.tolist() for name, sums in found.items()}


def expected(states: np.ndarray, real: np.ndarray, tokens: int) -> list[float]:
    """From the singular values of the chosen tokens of one sequence, in the order of `NAMES`."""
    states = states[real]
    if len(states) < tokens or not np.isfinite(states).all():
        return [NAN] * 3
    chosen = states[[number * len(states) // tokens for number in range(tokens)]]
    # Relative to a token first: of equal ones, nothing but zero is left.
    chosen = chosen - chosen[0]
    singular = np.linalg.svd(chosen - chosen.mean(axis=0), compute_uv=False)
    if not singular.any():
        return [0.0] * 3
    share = singular[singular > 0] / singular.sum()
    energies = (singular / singular[0]) ** 2
    return [energies.sum(), energies.sum() ** 2 / (energies**2).sum(), float(np.exp(-(share * np.log(share)).sum()))]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor | None, int]:
    """States of any shape, type and scale, with zeros, outliers and faults; which are real; how many to look at."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    sequences, tokens, width = (draw(st.integers(1, most)) for most in (4, 12, 9))
    number = draw(st.integers(2, 9))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    scale, common = draw(st.sampled_from([1e-3, 1.0, 100.0])), draw(st.sampled_from([0.0, 1.0, 100.0]))
    apart = torch.randn(sequences, tokens, width, generator=random, dtype=torch.float64)
    states = (scale * (apart + common * torch.randn(sequences, 1, width, generator=random))).to(dtype)
    fault = draw(st.sampled_from([None, "zero", "outlier", "nan", "infinite", "equal"]))
    if fault == "equal":
        states = states[:, :1].repeat(1, tokens, 1)
    elif fault:
        at = torch.rand(sequences, tokens, generator=random) < 0.1
        states[at] = {"zero": 0.0, "outlier": 6e4, "nan": NAN, "infinite": INF}[fault]
    real = real_tokens(draw, random, sequences, tokens, share=0.7)
    return states, real, number


@given(batches(), st.sampled_from([None, 8, 200, 2000]))
@settings(derandomize=True, database=None, deadline=None, max_examples=150)
def test_every_rank_equals_its_formula(batch: tuple[Tensor, Tensor | None, int], block: int | None) -> None:
    states, real, number = batch
    is_real = np.ones(states.shape[:2], bool) if real is None else real.expand(states.shape[:2]).numpy()
    rows = [expected(one, which, number) for one, which in zip(states.double().numpy(), is_real, strict=True)]
    found = values(states, real, number, block)
    for place, name in enumerate(NAMES):
        # Of singular values the Gram matrix tells those above 1e-8 of the largest, which is a part of 1e-6 of the
        # entropy; one that is left out adds nothing to the sums of squares.
        assert found[name] == pytest.approx([row[place] for row in rows], rel=1e-6, abs=1e-6, nan_ok=True), name


# What random states have.


@pytest.mark.parametrize(("tokens", "stable"), [(256, 102.9), (1024, 220.6)])
def test_isotropic_states(tokens: int, stable: float) -> None:
    """Gaussian states of width d: d / (1 + √(d / N))² and N d / (N + d), which is why N must be fixed."""
    width = 768
    assert stable == pytest.approx(width / (1 + math.sqrt(width / tokens)) ** 2, abs=0.05)
    found = values(torch.randn(1, tokens, width), tokens=tokens)
    assert found["state_stable_rank"] == pytest.approx([stable], rel=0.04)
    assert found["state_participation_ratio"] == pytest.approx([tokens * width / (tokens + width)], rel=0.01)
    assert stable < found["state_participation_ratio"][0] < found["state_effective_rank"][0] < min(tokens, width)


def test_lengths_can_be_compared() -> None:
    """Random states of any length have the rank of 64 tokens."""
    of_64 = values(torch.randn(8, 64, 256))
    for length in (65, 100, 1000):
        for name, found in values(torch.randn(8, length, 256)).items():
            assert np.mean(found) == pytest.approx(np.mean(of_64[name]), rel=0.03), name


def test_the_tokens_are_evenly_spaced_from_the_first_on() -> None:
    """What stands between them has no effect; what they are does."""
    states = torch.randn(1, 320, 16)
    found, others = values(states), states.clone()
    others[:, torch.arange(320) % 5 > 0] = 1e3
    assert values(others) == found
    others[:, 0] = 1e3
    assert values(others) != found


def test_states_along_some_directions() -> None:
    """Two clusters differ along one direction, and a simplex of 64 tokens along 63, all alike."""
    two = torch.randn(2, 30)[torch.arange(64) % 2]
    assert all(found == [pytest.approx(1, abs=1e-6)] for found in values(two[None]).values())
    assert all(found == [pytest.approx(63)] for found in values(torch.eye(64)[None] + 5).values())


def test_a_massive_activation_is_one_direction() -> None:
    states = torch.randn(1, 64, 32)
    states[0, 0, 7] = 3e4
    assert values(states)["state_stable_rank"] == [pytest.approx(1, abs=1e-3)]


# Collapse.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [64, 200])
def test_where_all_tokens_are_equal_the_rank_is_zero(dtype: torch.dtype, tokens: int) -> None:
    found = values(torch.randn(2, 1, 24).to(dtype).expand(-1, tokens, -1))
    assert found == {name: [0, 0] for name in NAMES}


@pytest.mark.parametrize("spread", [1e-3, 1e-5])
def test_a_collapse_along_few_directions_is_told_apart_from_its_mean(spread: float) -> None:
    states = 1 + spread * (torch.randn(1, 64, 3, dtype=torch.float64) @ torch.randn(3, 32, dtype=torch.float64))
    exact = expected(states.numpy()[0], np.ones(64, bool), 64)
    assert exact[2] < 3
    for place, name in enumerate(NAMES):
        assert values(states)[name] == [pytest.approx(exact[place], rel=1e-6)]


# What is absent, and what has no effect.


def test_sequences_of_fewer_tokens_are_absent() -> None:
    states, real = torch.randn(3, 70, 8), torch.arange(70) < torch.tensor([[63], [64], [70]])
    for found in values(states, real).values():
        assert [math.isnan(value) for value in found] == [True, False, False]
    assert all(math.isnan(found[0]) for found in values(torch.randn(1, 63, 8)).values())


def test_padding_may_hold_anything_and_stand_anywhere() -> None:
    states = torch.randn(1, 80, 8)
    alone = values(states)
    for at in (torch.arange(100) >= 20, torch.arange(100) < 80, torch.randperm(100) < 80):
        for filling in (NAN, INF, 1e30):
            padded = torch.full((1, 100, 8), filling)
            padded[:, at] = states
            assert values(padded, at[None]) == alone


def test_a_sequence_with_a_fault_is_left_out() -> None:
    states = torch.randn(3, 70, 4)
    healthy = values(states[[0, 2]])
    states[1, 3, 2] = NAN  # a token that is not looked at, but one of its sequence
    for name, found in values(states).items():
        assert [found[0], found[2]] == pytest.approx(healthy[name])
        assert math.isnan(found[1])


def test_the_way_round_lapack(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(matrix: Tensor) -> Tensor:
        raise torch.linalg.LinAlgError("did not converge")

    states = torch.randn(2, 64, 20)
    found = values(states)
    monkeypatch.setattr(torch.linalg, "eigvalsh", fail)
    for name, around in values(states).items():
        assert around == pytest.approx(found[name], rel=1e-6)


def test_the_three_share_one_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    decomposed, energies = [], state_spectrum._energies
    monkeypatch.setattr(state_spectrum, "_energies", lambda gram: decomposed.append(gram) or energies(gram))
    values(torch.randn(2, 64, 20))
    assert len(decomposed) == 1


def test_memory_is_that_of_a_block() -> None:
    """Many sequences, wide states, or many tokens to look at: nothing larger than a block is made."""
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not func.is_view:
                sizes.append(result.untyped_storage().nbytes())
            return result

    for shape, tokens in (((3000, 16, 4), 16), ((2, 64, 4096), 64), ((1, 256, 1024), 128)):
        states, block_bytes = torch.randn(shape), 2**17
        with Sizes():
            values(states, None, tokens, block_bytes)
        assert max(sizes) <= block_bytes < states.untyped_storage().nbytes()
        sizes.clear()


def test_the_ranks_of_a_model_are_those_of_what_enters_its_attention() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    states = torch.randn(2, 90, 16)
    observer = AttentionObserver(attention, statistics=NAMES)
    with observer:
        attention(states, states, states)
    snapshot, found = observer.snapshot(), values(states)
    assert set(NAMES) == {statistic.name for statistic in resolve(NAMES)}
    for name in NAMES:
        assert snapshot["(root)", name][0] == pytest.approx(np.mean(found[name]), rel=1e-6)
