"""Every way of calling `F.scaled_dot_product_attention`: the weights a call is said to have are the ones it has.

The weights are compared with dense float64 attention written from the formula, the output with the one torch computed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from lightning_attn import AttentionCall, AttentionObserver, record
from lightning_attn.capture.isolation import isolated
from lightning_attn.capture.reader import Sampling
from lightning_attn.capture.refusals import UnreadableError
from lightning_attn.capture.scaled_dot_product import read

INF = math.inf
N, M = 5, 7


class Attention(nn.Module):
    """A model that is one call of the function."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return functional.scaled_dot_product_attention(*args, **kwargs)


def run(*args: object, **kwargs: object) -> tuple[Tensor, AttentionCall]:
    """What the model gave, and the one call that was recorded."""
    model = Attention()
    with record(model) as recording:
        output = model(*args, **kwargs)
    (call,) = recording.calls
    return output, call


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def random_mask(*shape: int) -> Tensor:
    """Boolean; each query sees a key."""
    mask = torch.rand(shape) < 0.6
    return mask | (torch.arange(shape[-1]) == shape[-1] // 2)


def dense_weights(
    query: Tensor, key: Tensor, mask: Tensor | None = None, scale: float | None = None, is_causal: bool = False
) -> Tensor:
    """softmax(scale * Q K^T + bias) over the visible keys in float64, zero where none is."""
    query, key = query.double(), key.double()
    if key.dim() > 2 and 1 < key.shape[-3] < query.shape[-3]:  # grouped heads: neighbours share a key head
        key = key[..., torch.arange(query.shape[-3]) // (query.shape[-3] // key.shape[-3]), :, :]
    logits = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    visible = torch.ones_like(logits, dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        logits = logits + mask.double()
        visible = visible & (mask > -1e4)
    if is_causal:
        visible = visible & (torch.arange(key.shape[-2]) <= torch.arange(query.shape[-2])[:, None])
    exponentials = torch.where(visible, logits, -INF).exp()  # small logits: no maximum to be taken off
    return exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)


def assert_same_weights(call: AttentionCall, expected: Tensor) -> None:
    """The expected weights may have any leading dimensions."""
    assert call.weights().dtype == torch.float32
    assert_close(call.weights().double(), expected.reshape(call.weights().shape), rtol=1e-5, atol=1e-6)


def assert_same_output(call: AttentionCall, output: Tensor, atol: float = 1e-5) -> None:
    """Where a query sees a key; torch has no meaning for the other rows, and kernels differ in them."""
    seen = call.weights().sum(-1) > 0
    assert_close(call.output()[seen].double(), output.reshape(call.output().shape)[seen].double(), rtol=0, atol=atol)


# Masks


def boolean_masks() -> dict[str, Tensor]:
    return {
        "queries and keys": random_mask(N, M),
        "all keys the same": random_mask(1, M),
        "all or nothing for a query": random_mask(N, 1),
        "one value": torch.ones(1, 1, dtype=torch.bool),
        "heads": random_mask(3, N, M),
        "one for all heads": random_mask(1, N, M),
        "padding": random_mask(2, 1, 1, M),
        "sequences": random_mask(2, 1, N, M),
        "sequences and heads": random_mask(2, 3, N, M),
        "a query without a key": random_mask(N, M) & (torch.arange(N) != 2)[:, None],
        "a sequence without a key": random_mask(2, 1, 1, M) & torch.tensor([True, False])[:, None, None, None],
    }


@pytest.mark.parametrize("name", boolean_masks())
@pytest.mark.parametrize("additive", [None, -INF, torch.finfo(torch.float32).min, -65504.0, -1e4])
def test_masks_and_penalties_that_hide(name: str, additive: float | None) -> None:
    mask = visible = boolean_masks()[name]
    if additive is not None:
        mask = torch.where(mask, 0.0, additive)
    query, key, value = random(2, 3, N, 8), random(2, 3, M, 8), random(2, 3, M, 6)
    output, call = run(query, key, value, mask)
    assert_same_weights(call, dense_weights(query, key, visible))
    assert_same_output(call, output)


def biases() -> dict[str, Tensor]:
    distance = -(torch.arange(N)[:, None] - torch.arange(M)).abs().float()
    return {
        "ALiBi": distance * torch.tensor([0.5, 0.25, 0.0625])[:, None, None],
        "ALiBi with causality": (distance * torch.tensor([0.5, 0.25, 0.0625])[:, None, None]).masked_fill(
            torch.ones(N, M).triu(1).bool(), -INF
        ),
        "learned positions": nn.Parameter(random(1, 3, N, M)),
        "of each sequence": random(2, 1, N, M),
        "Swin's -100": torch.where(random_mask(2, 1, N, M), 0.0, -100.0),
        "of keys": random(1, M),
        "of queries": random(N, 1),
    }


@pytest.mark.parametrize("name", biases())
def test_biases_are_part_of_the_logits(name: str) -> None:
    bias = biases()[name]
    query, key, value = random(2, 3, N, 8), random(2, 3, M, 8), random(2, 3, M, 8)
    output, call = run(query, key, value, bias)
    assert_same_weights(call, dense_weights(query, key, bias))
    assert_same_output(call, output)


@pytest.mark.parametrize(("penalty", "is_visible"), [(-9999.0, True), (-1e4, False), (-10001.0, False)])
def test_a_penalty_hides_from_minus_ten_thousand_on(penalty: float, is_visible: bool) -> None:
    _, call = run(random(1, 1, 1, 4), random(1, 1, 2, 4), random(1, 1, 2, 4), torch.tensor([[0.0, penalty]]))
    logits, visible = call.logits()
    assert visible.flatten().tolist() == [True, is_visible]
    if is_visible:
        assert logits.flatten()[1] == pytest.approx(penalty, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("penalty", [-1e4, -3e4, "finfo.min", -INF])
def test_a_hiding_penalty_hides_in_every_precision(dtype: torch.dtype, penalty: float | str) -> None:
    """In bfloat16 -1e4 is -9984, the nearest there is."""
    if penalty == "finfo.min":
        penalty = torch.finfo(dtype).min
    visible = random_mask(2, 1, 1, M)
    mask = torch.zeros(2, 1, 1, M, dtype=dtype).masked_fill(~visible, penalty)
    query, key, value = (random(2, 3, n, 8, dtype=dtype) for n in (N, M, M))
    _, call = run(query, key, value, mask)
    assert torch.equal(call.logits()[1], visible.expand(2, 3, N, M))
    assert_same_weights(call, dense_weights(query, key, visible))


def test_a_query_that_has_nothing_but_a_large_penalty_still_has_weights() -> None:
    query, key, value = random(1, 2, 3, 4), random(1, 2, 3, 4), random(1, 2, 3, 4)
    output, call = run(query, key, value, torch.full((3, 3), -9999.0))
    assert_close(call.weights().sum(-1), torch.ones(1, 2, 3))
    assert_same_output(call, output, atol=2e-3)  # float32 has steps of 1e-3 at 9999, in torch's sum as in ours


def test_masks_may_have_strides_of_zero() -> None:
    mask = random_mask(2, 1, 1, M).expand(2, 3, N, M)
    query, key = random(2, 3, N, 8), random(2, 3, M, 8)
    _, call = run(query, key, random(2, 3, M, 8), mask)
    assert_same_weights(call, dense_weights(query, key, mask))


# Causality


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1), (1, 1)])
@pytest.mark.parametrize("gqa", [False, True])
def test_is_causal_starts_at_the_first_query_and_key(queries: int, keys: int, gqa: bool) -> None:
    key_heads = 2 if gqa else 4
    query, key, value = random(2, 4, queries, 8), random(2, key_heads, keys, 8), random(2, key_heads, keys, 8)
    output, call = run(query, key, value, is_causal=True, enable_gqa=gqa)
    assert_same_weights(call, dense_weights(query, key, is_causal=True))
    assert_same_output(call, output)


