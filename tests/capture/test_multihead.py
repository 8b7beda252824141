"""`nn.MultiheadAttention` and the layers of `nn.Transformer`: the weights are those that the module itself returns.

What it returns with `need_weights=True, average_attn_weights=False` outside of any recording is the reference. How it
is called while it is recorded (with or without weights, in train or eval mode) must not matter.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from lightning_attn import AttentionCall, AttentionObserver, record

WIDTH, HEADS = 12, 4  # an odd number of heads would never take torch's fast path
B, N, M = 2, 5, 6


def reference_weights(module: nn.MultiheadAttention, *tokens: Tensor, **masks: object) -> Tensor:
    """(B, H, N, M) as torch gives them."""
    module = copy.deepcopy(module).eval()
    with torch.no_grad():
        _, weights = module(*tokens, need_weights=True, average_attn_weights=False, **masks)
    return weights if weights.dim() == 4 else weights[None]


def reference_output(module: nn.MultiheadAttention, *tokens: Tensor, **masks: object) -> Tensor:
    """(B, N, L) as torch gives it without dropout, with a gradient so that it does not take a fast path."""
    module = copy.deepcopy(module).eval()
    output, _ = module(*tokens, need_weights=False, **masks)
    if output.dim() == 2:
        return output[None]
    return output if module.batch_first else output.transpose(0, 1)


def projected(call: AttentionCall, module: nn.MultiheadAttention) -> Tensor:
    """What the recorded call contributes to the module's output."""
    heads_BNHD = call.output().transpose(1, 2)
    return functional.linear(
        heads_BNHD.flatten(2),
        module.out_proj.weight.float(),
        None if module.out_proj.bias is None else module.out_proj.bias.float(),
    )


def only_call(module: nn.Module, *tokens: Tensor, **arguments: object) -> AttentionCall:
    with record(module) as recording:
        module(*tokens, **arguments)
    (call,) = recording.calls
    return call


def assert_seen_as_computed(
    module: nn.MultiheadAttention,
    *tokens: Tensor,
    called_with: dict[str, object] | None = None,
    queries_without_a_key: int = 0,
    **masks: object,
) -> AttentionCall:
    """Record a call; its weights and output must be those of torch."""
    call = only_call(module, *tokens, **masks, **(called_with or {}))
    # torch gives NaN in rows without a key, or shares them out evenly; they have no meaning.
    seen = call.weights().sum(-1) > 0
    assert (~seen).sum() == HEADS * queries_without_a_key
    assert_close(call.weights()[seen], reference_weights(module, *tokens, **masks)[seen], rtol=1e-5, atol=1e-6)
    output = reference_output(module, *tokens, **masks)
    assert_close(projected(call, module)[seen.all(1)], output[seen.all(1)], rtol=1e-4, atol=1e-5)
    return call


def self_attention_tokens(batch_first: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randn(B, N, WIDTH) if batch_first else torch.randn(N, B, WIDTH)
    return tokens, tokens, tokens


def cross_attention_tokens(
    kdim: int = WIDTH, vdim: int = WIDTH, batch_first: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randn(B, N, WIDTH), torch.randn(B, M, kdim), torch.randn(B, M, vdim)
    return tokens if batch_first else tuple(each.transpose(0, 1) for each in tokens)


def boolean_mask(*shape: int) -> Tensor:
    """True hides, as in `nn.MultiheadAttention`; the key in the middle is left to each query."""
    return (torch.rand(shape) < 0.4) & (torch.arange(shape[-1]) != shape[-1] // 2)


def additive(mask: Tensor, penalty: float = -math.inf) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, penalty)


CONSTRUCTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv and zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim and vdim": {"kdim": 7, "vdim": 9},
    "kdim without bias": {"kdim": 7, "bias": False},
    "kdim and all extra keys": {"kdim": 7, "add_bias_kv": True, "add_zero_attn": True},
    "dropout": {"dropout": 0.3},
}

WAYS_TO_CALL: dict[str, dict[str, object]] = {
    "weights of each head": {"need_weights": True, "average_attn_weights": False},
    "averaged weights": {"need_weights": True, "average_attn_weights": True},
    "no weights": {"need_weights": False},
}


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("way", WAYS_TO_CALL)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_constructions(construction: str, way: str, batch_first: bool, training: bool) -> None:
    arguments = CONSTRUCTIONS[construction]
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **arguments).train(training)
    tokens = cross_attention_tokens(arguments.get("kdim", WIDTH), arguments.get("vdim", WIDTH), batch_first)
    call = assert_seen_as_computed(module, *tokens, called_with=WAYS_TO_CALL[way])
    assert (call.sequences, call.heads, call.queries) == (B, HEADS, N)
    assert not call.self_attention


