"""The bounded series of snapshots."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from lightning_attn import History, Snapshot, Transition


def at(step: int, entropy: float = 0.5, heads: int = 2, site: str = "block") -> Snapshot:
    """A snapshot of one site, whose last head has this entropy and whose others have 1."""
    values = torch.ones(1, heads, dtype=torch.float64)
    values[0, -1] = entropy
    return Snapshot(step, {site: heads}, ("entropy",), values)


def a_history(*snapshots: Snapshot, size: int = 10) -> History:
    history = History(size)
    for snapshot in snapshots:
        history.append(snapshot)
    return history


def test_empty() -> None:
    history = History(3)
    assert len(history) == 0
    assert not history
    assert history.steps == []
    assert history.series("block", 0, "entropy") == ([], [])
    assert repr(history) == "History(0 snapshots, empty)"
    with pytest.raises(IndexError):
        history[0]


def test_the_oldest_make_room() -> None:
    history = a_history(*map(at, range(0, 50, 10)), size=3)
    assert history.steps == [20, 30, 40]
    assert repr(history) == "History(3 snapshots, steps 20 to 40)"


def test_it_is_a_sequence() -> None:
    snapshots = [at(step) for step in (1, 2, 3)]
    history = a_history(*snapshots)
    assert list(history) == snapshots
    assert list(reversed(history)) == snapshots[::-1]
    assert history[0] is snapshots[0]
    assert history[-1] is snapshots[2]
    assert history[1:] == snapshots[1:]
    assert snapshots[1] in history
    assert history.index(snapshots[1]) == 1


def test_series_of_a_head() -> None:
    history = a_history(at(1, 0.9), at(2, 0.4), at(5, 0.1))
    assert history.series("block", 1, "entropy") == ([1, 2, 5], [0.9, 0.4, 0.1])
    assert history.series("block", 0, "entropy") == ([1, 2, 5], [1, 1, 1])


def test_series_leaves_out_steps_without_a_value() -> None:
    """The site did not run, it had fewer heads, or the value was absent."""
    history = a_history(at(1), at(2, site="other"), at(3, heads=1), at(4, math.nan), at(5, 0.25))
    assert history.series("block", 1, "entropy") == ([1, 5], [0.5, 0.25])
    assert a_history().series("block", 1, "entropy") == ([], [])


@pytest.mark.parametrize(
    ("site", "head", "statistic"),
    [("block", 1, "max_logit"), ("nowhere", 0, "entropy"), ("block", 9, "entropy"), ("block", -1, "entropy")],
)
def test_series_of_what_no_snapshot_holds(site: str, head: int, statistic: str) -> None:
    with pytest.raises(
        KeyError, match=f"no snapshot holds '{statistic}' of head {head} of '{site}'; the last one holds"
    ):
        a_history(at(1), at(2)).series(site, head, statistic)


def test_series_of_a_site() -> None:
    """A statistic of sites has no heads: it stands at the first one, and `None` asks for it as well."""

    def similarity(step: int, value: float) -> Snapshot:
        values = torch.tensor([[value, math.nan]], dtype=torch.float64)
        return Snapshot(step, {"block": 2}, ("token_similarity",), values)

    history = a_history(similarity(1, 0.1), similarity(2, math.nan), similarity(3, 0.3))
    extreme = history[0].lowest("token_similarity")
    assert extreme is not None
    assert history.series(extreme.site, extreme.head, "token_similarity") == ([1, 3], [0.1, 0.3])
    assert history.series("block", 0, "token_similarity") == ([1, 3], [0.1, 0.3])
    with pytest.raises(KeyError, match="of head 1 of 'block'"):
        history.series("block", 1, "token_similarity")
    with pytest.raises(KeyError, match="of head None of 'block'"):
        a_history(at(1)).series("block", None, "entropy")


def test_clear() -> None:
    history = a_history(at(1), at(2), size=2)
    history.clear()
    assert len(history) == 0
    history.append(at(3))
    assert history.steps == [3]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda history: pickle.loads(pickle.dumps(history))])
def test_copies_keep_the_snapshots_and_the_size(copied: object) -> None:
    history = a_history(at(1), at(2), size=2)
    copy_of_it: History = copied(history)  # type: ignore[operator]
    assert list(copy_of_it) == list(history)
    copy_of_it.append(at(3))
    assert copy_of_it.steps == [2, 3]
    assert history.steps == [1, 2]


def course(step: int, *shares: float | None, site: str = "block") -> Snapshot:
    """A snapshot of the positional share of each head of a site."""
    values = torch.tensor([[math.nan if share is None else share for share in shares]], dtype=torch.float64)
    return Snapshot(step, {site: len(shares)}, ("positional_share",), values)


def test_transitions_of_each_head() -> None:
    history = History(100)
    for step in range(0, 2000, 100):
        history.append(course(step, 0.9 if step < 1000 else 0.3, 0.5, None))
        history.append(course(step, 0.1 if step < 700 else 0.8, site="later") if step % 200 == 100 else at(step))
    found = history.transitions()
    assert list(found) == [("block", 0), ("block", 1), ("later", 0)]
    assert found["block", 0] == Transition(1000, "positional_to_semantic", pytest.approx(0.999), 0.9, 0.3)
    assert found["block", 1] is None
    assert found["later", 0] is None  # ten values, of which only three are before the change


def test_transitions_of_another_statistic() -> None:
    history = a_history(*(at(step, 0.9 if step < 60 else 0.2) for step in range(0, 120, 10)), size=20)
    transition = history.transitions("entropy")["block", 1]
    assert transition is not None
    assert transition.step == 60
    assert history.transitions() == {}
    assert a_history().transitions() == {}


def test_what_a_run_went_back_on_is_in_no_transition() -> None:
    """The fall is undone by a checkpoint from before it, and does not come again."""
    history = History(100)
    for step in [*range(0, 2000, 100), *range(900, 2000, 100)]:
        history.append(course(step, 0.3 if step >= 1000 and len(history) < 20 else 0.9))
    assert history.transitions() == {("block", 0): None}
    assert history.steps[20] == 900
