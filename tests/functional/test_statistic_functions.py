"""A statistic as a function of weights, or of queries and keys, has the value that the float64 reference has."""

from __future__ import annotations

import doctest
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import torch
from drawn_calls import KINDS, calls, exact_every_time
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import lightning_attn.functional as functional
from lightning_attn import AttentionCall, record
from lightning_attn.functional import attention_call, attention_entropy, attention_max_logit, attention_statistics
from lightning_attn.functional.statistic_function import function_of
from lightning_attn.metrics import SimilarityContraction
from lightning_attn.statistics import RowStatistic, known_statistics, measure
from lightning_attn.statistics.description import function_name

OF_ROWS = {name: statistic for name, statistic in known_statistics().items() if issubclass(statistic, RowStatistic)}
A_CAUSAL_HEAD = torch.tensor([[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.5, 0.3, 0.2, 0], [0.7, 0.1, 0.1, 0.1]])


def arguments_of(call: AttentionCall) -> dict[str, Any]:
    """What a user would give to have this call."""
    visibility = call.visibility
    mask = visibility.mask if visibility.bias is None else visibility.bias
    return {
        "query": call.query,
        "key": call.key,
        "value": call.value,
        "mask": mask,
        "is_causal": visibility.causal_offset == 0,
        "scale": call.scale,
        "soft_cap": call.soft_cap,
        "sink_logits": call.sink_logits,
        "self_attention": call.self_attention,
    }


