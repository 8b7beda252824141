"""Compiled models run eagerly while they are watched, and as compiled before and after."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from models import Attention
from torch import nn

from lightning_attn import AttentionObserver


@pytest.mark.parametrize("statistics", [None, "entropy"], ids=["with states", "without states"])
@pytest.mark.parametrize("how", ["torch.compile", "torch.compile of a part", "module.compile"])
def test_a_compiled_model_is_seen_and_not_compiled_again(how: str, statistics: str | None) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = nn.Sequential(Attention(is_causal=True), Attention(is_causal=True)).eval()  # no dropout
    if how == "torch.compile":
        compiled = torch.compile(model, backend=counter, fullgraph=True)
    elif how == "torch.compile of a part":
        model[1] = torch.compile(model[1], backend=counter, fullgraph=True)
        compiled = model
    else:
        model.compile(backend=counter)
        compiled = model
    tokens = torch.randn(2, 12, 32)
    before = compiled(tokens)
    frames = counter.frame_count
    assert frames
    observer = AttentionObserver(compiled, statistics=statistics, strict=True)
    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as said:
        for _ in range(2):
            with observer:
                compiled(tokens).sum().backward()
            snapshot = observer.snapshot()
            assert snapshot.sites == ("0", "1")
            assert all(snapshot.summary(name) is not None for name in snapshot.statistics)
    assert not [warning for warning in said if "hook" in str(warning.message)]  # torch complains of hooks of others
    assert warnings.filters == filters
    torch.testing.assert_close(compiled(tokens), before)
    assert counter.frame_count == frames