def all_masks() -> dict[str, dict[str, Tensor]]:
    pairs = boolean_mask(N, N)
    each_head = boolean_mask(B * HEADS, N, N)
    padding = torch.tensor([[False] * N, [False] * 3 + [True] * (N - 3)])
    attention = {
        "": None,
        "2-D boolean": pairs,
        "3-D boolean": each_head,
        "2-D additive": additive(pairs),
        "3-D additive": additive(each_head),
        "2-D with the smallest float": additive(pairs, torch.finfo(torch.float32).min),
        "2-D bias": torch.randn(N, N),
        "3-D bias and causality": torch.randn(B * HEADS, N, N) + additive(torch.ones(N, N).triu(1).bool()),
    }
    paddings = {
        "": None,
        "padding": padding,
        "left padding": padding.flip(1),
        "additive padding": additive(padding),
        "bias of keys": torch.randn(B, N),
    }
    masks = {}
    for (name, mask), (padding_name, padding_mask) in itertools.product(attention.items(), paddings.items()):
        given = {"attn_mask": mask, "key_padding_mask": padding_mask}
        masks[f"{name} {padding_name}".strip() or "none"] = {k: v for k, v in given.items() if v is not None}
    return masks


@pytest.mark.parametrize("name", all_masks())
@pytest.mark.parametrize("extra_keys", [False, True])
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
def test_masks(name: str, extra_keys: bool) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=extra_keys, add_zero_attn=extra_keys)
    masks = all_masks()[name]
    # Causality leaves the first two queries nothing but the two keys that left padding hides.
    without_a_key = 2 if "causality left padding" in name and not extra_keys else 0
    call = assert_seen_as_computed(module, *self_attention_tokens(), queries_without_a_key=without_a_key, **masks)
    assert call.self_attention
    assert call.is_square == (not extra_keys)


