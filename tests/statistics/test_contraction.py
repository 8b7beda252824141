"""Values are asked for where a statistic needs them, and only there; what heads make of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_attn import AttentionCall, AttentionObserver
from lightning_attn.capture import Visibility
from lightning_attn.statistics import joint, known_statistics, measure, resolve


def contraction(call: AttentionCall) -> list[float]:
    return measure(call, resolve("value_contraction"))["value_contraction"].or_nan.tolist()


def of_logits(logits: Tensor, value: Tensor | None, **visibility: Any) -> AttentionCall:
    n = len(logits)
    query, key = torch.zeros(1, 1, n, 1), torch.zeros(1, 1, n, 1)
    return AttentionCall("site", query, key, value, 1.0, Visibility(bias=logits[None, None], **visibility), True)


@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_closed_forms(mean: float) -> None:
    """Copying keeps the spread, uniform attention leaves nothing of it, whatever all values have in common."""
    n = 64
    value = torch.randn(1, 1, n, 8) + mean
    assert contraction(of_logits(200 * torch.eye(n), value)) == [pytest.approx(1, rel=1e-6)]
    assert contraction(of_logits(torch.zeros(n, n), value)) == [pytest.approx(0, abs=1e-6)]


def test_random_values_under_uniform_causal_attention() -> None:
    n = 64
    call = of_logits(torch.zeros(n, n), torch.randn(1, 1, n, 4096), causal_offset=0)
    assert contraction(call) == [pytest.approx(0.21, abs=0.005)]


def test_a_nearly_collapsed_head_has_a_small_contraction_that_is_right() -> None:
    """Its outputs agree to five digits."""
    n = 40
    logits = 1e-5 * torch.randn(n, n)
    value = torch.randn(1, 1, n, 6) + 100
    weights = torch.softmax(logits.double(), -1).numpy()
    values = value[0, 0].double().numpy()
    outputs, spread = weights @ values, np.linalg.norm(values - values.mean(0))
    expected = np.linalg.norm(outputs - outputs.mean(0)) / spread
    assert contraction(of_logits(logits, value)) == [pytest.approx(expected, rel=0.05)]


@pytest.mark.parametrize("value", [None, torch.ones(1, 1, 5, 3), torch.full((1, 1, 5, 3), math.nan)])
def test_absent_where_values_are_unknown_alike_or_not_finite(value: Tensor | None) -> None:
    call = of_logits(torch.randn(5, 5), value)
    assert all(map(math.isnan, contraction(call)))
    sums = measure(call, resolve("value_contraction"))["value_contraction"]
    assert sums.numerator.tolist() == sums.denominator.tolist() == [0]


def test_what_a_hidden_value_holds_has_no_effect() -> None:
    mask = (torch.arange(6) != 3)[None, None, None]
    value = torch.randn(1, 1, 6, 3)
    clean = contraction(of_logits(torch.zeros(6, 6), value, mask=mask, causal_offset=0))
    value[:, :, 3] = math.nan
    assert contraction(of_logits(torch.zeros(6, 6), value, mask=mask, causal_offset=0)) == clean


@pytest.mark.parametrize("value_heads", [1, 2, 4])
def test_heads_share_values(value_heads: int) -> None:
    query, key, value = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, value_heads, 9, 5)
    call = AttentionCall("site", query, key, value, 0.3, Visibility(0), True)
    repeated = value.repeat_interleave(4 // value_heads, dim=1)
    whole = AttentionCall("site", query, key.repeat_interleave(2, dim=1), repeated, 0.3, Visibility(0), True)
    assert contraction(call) == pytest.approx(contraction(whole), rel=1e-6)
    for head in (0, 1):
        of_head = call.select(key_heads=slice(head, head + 1))
        assert contraction(of_head) == pytest.approx(contraction(whole)[2 * head : 2 * head + 2], rel=1e-6)
        torch.testing.assert_close(of_head.output(), call.output()[:, 2 * head : 2 * head + 2])


def test_values_are_captured_for_those_who_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.MultiheadAttention(16, num_heads=4, batch_first=True)
    tokens = torch.randn(2, 7, 16)
    seen: list[AttentionCall] = []

    def measured(call: AttentionCall, *arguments: Any, **options: Any) -> Any:
        seen.append(call)
        return measure(call, *arguments, **options)

    monkeypatch.setattr(joint, "measure", measured)
    needing = [name for name, statistic in known_statistics().items() if getattr(statistic, "needs_values", False)]
    assert {"value_contraction", "value_weighted_sink"} <= {*needing}
    for names in (None, needing, [name for name in known_statistics() if name not in needing]):
        watching = AttentionObserver(layer, statistics=names)
        with watching:
            layer(tokens, tokens, tokens, need_weights=False)
        watching.snapshot()
    with_values, only_values, without = seen
    assert with_values.value is not None and only_values.value is not None
    assert without.value is None
