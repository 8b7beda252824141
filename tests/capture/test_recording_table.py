"""What a recording looks like when it is printed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import record


class Attention(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(self.weight * query, key, key, **self.arguments)


def line(queries: int = 6, keys: int = 6, key_heads: int = 4, **arguments: Any) -> str:
    model = Attention(**arguments)
    with record(model) as recording:
        model(torch.randn(2, 4, queries, 8), torch.randn(2, key_heads, keys, 8))
    head, *lines = str(recording).splitlines()
    assert head.split() == ["site", "calls", "heads", "queries", "×", "keys", "see", "read", "from"]
    (only,) = lines
    return only


WINDOW = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)
PADDED = torch.ones(2, 1, 1, 6, dtype=torch.bool)
PADDED[1, :, :, 4:] = False


@pytest.mark.parametrize(
    ("arguments", "sees"),
    [
        ({}, "all keys"),
        ({"is_causal": True}, "earlier keys"),
        ({"attn_mask": WINDOW}, "the last 3 keys"),
        ({"attn_mask": WINDOW.T}, "42% of keys"),
        ({"attn_mask": PADDED}, "all keys, padding hidden"),
        ({"attn_mask": PADDED & WINDOW.tril()}, "the last 3 keys, padding hidden"),
        ({"attn_mask": torch.zeros(6, 6).masked_fill(~WINDOW, -torch.inf)}, "the last 3 keys"),
    ],
    ids=str,
)
def test_what_queries_see(arguments: dict[str, Any], sees: str) -> None:
    assert line(**arguments).split("6 × 6  ")[1].split("  queries and keys")[0].strip() == sees


def test_a_query_that_continues_a_cache_sees_earlier_keys() -> None:
    mask = torch.ones(2, 6, dtype=torch.bool).tril(4)
    assert "earlier keys" in line(queries=2, attn_mask=mask)


def test_what_it_was_read_from() -> None:
    assert line().endswith("queries and keys of width 8")
    assert line(attn_mask=torch.randn(6, 6)).endswith("queries and keys of width 8, a bias")
    assert "4 in groups of 2" in line(key_heads=2, enable_gqa=True)


def test_calls_that_differ_have_a_line_each() -> None:
    model = Attention()
    with record(model) as recording:
        for length in (3, 3, 5):
            model(torch.randn(2, 4, length, 8), torch.randn(2, 4, length, 8))
    assert [text.split()[1:3] for text in str(recording).splitlines()[1:]] == [["2", "4"], ["1", "4"]]


def test_nothing_is_a_head_line_only() -> None:
    with pytest.warns(match="No attention was seen"), record(nn.Linear(2, 2)) as recording:
        pass
    assert str(recording).startswith("site") and "\n" not in str(recording)
