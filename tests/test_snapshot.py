"""A snapshot: what people ask it, and what it answers where there is nothing."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
import torch

from lightning_attn import HeadValue, Snapshot, Summary
from lightning_attn.capture.sites import SitePatterns
from lightning_attn.statistics import Maximum, Ratio, resolve
from lightning_attn.statistics.measure import Sums

NAN = math.nan
SITES = ("blocks.0", "blocks.1", "decoder")


def a_snapshot(step: int = 7) -> Snapshot:
    """Three sites of two, three and one heads, of which some values are absent."""
    return Snapshot(
        step=step,
        heads={"blocks.0": 2, "blocks.1": 3, "decoder": 1},
        statistics=("entropy", "max_logit", "sink_rate"),
        values=torch.tensor(
            [
                [0.5, 0.25, 1.0, NAN, 0.0, 0.75],
                [3.0, -2.0, 10.0, 4.0, 1.0, -8.0],
                [NAN, NAN, NAN, NAN, NAN, NAN],
            ],
            dtype=torch.float64,
        ),
    )


def sums(entropies: list[float], logits: list[float]) -> Sums:
    """The sums of two rows for each head; a weight of zero for a NaN."""
    entropy = torch.tensor([entropies], dtype=torch.float64)
    weight = torch.where(entropy.isnan(), 0.0, 2.0).double()
    found = Sums.nothing(resolve(["entropy", "max_logit"]), len(entropies), torch.device("cpu"))
    found.add(
        {"entropy": Ratio(entropy.nan_to_num() * weight, weight), "max_logit": Maximum(torch.tensor([logits]))},
        slice(None),
    )
    return found


def test_made_of_sums() -> None:
    found = {"first": sums([0.5, NAN], [3.0, -math.inf]), "second": sums([0.25], [-1.0])}
    snapshot = Snapshot.from_sums(4, found, ["max_logit", "entropy"])
    assert snapshot.step == 4
    assert snapshot.statistics == ("max_logit", "entropy")
    assert snapshot.values.dtype == torch.float64
    assert snapshot.to_dict() == {
        "first": {"max_logit": [3.0, None], "entropy": [0.5, None]},
        "second": {"max_logit": [-1.0], "entropy": [0.25]},
    }


def test_made_of_nothing() -> None:
    snapshot = Snapshot.from_sums(3, {}, ["entropy", "max_logit"])
    assert not snapshot
    assert snapshot.sites == ()
    assert snapshot.to_dict() == {}
    assert snapshot.summary("entropy") is snapshot.lowest("entropy") is snapshot.highest("max_logit") is None
    assert snapshot.matrix("entropy").shape == (0, 0)
    assert snapshot.select(SitePatterns("blocks.*"), ["entropy"]).statistics == ("entropy",)
    assert snapshot.table().splitlines()[0] == "Attention at step 3: 0 sites, 0 heads"


def test_values_of_a_site() -> None:
    snapshot = a_snapshot()
    assert snapshot
    assert snapshot.sites == SITES
    assert snapshot["blocks.0", "entropy"] == [0.5, 0.25]
    assert snapshot["blocks.1", "entropy"] == [1.0, None, 0.0]
    assert snapshot["decoder", "max_logit"] == [-8.0]
    assert snapshot["decoder", "sink_rate"] == [None]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (("blocks.2", "entropy"), r"'blocks\.2' is not in this snapshot.*'blocks\.0', 'blocks\.1', 'decoder'"),
        (("blocks.0", "entropi"), r"'entropi' is not in this snapshot.*'entropy', 'max_logit', 'sink_rate'"),
    ],
)
def test_what_is_not_there_is_refused_and_what_is_there_named(key: tuple[str, str], message: str) -> None:
    snapshot = a_snapshot()
    with pytest.raises(KeyError, match=message):
        snapshot[key]
    with pytest.raises(KeyError, match=message):
        snapshot.over_heads(*key)


@pytest.mark.parametrize("method", ["summary", "lowest", "highest", "matrix"])
def test_an_unknown_statistic_is_refused_everywhere(method: str) -> None:
    with pytest.raises(KeyError, match=r"'entropi' is not in this snapshot.*'entropy'"):
        getattr(a_snapshot(), method)("entropi")


def test_summary_is_over_the_heads_that_have_a_value() -> None:
    snapshot = a_snapshot()
    assert snapshot.summary("entropy") == Summary(min=0.0, mean=0.5, max=1.0)
    assert snapshot.summary("max_logit") == Summary(min=-8.0, mean=pytest.approx(8 / 6), max=10.0)
    assert snapshot.summary("sink_rate") is None


def test_one_number_of_a_site_is_the_mean_and_for_logits_the_largest() -> None:
    snapshot = a_snapshot()
    assert snapshot.over_heads("blocks.1", "entropy") == 0.5
    assert snapshot.over_heads("blocks.1", "max_logit") == 10.0
    assert snapshot.over_heads("decoder", "max_logit") == -8.0
    assert snapshot.over_heads("blocks.0", "sink_rate") is None


def test_the_most_extreme_heads() -> None:
    snapshot = a_snapshot()
    assert snapshot.lowest("entropy") == HeadValue("blocks.1", 2, 0.0)
    assert snapshot.highest("entropy") == HeadValue("blocks.1", 0, 1.0)
    assert snapshot.lowest("max_logit") == HeadValue("decoder", 0, -8.0)
    assert snapshot.highest("max_logit") == HeadValue("blocks.1", 0, 10.0)
    assert snapshot.lowest("sink_rate") is snapshot.highest("sink_rate") is None


def test_of_equal_heads_the_first_is_named() -> None:
    snapshot = Snapshot(0, {"a": 2, "b": 2}, ("entropy",), torch.tensor([[NAN, 0.5, 0.5, NAN]], dtype=torch.float64))
    assert snapshot.lowest("entropy") == snapshot.highest("entropy") == HeadValue("a", 1, 0.5)


def test_matrix_for_drawing() -> None:
    expected = torch.tensor([[0.5, 0.25, NAN], [1.0, NAN, 0.0], [0.75, NAN, NAN]], dtype=torch.float64)
    torch.testing.assert_close(a_snapshot().matrix("entropy"), expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("patterns", "sites"),
    [
        (None, SITES),
        ("*", SITES),
        ("blocks.*", ("blocks.0", "blocks.1")),
        (["decoder", "blocks.0"], ("blocks.0", "decoder")),
        ("encoder", ()),
    ],
)
@pytest.mark.parametrize(
    ("asked", "statistics"),
    [
        (None, ("entropy", "max_logit", "sink_rate")),
        (["max_logit", "entropy"], ("max_logit", "entropy")),
        (["entropy", "spectral_gap"], ("entropy",)),
        ([], ()),
    ],
)
def test_select(
    patterns: str | list[str] | None, sites: tuple[str, ...], asked: list[str] | None, statistics: tuple[str, ...]
) -> None:
    """What is not there is left out: sites keep their order, statistics come in the order of asking."""
    snapshot = a_snapshot()
    selected = snapshot.select(None if patterns is None else SitePatterns(patterns), asked)
    assert selected.step == snapshot.step
    assert selected.statistics == statistics
    assert selected.to_dict() == {site: {name: snapshot[site, name] for name in statistics} for site in sites}


def test_selecting_everything_copies_nothing() -> None:
    snapshot = a_snapshot()
    assert snapshot.select() is snapshot
    assert snapshot.select(SitePatterns("*"), snapshot.statistics) is snapshot


def test_as_a_dictionary_it_goes_through_json() -> None:
    as_dict = a_snapshot().to_dict()
    assert as_dict["blocks.1"] == {
        "entropy": [1.0, None, 0.0],
        "max_logit": [10.0, 4.0, 1.0],
        "sink_rate": [None, None, None],
    }
    assert json.loads(json.dumps(as_dict, allow_nan=False)) == as_dict


def test_scalars_by_their_tags() -> None:
    """Summaries over the heads that have a value; sites by their mean, and for logits by their largest head."""
    assert a_snapshot().scalars() == {
        "attention/entropy/min": 0.0,
        "attention/entropy/mean": 0.5,
        "attention/entropy/max": 1.0,
        "attention/entropy/blocks.0": 0.375,
        "attention/entropy/blocks.1": 0.5,
        "attention/entropy/decoder": 0.75,
        "attention/max_logit/min": -8.0,
        "attention/max_logit/mean": pytest.approx(8 / 6),
        "attention/max_logit/max": 10.0,
        "attention/max_logit/blocks.0": 3.0,
        "attention/max_logit/blocks.1": 10.0,
        "attention/max_logit/decoder": -8.0,
    }


def test_scalars_with_another_prefix_and_without_sites() -> None:
    scalars = a_snapshot().select(statistics=["entropy"]).scalars("validation/attention", per_site=False)
    assert scalars == {f"validation/attention/entropy/{name}": x for name, x in (("min", 0), ("mean", 0.5), ("max", 1))}


def test_scalars_leave_out_sites_without_a_value() -> None:
    values = torch.tensor([[0.5, NAN]], dtype=torch.float64)
    tags = Snapshot(0, {"a": 1, "b": 1}, ("entropy",), values).scalars()
    assert "attention/entropy/a" in tags and "attention/entropy/b" not in tags


@pytest.mark.parametrize(("share", "tags"), [(0.0, 0), (0.25, 3)])
def test_scalars_hold_faults_where_there_are_any(share: float, tags: int) -> None:
    values = torch.tensor([[0.0, share]], dtype=torch.float64)
    assert len(Snapshot(0, {"a": 2}, ("non_finite_share",), values).scalars()) == tags


def test_table() -> None:
    expected = [
        "Attention at step 7: 3 sites, 6 heads",
        "statistic  lowest  in head       mean  highest  in head",
        "entropy         0  blocks.1 #2    0.5        1  blocks.1 #0",
        "max_logit      -8  decoder #0   1.333       10  blocks.1 #0",
        "sink_rate       –                   –        –",
    ]
    assert a_snapshot().table().splitlines() == expected
    assert str(a_snapshot()) == a_snapshot().table()


def test_repr_is_short() -> None:
    assert repr(a_snapshot()) == (
        "Snapshot(step=7, 3 sites, 6 heads, statistics=['entropy', 'max_logit', 'sink_rate'])"
    )


def test_equal_where_everything_is_equal() -> None:
    assert a_snapshot() == a_snapshot()
    assert a_snapshot() != a_snapshot(step=8)
    assert a_snapshot() != a_snapshot().select(statistics=["entropy"])
    assert a_snapshot() != a_snapshot().select(SitePatterns("decoder"))
    assert a_snapshot() != "a snapshot"


@pytest.mark.parametrize("other", [0.5, 0.0, math.inf])
def test_absent_equals_absent_alone(other: float) -> None:
    absent, value = (Snapshot(0, {"a": 1}, ("entropy",), torch.tensor([[x]]).double()) for x in (NAN, other))
    assert absent == copy.deepcopy(absent)
    assert absent != value


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda snapshot: pickle.loads(pickle.dumps(snapshot))])
def test_copies_are_equal(copied: object) -> None:
    assert copied(a_snapshot()) == a_snapshot()  # type: ignore[operator]


def test_it_is_no_key_of_a_dictionary() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(a_snapshot())


# Statistics of sites: they stand at the first head of each.


def of_sites(step: int = 7) -> Snapshot:
    return Snapshot(
        step=step,
        heads={"blocks.0": 2, "blocks.1": 3, "decoder": 1},
        statistics=("entropy", "token_similarity"),
        values=torch.tensor(
            [[0.5, 0.25, 1.0, NAN, 0.0, 0.75], [0.1, NAN, 0.7, NAN, NAN, NAN]],
            dtype=torch.float64,
        ),
    )


def test_a_site_has_one_value() -> None:
    snapshot = of_sites()
    assert snapshot["blocks.0", "token_similarity"] == [0.1]
    assert snapshot["blocks.1", "token_similarity"] == [0.7]
    assert snapshot["decoder", "token_similarity"] == [None]
    assert snapshot["blocks.1", "entropy"] == [1.0, None, 0.0]
    assert snapshot.to_dict()["blocks.1"] == {"entropy": [1.0, None, 0.0], "token_similarity": [0.7]}
    assert snapshot.over_heads("blocks.1", "token_similarity") == 0.7
    assert snapshot.over_heads("decoder", "token_similarity") is None
    assert snapshot.select(SitePatterns("blocks.1"))["blocks.1", "token_similarity"] == [0.7]


def test_a_summary_is_over_sites_and_the_most_extreme_ones_are_named_without_a_head() -> None:
    snapshot = of_sites()
    assert snapshot.summary("token_similarity") == Summary(min=0.1, mean=pytest.approx(0.4), max=0.7)
    assert snapshot.lowest("token_similarity") == HeadValue("blocks.0", None, 0.1)
    assert snapshot.highest("token_similarity") == HeadValue("blocks.1", None, 0.7)
    assert snapshot.table().splitlines() == [
        "Attention at step 7: 3 sites, 6 heads",
        "statistic         lowest  in head      mean  highest  in head",
        "entropy                0  blocks.1 #2   0.5        1  blocks.1 #0",
        "token_similarity     0.1  blocks.0      0.4      0.7  blocks.1",
    ]


def test_the_matrix_of_sites_has_one_column() -> None:
    expected = torch.tensor([[0.1], [0.7], [NAN]], dtype=torch.float64)
    torch.testing.assert_close(of_sites().matrix("token_similarity"), expected, equal_nan=True, rtol=0, atol=0)
    assert of_sites().matrix("entropy").shape == (3, 3)
