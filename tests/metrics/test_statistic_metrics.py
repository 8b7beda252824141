"""A statistic as a metric of torchmetrics: the value of its function, over batches, ranks, copies and devices."""

from __future__ import annotations

import doctest
import inspect
import math
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import matplotlib
import pytest
import torch
from rank_pool import RankPool
from test_written_metrics import WRITTEN, written_on_each
from torch import Tensor, nn
from torch import distributed as dist
from torchmetrics import Metric, MetricCollection

import lightning_attn.functional as functional
import lightning_attn.metrics as metrics
from lightning_attn.functional import attention_entropy, attention_statistics
from lightning_attn.functional.statistic_function import function_of
from lightning_attn.metrics import AttentionEntropy, AttentionMaxLogit, AttentionSinkRate, AttentionStatistics
from lightning_attn.metrics.statistic_metric import metric_of
from lightning_attn.statistics import Statistic, known_statistics
from lightning_attn.statistics.description import metric_name

matplotlib.use("Agg")

STATISTICS = known_statistics()
OF_CAUSAL_HEADS = [name for name, s in STATISTICS.items() if s.per == "head" and name != "sinkhorn_distance"]
HEADS = 3


def a_batch(statistic: type[Statistic], sequences: slice = slice(None)) -> dict[str, Any]:
    """Sequences of different lengths: queries, keys and values, or states."""
    random = torch.Generator().manual_seed(1)
    real = torch.arange(70) < torch.tensor([70, 52, 11, 67])[:, None]
    if statistic.per == "site":
        states = torch.randn(2, 4, 70, 16, generator=random)
        return {"entering": states[0, sequences], "leaving": states[1, sequences], "token_mask": real[sequences]}
    query, key, value = 2 * torch.randn(3, 4, HEADS, 70, 8, generator=random)
    return {
        "query": query[sequences],
        "key": key[sequences],
        "value": value[sequences],
        "mask": real[sequences, None, None],
        "is_causal": statistic.name not in ("sinkhorn_distance", "leader_mass", "leader_position"),
    }


def new(statistic: type[Statistic], **arguments: Any) -> Any:
    heads = {} if statistic.per == "site" else {"num_heads": HEADS}
    return metric_of(statistic)(**heads, **arguments)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


# One process.


@pytest.mark.parametrize("name", STATISTICS)
def test_a_metric_has_the_value_of_its_function(name: str) -> None:
    statistic = STATISTICS[name]
    batch = a_batch(statistic)
    metric = new(statistic)
    expected = function_of(statistic)(**batch)
    assert not expected.isnan().any()
    close(metric(**batch), expected)
    close(metric.compute(), expected)


@pytest.mark.parametrize("name", [name for name in STATISTICS if not STATISTICS[name].compares_sequences])
def test_batches_add_up_to_the_whole(name: str) -> None:
    statistic = STATISTICS[name]
    metric = new(statistic)
    for half in (slice(3), slice(3, 4)):
        metric.update(**a_batch(statistic, half))
    close(metric.compute(), function_of(statistic)(**a_batch(statistic)))


@pytest.mark.parametrize("name", STATISTICS)
def test_forward_gives_the_batch_and_adds_it(name: str) -> None:
    statistic = STATISTICS[name]
    of_updates, of_forwards = new(statistic), new(statistic)
    for half in (slice(2), slice(2, 4)):
        batch = a_batch(statistic, half)
        of_updates.update(**batch)
        close(of_forwards(**batch), function_of(statistic)(**batch))
    close(of_forwards.compute(), of_updates.compute())


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("copy", [pickle.dumps, deepcopy, Metric.clone], ids=["pickle", "deepcopy", "clone"])
def test_copies_go_on_where_the_metric_was(name: str, copy: Any) -> None:
    statistic = STATISTICS[name]
    metric = new(statistic)
    metric.update(**a_batch(statistic, slice(2)))
    copied = copy(metric)
    copied = pickle.loads(copied) if isinstance(copied, bytes) else copied
    assert type(copied) is type(metric)
    close(copied.compute(), metric.compute())
    for one in (metric, copied):
        one.update(**a_batch(statistic, slice(2, 4)))
    close(copied.compute(), metric.compute())


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_reset_forgets_everything(name: str) -> None:
    statistic = STATISTICS[name]
    metric = new(statistic)
    metric.update(**a_batch(statistic))
    metric.reset()
    assert metric.compute().isnan().all()
    metric.update(**a_batch(statistic, slice(2)))
    close(metric.compute(), function_of(statistic)(**a_batch(statistic, slice(2))))


