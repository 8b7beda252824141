"""Attention functions of Hugging Face's registry."""

from __future__ import annotations

import sys
import types
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
    mask: Tensor | None,
    queries: int = 5,
    keys: int = 5,
    is_causal: bool = True,
    sequences: int = 2,
    function: Any = flash_like,
    registry: Any = ALL_ATTENTION_FUNCTIONS,
    max_sequences: int | None = None,
    **kwargs: Any,
) -> tuple[Any, Tensor, Tensor]:
    """The one call of a module that calls a registered function with these arguments, its query and its key."""

    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            self.is_causal = is_causal
            return registry["opaque"](self, query, key, key, mask, scaling=0.4, **kwargs)[0]

    AttentionInterface.register("opaque", function)
    query, key = torch.randn(sequences, 4, queries, 8), torch.randn(sequences, 2, keys, 8)
    model = Attention()
    with record(model, max_sequences=max_sequences) as recording:
        model(query, key)
    AttentionInterface.register("opaque", kernel)
    assert len(recording.calls) <= 1
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


def test_a_window_that_looks_both_ways() -> None:
    call, *_ = call_of(None, queries=6, keys=6, sliding_window=2, is_causal=False)
    i, j = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
    assert torch.equal(call.logits()[1], ((i - j).abs() < 2).expand(2, 4, 6, 6))


PACKED: dict[str, dict[str, Any]] = {
    "lengths": {"cu_seq_lens_q": torch.tensor([0, 2, 5, 6], dtype=torch.int32)},
    "lengths of both": {"cu_seq_lens_q": torch.tensor([0, 2, 5, 6]), "cu_seq_lens_k": torch.tensor([0, 2, 5, 6])},
    "positions": {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 0]])},
}


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("packed", PACKED)
def test_packed_sequences(packed: str, is_causal: bool, window: int | None) -> None:
    call, *_ = call_of(
        None, queries=6, keys=6, is_causal=is_causal, sequences=1, sliding_window=window, **PACKED[packed]
    )
    expected = torch.zeros(6, 6, dtype=torch.bool)
    for first, last in ((0, 2), (2, 5), (5, 6)):
        for i in range(first, last):
            for j in range(first, i + 1 if is_causal else last):
                expected[i, j] = window is None or abs(i - j) < window
    assert torch.equal(call.logits()[1], expected.expand(1, 4, 6, 6))


def test_packed_sequences_with_keys_from_before() -> None:
    """The second has one key more than queries; after both nothing is a token."""
    ends = {"cu_seq_lens_q": torch.tensor([0, 2, 4]), "cu_seq_lens_k": torch.tensor([0, 2, 5])}
    call, *_ = call_of(None, queries=5, keys=6, sequences=1, **ends)
    expected = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]]
    assert torch.equal(call.logits()[1], torch.tensor(expected).bool().expand(1, 4, 5, 6))


@pytest.mark.parametrize("arguments", [PACKED["positions"], PACKED["lengths"], {"sliding_window": 2}])
def test_no_mask_of_all_pairs_is_written_down(arguments: dict[str, Any]) -> None:
    call, *_ = call_of(None, queries=6, keys=6, sequences=1, **arguments)
    assert call.visibility.mask is None and call.visibility.bias is None


@pytest.mark.parametrize(
    "position_ids", [torch.arange(6)[None], torch.arange(3, 9)[None], torch.tensor([[0, 1, 0, 1, 2, 0]] * 2)]
)
def test_positions_that_pack_nothing(position_ids: Tensor) -> None:
    """One sequence, one that goes on after a cache, and a batch, in which kernels do not look at positions."""
    call, *_ = call_of(None, queries=6, keys=6, sequences=len(position_ids), position_ids=position_ids)
    assert torch.equal(call.logits()[1], torch.ones(6, 6).tril().bool().expand(len(position_ids), 4, 6, 6))


