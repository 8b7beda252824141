"""Joining the sums of all ranks: alone, and of several processes.

A case is a function that every rank runs; what it returns on each rank is looked at here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import reduce
from itertools import accumulate
from typing import Any

import pytest
import torch
from collectives import collectives
from rank_pool import RankPool
from torch import distributed as dist

from lightning_attn import AttentionCall, AttentionWarning
from lightning_attn.callbacks.budget import TimeBudget
from lightning_attn.capture import Visibility
from lightning_attn.distributed import RankReduction
from lightning_attn.statistics import known_statistics, measure, resolve
from lightning_attn.statistics.measure import Sums
from lightning_attn.statistics.statistic import Maximum, Ratio

CPU = torch.device("cpu")
STATISTICS = resolve(["entropy", "max_logit"])
FIRST, STEADY = ["MAX", "gather", "MAX", "SUM"], ["MAX", "SUM"]


def sums(entropies: list[float], logits: list[float], weight: float = 1.0) -> Sums:
    """What a rank found at a site: the heads' mean entropies over some rows, and their largest logits."""
    weights = torch.full((1, len(entropies)), weight, dtype=torch.float64)
    found = Sums.nothing(STATISTICS, len(entropies), CPU)
    entropy = Ratio(torch.tensor([entropies], dtype=torch.float64) * weights, weights)
    found.add({"entropy": entropy, "max_logit": Maximum(torch.tensor([logits]))}, slice(None))
    return found


def values(joined: dict[str, Sums]) -> dict[str, dict[str, list[float]]]:
    return {site: {name: s.or_nan.tolist() for name, s in of_site.items()} for site, of_site in joined.items()}


def a_batch(sequences: int) -> AttentionCall:
    random = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, sequences, 3, 20, 8, generator=random)
    padding = torch.arange(20) < torch.tensor([20, 12, 1, 17, 20, 9])[:sequences, None, None, None]
    return AttentionCall("block", 3 * query, key, None, 1.0, Visibility(0, mask=padding), self_attention=True)


# One process.


def test_alone_nothing_changes() -> None:
    call = a_batch(4)
    found = {"block": measure(call, resolve("all")), "other": measure(call, resolve("all"))}
    quiet: set[str] = set()
    joined = RankReduction()(found, resolve("all"), quiet, CPU)
    assert list(joined) == ["block", "other"]
    assert not quiet
    for site, of_site in joined.items():
        assert list(of_site) == [statistic.name for statistic in resolve("all")]
        for name, joined_sums in of_site.items():
            torch.testing.assert_close(joined_sums, found[site][name], rtol=0, atol=0)


def test_alone_a_site_counts_when_it_runs_and_is_not_quiet() -> None:
    reduction, entropy = RankReduction(), sums([0.5], [1.0])
    assert list(reduction({"a": entropy, "b": entropy}, STATISTICS, set(), CPU)) == ["a", "b"]
    assert list(reduction({"b": entropy}, STATISTICS, set(), CPU)) == ["b"]
    assert list(reduction({}, STATISTICS, set(), CPU)) == []
    assert list(reduction({"a": entropy, "b": entropy, "c": entropy}, STATISTICS, {"b"}, CPU)) == ["a", "c"]


def test_alone_a_site_that_was_skipped_at_first_stands_where_it_runs() -> None:
    reduction, entropy = RankReduction(), sums([0.5], [1.0])
    assert list(reduction(dict.fromkeys("bd", entropy), STATISTICS, set(), CPU)) == ["b", "d"]
    assert list(reduction(dict.fromkeys("abcde", entropy), STATISTICS, set(), CPU)) == ["a", "b", "c", "d", "e"]
    assert list(reduction(dict.fromkeys("ace", entropy), STATISTICS, set(), CPU)) == ["a", "c", "e"]


def test_alone_numbers_stay_what_they_are() -> None:
    reduction = RankReduction()
    reduction.numbers = [0.1, 1e9]
    reduction({"a": sums([0.5], [1.0])}, STATISTICS, set(), CPU)
    assert reduction.numbers == [0.1, 1e9]


def test_alone_a_site_may_change_its_number_of_heads() -> None:
    reduction = RankReduction()
    for entropies in ([0.5, 0.25], [0.75], [0.1, 0.2, 0.3]):
        joined = reduction({"a": sums(entropies, [0.0] * len(entropies))}, STATISTICS, set(), CPU)
        assert values(joined)["a"]["entropy"] == pytest.approx(entropies)