#: `logit_spacing` is of the type itself: tests/statistics/test_logit_spacing.py.
ALIKE_IN_ALL_TYPES = [name for name in STATISTICS if name != "logit_spacing"]


@pytest.mark.parametrize("name", ALIKE_IN_ALL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_full(name: str, dtype: torch.dtype) -> None:
    statistic = STATISTICS[name]
    batch = {
        key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in a_batch(statistic).items()
    }
    in_full = {
        key: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in batch.items()
    }
    metric = new(statistic).half()
    metric.update(**batch)
    close(metric.compute(), function_of(statistic)(**in_full))


@pytest.mark.parametrize("name", STATISTICS)
def test_it_moves_to_another_device(name: str) -> None:
    """The meta device, for want of another one: there a metric has shapes and types alone."""
    metric = new(STATISTICS[name])
    metric.update(**a_batch(STATISTICS[name]))
    moved = metric.to("meta")
    assert moved.device.type == "meta"
    assert {state.device.type for state in moved.metric_state.values()} == {"meta"}
    assert {default.device.type for default in moved._defaults.values()} == {"meta"}


def test_sums_are_single_where_there_is_no_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_attn.metrics.base._SINGLE", ("meta",))
    assert {state.dtype for state in AttentionEntropy(2).to("meta").metric_state.values()} == {torch.float32}
    assert {state.dtype for state in AttentionEntropy(2).to("cpu").metric_state.values()} == {torch.float64}


@pytest.mark.parametrize("name", STATISTICS)
def test_its_states_have_a_fixed_shape_and_its_flags_are_set(name: str) -> None:
    statistic = STATISTICS[name]
    metric = new(statistic)
    before = {key: state.shape for key, state in metric.metric_state.items()}
    metric.update(**a_batch(statistic))
    assert {key: state.shape for key, state in metric.metric_state.items()} == before
    assert (metric.is_differentiable, metric.higher_is_better, metric.full_state_update) == (False, None, False)
    low, high = statistic.range.numbers
    assert (metric.plot_lower_bound, metric.plot_upper_bound) == (low, high)


@pytest.mark.parametrize("name", STATISTICS)
def test_it_is_plotted(name: str) -> None:
    statistic = STATISTICS[name]
    metric = new(statistic)
    values = [metric(**a_batch(statistic, slice(part, part + 2))) for part in (0, 2)]
    for given in (None, values):
        figure, axis = metric.plot(given)
        assert axis.get_ylabel() == metric_name(statistic)
        matplotlib.pyplot.close(figure)


@pytest.mark.parametrize("name", STATISTICS)
def test_it_says_what_it_is_and_its_example_runs(name: str) -> None:
    statistic = STATISTICS[name]
    metric = getattr(metrics, metric_name(statistic))
    text = inspect.getdoc(metric) or ""
    for part in ("Range:", "Reading:", "Args:", "Raises:"):
        assert part in text, part
    if statistic.example is not None:
        test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
        assert test.examples
        assert doctest.DocTestRunner().run(test).failed == 0


# Several of them.


def test_several_statistics_share_a_walk_and_a_state() -> None:
    batch = a_batch(STATISTICS["entropy"])
    metric = AttentionStatistics(num_heads=HEADS, statistics="all")
    found = metric(**batch)
    assert len(metric.metric_state) == 2
    for name, expected in attention_statistics(statistics="all", **batch).items():
        close(found[name], expected)


def test_several_statistics_are_plotted_over_the_heads() -> None:
    metric = AttentionStatistics(num_heads=HEADS, statistics=["entropy", "max_weight"])
    metric.update(**a_batch(STATISTICS["entropy"]))
    figure, axis = metric.plot()
    assert axis.get_xlabel() == "Head"
    assert [len(line.get_xdata()) for line in axis.get_lines()] == [HEADS, HEADS]
    matplotlib.pyplot.close(figure)


def test_metrics_of_a_collection_stay_apart_though_they_begin_alike() -> None:
    """A collection takes metrics for one whose states are equal after the first batch."""
    collection = MetricCollection(
        {
            "hidden": metrics.AttentionHiddenRowShare(1),
            "not finite": metrics.AttentionNonFiniteShare(1),
            "rate": AttentionSinkRate(1),
            "low rate": AttentionSinkRate(1, threshold=0.01),
        }
    )
    everything = torch.full((1, 1, 20, 20), 1 / 20)
    collection.update(torch.eye(20)[None, None])
    spoilt = everything.clone()
    spoilt[0, 0, :10] = math.nan
    collection.update(spoilt)
    found = {name: value.item() for name, value in collection.compute().items()}
    assert found == pytest.approx({"hidden": 0, "not finite": 0.25, "rate": 0, "low rate": 1})


def test_a_collection_gives_states_and_weights_to_whom_they_belong() -> None:
    collection = MetricCollection([AttentionEntropy(HEADS), metrics.TokenSimilarity()])
    states, heads = a_batch(STATISTICS["token_similarity"]), a_batch(STATISTICS["entropy"])
    collection.update(**states, **heads)
    found = collection.compute()
    close(found["AttentionEntropy"], functional.attention_entropy(**heads))
    close(found["TokenSimilarity"], functional.token_similarity(**states))


def test_a_warning_is_said_at_the_line_that_gave_the_weights() -> None:
    weights = torch.rand(1, HEADS, 6, 6).tril()
    metric = AttentionEntropy(HEADS)
    for call in (metric.update, metric, functional.attention_entropy, attention_statistics, functional.attention_call):
        with pytest.warns(UserWarning, match="say `is_causal=True`") as said:
            call(weights)
        assert {warning.filename for warning in said} == {__file__}


def test_one_number_for_all_heads_can_be_logged() -> None:
    batch = a_batch(STATISTICS["entropy"])
    per_head = functional.attention_entropy(**batch)
    metric = AttentionEntropy(HEADS, over_heads="min")
    assert metric(**batch).item() == per_head.min().item()


def test_parameters_are_kept_by_copies() -> None:
    metric = AttentionSinkRate(1, threshold=0.01)
    metric.update(torch.full((20, 20), 1 / 20))
    for copied in (metric, pickle.loads(pickle.dumps(metric)), metric.clone()):
        assert copied.compute().item() == 1


def test_the_state_can_be_saved_and_loaded() -> None:
    metric, loaded = AttentionMaxLogit(HEADS), AttentionMaxLogit(HEADS)
    metric.update(**a_batch(STATISTICS["max_logit"]))
    for one in (metric, loaded):
        one.persistent(True)
    loaded.load_state_dict(metric.state_dict())
    loaded._update_count = 1
    close(loaded.compute(), metric.compute())


def test_a_state_of_another_number_of_heads_is_refused() -> None:
    metric, other = AttentionMaxLogit(HEADS), AttentionMaxLogit(HEADS + 1)
    metric.persistent(True)
    with pytest.raises(ValueError, match=r"'maxima_of_max_logit' was saved with shape \(1, 3\), and this metric has"):
        other.load_state_dict(metric.state_dict())


def test_sums_are_not_held_in_half_precision() -> None:
    with pytest.raises(ValueError, match=r"`dst_type` must be torch.float64 or torch.float32, got torch.float16"):
        AttentionEntropy(HEADS).set_dtype(torch.float16)
    assert AttentionEntropy(HEADS).half().sums_of_entropy.dtype == torch.float64


@pytest.mark.parametrize(
    "convert", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("cpu", torch.float16)]
)
def test_a_model_that_is_converted_leaves_sums_as_they_are(convert: Callable[[nn.Module], nn.Module]) -> None:
    metric = AttentionEntropy(2)
    weights = torch.rand(300, 2, 4, 4).softmax(-1)
    for part in (weights[:299], weights[299:]):
        convert(nn.ModuleList([metric, nn.Linear(2, 2)]))
        metric.update(part)
    assert metric.sums_of_entropy.dtype == torch.float64
    close(metric.compute(), attention_entropy(weights))
    metric.reset()
    assert metric.sums_of_entropy.dtype == torch.float64


