"""Attention functions of Hugging Face's registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from lightning_attn import AttentionObserver, AttentionWarning, record  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def kernel(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stands for a kernel that nothing can see into, with the signature that the registry asks for."""
    heads = query.shape[1] // key.shape[1]
    with torch._C.DisableTorchFunction():
        key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
        is_causal = attention_mask is None and module.is_causal and query.shape[2] > 1
        output = functional.scaled_dot_product_attention(
            query, key, value, attention_mask, is_causal=is_causal, scale=kwargs["scaling"]
        )
        return output.transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def _registered() -> Any:
    AttentionInterface.register("opaque", kernel)
    AttentionMaskInterface.register("opaque", sdpa_mask)
    before = dict(ALL_ATTENTION_FUNCTIONS)
    yield
    assert dict(ALL_ATTENTION_FUNCTIONS) == before, "a function of the registry was not put back"
    AttentionInterface._global_mapping.pop("opaque")
    AttentionMaskInterface._global_mapping.pop("opaque")


def llama(implementation: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, attn_implementation=implementation))


def ids(length: int = 9) -> Tensor:
    return torch.randint(60, (3, length), generator=torch.Generator().manual_seed(2))


SITES = ("model.layers.0.self_attn", "model.layers.1.self_attn")


@pytest.mark.parametrize("implementation", ["opaque", "sdpa", "eager"])
def test_each_layer_is_seen_once_with_the_same_weights(implementation: str) -> None:
    weights = []
    for name in (implementation, "sdpa"):
        model = llama(name)
        with record(model, max_sequences=2) as recording:
            model(ids())
        assert tuple(call.site for call in recording.calls) == SITES
        weights.append([call.weights() for call in recording.calls])
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding(padding: str) -> None:
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, slice(0, 4) if padding == "left" else slice(5, 9)] = 0
    snapshots = []
    for implementation in ("opaque", "sdpa"):
        torch.manual_seed(0)
        model = BertModel(BertConfig(**SMALL, attn_implementation=implementation)).eval()
        observer = AttentionObserver(model)
        with observer:
            model(ids(), attention_mask=mask)
        snapshots.append(observer.snapshot())
    assert snapshots[0].sites == snapshots[1].sites == tuple(f"encoder.layer.{i}.attention.self" for i in range(2))
    torch.testing.assert_close(snapshots[0].values, snapshots[1].values, rtol=1e-4, atol=1e-5, equal_nan=True)


def flash_like(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Takes padding as (B, M) and makes causality and the window itself."""
    flash_like.seen = (attention_mask, kwargs)  # type: ignore[attr-defined]
    return query.transpose(1, 2).contiguous(), None


def call_of(
    mask: Tensor | None, queries: int = 5, keys: int = 5, is_causal: bool = True, **kwargs: Any
) -> tuple[Any, Tensor, Tensor]:
    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            self.is_causal = is_causal
            function = ALL_ATTENTION_FUNCTIONS["opaque"]
            return function(self, query, key, key, mask, scaling=0.4, **kwargs)[0]

    AttentionInterface.register("opaque", flash_like)
    query, key = torch.randn(2, 4, queries, 8), torch.randn(2, 2, keys, 8)
    model = Attention()
    with record(model) as recording:
        model(query, key)
    AttentionInterface.register("opaque", kernel)
    return (recording.calls or [None])[0], query, key


def test_the_arguments_of_a_kernel_are_read() -> None:
    call, query, key = call_of(None, softcap=3.0, s_aux=torch.arange(4.0))
    logits = 3 * torch.tanh(query @ key.repeat_interleave(2, 1).mT * 0.4 / 3)
    seen, visible = call.logits()
    assert torch.equal(visible, torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 4, 5, 5))
    torch.testing.assert_close(seen, logits)
    assert torch.equal(call.sink_logits, torch.arange(4.0))


def test_a_window_and_padding_in_two_dimensions() -> None:
    padding = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    call, *_ = call_of(padding, sliding_window=2)
    near = torch.ones(5, 5, dtype=torch.bool).tril() & torch.ones(5, 5, dtype=torch.bool).triu(-1)
    assert torch.equal(call.logits()[1], (near & padding.bool()[:, None, None]).expand(2, 4, 5, 5))


def test_the_last_query_of_a_cached_sequence_sees_everything() -> None:
    call, *_ = call_of(None, queries=1, keys=6)
    assert call.logits()[1].all()
    call, *_ = call_of(None, queries=2, keys=6)
    assert torch.equal(call.logits()[1][0, 0], torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool())


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_module_says_whether_it_is_causal(is_causal: bool) -> None:
    call, *_ = call_of(None, is_causal=is_causal)
    assert bool(call.logits()[1].all()) == (not is_causal)


def test_packed_sequences_are_refused_by_name() -> None:
    with pytest.warns(AttentionWarning, match="packed into one.*padded batches"):
        call, *_ = call_of(None, cu_seq_lens_q=torch.tensor([0, 2, 5]))
    assert call is None


def test_a_function_that_a_user_put_into_the_registry_itself_is_put_back() -> None:
    def mine(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return kernel(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
    try:
        model = llama("sdpa")
        with record(model) as recording:
            model(ids())
        assert len(recording.calls) == 2
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def test_the_registry_is_put_back_after_an_exception() -> None:
    model = llama("opaque")
    with pytest.raises(ZeroDivisionError), AttentionObserver(model):
        model(ids())
        raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention_through_the_registry() -> None:
    model, sdpa = llama("flex_attention").eval(), llama("sdpa").eval()
    with torch.no_grad():
        with record(model) as recording:
            model(ids())
        with record(sdpa) as expected:
            sdpa(ids())
    assert tuple(call.site for call in recording.calls) == SITES
    for ours, theirs in zip(recording.calls, expected.calls, strict=True):
        torch.testing.assert_close(ours.weights(), theirs.weights(), rtol=0, atol=1e-6)