# Several processes. The cases run in them; each returns something that can be sent back.


def captures(*found: dict[str, Sums], quiet: set[str] | None = None) -> list[dict[str, Any]]:
    """Several captures in a row by one reduction: what each gave, what it said, and what it cost."""
    reduction, quiet = RankReduction(), set() if quiet is None else quiet
    results = []
    for of_capture in found:
        with collectives() as called, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            joined = reduction(of_capture, STATISTICS, quiet, CPU)
        results.append(
            {
                "values": values(joined),
                "weights": {site: of_site["entropy"].denominator.tolist() for site, of_site in joined.items()},
                "quiet": sorted(quiet),
                "collectives": called,
                "said": [str(w.message) for w in said if issubclass(w.category, AttentionWarning)],
            }
        )
    return results


def the_same_site() -> Any:
    rank = dist.get_rank()
    mine = sums([0.2, 0.8], [5.0, -3.0], weight=1) if rank == 0 else sums([0.8, 0.8], [4.0, 7.0], weight=3)
    return captures({"a": mine}, {"a": mine}, {"a": mine})


def different_sites() -> Any:
    """An expert that is chosen on one rank only."""
    rank = dist.get_rank()
    mine = {f"expert.{rank}": sums([0.1 + rank], [10.0 + rank]), "shared": sums([0.5], [float(rank)])}
    return captures(mine, mine)


def a_rank_that_found_nothing() -> Any:
    rank = dist.get_rank()
    mine = {} if rank == 1 else {"a": sums([0.25, math.nan], [-2.0, 3.0])}
    return captures(mine, mine)


def nobody_found_anything() -> Any:
    return captures({}, {})


def a_site_that_appears_later() -> Any:
    rank = dist.get_rank()
    old, new = {"a": sums([0.5], [1.0])}, {"a": sums([0.5], [1.0]), "b": sums([0.25], [2.0])}
    return captures(old, new if rank == 1 else old, new)


def a_site_that_is_gone_for_a_while() -> Any:
    here, gone = {"a": sums([0.5], [1.0]), "b": sums([0.25], [2.0])}, {"b": sums([0.75], [3.0])}
    return captures(here, gone, here)


def different_numbers_of_heads() -> Any:
    rank = dist.get_rank()
    heads = 2 + rank
    mine = {"a": sums([0.5] * heads, [1.0] * heads), "b": sums([0.25], [2.0])}
    return captures(mine, {"b": mine["b"]})


def both_change_their_number_of_heads() -> Any:
    two, three = {"a": sums([0.5] * 2, [1.0] * 2)}, {"a": sums([0.25] * 3, [2.0] * 3)}
    return captures(two, three, three)


def a_fault_on_one_rank() -> Any:
    """The site runs on both at first; then it fails on the second rank, which stops watching it."""
    rank = dist.get_rank()
    both = {"a": sums([0.5], [1.0]), "b": sums([0.25], [2.0])}
    quiet: set[str] = set()
    reduction = RankReduction()
    results = []
    for fails in (False, True, False):
        if fails and rank == 1:
            quiet.add("a")
        found = {site: found for site, found in both.items() if site not in quiet}
        with collectives() as called:
            joined = reduction(found, STATISTICS, quiet, CPU)
        results.append({"sites": list(joined), "quiet": sorted(quiet), "collectives": called})
    return results


def a_fault_on_one_rank_at_the_first_capture() -> Any:
    rank = dist.get_rank()
    both = {"a": sums([0.5], [1.0]), "b": sums([0.25], [2.0])}
    return captures({"b": both["b"]} if rank == 1 else both, {"b": both["b"]}, quiet={"a"} if rank == 1 else set())


def parts(sizes: tuple[int, ...]) -> list[slice]:
    """So many sequences for each rank, one rank's after the other's."""
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def a_part_of_a_batch_on_each(sizes: tuple[int, ...]) -> Any:
    mine = a_batch(sum(sizes)).select(parts(sizes)[dist.get_rank()])
    joined = RankReduction()({"block": measure(mine, resolve("all"))}, resolve("all"), set(), CPU)
    return {name: tuple(found) for name, found in joined["block"].items()}