def test_it_shows_what_it_was_made_with() -> None:
    assert repr(AttentionEntropy(HEADS)) == "AttentionEntropy(num_heads=3, over_heads='none')"
    rate = AttentionSinkRate(2, over_heads="max", threshold=0.1)
    assert repr(rate) == "AttentionSinkRate(num_heads=2, over_heads='max', threshold=0.1)"
    assert repr(metrics.TokenSimilarity()) == "TokenSimilarity()"
    several = "AttentionStatistics(num_heads=2, over_heads='none', statistics=['entropy', 'max_logit'])"
    assert repr(AttentionStatistics(2, ["entropy", "max_logit"])) == several
    assert repr(metrics.RolloutFirstTokenMass(2)) == "RolloutFirstTokenMass(num_layers=2, residual=False)"
    assert repr(metrics.PermutationResponse(2)) == "PermutationResponse(num_heads=2)"


def test_names_of_states_are_short_enough_for_checkpoints() -> None:
    names = [*AttentionStatistics(2, "all").metric_state, *AttentionStatistics(2).metric_state]
    assert max(map(len, names)) < 100 and len({*names}) == 4


@pytest.mark.parametrize("heads", [0, -1, 2.0, True])
def test_a_number_of_heads_that_is_none_is_refused(heads: Any) -> None:
    with pytest.raises(ValueError, match="`num_heads` must be a positive integer, got"):
        AttentionEntropy(num_heads=heads)


