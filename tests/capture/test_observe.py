"""The line by which a model tells of its attention."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AttentionObserver, AttentionWarning, observe, record


class Kernel(torch.autograd.Function):
    """Attention that nothing can see into, its modes switched off as in a compiled extension."""

    @staticmethod
    def forward(ctx: object, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Layer(nn.Module):
    def __init__(self, **told: object) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.told = told

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        observe(query, key, value, **{"is_causal": True, **self.told})
        return Kernel.apply(query, key, value)


def test_it_gives_what_a_fused_call_gives() -> None:
    model, tokens = nn.Sequential(Layer()), torch.randn(3, 6, 8)
    with record(model) as recording:
        output = model(tokens)
    (call,) = recording.calls
    assert call.site == "0"
    torch.testing.assert_close(call.output(), output.detach())


def test_nobody_is_told_when_nobody_watches() -> None:
    model, tokens = Layer(), torch.randn(3, 6, 8)
    observer = AttentionObserver(model)
    model(tokens)
    with observer:
        pass
    model(tokens)
    with pytest.warns(AttentionWarning, match="No attention was seen"):
        assert not observer.snapshot()


@pytest.mark.parametrize("mask", [torch.ones(6, 6, dtype=torch.bool).tril(), torch.full((3, 1, 6, 6), -1e9).triu(1)])
def test_masks(mask: Tensor) -> None:
    model = Layer(attn_mask=mask, is_causal=False)
    with record(model, max_sequences=2) as recording:
        output = model(torch.randn(3, 6, 8))
    (call,) = recording.calls
    torch.testing.assert_close(call.output(), output[:2].detach())


def test_scale_soft_cap_and_sinks() -> None:
    layer = Layer(scale=0.3, soft_cap=2.0, sink_logits=torch.tensor([0.5, -1.0]))
    with record(layer) as recording:
        layer(torch.randn(1, 4, 8))
    (call,) = recording.calls
    logits = 2.0 * torch.tanh((call.query @ call.key.mT * 0.3) / 2.0)
    logits = logits.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -torch.inf)
    total = logits.exp().sum(-1) + torch.tensor([0.5, -1.0]).exp()[:, None]
    torch.testing.assert_close(call.weights(), (logits.exp() / total[..., None]).detach())


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"attn_mask": torch.ones(5, 5)}, r"`attn_mask`.*broadcast to \(3, 2, 6, 6\), got \(5, 5\)"),
        ({"sink_logits": torch.ones(3)}, r"`sink_logits`.*each of 2 heads, got \(3,\)"),
        ({"attn_mask": torch.ones(6, 6, dtype=torch.long)}, r"`attn_mask`.*must be boolean.*got torch.int64"),
        ({"attn_mask": "causal"}, r"`attn_mask`.*must be boolean.*got 'causal'"),
        ({"attn_mask": torch.ones(3, 2, 6, 6)[None]}, r"`attn_mask`.*broadcast to \(3, 2, 6, 6\)"),
        ({"attn_mask": torch.ones(6, 1, 6, 6)}, r"`attn_mask`.*broadcast to \(3, 2, 6, 6\), got \(6, 1, 6, 6\)"),
        ({"scale": 10**400}, r"`scale`.*positive number or None, got 1000"),
        ({"soft_cap": True}, r"`soft_cap`.*positive number or None, got True"),
        ({"soft_cap": 0.0}, r"`soft_cap`.*positive number or None, got 0.0"),
        ({"scale": "x"}, r"`scale`.*positive number or None, got 'x'"),
    ],
)
def test_what_does_not_fit_is_reported_and_the_pass_goes_on(told: dict[str, object], message: str) -> None:
    model = Layer(**told)
    with pytest.warns(AttentionWarning, match=message), record(model) as recording:
        model(torch.randn(3, 6, 8))
    assert not recording.calls


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((6, 8), (6, 8), None), r"`query`.*must be \(B, H, N, D\), got \(6, 8\)"),
        (((1, 3, 6, 8), (1, 2, 6, 8), None), r"`key`.*K dividing H"),
        (((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 5, 8)), r"`value`.*must be \(B, K, M, E\)"),
    ],
)
def test_shapes_that_do_not_fit(shapes: tuple[tuple[int, ...] | None, ...], message: str) -> None:
    class Wrong(nn.Module):
        def forward(self) -> None:
            observe(*[None if shape is None else torch.zeros(shape) for shape in shapes])

    model = Wrong()
    with pytest.warns(AttentionWarning, match=message), record(model) as recording:
        model()
    assert not recording.calls


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (np.ones((1, 2, 6, 8)), "`query`.*floating-point tensor, got array"),
        (None, "`query`.*floating-point tensor, got None"),
        (torch.ones(1, 2, 6, 8).long(), "`query`.*got torch.int64"),
    ],
)
def test_what_is_no_query_is_reported_too(query: Tensor | None, message: str) -> None:
    class Wrong(nn.Module):
        def forward(self) -> None:
            observe(query, torch.zeros(1, 2, 6, 8))

    with pytest.warns(AttentionWarning, match=message), record(model := Wrong()) as recording:
        model()
    assert not recording.calls


def test_a_compiled_module_is_compiled_whole_and_only_once() -> None:
    compiled = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal compiled
        compiled += 1
        return graph

    class Told(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            observe(tokens, tokens)
            return tokens * 2

    model = Told()
    run, tokens = torch.compile(model, backend=count, fullgraph=True), torch.randn(1, 2, 5, 4)
    observer = AttentionObserver(model, statistics="entropy")
    for _ in range(2):
        run(tokens)
        with observer:
            run(tokens)
        assert observer.snapshot()
    assert compiled == 1


def test_it_does_nothing_when_nobody_watches() -> None:
    query = torch.randn(1, 2, 5, 4)
    called: list[str] = []
    sys.setprofile(lambda frame, event, argument: called.append(event) if event.endswith("call") else None)
    try:
        observe(query, query, query)
    finally:
        sys.setprofile(None)
    assert called == ["call", "c_call"]  # the function itself, and the end of this profile