def test_positions_do_not_pack_beside_a_mask() -> None:
    call, *_ = call_of(torch.ones(1, 6), queries=6, keys=6, sequences=1, **PACKED["positions"])
    assert torch.equal(call.logits()[1], torch.ones(6, 6).tril().bool().expand(1, 4, 6, 6))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"cu_seq_lens_q": torch.tensor([0, 2, 10])}, "over several rows.*padded batches"),
        ({"block_table": torch.zeros(2, 3)}, "paged cache.*without continuous batching"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_way_out(arguments: dict[str, Any], message: str) -> None:
    with pytest.warns(AttentionWarning, match=message):
        call, *_ = call_of(None, **arguments)
    assert call is None


def test_the_bias_of_positions_is_part_of_the_logits() -> None:
    bias, mask = torch.randn(1, 4, 5, 5), torch.zeros(2, 1, 5, 5)
    mask[1, :, :, 3:] = -torch.inf
    for given in (None, mask, mask == 0):
        call, query, key = call_of(given, position_bias=bias, is_causal=False)
        logits, visible = call.logits()
        expected = query @ key.repeat_interleave(2, 1).mT * 0.4 + bias
        torch.testing.assert_close(logits[visible], expected.expand_as(logits)[visible])
        assert torch.equal(visible, (mask == 0 if given is not None else torch.tensor(True)).expand(2, 4, 5, 5))


def folding(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Gives each head of the keys all query heads of its group as queries; `fold` may do it in another way."""
    heads, queries = query.shape[1:3]
    fold = kwargs.get("fold", lambda query: query.reshape(len(query), key.shape[1], -1, query.shape[-1]))
    if kwargs.get("is_written_out"):
        weights = (fold(query) @ key.mT * kwargs["scaling"]).softmax(-1)
        output = weights @ value
    else:
        output = functional.scaled_dot_product_attention(
            fold(query), key, value, kwargs.get("folded_mask"), scale=kwargs["scaling"]
        )
    return output.reshape(len(query), heads, queries, -1).transpose(1, 2), None


def folded_call(queries: int = 1, keys: int = 5, **kwargs: Any) -> tuple[Any, Tensor, Tensor]:
    return call_of(None, queries=queries, keys=keys, function=folding, **kwargs)


@pytest.mark.parametrize("is_written_out", [False, True])
@pytest.mark.parametrize("keys", [1, 2, 5])
def test_heads_that_were_folded_into_queries_are_heads(keys: int, is_written_out: bool) -> None:
    """With two keys, what the kernel is given looks like self-attention of two tokens."""
    call, query, key = folded_call(keys=keys, is_written_out=is_written_out)
    assert (call.heads, call.queries, call.keys) == (4, 1, keys)
    assert call.self_attention == (keys == 1)
    torch.testing.assert_close(call.logits()[0], query @ key.repeat_interleave(2, 1).mT * 0.4)
    torch.testing.assert_close(call.output(), call.weights() @ key.repeat_interleave(2, 1))


@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (2, 1, 2, 5), (2, 2, 2, 5), (1, 2, 1, 5)])
@pytest.mark.parametrize("is_boolean", [True, False])
def test_masks_that_were_folded_with_them(shape: tuple[int, ...], is_boolean: bool) -> None:
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True
    given = mask if is_boolean else torch.where(mask, torch.randn(shape), -torch.inf)
    call, query, key = folded_call(folded_mask=given)
    expected = (query.reshape(2, 2, 2, 8) @ key.mT * 0.4).reshape(2, 4, 1, 5)
    logits, visible = call.logits()
    assert torch.equal(visible, mask.expand(2, 2, 2, 5).reshape(2, 4, 1, 5))
    if not is_boolean:
        expected = expected + given.expand(2, 2, 2, 5).reshape(2, 4, 1, 5)
    torch.testing.assert_close(logits[visible], expected[visible])


@pytest.mark.parametrize("is_written_out", [False, True])
def test_some_sequences_of_heads_that_were_folded(is_written_out: bool) -> None:
    call, query, key = folded_call(sequences=3, max_sequences=2, is_written_out=is_written_out)
    assert call.sequences == 2
    torch.testing.assert_close(call.logits()[0], (query @ key.repeat_interleave(2, 1).mT * 0.4)[:2])


def test_several_queries_of_each_head_that_were_folded() -> None:
    call, query, key = folded_call(queries=3)
    assert (call.heads, call.queries) == (4, 3)
    torch.testing.assert_close(call.logits()[0], query @ key.repeat_interleave(2, 1).mT * 0.4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"queries": 3, "is_written_out": True},
        {"queries": 3, "fold": lambda query: query.transpose(1, 2).reshape(2, 2, 6, 8)},
        {"fold": lambda query: query.flip(1).reshape(2, 2, 2, 8)},
    ],
)
def test_folding_that_cannot_be_undone_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.warns(AttentionWarning, match="folds 4 heads.*attn_implementation='eager'"):
        call, *_ = folded_call(**arguments)
    assert call is None


def test_a_function_that_divides_the_batch_is_left_as_it_is() -> None:
    def divided(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> Any:
        return functional.scaled_dot_product_attention(
            query.flatten(0, 1)[:, None], key.repeat_interleave(2, 1).flatten(0, 1)[:, None], value[:1, :1]
        ), None

    call, *_ = call_of(None, function=divided)
    assert (call.sequences, call.heads, call.queries) == (8, 1, 5)


def test_folded_queries_that_are_not_finite_are_heads_too() -> None:
    def spoiling(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        with torch._C.DisableTorchFunction():
            query[0, 0] = torch.nan
        return folding(module, query, *args, **kwargs)

    call, *_ = call_of(None, queries=1, function=spoiling)
    assert (call.heads, call.queries) == (4, 1)


def test_arguments_by_name_and_others_than_the_registry_asks_for() -> None:
    def by_name(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return query

    def of_its_own(x: Tensor, *, memory: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, memory, memory)

    tensors = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)

    class Attention(nn.Module):
        is_causal = False

        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            named = ALL_ATTENTION_FUNCTIONS["by name"](module=self, query=query, key=key, value=key)
            own = ALL_ATTENTION_FUNCTIONS["of its own"](query, memory=key)
            return named + own

    AttentionInterface.register("by name", by_name)
    AttentionInterface.register("of its own", of_its_own)
    try:
        with record(model := Attention()) as recording:
            model(*tensors)
    finally:
        AttentionInterface._global_mapping.pop("by name")
        AttentionInterface._global_mapping.pop("of its own")
    assert len(recording.calls) == 2


def test_a_registry_of_a_single_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doge has one, for a function of its own."""

    def mine(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return flash_like(*args, **kwargs)

    own = AttentionInterface()
    own["opaque"] = mine
    modeling = types.ModuleType("modeling_of_a_single_model")
    modeling.ALL_ATTENTION_FUNCTIONS = own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, modeling.__name__, modeling)
    call, *_ = call_of(None, registry=own)
    assert call is not None
    assert own["opaque"] is mine


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
