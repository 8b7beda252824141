"""The dtype in which a model compares queries with keys is that of the call's queries, whatever way it computes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from lightning_attn import AttentionObserver, record

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1) @ value


def softmax_in_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As the eager attention of Hugging Face's models."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value


def logits_made_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (query @ key.mT).float() / math.sqrt(query.shape[-1]) + torch.zeros(query.shape[-2], key.shape[-2])
    return scores.softmax(-1).to(value.dtype) @ value


def compared_in_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query.float() @ key.float().mT / math.sqrt(query.shape[-1])).softmax(-1).to(value.dtype) @ value


def logits_made_bfloat16(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / math.sqrt(query.shape[-1])).bfloat16().softmax(-1).to(value.dtype) @ value


def with_bias(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A bias so large that rounding it changes the weights."""
    bias = 1000 + torch.linspace(-3, 3, 36).view(6, 6)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flex_attention(query, key, value)


WAYS = (fused, written_out, softmax_in_float32, logits_made_float32)


class Attending(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attend(query, key, value)


class Site(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.project = nn.Linear(8, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.project(tokens).to(tokens.dtype).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.attend(query, key, value)


def dtype_of(model: nn.Module, *arguments: Tensor) -> torch.dtype:
    with record(model) as recording:
        model(*arguments)
    (call,) = recording.calls
    assert call.key.dtype == call.query.dtype
    return call.query.dtype


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64], ids=str)
@pytest.mark.parametrize("attend", WAYS)
def test_of_a_model_of_one_type(attend: Callable[..., Tensor], dtype: torch.dtype) -> None:
    expected = FP32 if dtype == torch.float64 and attend is logits_made_float32 else dtype
    assert dtype_of(Site(attend).to(dtype), torch.randn(2, 5, 8, dtype=dtype)) == expected


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("attend", WAYS)
def test_under_autocast_queries_of_float32_are_rounded(attend: Callable[..., Tensor], dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        assert dtype_of(Site(attend), torch.randn(2, 5, 8)) == dtype


def test_under_autocast_the_fused_function_has_what_is_captured() -> None:
    """Weights of rounded queries and keys, and values that are rounded too."""
    model, tokens = Site(fused), 3 * torch.randn(2, 5, 8)
    with torch.autocast("cpu", BF16), record(model) as recording:
        model(tokens)
        rounded = model.project(tokens)
    (call,) = recording.calls
    query, key, value = rounded.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    assert torch.equal(call.query, query) and torch.equal(call.key, key)
    assert call.value is not None and torch.equal(call.value, value)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("attend", [fused, with_bias, flex], ids=lambda one: one.__name__)
def test_under_autocast_weights_are_those_of_the_function(attend: Callable[..., Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key = 3 * torch.randn(2, 1, 2, 6, 8)
    everything = torch.eye(6, 8).expand(1, 2, 6, 8)  # what comes out are the weights
    model = Attending(attend)
    with torch.autocast("cpu", dtype), record(model) as recording:
        computed = model(query, key, everything)[..., :6]
    (call,) = recording.calls
    assert call.query.dtype == dtype
    torch.testing.assert_close(call.weights().float(), computed.float(), rtol=0, atol=0.003)


def test_what_is_compared_in_float32_is_not_rounded_by_what_it_was_before() -> None:
    assert dtype_of(Site(compared_in_float32).bfloat16(), torch.randn(2, 5, 8, dtype=BF16)) == FP32


def test_logits_that_are_rounded_afterwards() -> None:
    assert dtype_of(Site(logits_made_bfloat16), torch.randn(2, 5, 8)) == BF16


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_multihead_attention(training: bool, need_weights: bool) -> None:
    module, tokens = nn.MultiheadAttention(8, 2, batch_first=True).train(training), torch.randn(2, 5, 8)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, tokens: Tensor) -> Tensor:
            return self.attention(tokens, tokens, tokens, need_weights=need_weights)[0]

    assert dtype_of(Model(), tokens) == FP32
    with torch.autocast("cpu", BF16):
        assert dtype_of(Model(), tokens) == BF16
    assert dtype_of(Model().bfloat16(), tokens.bfloat16()) == BF16


class Several(nn.Module):
    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.sites = nn.ModuleList(Site(fused).to(dtype) for dtype in dtypes)
        self.dtypes = dtypes

    def forward(self, tokens: Tensor) -> None:
        for site, dtype in zip(self.sites, self.dtypes, strict=True):
            site.project.weight.data.zero_()
            site.project.bias.data.fill_(16.0)
            site(tokens.to(dtype))


def test_small_calls_that_are_measured_together_keep_their_types() -> None:
    """All logits are 4 * 16 * 16 / 2 = 512."""
    dtypes = [BF16, FP32, BF16, FP16, FP32, FP16]
    observer = AttentionObserver(model := Several(dtypes), statistics="logit_spacing")
    with observer:
        model(torch.zeros(1, 5, 8))
    found = observer.snapshot()
    expected = [[512 * torch.finfo(dtype).eps] * 2 for dtype in dtypes]
    assert [found[site, "logit_spacing"] for site in found.sites] == expected


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_models_of_hugging_face(implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, attn_implementation=implementation)
    ids = torch.arange(6)[None]
    assert dtype_of(transformers.LlamaModel(config), ids) == FP32
    assert dtype_of(transformers.LlamaModel(config).bfloat16(), ids) == BF16
    with torch.autocast("cpu", BF16):
        assert dtype_of(transformers.LlamaModel(config), ids) == BF16
