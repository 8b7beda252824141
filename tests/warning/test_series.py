"""Statistics over training, at places that come and go."""

from __future__ import annotations

import math

import numpy as np
import pytest
from snapshot_series import course, record, snapshot

from lightning_attn.warning import Place, Record, Series

NAN = math.nan


def rows(series: Series) -> list[list[float | None]]:
    return [[None if value != value else value for value in row] for row in series.values_TP.tolist()]


def test_places_are_heads_in_the_order_of_sites() -> None:
    series = record(snapshot(3, {"b": 2, "a": 1}, entropy=[0.1, 0.2, 0.3])).series("entropy")
    assert series.places == (Place("b", 0), Place("b", 1), Place("a", 0))
    assert series.steps_T.tolist() == [3]
    assert series.last_P.tolist() == [0.1, 0.2, 0.3]


def test_a_statistic_of_sites_has_one_place_for_each() -> None:
    """Its value stands at the first head."""
    series = record(snapshot(3, {"b": 2, "a": 1}, rank_residual=[0.1, NAN, 0.3])).series("rank_residual")
    assert series.places == (Place("b", None), Place("a", None))
    assert series.last_P.tolist() == [0.1, 0.3]


def test_a_site_that_comes_has_no_past() -> None:
    series = record(snapshot(0, {"a": 1}, entropy=0.5), snapshot(1, {"new": 1, "a": 1}, entropy=[0.1, 0.6]))
    assert rows(series.series("entropy")) == [[None, 0.5], [0.1, 0.6]]


def test_a_site_that_vanishes_is_left_out() -> None:
    series = record(snapshot(0, {"gone": 2, "a": 1}, entropy=[0.1, 0.2, 0.5]), snapshot(1, {"a": 1}, entropy=0.6))
    assert series.series("entropy").places == (Place("a", 0),)
    assert rows(series.series("entropy")) == [[0.5], [0.6]]


def test_a_site_of_another_number_of_heads_is_another_one() -> None:
    series = record(snapshot(0, {"a": 2, "b": 1}, entropy=[0.1, 0.2, 0.3]), snapshot(1, {"a": 1, "b": 1}, entropy=0.6))
    assert rows(series.series("entropy")) == [[None, 0.3], [0.6, 0.6]]


def test_sites_in_another_order() -> None:
    series = record(
        snapshot(0, {"a": 1, "b": 2}, entropy=[0.1, 0.2, 0.3]), snapshot(1, {"b": 2, "a": 1}, entropy=[0.4, 0.5, 0.6])
    )
    assert rows(series.series("entropy")) == [[0.2, 0.3, 0.1], [0.4, 0.5, 0.6]]


def test_a_snapshot_without_the_statistic() -> None:
    with_gap = record(snapshot(0, {"a": 2}, entropy=0.1), snapshot(1, {"a": 2}, max_logit=3.0))
    assert not with_gap.has("entropy")
    assert with_gap.has("max_logit")
    assert rows(with_gap.series("entropy")) == [[0.1, 0.1], [None, None]]
    assert rows(with_gap.series("rank_residual")) == [[None], [None]]


def test_a_snapshot_without_heads() -> None:
    empty = record(snapshot(0, {}, entropy=[]))
    for scope in ("head", "site", "model"):
        series = empty.series("entropy").averaged(scope)
        assert series.values_TP.shape == (1, 0)
        assert list(series.places) == []


@pytest.mark.parametrize(
    ("scope", "places", "values"),
    [
        ("head", [("a", 0), ("a", 1), ("b", 0)], [[1, 3, 5], [2, None, None]]),
        ("site", [("a", None), ("b", None)], [[2, 5], [2, None]]),
        ("model", [(None, None)], [[3], [2]]),
    ],
)
def test_averages_are_of_what_has_a_value(scope: str, places: list[Place], values: list[list[float | None]]) -> None:
    heads = {"a": 2, "b": 1}
    series = record(*course("entropy", [[1, 3, 5], [2, NAN, NAN]], heads)).series("entropy").averaged(scope)
    assert list(series.places) == places
    assert rows(series) == values


def test_the_last_snapshots() -> None:
    series = record(*course("entropy", [1, 2, 3])).series("entropy")
    assert rows(series.last(2)) == [[2], [3]]
    assert series.last(2).steps_T.tolist() == [10, 20]
    assert rows(series.last(9)) == rows(series)


@pytest.mark.parametrize(
    ("place", "there"),
    [
        (Place("a", 0), True),
        (Place("a", 1), False),  # no value
        (Place("a", 2), False),  # no such head
        (Place("a", None), True),
        (Place("b", 0), False),
        (Place("b", None), False),
        (Place("c", None), False),  # no such site
        (Place(None, None), True),
    ],
)
def test_has_value(place: Place, there: bool) -> None:
    found = record(snapshot(0, {"a": 2, "b": 1}, entropy=[0.1, NAN, NAN]))
    assert found.has_value("entropy", place) is there
    assert not found.has_value("max_logit", place)


def test_has_value_of_a_site() -> None:
    found = record(snapshot(0, {"a": 2, "b": 2}, rank_residual=[NAN, NAN, 0.2, NAN]))
    assert not found.has_value("rank_residual", Place("a", None))
    assert found.has_value("rank_residual", Place("b", None))


def test_what_rules_share_cannot_be_written_to() -> None:
    for snapshots in (course("entropy", [1.0]), course("entropy", [1.0, 2.0])):
        series = Record(snapshots).series("entropy")
        for array in (series.values_TP, series.steps_T, series.last_P):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
        assert snapshots[-1].values.numpy().flags.writeable
        assert not np.isnan(snapshots[0].values.numpy()).any()
