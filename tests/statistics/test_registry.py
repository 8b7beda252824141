"""Statistics are known by name; a user's own one works like those of the package."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_attn import AttentionObserver
from lightning_attn.statistics import (
    Range,
    Ratio,
    RowBlock,
    RowMean,
    RowStatistic,
    StateStatistic,
    Tokens,
    known_statistics,
    register,
    registry,
    resolve,
)
from lightning_attn.statistics.registry import is_per_site

NAMES = [
    "consensus_rate",
    "entropy",
    "entropy_without_sink",
    "hidden_row_share",
    "kl_to_uniform",
    "leader_distance",
    "logit_std",
    "massive_activation",
    "max_logit",
    "max_weight",
    "non_finite_share",
    "rank_residual",
    "self_weight",
    "similarity_contraction",
    "sink_rate",
    "sink_strength",
    "stable_rank",
    "token_similarity",
]


def test_the_statistics_of_the_package_in_alphabetical_order() -> None:
    known = list(known_statistics())
    assert known == sorted(known)
    assert set(known) >= set(NAMES)


def test_none_means_those_by_default() -> None:
    assert resolve(None) == tuple(statistic for statistic in known_statistics().values() if statistic.by_default)


def test_all_means_all() -> None:
    assert resolve("all") == tuple(known_statistics().values())


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("entropy", ["entropy"]),
        (["max_logit", "entropy"], ["max_logit", "entropy"]),
        (("entropy", "max_logit", "entropy"), ["entropy", "max_logit"]),
    ],
    ids=["one name", "order of asking", "twice the same"],
)
def test_names_are_resolved(asked: str | list[str], expected: list[str]) -> None:
    assert [statistic.name for statistic in resolve(asked)] == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_statistic_says_what_it_is(name: str) -> None:
    statistic = known_statistics()[name]
    assert all((statistic.unit, str(statistic.range), statistic.uniform, statistic.reading, statistic.__doc__))
    assert statistic.over_heads in ("mean", "max")
    assert statistic.joined_by in ("mean", "max")
    assert statistic.per in ("head", "site")


@pytest.mark.parametrize("names", ["entropi", ["max_logit", "entropi"]])
def test_an_unknown_name_is_refused_with_the_nearest_one(names: str | list[str]) -> None:
    with pytest.raises(
        ValueError, match=r"holds 'entropi', which is none of \[.*'entropy'.*\. Did you mean 'entropy'\?"
    ):
        resolve(names)


def test_a_name_that_is_like_none_is_refused_without_a_guess() -> None:
    with pytest.raises(ValueError, match="holds 'loss', which is none of") as error:
        resolve(["loss"])
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize("nothing", [[], ()])
def test_no_name_is_refused(nothing: list[str]) -> None:
    with pytest.raises(ValueError, match="must name at least one statistic, or be None or 'all', got"):
        resolve(nothing)


def test_something_that_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 3, which is none of"):
        resolve([3])  # type: ignore[list-item]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_STATISTICS", dict(known_statistics()))


class _SecondWeight(RowMean):
    name = "second_weight"
    range = Range(0, 1)
    uniform = "mean of 1 / m_i"
    reading = "Mean weight of the key that comes second."

    def values(self, rows: RowBlock) -> Tensor:
        return rows.weights_BHRM.sort(-1).values[..., -2]


def test_a_statistic_of_a_user_works_like_any_other(own_registry: None) -> None:
    assert register(_SecondWeight) is _SecondWeight
    layer = torch.nn.MultiheadAttention(16, num_heads=4, batch_first=True)
    observer = AttentionObserver(layer, statistics=["second_weight", "max_weight"])
    tokens = torch.randn(2, 7, 16)
    with observer:
        _, weights = layer(tokens, tokens, tokens, average_attn_weights=False)
    ordered = weights.sort(-1).values.mean((0, 2))
    snapshot = observer.snapshot(step=3)
    assert snapshot.statistics == ("second_weight", "max_weight")
    assert snapshot["(root)", "second_weight"] == pytest.approx(ordered[:, -2].tolist())
    assert snapshot["(root)", "max_weight"] == pytest.approx(ordered[:, -1].tolist())
    assert "second_weight" in snapshot.table()


def test_what_was_registered_in_another_test_is_gone() -> None:
    with pytest.raises(ValueError, match="second_weight"):
        resolve("second_weight")


def test_a_name_that_is_taken_is_refused(own_registry: None) -> None:
    class Entropy(_SecondWeight):
        name = "entropy"

    with pytest.raises(ValueError, match=r"'entropy' already, lightning_attn\.statistics\.entropy\.Entropy"):
        register(Entropy)
    assert known_statistics()["entropy"] is not Entropy


def test_registering_twice_is_harmless(own_registry: None) -> None:
    register(_SecondWeight)
    register(_SecondWeight)
    assert resolve("second_weight") == (_SecondWeight,)


def test_a_statistic_without_a_result_cannot_be_made() -> None:
    class Unfinished(RowStatistic):
        name = "unfinished"

    with pytest.raises(TypeError, match="result"):
        Unfinished(None)  # type: ignore[abstract, arg-type]


class _Norm(StateStatistic):
    name = "norm"
    range = Range(0, None)
    uniform = "any"
    reading = "Mean square of the states that leave."

    @classmethod
    def result(cls, entering: Tokens, leaving: Tokens | None) -> Ratio:
        assert leaving is not None
        return Ratio(leaving.square_sum_B, leaving.count_B)


def test_a_statistic_of_states_of_a_user_works_like_any_other(own_registry: None) -> None:
    register(_Norm)
    layer = torch.nn.MultiheadAttention(16, num_heads=4, batch_first=True)
    observer = AttentionObserver(layer, statistics="norm")
    tokens = torch.randn(2, 7, 16)
    with observer:
        output, _ = layer(tokens, tokens, tokens)
    assert observer.snapshot()["(root)", "norm"] == pytest.approx([output.square().sum(-1).mean().item()])


def test_a_statistic_of_sites_is_told_from_one_of_heads(own_registry: None) -> None:
    assert not is_per_site("norm")
    register(_Norm)
    assert is_per_site("norm")
    assert is_per_site("token_similarity")
    assert not is_per_site("entropy")