def numbers_to_agree_on() -> Any:
    """Beside a new site, beside a known one, and beside nothing."""
    rank = dist.get_rank()
    reduction, results = RankReduction(), []
    for found in ({"a": sums([0.5], [1.0])}, {"a": sums([0.25], [2.0])}, {}):
        reduction.numbers = [0.125 + rank, 7.5 - rank]
        with collectives() as called:
            joined = reduction(found, STATISTICS, set(), CPU)
        results.append({"numbers": reduction.numbers, "values": values(joined), "collectives": called})
    return results


def a_time_budget_on_each() -> Any:
    """The same training, in which captures take long on the second rank alone."""
    rank = dist.get_rank()
    now = [0.0]
    budget, reduction, settled = TimeBudget(0.1, lambda: now[0]), RankReduction(), []
    for capture in range(4):
        for batch in range(10):
            budget.batch_starts((lambda: None) if batch == 0 else None)
            now[0] += 1.0
            if batch == 0:
                reduction.numbers = [budget.needed_steps]
                with collectives() as called:
                    reduction({"a": sums([0.5], [1.0])}, STATISTICS, set(), CPU)
                budget.settle(reduction.numbers[0], asked_steps=10)
                settled.append((budget.fewest_steps, called if capture else None))
                now[0] += 10.0 * rank
            budget.batch_ends("plain" if batch else "capture", stepped=True)
    return settled


@pytest.fixture
def results(request: pytest.FixtureRequest, ranks: RankPool) -> list[Any]:
    """What the case that a test names returned on the two ranks."""
    return ranks(request.param)


