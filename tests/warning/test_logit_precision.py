"""`LogitPrecision`: logits that are too large for the type they come in, from a model to a warning."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AttentionObserver
from lightning_attn.warning import EarlyWarning, LogitPrecision, Watch, built_in_rules


class Site(nn.Module):
    """Two heads: the first has logits from 0 to 3, the second has all of a given size."""

    def forward(self, size: float, dtype: torch.dtype) -> Tensor:
        query = torch.full((1, 2, 4, 1), 1.0, dtype=dtype)
        key = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=dtype)[:, None].repeat(1, 2, 1, 1)
        key[:, 1] = size
        return functional.scaled_dot_product_attention(query, key, key, scale=1.0)


def warnings_of(size: float, dtype: torch.dtype, snapshots: int = 2) -> list[EarlyWarning]:
    rule = LogitPrecision()
    watch, observer = Watch([rule]), AttentionObserver(model := Site(), statistics=list(rule.statistics))
    found: list[EarlyWarning] = []
    for step in range(snapshots):
        with observer:
            model(size, dtype)
        found += watch.look(observer.snapshot(step))
    return found


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 512.0), (torch.bfloat16, -512.0), (torch.float16, 4096.0)], ids=str
)
def test_it_warns_of_logits_that_are_too_large_for_their_type(dtype: torch.dtype, size: float) -> None:
    (warning,) = warnings_of(size, dtype, snapshots=4)
    assert (warning.rule, warning.severity, warning.step) == ("logit_precision", "warning", 1)
    assert (warning.site, warning.head, warning.value) == ("(root)", 1, 4.0)
    assert warning.meaning and warning.remedy


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bfloat16, 508.0), (torch.float16, 4092.0), (torch.float32, 4096.0), (torch.float32, 1e6)],
    ids=str,
)
def test_it_says_nothing_of_logits_that_their_type_can_hold(dtype: torch.dtype, size: float) -> None:
    assert warnings_of(size, dtype) == []


def test_under_autocast_the_type_is_that_of_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (warning,) = warnings_of(512.0, torch.float32)
    assert warning.value == 4.0


def test_it_is_among_the_built_in_rules_behind_the_level() -> None:
    names = [rule.name for rule in built_in_rules()]
    assert names[names.index("logit_level") + 1] == "logit_precision"


def test_it_says_nothing_of_alibi_in_a_long_sequence() -> None:
    """Keys far away have logits down to -1023 (BLOOM, MPT), and no weight that rounding could change."""

    class WithBias(nn.Module):
        def forward(self) -> Tensor:
            tokens = torch.ones(1, 1, 2048, 1, dtype=torch.bfloat16)
            distance = torch.arange(2048)[:, None] - torch.arange(2048)
            bias = torch.where(distance >= 0, -0.5 * distance, -torch.inf).bfloat16()
            return functional.scaled_dot_product_attention(tokens, tokens, tokens, bias, scale=1.0)

    observer = AttentionObserver(model := WithBias(), statistics="logit_spacing")
    watch = Watch([LogitPrecision(patience=1)])
    with observer:
        model()
    assert watch.look(observer.snapshot()) == []