@pytest.mark.parametrize("way", WAYS_TO_CALL)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("construction", ["plain", "zero_attn", "bias_kv", "bias_kv and zero_attn"])
@pytest.mark.parametrize("training", [True, False])
def test_the_hint_is_causal(way: str, padded: bool, construction: str, training: bool) -> None:
    """Without padding and weights torch follows the hint and reads no mask: nobody sees an added key then."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **CONSTRUCTIONS[construction]).train(training)
    tokens = self_attention_tokens()
    masks: dict[str, object] = {"attn_mask": torch.ones(N, N).triu(1).bool(), "is_causal": True}
    if padded:
        masks["key_padding_mask"] = torch.tensor([[False] * N, [False] * 3 + [True] * 2])
    call = only_call(module, *tokens, **masks, **WAYS_TO_CALL[way])
    expected, _ = copy.deepcopy(module).eval()(*tokens, **masks, **WAYS_TO_CALL[way])
    assert_close(projected(call, module), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS_TO_CALL)
@pytest.mark.parametrize("mask", ["none", "2-D", "3-D", "padding", "additive padding", "both"])
def test_unbatched_tokens(way: str, mask: str) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS)
    query, memory = torch.randn(N, WIDTH), torch.randn(M, WIDTH)
    padding = torch.tensor([False] * 4 + [True] * 2)
    masks = {
        "none": {},
        "2-D": {"attn_mask": boolean_mask(N, M)},
        "3-D": {"attn_mask": boolean_mask(HEADS, N, M)},
        "padding": {"key_padding_mask": padding},
        "additive padding": {"key_padding_mask": additive(padding)},
        "both": {"attn_mask": boolean_mask(HEADS, N, M), "key_padding_mask": padding},
    }[mask]
    call = assert_seen_as_computed(module, query, memory, memory, called_with=WAYS_TO_CALL[way], **masks)
    assert call.weights().shape == (1, HEADS, N, M)


def test_a_sequence_without_a_key_has_no_weights() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    padding = torch.tensor([[False] * N, [True] * N])
    call = only_call(module, *self_attention_tokens(), key_padding_mask=padding, need_weights=False)
    assert (call.weights()[1] == 0).all()
    assert_close(call.weights()[0].sum(-1), torch.ones(HEADS, N))


@pytest.mark.parametrize("masked", [False, True])
def test_max_sequences(masked: bool) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True, add_zero_attn=True)
    tokens = tuple(torch.randn(4, N, WIDTH) for _ in range(3))
    masks = {}
    if masked:
        masks = {"attn_mask": boolean_mask(4 * HEADS, N, N), "key_padding_mask": boolean_mask(4, N)}
    with record(module, max_sequences=2) as recording:
        module(*tokens, **masks)
    assert_close(recording.calls[0].weights(), reference_weights(module, *tokens, **masks)[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_modules_in_other_precisions(dtype: torch.dtype) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=dtype)
    tokens = torch.randn(B, N, WIDTH, dtype=dtype)
    call = only_call(module, tokens, tokens, tokens, need_weights=False)
    expected = reference_weights(module, tokens, tokens, tokens)
    tolerance = {torch.float64: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    assert_close(call.weights(), expected.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("way", WAYS_TO_CALL)
@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_under_autocast_the_projections_are_those_of_the_model(way: str, construction: str) -> None:
    """Weights are taken of the bfloat16 queries and keys, as the model has them, in float32."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **CONSTRUCTIONS[construction])
    arguments = CONSTRUCTIONS[construction]
    tokens = cross_attention_tokens(arguments.get("kdim", WIDTH), arguments.get("vdim", WIDTH))
    with torch.autocast("cpu", torch.bfloat16):
        call = only_call(module, *tokens, **WAYS_TO_CALL[way])
        expected = reference_weights(module, *tokens)
    assert call.query.dtype == call.key.dtype == torch.bfloat16
    assert_close(call.weights(), expected.float(), rtol=0, atol=8e-3)


def test_a_module_of_float32_is_projected_in_float32_where_autocast_is_switched_off() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        call = only_call(module, *self_attention_tokens())
    assert call.query.dtype == torch.float32


# The function itself