def of(function: Callable[..., Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("results", [function], indirect=True, ids=lambda case: case.__name__)


@pytest.mark.parametrize("size", [2, 4])
def test_several_processes_run(ranks: RankPool, size: int) -> None:
    assert ranks(dist.get_world_size, ranks=size) == [size] * size


IN_CAPTURES = [
    the_same_site,
    different_sites,
    a_rank_that_found_nothing,
    nobody_found_anything,
    a_site_that_appears_later,
    a_site_that_is_gone_for_a_while,
    both_change_their_number_of_heads,
    a_fault_on_one_rank,
    a_fault_on_one_rank_at_the_first_capture,
    numbers_to_agree_on,
    a_time_budget_on_each,
]


@pytest.mark.parametrize("results", IN_CAPTURES, indirect=True, ids=lambda case: case.__name__)
def test_ranks_agree_on_everything(results: Any) -> None:
    """The same values, the same quiet sites, the same collectives in the same order."""
    assert repr(results[0]) == repr(results[1])


@of(the_same_site)
def test_sums_add_and_the_largest_counts(results: Any) -> None:
    for capture in results[0]:
        assert capture["values"] == {"a": {"entropy": pytest.approx([0.65, 0.8]), "max_logit": [5.0, 7.0]}}
        assert capture["weights"] == {"a": [4, 4]}


@of(the_same_site)
def test_a_capture_costs_two_collectives_and_the_first_one_an_exchange_more(results: Any) -> None:
    assert [capture["collectives"] for capture in results[0]] == [FIRST, STEADY, STEADY]


@of(different_sites)
def test_sites_of_one_rank_are_known_to_all(results: Any) -> None:
    for capture in results[1]:
        assert capture["values"] == {
            "expert.0": {"entropy": pytest.approx([0.1]), "max_logit": [10.0]},
            "shared": {"entropy": [0.5], "max_logit": [1.0]},
            "expert.1": {"entropy": pytest.approx([1.1]), "max_logit": [11.0]},
        }
    assert [capture["collectives"] for capture in results[1]] == [FIRST, STEADY]


@of(a_rank_that_found_nothing)
def test_a_rank_that_found_nothing_adds_zeros(results: Any) -> None:
    for capture in results[1]:
        assert capture["weights"] == {"a": [1, 1]}
        assert capture["values"]["a"]["entropy"][0] == 0.25
        assert capture["values"]["a"]["max_logit"] == [-2, 3]
    assert [capture["collectives"] for capture in results[1]] == [FIRST, STEADY]


@of(nobody_found_anything)
def test_where_nobody_found_anything_there_is_nothing_to_exchange(results: Any) -> None:
    assert [(capture["values"], capture["collectives"]) for capture in results[0]] == [({}, STEADY)] * 2


@of(a_site_that_appears_later)
def test_a_new_site_costs_one_exchange_more(results: Any) -> None:
    assert [list(capture["values"]) for capture in results[0]] == [["a"], ["a", "b"], ["a", "b"]]
    assert [capture["weights"].get("b") for capture in results[0]] == [None, [1], [2]]
    assert [capture["collectives"] for capture in results[0]] == [FIRST, FIRST, STEADY]


@of(a_site_that_is_gone_for_a_while)
def test_a_site_that_did_not_run_is_left_out_and_comes_back_for_free(results: Any) -> None:
    assert [list(capture["values"]) for capture in results[0]] == [["a", "b"], ["b"], ["a", "b"]]
    assert [capture["values"]["b"]["max_logit"] for capture in results[0]] == [[2], [3], [2]]
    assert [capture["collectives"] for capture in results[0]] == [FIRST, STEADY, STEADY]


@of(different_numbers_of_heads)
def test_a_site_on_whose_heads_ranks_disagree_is_given_up_aloud_by_all(results: Any) -> None:
    said = ["Ranks count 2 and 3 heads at 'a'; it is not watched."]
    for rank, spoken in zip(results, (said, []), strict=True):
        first, second = rank
        assert first["said"] == spoken
        assert second["said"] == []
        for capture in rank:
            assert capture["quiet"] == ["a"]
            assert capture["values"] == {"b": {"entropy": [0.25], "max_logit": [2.0]}}
        assert [capture["collectives"] for capture in rank] == [FIRST, STEADY]


@of(both_change_their_number_of_heads)
def test_a_site_may_change_its_number_of_heads_on_all_ranks(results: Any) -> None:
    assert [capture["values"]["a"]["entropy"] for capture in results[0]] == [[0.5] * 2, [0.25] * 3, [0.25] * 3]
    assert [capture["quiet"] for capture in results[0]] == [[], [], []]
    assert [capture["collectives"] for capture in results[0]] == [FIRST, FIRST, STEADY]


@of(a_fault_on_one_rank)
def test_a_site_that_fails_on_one_rank_goes_quiet_on_all(results: Any) -> None:
    for rank in results:
        assert [capture["sites"] for capture in rank] == [["a", "b"], ["b"], ["b"]]
        assert [capture["quiet"] for capture in rank] == [[], ["a"], ["a"]]
        assert [capture["collectives"] for capture in rank] == [FIRST, STEADY, STEADY]


@of(a_fault_on_one_rank_at_the_first_capture)
def test_a_site_that_fails_on_one_rank_at_once_goes_quiet_on_all(results: Any) -> None:
    for rank in results:
        assert [list(capture["values"]) for capture in rank] == [["b"], ["b"]]
        assert [capture["quiet"] for capture in rank] == [["a"], ["a"]]


@of(numbers_to_agree_on)
def test_the_largest_numbers_come_with_the_capture_and_cost_no_collective_more(results: Any) -> None:
    assert [capture["numbers"] for capture in results[0]] == [[1.125, 7.5]] * 3
    assert [capture["collectives"] for capture in results[0]] == [FIRST, STEADY, STEADY]
    assert [capture["values"] for capture in results[0]] == [
        {"a": {"entropy": [0.5], "max_logit": [1.0]}},
        {"a": {"entropy": [0.25], "max_logit": [2.0]}},
        {},
    ]


@of(a_time_budget_on_each)
def test_ranks_follow_the_one_whose_captures_take_longest(results: Any) -> None:
    """10 s beyond steps of 1 s, of which captures may take a tenth: every 90 steps, the next power of two is 128."""
    assert [fewest for fewest, _ in results[0]] == [8, 8, 80, 128]
    assert [called for _, called in results[0][1:]] == [STEADY] * 3


@pytest.mark.parametrize("sizes", [(4, 2), (3, 0), (2, 1, 1, 2), (1, 0, 4, 1)], ids=str)
def test_ranks_have_the_values_of_one_process_on_the_whole_batch(ranks: RankPool, sizes: tuple[int, ...]) -> None:
    """However many sequences each has, or none."""
    whole = measure(a_batch(sum(sizes)), resolve("all"))
    # Statistics that compare sequences pair those of one rank.
    paired = resolve([name for name, statistic in known_statistics().items() if statistic.compares_sequences])
    of_ranks = [measure(a_batch(sum(sizes)).select(part), paired) for part in parts(sizes)]
    expected = {**whole, **reduce(Sums.joined, of_ranks)}
    for rank in ranks(a_part_of_a_batch_on_each, sizes, ranks=len(sizes)):
        assert rank.keys() == expected.keys()
        for name, found in rank.items():
            torch.testing.assert_close(found, tuple(expected[name]), rtol=1e-6, atol=1e-6)
