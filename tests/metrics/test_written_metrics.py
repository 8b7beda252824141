"""The metrics of several layers and of two runs: the value of their function, over batches, ranks and copies."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import matplotlib
import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torchmetrics import Metric, MetricCollection

from lightning_attn import AttentionCall
from lightning_attn.capture import Visibility
from lightning_attn.functional import permutation_response, rollout_first_token_mass
from lightning_attn.metrics import PermutationResponse, RolloutFirstTokenMass

matplotlib.use("Agg")

HEADS, LAYERS, TOKENS = 3, 4, 12
REAL = torch.arange(TOKENS) < torch.tensor([12, 9, 5, 11])[:, None]
CAUSAL = torch.ones(TOKENS, TOKENS).tril().bool()


def weights(count: int, mask: Tensor) -> Tensor:
    """Of some runs or layers, (count, 4, HEADS, TOKENS, TOKENS)."""
    random = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(count, 4, HEADS, TOKENS, TOKENS, generator=random)
    return logits.masked_fill(~mask, -torch.inf).softmax(-1)


def several_layers(sequences: slice = slice(None)) -> dict[str, Any]:
    mask = REAL[:, None, None] & CAUSAL
    return {"layers": list(weights(LAYERS, mask)[:, sequences]), "mask": mask[sequences]}


def two_runs(sequences: slice = slice(None)) -> dict[str, Any]:
    mask = REAL[:, None, None]
    before, after = weights(2, mask)[:, sequences]
    permutation = torch.arange(TOKENS)
    permutation[1:5] = torch.tensor([3, 4, 1, 2])
    return {
        "weights": before,
        "weights_of_permuted": after,
        "permutation": permutation,
        "mask": mask[sequences],
    }


class Written(NamedTuple):
    new: Callable[..., Any]
    function: Callable[..., Tensor]
    batch: Callable[..., dict[str, Any]]


def mass_with_residual(**batch: Any) -> Tensor:
    return rollout_first_token_mass(**batch, residual=True)


def metric_with_residual(**arguments: Any) -> RolloutFirstTokenMass:
    return RolloutFirstTokenMass(LAYERS, residual=True, **arguments)


def metric_without(**arguments: Any) -> RolloutFirstTokenMass:
    return RolloutFirstTokenMass(LAYERS, **arguments)


def metric_of_two_runs(**arguments: Any) -> PermutationResponse:
    return PermutationResponse(HEADS, **arguments)


WRITTEN = {
    "rollout": Written(metric_without, rollout_first_token_mass, several_layers),
    "rollout with residual": Written(metric_with_residual, mass_with_residual, several_layers),
    "permutation": Written(metric_of_two_runs, permutation_response, two_runs),
}
each = pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)


def written_on_each(parts: list[slice]) -> dict[str, list[Tensor]]:
    """What synchronisation makes of these metrics on several ranks, asked twice."""
    found = {}
    for name, written in WRITTEN.items():
        metric = written.new()
        metric.update(**written.batch(parts[dist.get_rank()]))
        found[name] = [metric.compute(), metric.compute()]
    return found


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@each
def test_a_metric_has_the_value_of_its_function(written: Written) -> None:
    metric, expected = written.new(), written.function(**written.batch())
    assert not expected.isnan().any() and len(expected.unique()) == len(expected)
    close(metric(**written.batch()), expected)
    close(metric.compute(), expected)


@each
def test_batches_add_up_to_the_whole(written: Written) -> None:
    metric = written.new()
    for part in (slice(3), slice(3, 4)):
        close(metric(**written.batch(part)), written.function(**written.batch(part)))
    close(metric.compute(), written.function(**written.batch()))


@each
@pytest.mark.parametrize("copy", [pickle.dumps, deepcopy, Metric.clone], ids=["pickle", "deepcopy", "clone"])
def test_copies_go_on_where_the_metric_was(written: Written, copy: Any) -> None:
    metric = written.new()
    metric.update(**written.batch(slice(2)))
    copied = copy(metric)
    copied = pickle.loads(copied) if isinstance(copied, bytes) else copied
    assert type(copied) is type(metric)
    copied.update(**written.batch(slice(2, 4)))
    close(copied.compute(), written.function(**written.batch()))
    close(metric.compute(), written.function(**written.batch(slice(2))))


@each
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_reset_forgets_everything(written: Written) -> None:
    metric = written.new()
    metric.update(**written.batch())
    metric.reset()
    assert metric.compute().isnan().all()
    metric.update(**written.batch(slice(2)))
    close(metric.compute(), written.function(**written.batch(slice(2))))


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_full(written: Written, dtype: torch.dtype) -> None:
    def taken_to(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list):
            return [one.to(dtype) for one in value]
        return value.to(dtype) if value.is_floating_point() else value

    batch = {name: taken_to(value, dtype) for name, value in written.batch().items()}
    in_full = {name: taken_to(value, torch.float32) for name, value in batch.items()}
    metric = written.new().half()
    metric.update(**batch)
    assert metric.compute().dtype == torch.float32
    close(metric.compute(), written.function(**in_full))


@each
def test_it_moves_to_another_device(written: Written) -> None:
    """The meta device, for want of another one: there a metric has shapes and types alone."""
    metric = written.new()
    metric.update(**written.batch())
    moved = metric.to("meta")
    assert {state.device.type for state in moved.metric_state.values()} == {"meta"}
    assert {default.device.type for default in moved._defaults.values()} == {"meta"}


@each
def test_sums_are_single_where_there_is_no_double_precision(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_attn.metrics.base._SINGLE", ("meta",))
    assert {state.dtype for state in written.new().metric_state.values()} == {torch.float64}
    assert {state.dtype for state in written.new().to("meta").metric_state.values()} == {torch.float32}
    metric = written.new().set_dtype(torch.float32)
    metric.update(**written.batch())
    assert {state.dtype for state in metric.metric_state.values()} == {torch.float32}
    close(metric.compute(), written.function(**written.batch()))


@each
def test_its_states_have_a_fixed_shape_and_its_flags_are_set(written: Written) -> None:
    metric = written.new()
    before = {name: state.shape for name, state in metric.metric_state.items()}
    metric.update(**written.batch())
    assert {name: state.shape for name, state in metric.metric_state.items()} == before
    assert (metric.is_differentiable, metric.higher_is_better, metric.full_state_update) == (False, None, False)


@each
def test_it_is_plotted(written: Written) -> None:
    metric = written.new()
    values = [metric(**written.batch(slice(part, part + 2))) for part in (0, 2)]
    kind = "Head" if isinstance(metric, PermutationResponse) else "Layer"
    for given in (None, values):
        figure, axis = metric.plot(given)
        assert axis.get_ylabel() == type(metric).__name__
        assert f"{kind} 0" in [text.get_text() for text in axis.get_legend().get_texts()]
        matplotlib.pyplot.close(figure)


def test_bounds_of_plots_are_those_of_values() -> None:
    """The response has none: noise exceeds 0 and 1."""
    assert (RolloutFirstTokenMass.plot_lower_bound, RolloutFirstTokenMass.plot_upper_bound) == (0, 1)
    assert PermutationResponse.plot_lower_bound is PermutationResponse.plot_upper_bound is None


def test_metrics_of_a_collection_stay_apart_though_they_begin_alike() -> None:
    """A collection takes metrics for one whose states are equal after the first batch."""
    collection = MetricCollection(
        {"without": RolloutFirstTokenMass(LAYERS), "with": RolloutFirstTokenMass(LAYERS, residual=True)}
    )
    collection.update([torch.full((1, 1, TOKENS, TOKENS), math.nan)] * LAYERS)  # adds nothing to either
    collection.update(**several_layers())
    found = collection.compute()
    close(found["without"], rollout_first_token_mass(**several_layers()))
    close(found["with"], mass_with_residual(**several_layers()))
    assert float((found["with"] - found["without"]).abs().min()) > 0.01


def test_calls_are_taken_as_layers() -> None:
    calls = [
        AttentionCall("", query, key, None, 0.5, Visibility(0), True)
        for query, key in torch.randn(LAYERS, 2, 2, HEADS, TOKENS, 4)
    ]
    metric = RolloutFirstTokenMass(LAYERS)
    metric.update(calls)
    close(metric.compute(), rollout_first_token_mass([call.weights() for call in calls]))


def test_a_sequence_without_a_value_does_not_count() -> None:
    batch = several_layers()
    spoilt = [torch.where(torch.arange(4)[:, None, None, None] == 1, math.nan, layer) for layer in batch["layers"]]
    metric = RolloutFirstTokenMass(LAYERS)
    metric.update(spoilt, batch["mask"])
    kept = [0, 2, 3]
    expected = rollout_first_token_mass([layer[kept] for layer in batch["layers"]], mask=batch["mask"][kept])
    close(metric.compute(), expected)


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
@pytest.mark.parametrize(
    ("metric", "name"), [(RolloutFirstTokenMass, "num_layers"), (PermutationResponse, "num_heads")]
)
def test_a_number_that_is_none_is_refused(metric: Any, name: str, count: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be a positive integer, got {count!r}"):
        metric(count)


def test_other_arguments_that_fit_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="`residual` must be True or False, got 1"):
        RolloutFirstTokenMass(2, residual=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`layers` must be `num_layers` = 3 in number, got 4"):
        RolloutFirstTokenMass(3).update(**several_layers())
    with pytest.raises(ValueError, match="`num_heads` = 2 heads, got attention of 3"):
        PermutationResponse(2).update(**two_runs())