def dense(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The weights of a call in float64 and which keys are visible, from the reference."""
    heads = reference.heads(call)
    weights = np.array([[head.weights for head in of_head] for of_head in heads]).swapaxes(0, 1)
    visible = np.array([[head.visible for head in of_head] for of_head in heads]).swapaxes(0, 1)
    return torch.from_numpy(weights), torch.from_numpy(visible)


@pytest.mark.parametrize("kind", KINDS)
@exact_every_time
@given(data=st.data())
def test_queries_and_keys_give_what_the_streamed_statistic_gives(kind: str, data: st.DataObject) -> None:
    """That equals the reference; here it is the arguments that are read right."""
    call = data.draw(calls(KINDS[kind]))
    assume(call.visibility.causal_offset in (None, 0))
    streamed = measure(call, tuple(OF_ROWS.values()))
    found = attention_statistics(statistics="all", **arguments_of(call))
    for name, values_H in found.items():
        if OF_ROWS[name].needs_values and call.value is None:
            assert values_H.isnan().all()
        else:
            expected_H = streamed[name].or_nan.float()
            torch.testing.assert_close(values_H, expected_H, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@exact_every_time
@given(data=st.data())
def test_dense_weights_have_the_values_of_the_reference(kind: str, data: st.DataObject) -> None:
    """Weights of float64 with the mask alone, which tell of logits how far they are apart."""
    call = data.draw(calls(KINDS[kind]))
    weights_BHNM, visible_BHNM = dense(call)
    is_sharp = bool((visible_BHNM & (weights_BHNM < 1e-30) & (weights_BHNM.sum(-1, keepdim=True) > 0)).any())
    has_lost_rows = bool((visible_BHNM.any(-1) & (weights_BHNM.amax(-1) < 1e-30) & (weights_BHNM.amax(-1) > 0)).any())
    assume(not has_lost_rows)  # beside a learned sink that takes all that single precision holds
    heads = reference.heads(call)
    found = attention_statistics(
        weights_BHNM,
        visible_BHNM,
        value=call.value,
        statistics="all",
        self_attention=call.self_attention,
    )
    for name, values_H in found.items():
        statistic = OF_ROWS[name]
        if statistic.needs_logits or (statistic.needs_values and call.value is None):
            assert values_H.isnan().all(), name
            continue
        if is_sharp and name in OF_SMALL_WEIGHTS:
            continue
        tolerance = reference.TOLERANCES.get(name)
        relative = 1e-3 if statistic.is_spectral else 2e-5
        relative = relative if tolerance is None else max(relative, tolerance.relative)
        for value, expected, sequences in zip(
            values_H.tolist(), reference.head_values(name, heads), heads, strict=True
        ):
            absolute = 2e-6
            if tolerance is not None:
                of_head = tolerance.absolute
                absolute = 10 * (of_head(sequences) if callable(of_head) else of_head)
            elif name in ("spectral_gap", "consensus_rate"):
                absolute = relative  # differences of numbers near 1
            elif name in reference.SHARES:  # patterns beside what they differ from uniform ones
                absolute = relative + 1e-6 / max(reference.contrast(name, sequences), 1e-6)
            if not reference.is_undecided(name, sequences):
                assert value == pytest.approx(expected, rel=relative, abs=absolute, nan_ok=True), name


#: What depends on weights that single precision does not hold: on how far logits are apart, and on what is left without
#: the largest weights.
OF_SMALL_WEIGHTS = {
    "critical_scaling",
    "entropy_floor",
    "entropy_without_sink",
    "logit_std",
    "positional_share_without_sink",
    "selectivity",
    "sinkhorn_distance",
    "toeplitz_share",
}


def test_an_attention_call_is_taken_as_it_is() -> None:
    layer = torch.nn.MultiheadAttention(16, num_heads=4, batch_first=True)
    tokens = torch.randn(2, 9, 16)
    with record(layer) as recording:
        _, weights = layer(tokens, tokens, tokens, average_attn_weights=False)
    of_call = attention_entropy(recording.calls[0])
    torch.testing.assert_close(of_call, attention_entropy(weights), rtol=1e-5, atol=0)


def test_the_example_of_gu_with_and_without_the_self_query() -> None:
    assert functional.attention_sink_strength(A_CAUSAL_HEAD, is_causal=True).tolist() == pytest.approx([0.6])


def test_heads_are_joined_as_it_is_wanted() -> None:
    weights = torch.stack([torch.eye(8), torch.full((8, 8), 1 / 8)])[None]
    assert attention_entropy(weights).tolist() == pytest.approx([0, 1])
    for how, expected in {"mean": 0.5, "min": 0, "max": 1}.items():
        assert attention_entropy(weights, over_heads=how).item() == pytest.approx(expected)


def test_heads_without_a_value_are_in_no_mean() -> None:
    weights = torch.stack([torch.zeros(8, 8), torch.full((8, 8), 1 / 8)])[None]
    assert attention_entropy(weights).isnan().tolist() == [True, False]
    for how in ("mean", "min", "max"):
        assert attention_entropy(weights, over_heads=how).item() == pytest.approx(1)
        assert attention_entropy(weights[:, :1], over_heads=how).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_type_is_taken(dtype: torch.dtype) -> None:
    weights = torch.randn(2, 3, 12, 12).softmax(-1)
    found = attention_statistics(weights.to(dtype), statistics=["entropy", "max_weight"])
    for name, values_H in attention_statistics(weights, statistics=["entropy", "max_weight"]).items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], values_H, rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=0)


def test_nothing_is_differentiated_and_no_random_number_drawn() -> None:
    query = torch.randn(1, 2, 12, 8, requires_grad=True)
    state = torch.get_rng_state()
    found = attention_statistics(query=query, key=query, value=query, statistics="all")
    assert torch.equal(state, torch.get_rng_state())
    assert not any(values_H.requires_grad for values_H in found.values())


def test_under_autocast_nothing_is_rounded() -> None:
    query, key = torch.randn(2, 1, 2, 32, 16)
    expected = attention_entropy(query=query, key=key)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_entropy(query=query, key=key)
    assert torch.equal(found, expected)


def test_rows_of_padding_that_are_all_zero_are_absent() -> None:
    weights = torch.full((1, 1, 4, 4), 0.25)
    weights[:, :, 2:] = 0
    found = attention_statistics(weights, statistics=["entropy", "max_weight", "hidden_row_share"])
    assert found["entropy"].item() == pytest.approx(1)
    assert found["max_weight"].item() == pytest.approx(0.25)


def test_a_row_that_is_no_number_is_absent_and_counted() -> None:
    weights = torch.full((1, 1, 4, 4), 0.25)
    weights[0, 0, 3, 1] = math.nan
    found = attention_statistics(weights, statistics="all", value=torch.randn(1, 1, 4, 2))
    assert found["non_finite_share"].item() == 0.25
    assert found["entropy"].item() == pytest.approx(1)


def test_weights_are_taken_as_they_are() -> None:
    """Rows that sum to less, as beside a learned sink, or to more, as after dropout."""
    weights = torch.full((1, 2, 4, 4), 0.25) * torch.tensor([0.5, 2.0])[:, None, None]
    assert functional.attention_max_weight(weights).tolist() == pytest.approx([0.125, 0.5])
    assert attention_entropy(weights).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 2, 0, 4), (2, 2, 4, 0), (1, 1, 1, 1)])
def test_no_tokens_have_no_value_and_no_error(shape: tuple[int, ...]) -> None:
    sequences, heads, _, keys = shape
    found = attention_statistics(torch.ones(shape), value=torch.ones(sequences, heads, keys, 3), statistics="all")
    assert {tuple(values_H.shape) for values_H in found.values()} == {(heads,)}


def test_rows_that_sum_to_much_are_doubted_aloud() -> None:
    weights = torch.randn(1, 1, 6, 6).softmax(-1)
    with pytest.warns(UserWarning, match="A row of `weights` sums to 100"):
        attention_entropy(100 * weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention_entropy(2 * weights)  # as after dropout


def causal_weights() -> Tensor:
    return torch.randn(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf).softmax(-1)


def test_causal_weights_without_a_mask_are_doubted_aloud() -> None:
    with pytest.warns(UserWarning, match="say `is_causal=True`"):
        attention_entropy(causal_weights())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention_entropy(causal_weights(), is_causal=True)
        attention_entropy(causal_weights(), validate_args=False)


QUERY, WEIGHTS = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 6).softmax(-1)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, r"Give `weights`, or `query` and `key` together: got neither\."),
    "half": ({"query": QUERY}, "got only `query`"),
    "both": ({"weights": WEIGHTS, "query": QUERY}, "`query` is for attention given by `query` and `key`"),
    "integers": ({"weights": WEIGHTS.long()}, r"`weights` must be a floating tensor .*got torch.int64 of shape"),
    "a list": ({"weights": [[1.0]]}, r"`weights` must be a floating tensor .*got \[\[1.0\]\]"),
    "three dimensions": ({"weights": WEIGHTS[0]}, r"`weights\[:, None\]`"),
    "a long list": ({"weights": WEIGHTS.tolist()}, r"got \[\[\[\[.{76}…\.$"),
    "an array": ({"weights": WEIGHTS.numpy()}, r"got ndarray of float32 of shape \(2, 4, 6, 6\)\.$"),
    "sparse": ({"weights": WEIGHTS.to_sparse()}, r"got torch.float32 torch.sparse_coo of shape"),
    "nested": ({"weights": torch.nested.nested_tensor([WEIGHTS[0], WEIGHTS[1]])}, r"got torch.float32 nested\.$"),
    "no head": ({"weights": WEIGHTS[:, :0]}, r"`weights` must have a head, got shape \(2, 0, 6, 6\)"),
    "negative": ({"weights": -WEIGHTS}, "must not be negative, got -.*are these logits"),
    "mask of numbers": ({"weights": WEIGHTS, "mask": torch.zeros(6, 6)}, "`mask` must be a boolean tensor"),
    "mask of another shape": ({"weights": WEIGHTS, "mask": torch.ones(5, 6).bool()}, r"\(2, 4, 6, 6\), got shape \(5"),
    "mask the wrong way": ({"weights": WEIGHTS, "mask": torch.eye(6) == 0}, "True in `mask` means visible"),
    "wide key": ({"query": QUERY, "key": QUERY[..., :4]}, "`query` and `key` must be of shapes"),
    "heads": ({"query": QUERY, "key": QUERY[:, :3]}, "divides the 4 of `query`, got 3"),
    "scale": ({"query": QUERY, "key": QUERY, "scale": math.nan}, "`scale` must be a finite number"),
    "scale of letters": (
        {"query": QUERY, "key": QUERY, "scale": "a"},
        "`scale` must be a finite number or None, got 'a'",
    ),
    "soft cap of letters": ({"query": QUERY, "key": QUERY, "soft_cap": "a"}, "`soft_cap` must be positive or None"),
    "no head of queries": ({"query": QUERY[:, :0], "key": QUERY[:, :1]}, "`query` must have a head"),
    "scale in words": (
        {"query": QUERY, "key": QUERY, "scale": "1"},
        "`scale` must be a finite number or None, got '1'",
    ),
    "soft cap in words": (
        {"query": QUERY, "key": QUERY, "soft_cap": "1"},
        "`soft_cap` must be positive or None, got '1'",
    ),
    "soft cap": ({"query": QUERY, "key": QUERY, "soft_cap": 0.0}, "`soft_cap` must be positive"),
    "sink logits": ({"query": QUERY, "key": QUERY, "sink_logits": torch.zeros(3)}, r"shape \(4,\), got .*\(3,\)"),
    "value": ({"weights": WEIGHTS, "value": QUERY[:, :, :5]}, r"`value` must be of shape .* M = 6"),
    "causal": ({"weights": WEIGHTS, "is_causal": 1}, "`is_causal` must be True or False, got 1"),
    "self-attention in words": (
        {"weights": WEIGHTS, "self_attention": "no"},
        "`self_attention` must be True.*got 'no'",
    ),
    "not the same tokens": (
        {"query": QUERY, "key": QUERY[:, :, :5], "self_attention": True},
        "`self_attention` must be False of 6 queries and 5 keys",
    ),
    "over heads": ({"weights": WEIGHTS, "over_heads": "sum"}, r"`over_heads` must be one of \['none'.*got 'sum'"),
    "beside a call": ({"weights": attention_call(WEIGHTS), "mask": WEIGHTS > 0}, "`mask` must not be given beside"),
    "order beside a call": ({"weights": attention_call(WEIGHTS), "is_causal": True}, "`is_causal` must not be given"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_entropy(**arguments)


def test_what_weights_do_not_tell_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'max_logit' is of logits.*give `query` and `key`"):
        attention_max_logit(WEIGHTS)
    with pytest.raises(ValueError, match="'value_contraction' needs `value`, got None"):
        functional.attention_value_contraction(WEIGHTS)
    with pytest.raises(ValueError, match="'similarity_contraction' needs `leaving`, got None"):
        functional.similarity_contraction(STATES)
    with pytest.raises(ValueError, match="'similarity_contraction' needs `leaving`, got None"):
        SimilarityContraction().update(STATES)


def test_a_mask_of_ones_and_zeros_that_is_added_is_doubted_aloud() -> None:
    tokens = torch.ones(2, 1, 1, 6)
    tokens[1, ..., 4:] = 0
    with pytest.warns(UserWarning, match=r"zeros and ones alone.*give `mask.bool\(\)`"):
        attention_entropy(query=QUERY, key=QUERY, mask=tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mask in (torch.zeros(6, 6), (1 - tokens) * -1e4, tokens.bool()):
            attention_entropy(query=QUERY, key=QUERY, mask=mask)


def test_statistics_of_heads_are_not_those_of_hidden_states() -> None:
    for names in ("token_similarity", ["entropy", "token_similarity"]):
        with pytest.raises(ValueError, match=r"`statistics` must name statistics of heads, got \['token_similarity'\]"):
            functional.attention_statistics(WEIGHTS, statistics=names)
    assert "token_similarity" not in functional.attention_statistics(WEIGHTS, statistics="all")


def test_a_parameter_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="`threshold` must be finite, got nan"):
        functional.attention_sink_rate(WEIGHTS, threshold=math.nan)


@pytest.mark.parametrize("function", [functional.sink_importance, functional.key_marginal])
def test_logits_are_no_weights(function: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"`weights` must not be negative, got -.*are these logits"):
        function(WEIGHTS.log())
    with pytest.raises(ValueError, match="`weights` must not be negative"):
        functional.stationary_distribution(WEIGHTS.log())


def test_an_argument_that_no_function_has_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^attention_entropy\(\) got an unexpected keyword argument 'masc'"):
        attention_entropy(WEIGHTS, masc=None)


STATES = torch.randn(2, 6, 8)
REFUSED_STATES: dict[str, tuple[dict[str, Any], str]] = {
    "two dimensions": ({"entering": STATES[0]}, r"`entering` must be a floating tensor of shape \(B, N, L\)"),
    "integers": ({"entering": STATES.long()}, "`entering` must be a floating tensor"),
    "other tokens": ({"entering": STATES, "leaving": STATES[:, :5]}, r"`leaving` .* shape \(2, 6, E\)"),
    "mask": ({"entering": STATES, "token_mask": torch.ones(2, 5).bool()}, r"`token_mask` .* shape \(2, 6\)"),
    "mask of numbers": ({"entering": STATES, "token_mask": torch.ones(2, 6)}, "`token_mask` must be a boolean tensor"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED_STATES.values(), ids=REFUSED_STATES)
def test_bad_states_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        functional.token_similarity(**arguments)


def test_what_leaves_is_needed_where_it_is_compared() -> None:
    with pytest.raises(ValueError, match="'similarity_contraction' needs `leaving`, got None"):
        functional.similarity_contraction(STATES)


def test_padding_is_in_no_statistic_of_states() -> None:
    padded = torch.cat([STATES, torch.full((2, 3, 8), 7.0)], dim=1)
    mask = torch.arange(9) < 6
    for name, statistic in known_statistics().items():
        if statistic.per == "site":
            found = function_of(statistic)(padded, padded, mask[None])
            expected = function_of(statistic)(STATES, STATES)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True, msg=name)


# What they say of themselves.


@pytest.mark.parametrize("name", known_statistics())
def test_a_function_says_what_it_computes_and_its_example_runs(name: str) -> None:
    function: Callable[..., Any] = getattr(functional, function_name(known_statistics()[name]))
    assert function.__module__ == "lightning_attn.functional"
    assert next(iter(inspect.signature(function).parameters)) in ("weights", "entering")
    text = inspect.getdoc(function) or ""
    for part in ("Range:", "Reading:", "Args:", "Returns:", "Raises:"):
        assert part in text, part
    if known_statistics()[name].example is not None:
        _run_examples(text, function.__name__)


def _run_examples(text: str, name: str) -> None:
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert test.examples
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test)
    assert runner.failures == 0


def test_the_example_of_each_statistic_is_that_of_the_reference() -> None:
    """Uniform causal attention over 64 tokens, whose values are unit vectors."""
    uniform = torch.zeros(1, 1, 64, 8)
    call = attention_call(query=uniform, key=uniform, value=torch.eye(64)[None, None], is_causal=True)
    heads = reference.heads(call)
    for name, statistic in OF_ROWS.items():
        (expected,) = reference.head_values(name, heads)
        example = math.nan if statistic.example is None else statistic.example
        assert example == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True), name


def test_all_functions_are_listed_and_others_are_not_there() -> None:
    assert set(functional.__all__) <= set(dir(functional))
    assert "attention_entropy" in functional.__all__ and "token_similarity" in functional.__all__
    with pytest.raises(AttributeError, match="no attribute 'attention_entropi'"):
        _ = functional.attention_entropi  # type: ignore[attr-defined]


def of_lengths(logits: Tensor, *lengths: int, is_causal: bool, is_left: bool = False) -> tuple[Tensor, Tensor]:
    """Weights and mask of sequences of given lengths, of which the first is the longest, with padding on one side."""
    tokens, length = torch.arange(lengths[0]), torch.tensor(lengths)[:, None, None, None]
    mask = (tokens >= lengths[0] - length if is_left else tokens < length).expand(-1, -1, lengths[0], -1)
    mask = mask & torch.ones(lengths[0], lengths[0], dtype=torch.bool).tril() if is_causal else mask
    return torch.where(mask, logits, -torch.inf).softmax(-1).nan_to_num(), mask


on_either_side = pytest.mark.parametrize("is_left", [False, True], ids=["right", "left"])


@on_either_side
@pytest.mark.parametrize(
    ("lengths", "share"), [((16, 16), 0.953), ((16, 8), 0.932), ((16, 4), 0.853), ((256, 256), 0.989)]
)
def test_distances_explain_a_little_less_under_causality(lengths: tuple[int, ...], share: float, is_left: bool) -> None:
    """The uniform weights that a previous-token head is compared with depend on the row."""
    tokens = torch.arange(lengths[0])
    previous = torch.where(tokens[:, None] - tokens == 1, 20.0, 0.0)
    got = functional.attention_toeplitz_share(*of_lengths(previous, *lengths, is_causal=True, is_left=is_left))
    assert got.item() == pytest.approx(share, abs=0.0005)


@on_either_side
@pytest.mark.parametrize("lengths", [(16, 16), (16, 8), (16, 4), (16, 12, 9, 4)])
def test_a_window_is_a_pattern_of_distances_at_any_lengths(lengths: tuple[int, ...], is_left: bool) -> None:
    """Every row that has a choice sees its own key and the one before, so that uniform weights are one of distances."""
    tokens = torch.arange(16)
    distance = tokens[:, None] - tokens
    logits = torch.tensor([0.0, 1.5, -torch.inf])[distance.clamp(0, 2)]
    weights, mask = of_lengths(logits, *lengths, is_causal=True, is_left=is_left)
    mask = mask & (distance < 2)
    assert functional.attention_toeplitz_share(weights, mask).item() == pytest.approx(1, abs=1e-6)
    # Half as strong a pattern in the first sequence is still one of distances, but not the same.
    weights[0] = (weights[0] + mask[0] / mask[0].sum(-1, keepdim=True).clamp(min=1)) / 2
    share = functional.attention_toeplitz_share(weights, mask).item()
    others = len(lengths) - 1
    assert share == pytest.approx((2 * others * 0.5 + others * (others - 1)) / others / (others + 0.25), abs=1e-6)


@on_either_side
def test_distances_that_one_sequence_alone_has_do_not_count(is_left: bool) -> None:
    """The first five queries see their own key and the one before alike; only the long sequence has queries that look
    further."""
    tokens = torch.arange(16)
    distance = tokens[:, None] - tokens
    _, mask = of_lengths(torch.zeros(16, 16), 16, 5, is_causal=True, is_left=is_left)
    first = 16 - torch.tensor([16, 5])[:, None, None, None] if is_left else 0
    is_near = (tokens[:, None] - first < 9).expand_as(mask)
    mask = mask & torch.where(is_near, distance < 2, (distance >= 5) & (distance < 8))
    weights = mask * torch.where(is_near, torch.where(distance == 1, 0.8, 0.2), torch.rand(16, 16))
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    assert functional.attention_toeplitz_share(weights, mask).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sink_logit", [-3.0, 0.0, 6.0])
def test_what_a_learned_sink_takes_is_no_pattern_and_at_no_distance(sink_logit: float, is_causal: bool) -> None:
    names = ["positional_share", "attention_distance"]
    alike, sinks = torch.zeros(3, 2, 24, 8), torch.full((2,), sink_logit)
    uniform = attention_statistics(query=alike, key=alike, is_causal=is_causal, sink_logits=sinks, statistics=names)
    assert uniform["positional_share"].isnan().all()
    torch.testing.assert_close(uniform["attention_distance"], torch.ones(2))

    query, key = torch.randn(2, 64, 2, 24, 8)
    content = attention_statistics(query=query, key=key, is_causal=is_causal, sink_logits=sinks, statistics=names)
    assert content["positional_share"].abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_given_weights_is_no_pattern(dtype: torch.dtype) -> None:
    uniform = torch.full((3, 2, 24, 24), 1 / 24, dtype=dtype)
    assert functional.attention_positional_share(uniform).isnan().all()
    torch.testing.assert_close(functional.attention_distance(uniform), torch.ones(2))