def test_another_number_of_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="`num_heads` = 2 heads, got attention of 3"):
        AttentionEntropy(num_heads=2).update(**a_batch(STATISTICS["entropy"]))


def test_a_way_of_joining_heads_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="`over_heads` must be one of"):
        AttentionEntropy(2, over_heads="sum")


def test_unknown_names_and_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="Did you mean 'entropy'"):
        AttentionStatistics(2, statistics="entropi")
    with pytest.raises(ValueError, match="must name statistics of heads"):
        AttentionStatistics(2, statistics="token_similarity")
    with pytest.raises(ValueError, match=r"must name statistics of heads, got \['token_similarity'\]"):
        AttentionStatistics(2, statistics=["entropy", "token_similarity"])
    with pytest.raises(ValueError, match="Unexpected keyword arguments: `threshhold`"):
        AttentionSinkRate(2, threshhold=0.1)
    with pytest.raises(ValueError, match="`threshold` must be of type float, got 'high'"):
        AttentionSinkRate(2, threshold="high")
    with pytest.raises(AttributeError, match="no attribute 'AttentionEntropi'"):
        _ = metrics.AttentionEntropi  # type: ignore[attr-defined]


# Several processes.

#: The sequences of each rank, for each number of ranks.
PARTS = {2: [slice(3), slice(3, 4)], 4: [slice(2), slice(2, 3), slice(0), slice(3, 4)]}
sizes = pytest.mark.parametrize("size", PARTS)


def my_part() -> slice:
    return PARTS[dist.get_world_size()][dist.get_rank()]


def a_part_of_a_batch_on_each() -> dict[str, list[Tensor]]:
    """What torchmetrics' own synchronisation makes of it, asked twice."""
    found = {}
    for name, statistic in STATISTICS.items():
        metric = new(statistic)
        metric.update(**a_batch(statistic, my_part()))
        found[name] = [metric.compute(), metric.compute()]
    return found


def many_statistics_at_once() -> dict[str, Tensor]:
    metric = AttentionStatistics(num_heads=HEADS, statistics=OF_CAUSAL_HEADS)
    metric.update(**a_batch(STATISTICS["entropy"], my_part()))
    return metric.compute()


def a_rank_that_saw_nothing() -> dict[str, Tensor]:
    found = {}
    for name in ("entropy", "max_logit", "token_similarity"):
        metric = new(STATISTICS[name])
        if dist.get_rank() == 0:
            metric.update(**a_batch(STATISTICS[name]))
        found[name] = metric.compute()
    return found


def expected_of_ranks(statistic: type[Statistic], parts: list[slice]) -> Tensor:
    """The value of the whole batch; where sequences are compared, those of one rank, joined by their sums."""
    if not statistic.compares_sequences:
        return function_of(statistic)(**a_batch(statistic))
    metric = new(statistic)
    for part in parts:
        metric.update(**a_batch(statistic, part))
    value: Tensor = metric.compute()
    return value


@sizes
def test_ranks_have_the_value_of_one_process(ranks: RankPool, size: int) -> None:
    for rank in ranks(a_part_of_a_batch_on_each, ranks=size):
        for name, statistic in STATISTICS.items():
            for computed in rank[name]:
                close(computed, expected_of_ranks(statistic, PARTS[size]))


@sizes
def test_many_statistics_have_the_values_of_one_process(ranks: RankPool, size: int) -> None:
    alone = AttentionStatistics(num_heads=HEADS, statistics=OF_CAUSAL_HEADS)
    for part in PARTS[size]:
        alone.update(**a_batch(STATISTICS["entropy"], part))
    for rank in ranks(many_statistics_at_once, ranks=size):
        for name, expected in alone.compute().items():
            close(rank[name], expected)


@sizes
def test_a_rank_that_saw_nothing_adds_nothing(ranks: RankPool, size: int) -> None:
    for rank in ranks(a_rank_that_saw_nothing, ranks=size):
        for name, found in rank.items():
            close(found, function_of(STATISTICS[name])(**a_batch(STATISTICS[name])))


@sizes
def test_what_is_written_has_the_value_of_one_process_too(ranks: RankPool, size: int) -> None:
    for rank in ranks(written_on_each, PARTS[size], ranks=size):
        for name, written in WRITTEN.items():
            for computed in rank[name]:
                close(computed, written.function(**written.batch()))
