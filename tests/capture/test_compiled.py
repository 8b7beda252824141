"""Compiled models run eagerly while they are watched, and as compiled before and after."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from models import Attention
from torch import nn

from lightning_attn import AttentionObserver


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_a_compiled_model_is_seen_and_not_compiled_again(how: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = nn.Sequential(Attention(is_causal=True), Attention(is_causal=True)).eval()  # no dropout
    if how == "torch.compile":
        compiled = torch.compile(model, backend=counter, fullgraph=True)
    else:
        model.compile(backend=counter)
        compiled = model
    tokens = torch.randn(2, 8, 32)
    before = compiled(tokens)
    frames = counter.frame_count
    assert frames
    observer = AttentionObserver(compiled)
    for _ in range(2):
        with observer:
            compiled(tokens).sum().backward()
        assert observer.snapshot().sites == ("0", "1")
    torch.testing.assert_close(compiled(tokens), before)
    assert counter.frame_count == frames