class Functional(nn.Module):
    """Calls the function with everything it takes, keys and values given or not."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **arguments: object) -> tuple[Tensor, Tensor | None]:
        module = self.attention
        return functional.multi_head_attention_forward(
            query,
            key,
            value,
            WIDTH,
            HEADS,
            module.in_proj_weight,
            module.in_proj_bias,
            None,
            None,
            arguments.pop("add_zero_attn", False),
            0.0,
            module.out_proj.weight,
            module.out_proj.bias,
            **arguments,
        )


@pytest.mark.parametrize("add_zero_attn", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("static", [("static_k",), ("static_v",), ("static_k", "static_v")], ids=" and ".join)
def test_static_keys_and_values(static: tuple[str, ...], masked: bool, add_zero_attn: bool) -> None:
    """They stand in the place of projected ones."""
    model = Functional()
    query, key, value = torch.randn(N, B, WIDTH), torch.randn(M, B, WIDTH), torch.randn(M, B, WIDTH)
    arguments: dict[str, object] = {name: torch.randn(B * HEADS, M, WIDTH // HEADS) for name in static}
    if masked:
        padding = torch.tensor([[False] * M, [False] * 4 + [True] * 2])
        arguments |= {"attn_mask": boolean_mask(B * HEADS, N, M), "key_padding_mask": padding}
    with record(model) as recording:
        output, weights = model(query, key, value, add_zero_attn=add_zero_attn, average_attn_weights=False, **arguments)
    (call,) = recording.calls
    assert_close(call.weights(), weights, rtol=1e-5, atol=1e-6)
    assert_close(projected(call, model.attention), output.transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_static_keys_are_not_the_queries() -> None:
    tokens = torch.randn(N, B, WIDTH)
    with record(model := Functional()) as recording:
        model(tokens, tokens, tokens, static_k=torch.randn(B * HEADS, N, WIDTH // HEADS))
    assert not recording.calls[0].self_attention


@pytest.mark.parametrize("as_many", [True, False])
def test_other_tokens_are_not_the_queries(as_many: bool) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    memory = torch.randn(B, N if as_many else M, WIDTH)
    assert not only_call(module, torch.randn(B, N, WIDTH), memory, memory).self_attention


@pytest.mark.parametrize("way", WAYS_TO_CALL)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("batch", "queries"), [(0, 4), (1, 1)])
def test_no_sequence_and_one_token(batch: int, queries: int, masked: bool, way: str) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=masked)
    tokens = torch.randn(batch, queries, WIDTH)
    masks = {}
    if masked:
        masks = {
            "attn_mask": torch.zeros(batch * HEADS, queries, queries, dtype=torch.bool),
            "key_padding_mask": torch.zeros(batch, queries, dtype=torch.bool),
        }
    try:
        module(tokens, tokens, tokens, **masks, **WAYS_TO_CALL[way])
    except RuntimeError:
        pytest.skip("this torch refuses it")
    call = only_call(module, tokens, tokens, tokens, **masks, **WAYS_TO_CALL[way])
    assert call.weights().shape == (batch, HEADS, queries, queries + masked)
    assert_close(call.weights().sum(-1), torch.ones(batch, HEADS, queries))


# Encoder layers


def layer_arguments(**arguments: object) -> dict[str, object]:
    return {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 16, "dropout": 0.2, **arguments}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", ["none", "boolean", "additive", "padding", "both", "causal"])
def test_encoder_layer(training: bool, gradients: bool, norm_first: bool, batch_first: bool, mask: str) -> None:
    layer = nn.TransformerEncoderLayer(**layer_arguments(norm_first=norm_first, batch_first=batch_first)).train(
        training
    )
    source = torch.randn(B, N, WIDTH) if batch_first else torch.randn(N, B, WIDTH)
    pairs = boolean_mask(N, N)
    padding = torch.tensor([[False] * N, [False] * 3 + [True] * 2])
    causal = nn.Transformer.generate_square_subsequent_mask(N)
    arguments = {
        "none": {},
        "boolean": {"src_mask": pairs},
        "additive": {"src_mask": additive(pairs)},
        "padding": {"src_key_padding_mask": padding},
        "both": {"src_mask": pairs, "src_key_padding_mask": padding},
        "causal": {"src_mask": causal, "is_causal": True},
    }[mask]
    with torch.set_grad_enabled(gradients):
        call = only_call(layer, source, **arguments)
    tokens = layer.norm1(source) if norm_first else source
    masks = {"attn_mask": arguments.get("src_mask"), "key_padding_mask": arguments.get("src_key_padding_mask")}
    assert call.site == "self_attn"
    assert_close(
        call.weights(), reference_weights(layer.self_attn, tokens, tokens, tokens, **masks), rtol=1e-5, atol=1e-6
    )


def encoder_arguments(mask: str) -> dict[str, Tensor]:
    return {
        "none": {},
        "causal": {"mask": nn.Transformer.generate_square_subsequent_mask(N)},
        "padding": {"src_key_padding_mask": torch.tensor([[False] * N, [False] * 3 + [True] * 2])},
    }[mask]


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("training", [True, False])
def test_encoder(training: bool, mask: str) -> None:
    layer = nn.TransformerEncoderLayer(**layer_arguments(batch_first=True, dropout=0.0))
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).train(training)
    source, arguments = torch.randn(B, N, WIDTH), encoder_arguments(mask)
    with record(encoder) as recording:
        output = encoder(source, **arguments)
    assert recording.sites == ("layers.0.self_attn", "layers.1.self_attn", "layers.2.self_attn")
    masks = {"attn_mask": arguments.get("mask"), "key_padding_mask": arguments.get("src_key_padding_mask")}
    hidden = source
    for layer, call in zip(encoder.layers, recording.calls, strict=True):
        expected = reference_weights(layer.self_attn, hidden, hidden, hidden, **masks)
        assert_close(call.weights(), expected, rtol=1e-4, atol=1e-5)
        hidden = layer(hidden, src_mask=masks["attn_mask"], src_key_padding_mask=masks["key_padding_mask"])
    assert_close(output, hidden, rtol=1e-4, atol=1e-5)


# Fast paths: in eval mode and without gradients torch runs a whole module as one function.


@pytest.fixture
def fast_paths_taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    taken: list[str] = []
    for name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
        original = getattr(torch, name)

        def spy(*args: object, name: str = name, original: Callable[..., object] = original) -> object:
            taken.append(name)
            return original(*args)

        monkeypatch.setattr(torch, name, spy)
    return taken


@pytest.mark.parametrize("way", WAYS_TO_CALL)
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "both", "heads"])
@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_the_fast_path_stays_the_one_that_is_taken(
    fast_paths_taken: list[str], way: str, mask: str, no_gradients: type
) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    tokens = torch.randn(B, N, WIDTH)
    padding, causal = torch.tensor([[False] * N, [False] * 3 + [True] * 2]), torch.ones(N, N).triu(1).bool()
    masks: dict[str, dict[str, object]] = {
        "none": {},
        "causal": {"attn_mask": causal},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
        "heads": {"attn_mask": boolean_mask(B * HEADS, N, N)},
    }
    arguments = {**masks[mask], **WAYS_TO_CALL[way]}
    with no_gradients():
        expected, expected_weights = module(tokens, tokens, tokens, **arguments)
        assert fast_paths_taken == ["_native_multi_head_attention"], "otherwise this test shows nothing"
        with record(module) as recording:
            output, weights = module(tokens, tokens, tokens, **arguments)
        (call,) = recording.calls
        assert len(fast_paths_taken) == 2
        assert torch.equal(output, expected)
        assert weights is None or torch.equal(weights, expected_weights)
        assert_close(projected(call, module), expected, rtol=1e-4, atol=1e-5)
        assert_close(call.weights(), reference_weights(module, tokens, tokens, tokens, **masks[mask]))


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor")
def test_the_fast_path_through_an_encoder_stays(fast_paths_taken: list[str], mask: str, norm_first: bool) -> None:
    """That includes packing padded sequences into nested tensors, which leaves zeros in the place of padding."""
    layer = nn.TransformerEncoderLayer(**layer_arguments(batch_first=True, norm_first=norm_first))
    encoder = nn.TransformerEncoder(layer, 2).eval()
    source, arguments = torch.randn(B, N, WIDTH), encoder_arguments(mask)
    with torch.no_grad():
        alone = encoder(source, **arguments)
        assert fast_paths_taken == ["_transformer_encoder_layer_fwd"] * 2, "otherwise this test shows nothing"
        with record(encoder) as recording:
            output = encoder(source, **arguments)
    assert len(fast_paths_taken) == 4
    assert torch.equal(output, alone)
    assert recording.sites == ("layers.0.self_attn", "layers.1.self_attn")
    with record(encoder) as plainly:  # gradients keep it off the fast path
        encoder(source, **arguments)
    for fast, plain in zip(recording.calls, plainly.calls, strict=True):
        tokens = plain.logits()[1].any(2).any(1)
        tokens_BHN = tokens[:, None].expand(-1, HEADS, -1)
        assert_close(fast.weights()[tokens_BHN], plain.weights()[tokens_BHN])


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor")
def test_every_statistic_is_the_same_on_the_fast_path(mask: str, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(**layer_arguments(batch_first=True, norm_first=norm_first))
    encoder = nn.TransformerEncoder(layer, 2).eval()
    source, arguments = torch.randn(B, N, WIDTH), encoder_arguments(mask)
    snapshots = []
    for gradients in (False, True):
        observer = AttentionObserver(encoder, strict=True, spectral_sequences=None)
        with observer, torch.set_grad_enabled(gradients):
            encoder(source, **arguments)
        snapshots.append(observer.snapshot())
    fast, plain = snapshots
    assert fast.sites == plain.sites
    assert all(plain[site, "similarity_contraction"][0] is not None for site in plain.sites)
    assert_close(fast.values, plain.values, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_another_mode_keeps_the_fast_path_closed_as_it_does_unwatched(fast_paths_taken: list[str]) -> None:
    module, tokens = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval(), torch.randn(B, N, WIDTH)
    asked = torch.overrides.has_torch_function
    with torch.no_grad(), torch.device("cpu"), record(module) as recording:
        module(tokens, tokens, tokens)
    assert fast_paths_taken == []
    assert len(recording.calls) == 1
    assert torch.overrides.has_torch_function is asked


# The other layers of nn.Transformer


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_decoder_layer(training: bool, norm_first: bool, batch_first: bool) -> None:
    layer = nn.TransformerDecoderLayer(**layer_arguments(norm_first=norm_first, batch_first=batch_first, dropout=0.0))
    layer.train(training)
    target, memory = torch.randn(B, N, WIDTH), torch.randn(B, M, WIDTH)
    if not batch_first:
        target, memory = target.transpose(0, 1), memory.transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(N)
    padding = torch.tensor([[False] * M, [False] * 4 + [True] * 2])
    with record(layer) as recording:
        layer(target, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)
    assert recording.sites == ("self_attn", "multihead_attn")
    own, cross = recording.calls
    tokens = layer.norm1(target) if norm_first else target
    after = target + layer.self_attn(tokens, tokens, tokens, attn_mask=causal, need_weights=True)[0]
    query = layer.norm2(after) if norm_first else layer.norm1(after)
    expected_own = reference_weights(layer.self_attn, tokens, tokens, tokens, attn_mask=causal)
    expected_cross = reference_weights(layer.multihead_attn, query, memory, memory, key_padding_mask=padding)
    assert_close(own.weights(), expected_own, rtol=1e-5, atol=1e-6)
    assert_close(cross.weights(), expected_cross, rtol=1e-4, atol=1e-5)
    assert own.self_attention and not cross.self_attention


def test_whole_transformer() -> None:
    model = nn.Transformer(WIDTH, HEADS, 2, 2, 16, batch_first=True, norm_first=False)
    with record(model) as recording:
        model(torch.randn(B, M, WIDTH), torch.randn(B, N, WIDTH))
    assert recording.sites == (
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.multihead_attn",
    )
    assert [(call.queries, call.keys) for call in recording.calls] == [(M, M), (M, M), (N, N), (N, M), (N, N), (N, M)]


def test_an_additive_mask_on_the_fast_path_hides_what_is_not_zero_as_torch_has_it() -> None:
    layer = nn.TransformerEncoderLayer(**layer_arguments(batch_first=True)).eval()
    tokens, bias = torch.randn(B, N, WIDTH), torch.full((N, N), -2.0).triu(1)
    with torch.no_grad():
        assert torch.equal(layer(tokens, bias), layer(tokens, bias != 0)), "otherwise torch has changed"
        with record(layer) as recording:
            layer(tokens, bias)
    assert torch.equal(recording.calls[0].logits()[1], (bias == 0).expand(B, HEADS, N, N))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_two_observers_leave_the_fast_path_as_it_is() -> None:
    """With nested tensors there is no other."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    tokens = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)])
    observers = [AttentionObserver(module, statistics="entropy") for _ in range(2)]
    with torch.no_grad(), observers[0], observers[1]:
        module(tokens, tokens, tokens, need_weights=False)
    first, second = (observer.snapshot() for observer in observers)
    assert first.to_dict() == second.to_dict() != {}