@pytest.mark.parametrize("make_mask", [random_mask, random], ids=["boolean", "additive"])
@pytest.mark.parametrize("shape", [(N, N), (2, 1, 1, N), (3, N, N)], ids=str)
def test_is_causal_together_with_a_mask(make_mask: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    query, key, value, mask = random(2, 3, N, 8), random(2, 3, N, 8), random(2, 3, N, 8), make_mask(*shape)
    try:
        output, call = run(query, key, value, mask, is_causal=True)
    except RuntimeError:
        pytest.skip("this torch refuses it")
    assert_same_weights(call, dense_weights(query, key, mask, is_causal=True))
    assert_same_output(call, output)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize(("bias", "is_lower_right"), [(causal_upper_left, False), (causal_lower_right, True)])
def test_causal_biases(bias: object, is_lower_right: bool, queries: int, keys: int) -> None:
    query, key, value = random(2, 3, queries, 8), random(2, 3, keys, 8), random(2, 3, keys, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: NaNs for queries that see no key
        output, call = run(query, key, value, bias(queries, keys))
    surplus = keys - queries if is_lower_right else 0
    visible = torch.arange(keys) <= torch.arange(queries)[:, None] + surplus
    assert_same_weights(call, dense_weights(query, key, visible))
    assert_same_output(call, output)


def test_a_square_causal_bias_for_another_shape_starts_at_the_first_key() -> None:
    """torch passes a square one on as `is_causal`, whatever the shape of the call."""
    query, key, value = random(1, 2, 4, 8), random(1, 2, 8, 8), random(1, 2, 8, 8)
    output, call = run(query, key, value, causal_lower_right(8, 8))
    assert_same_weights(call, dense_weights(query, key, is_causal=True))
    assert_same_output(call, output)


# Heads, sequences and dimensions


@pytest.mark.parametrize(("heads", "key_heads", "value_heads"), [(4, 4, 4), (4, 2, 2), (6, 2, 2), (4, 1, 1), (8, 2, 4)])
def test_enable_gqa(heads: int, key_heads: int, value_heads: int) -> None:
    query, key, value = random(2, heads, N, 8), random(2, key_heads, M, 8), random(2, value_heads, M, 8)
    output, call = run(query, key, value, enable_gqa=True)
    assert call.key.shape[1] == key_heads  # not repeated
    assert_same_weights(call, dense_weights(query, key))
    assert_same_output(call, output)


def test_enable_gqa_without_a_batch_dimension() -> None:
    """In three dimensions the first are heads then: torch counts them at -3."""
    query, key, value = random(4, N, 8), random(2, M, 8), random(2, M, 8)
    output, call = run(query, key, value, enable_gqa=True)
    assert_same_weights(call, dense_weights(query, key))
    assert_same_output(call, output)


@pytest.mark.parametrize(
    ("leading", "expected"),
    [((), (1, 1)), ((4,), (4, 1)), ((2, 3), (2, 3)), ((2, 3, 4), (6, 4)), ((2, 1, 3, 2), (6, 2)), ((1, 1, 1), (1, 1))],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_two_to_six_dimensions(leading: tuple[int, ...], expected: tuple[int, int], masked: bool) -> None:
    query, key, value = random(*leading, N, 8), random(*leading, M, 8), random(*leading, M, 6)
    mask = random_mask(*leading, N, M) if masked else None
    output, call = run(query, key, value, mask)
    assert (call.sequences, call.heads, call.queries, call.keys) == (*expected, N, M)
    assert_same_weights(call, dense_weights(query, key, mask))
    assert_same_output(call, output)


@pytest.mark.parametrize(
    ("query_leading", "key_leading", "value_leading"),
    [
        ((2, 3), (1, 3), (1, 3)),
        ((1, 3), (2, 3), (2, 3)),
        ((2, 3), (2, 1), (2, 1)),
        ((2, 1), (2, 3), (2, 3)),
        ((2, 1), (1, 3), (1, 3)),
        ((2, 3), (2, 3), (1, 3)),
        ((2, 3), (2, 3), (2, 1)),
        ((2, 3), (2, 3), (1, 1)),
        ((2, 3), (3,), (3,)),
        ((3,), (2, 3), (2, 3)),
        ((4, 2, 3), (1, 2, 3), (4, 1, 3)),
        ((4, 2, 3), (2, 3), (2, 3)),
    ],
    ids=str,
)
def test_broadcast_sequences_and_heads(
    query_leading: tuple[int, ...], key_leading: tuple[int, ...], value_leading: tuple[int, ...]
) -> None:
    query, key, value = random(*query_leading, N, 8), random(*key_leading, M, 8), random(*value_leading, M, 6)
    output, call = run(query, key, value)
    assert_same_weights(call, dense_weights(query, key))
    assert_same_output(call, output)


@pytest.mark.parametrize(
    ("leading", "value_leading"),
    [((1, 3), (2, 3)), ((2, 1), (2, 3)), ((1, 1), (2, 3)), ((2, 3), (4, 2, 3)), ((1,), (2,)), ((), (2,))],
    ids=str,
)
def test_one_matrix_for_several_values(leading: tuple[int, ...], value_leading: tuple[int, ...]) -> None:
    """Rare, but torch computes it."""
    query, key, value = random(*leading, N, 8), random(*leading, M, 8), random(*value_leading, M, 6)
    output, call = run(query, key, value)
    assert_close(call.weights().sum(-1), torch.ones(call.weights().shape[:3]))
    assert_same_output(call, output)


@pytest.mark.parametrize("masked", [False, True])
def test_max_sequences_takes_the_first_of_everything(masked: bool) -> None:
    model, query, key, value = Attention(), random(4, 3, N, 8), random(1, 3, M, 8), random(4, 3, M, 6)
    mask = random_mask(4, 1, N, M) if masked else None
    with record(model, max_sequences=2) as recording:
        output = model(query, key, value, mask)
    (call,) = recording.calls
    assert_same_weights(call, dense_weights(query, key, mask)[:2])
    assert_same_output(call, output[:2])


# Other arguments


@pytest.mark.parametrize("scale", [None, 1.0, 0.05, 0.0, -0.5, 2])
def test_scale(scale: float | None) -> None:
    query, key, value = random(2, 3, N, 8), random(2, 3, M, 8), random(2, 3, M, 8)
    output, call = run(query, key, value, scale=scale)
    assert_same_weights(call, dense_weights(query, key, scale=scale))
    assert_same_output(call, output)


def test_weights_are_before_dropout() -> None:
    query, key, value = random(2, 3, N, 8), random(2, 3, M, 8), random(2, 3, M, 8)
    output, call = run(query, key, value, dropout_p=0.5)
    without_dropout = functional.scaled_dot_product_attention(query, key, value)
    assert not torch.allclose(output, without_dropout)
    assert_same_weights(call, dense_weights(query, key))
    assert_same_output(call, without_dropout)


@pytest.mark.parametrize("positional", range(10))
def test_arguments_by_position_and_by_name(positional: int) -> None:
    query, key, value = random(2, 4, N, 8), random(2, 2, N, 8), random(2, 2, N, 8)
    everything = {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": True,
        # torch takes these by name only.
        "scale": 0.7,
        "enable_gqa": True,
    }
    names = list(everything)[: min(positional, 6)]
    output, call = run(
        *(everything[name] for name in names),
        **{name: value for name, value in everything.items() if name not in names},
    )
    assert_same_weights(call, dense_weights(query, key, scale=0.7, is_causal=True))
    assert_same_output(call, output)


def test_function_imported_by_name() -> None:
    class Named(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return scaled_dot_product_attention(tokens, tokens, tokens)

    tokens = random(2, 3, N, 8)
    with record(model := Named()) as recording:
        output = model(tokens)
    assert_same_output(recording.calls[0], output)


@pytest.mark.parametrize(
    ("dtype", "atol"),
    [(torch.float32, 1e-5), (torch.float64, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
    ids=str,
)
@pytest.mark.parametrize("mask", ["none", "boolean", "bias", "finfo.min"])
def test_dtypes(dtype: torch.dtype, atol: float, mask: str) -> None:
    """Weights are as exact in half precision: they are computed in float32 of what the model passed."""
    query, key, value = (random(2, 3, n, 8, dtype=dtype) for n in (N, M, M))
    given = {
        "none": None,
        "boolean": random_mask(N, M),
        "bias": random(3, N, M, dtype=dtype),
        "finfo.min": torch.zeros(2, 1, N, M, dtype=dtype).masked_fill(~random_mask(2, 1, N, M), torch.finfo(dtype).min),
    }[mask]
    output, call = run(query, key, value, given)
    assert_same_weights(call, dense_weights(query, key, given))
    assert_close(call.output().double(), dense_weights(query, key, given) @ value.double(), rtol=1e-5, atol=1e-5)
    assert_same_output(call, output, atol=atol)


def test_non_contiguous_inputs() -> None:
    query, key, value = random(3, 2, N, 3, 8).transpose(2, 3).unbind(0)
    output, call = run(query, key, value)
    assert_same_weights(call, dense_weights(query, key))
    assert_same_output(call, output)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 4), (2, 0, 4), (1, 1, 1)])
def test_nothing_and_one_token(batch: int, queries: int, keys: int) -> None:
    output, call = run(random(batch, 2, queries, 8), random(batch, 2, keys, 8), random(batch, 2, keys, 8))
    assert call.weights().shape == (batch, 2, queries, keys)
    assert_same_output(call, output)


@pytest.mark.parametrize(("queries", "keys", "expected"), [(5, 5, True), (5, 6, False)])
def test_as_many_queries_as_keys_are_taken_for_self_attention(queries: int, keys: int, expected: bool) -> None:
    _, call = run(random(1, 2, queries, 8), random(1, 2, keys, 8), random(1, 2, keys, 8))
    assert call.self_attention == call.is_square == expected


def test_a_mask_that_torch_refuses_is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        run(random(1, 2, N, 8), random(1, 2, M, 8), random(1, 2, M, 8), random_mask(3, 1, N, M))


# Nested tensors: what is seen of each sequence is what a call of it alone would be.

LENGTHS = (3, 5, 1, 4)
OTHER_LENGTHS = (2, 4, 6, 5)
nested_tensors = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def nested(lengths: tuple[int, ...], heads: int, width: int, layout: torch.layout) -> Tensor:
    """(B, H, ragged, D)."""
    tokens = torch.nested.nested_tensor([random(length, heads * width) for length in lengths], layout=layout)
    heads_first = tokens.view(len(lengths), -1, heads, width).transpose(1, 2)
    return heads_first.contiguous() if layout == torch.strided else heads_first


def assert_each_sequence_is_seen(
    call: AttentionCall, query: Tensor, key: Tensor, is_causal: bool = False, sequences: int = len(LENGTHS)
) -> None:
    visible_BHNM = call.logits()[1]
    assert call.visibility.padding is not None
    for number, (of_query, of_key) in enumerate(zip(query.unbind(), key.unbind(), strict=True)):
        if number == sequences:
            break
        queries, keys = of_query.shape[-2], of_key.shape[-2]
        expected = dense_weights(of_query, of_key, is_causal=is_causal)
        weights_HNM = call.weights()[number, :, :queries, :keys].double()
        assert_close(weights_HNM, expected.reshape(weights_HNM.shape), rtol=1e-5, atol=1e-6)
        assert not visible_BHNM[number, :, queries:].any()
        assert not visible_BHNM[number, :, :, keys:].any()
        assert call.visibility.padding[number].tolist() == [False] * queries + [True] * (call.queries - queries)
    assert call.sequences == sequences


@nested_tensors
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize(("key_lengths", "is_self"), [(LENGTHS, True), (OTHER_LENGTHS, False), ((5, 1, 3, 4), False)])
@pytest.mark.parametrize("max_sequences", [None, 2])
def test_nested_tensors(
    layout: torch.layout, key_lengths: tuple[int, ...], is_self: bool, max_sequences: int | None
) -> None:
    query = nested(LENGTHS, 2, 8, layout)
    key, value = nested(key_lengths, 2, 8, layout), nested(key_lengths, 2, 8, layout)
    with record(model := Attention(), max_sequences=max_sequences) as recording:
        output = model(query, key, value)
    (call,) = recording.calls
    assert call.self_attention == is_self
    assert_each_sequence_is_seen(call, query, key, sequences=max_sequences or len(LENGTHS))
    assert call.queries == max(LENGTHS[:max_sequences])  # no more than what is wanted
    for number, of_sequence in enumerate(output.unbind()[:max_sequences]):
        assert_close(call.output()[number, :, : LENGTHS[number]], of_sequence, rtol=0, atol=1e-5)


@nested_tensors
def test_nested_tensors_that_are_causal_grouped_or_have_holes() -> None:
    """torch computes these on an accelerator alone, so that the arguments are read without the call."""
    query, key = nested(LENGTHS, 4, 8, torch.jagged), nested(LENGTHS, 2, 8, torch.jagged)
    arguments = {"is_causal": True, "enable_gqa": True}
    with isolated(torch.device("cpu")):
        call = read((query, key, key), arguments, Sampling("site", with_values=True))
    assert call.key.shape[1] == 2
    assert_each_sequence_is_seen(call, query, key, is_causal=True)
    values, offsets, lengths = random(10, 2, 8), torch.tensor([0, 4, 10]), torch.tensor([3, 5])
    with_holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=lengths).transpose(1, 2)
    with isolated(torch.device("cpu")):
        call = read((with_holes, with_holes, with_holes), {}, Sampling("site"))
    assert_each_sequence_is_seen(call, with_holes, with_holes, sequences=2)


@nested_tensors
def test_nested_tensors_of_one_head() -> None:
    tokens = torch.nested.nested_tensor([random(length, 8) for length in LENGTHS])
    output, call = run(tokens, tokens, tokens)
    assert_each_sequence_is_seen(call, tokens, tokens)
    assert call.heads == 1
    assert_close(call.output()[1, 0, :5], output.unbind()[1], rtol=0, atol=1e-5)


@nested_tensors
def test_nested_tensors_of_whole_sequences_are_sequences() -> None:
    """torch hands what is inside to its dense function."""
    parts = [random(count, 2, N, 8) for count in (2, 1, 3)]
    tensor = torch.nested.nested_tensor(parts, layout=torch.jagged)
    output, call = run(tensor, tensor, tensor)
    assert (call.sequences, call.heads, call.queries) == (6, 2, N)
    assert call.visibility.padding is None
    assert_same_weights(call, dense_weights(torch.cat(parts), torch.cat(parts)))
    assert_same_output(call, output.values())


@nested_tensors
@pytest.mark.parametrize("statistic", ["entropy", "hidden_row_share", "max_weight", "marginal_gap", "sink_strength"])
@pytest.mark.parametrize("key_lengths", [LENGTHS, OTHER_LENGTHS])
def test_padding_of_nested_tensors_is_in_no_statistic(statistic: str, key_lengths: tuple[int, ...]) -> None:
    query, key = nested(LENGTHS, 2, 8, torch.jagged), nested(key_lengths, 2, 8, torch.jagged)
    observer = AttentionObserver(Attention(), statistics=statistic, strict=True)
    with observer:
        observer.model(query, key, key)
    alone: list[list[reference.Head]] = [[], []]
    for of_query, of_key in zip(query.unbind(), key.unbind(), strict=True):
        logits = (of_query.double() @ of_key.double().transpose(-1, -2) / math.sqrt(8)).numpy()
        for head in range(2):
            visible = np.ones_like(logits[head], dtype=bool)
            alone[head].append(reference.Head(logits[head], visible, key_lengths == LENGTHS, None))
    expected = reference.head_values(statistic, alone)
    assert observer.snapshot()["(root)", statistic] == pytest.approx(expected, rel=1e-4)


@nested_tensors
def test_nested_tensors_with_a_mask_or_of_other_shapes_are_refused_with_a_way_out() -> None:
    query = nested(LENGTHS, 2, 8, torch.strided)
    with pytest.raises(UnreadableError, match="a mask of their own; pad them"):
        read((query, query, query, torch.ones(5, 5)), {}, Sampling("site"))
    ragged = torch.nested.nested_tensor([random(2, 3, 8), random(4, 3, 8)])
    with pytest.raises(UnreadableError, match=r"more than the number of tokens\. Padded tensors with a mask"):
        read((ragged, ragged, ragged), {}, Sampling("site"))


# Anything


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Tensor, ...], dict[str, object], Tensor | None]:
    """Arguments of a call, and its mask as the reference takes it."""
    torch.manual_seed(draw(st.integers(0, 2**20)))
    batch, key_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys, width = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    spread = draw(st.sampled_from([0.1, 1.0, 3.0]))
    query, key, value = (
        spread * random(batch, key_heads * group, queries, width, dtype=dtype),
        spread * random(batch, key_heads, keys, width, dtype=dtype),
        random(batch, key_heads, keys, draw(st.integers(1, 9)), dtype=dtype),
    )
    kwargs: dict[str, object] = {"enable_gqa": group > 1}
    if draw(st.booleans()):
        kwargs["scale"] = draw(st.floats(0.01, 2.0))
    kind, mask = draw(st.sampled_from(["none", "causal", "boolean", "additive", "both"])), None
    if kind == "causal":
        kwargs["is_causal"] = True
    elif kind != "none":
        sizes = (batch, key_heads * group, queries, keys)
        dimensions = draw(st.integers(2, 4))
        shape = [draw(st.sampled_from([1, size])) for size in sizes[4 - dimensions :]]
        visible = torch.rand(shape) < draw(st.sampled_from([0.2, 0.7, 1.0]))
        if kind == "boolean":
            mask = visible
        else:
            hiding = draw(st.sampled_from([-INF, torch.finfo(dtype).min, -3e4]))
            bias = random(*shape, dtype=dtype) if kind == "both" else torch.zeros(shape, dtype=dtype)
            mask = bias.masked_fill(~visible, hiding)
        kwargs["attn_mask"] = mask
    return (query, key, value), kwargs, mask


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(calls())
def test_any_call(drawn: tuple[tuple[Tensor, ...], dict[str, object], Tensor | None]) -> None:
    (query, key, value), kwargs, mask = drawn
    output, call = run(query, key, value, **kwargs)
    expected = dense_weights(query, key, mask, scale=kwargs.get("scale"), is_causal=bool(kwargs.get("is_causal")))
    # Logits reach about a hundred here, where float32 leaves a relative error of 1e-5 in a weight.
    assert_close(call.weights().double(), expected, rtol=1e-4, atol=1e-6)
    assert call.weights().isfinite().all()
    assert_same_output(call, output, atol={torch.bfloat16: 6e-2, torch.float16: 8e-3}.get(query.dtype, 1e-4))
