"""Queries in another order than keys: row and column of one number are not one token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_attn import AttentionObserver, record

HEADS, WIDTH, TOKENS = 2, 4, 6
CHANNELS = HEADS * WIDTH
ORDER = torch.tensor([3, 0, 5, 1, 4, 2])

Change = Callable[[Tensor], Tensor]


def by_an_index(heads: Tensor) -> Tensor:
    return heads[:, :, ORDER]


def by_indices_of_all_axes(heads: Tensor) -> Tensor:
    """As Informer chooses its queries."""
    order = heads.norm(dim=-1).topk(TOKENS, dim=-1).indices
    return heads[torch.arange(len(heads))[:, None, None], torch.arange(HEADS)[None, :, None], order]


def by_gather(heads: Tensor) -> Tensor:
    return heads.gather(2, ORDER[None, None, :, None].expand(heads.shape))


def by_index_select(heads: Tensor) -> Tensor:
    return heads.index_select(2, ORDER)


class Layer(nn.Module):
    def __init__(self, of_tokens: Change, of_queries: Change, is_fused: bool) -> None:
        super().__init__()
        self.project = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.of_tokens, self.of_queries, self.is_fused = of_tokens, of_queries, is_fused

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.of_tokens(self.project(tokens)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in parts)
        query = self.of_queries(query) * 1.5
        if self.is_fused:
            return scaled_dot_product_attention(query, key, value)
        return (query @ key.mT / 2).softmax(-1) @ value


def is_square(of_tokens: Change, of_queries: Change, is_fused: bool) -> bool:
    model = Layer(of_tokens, of_queries, is_fused)
    tokens = torch.randn(2, TOKENS, CHANNELS)
    with record(model) as recording:
        model(tokens)
    (call,) = recording.calls
    observer = AttentionObserver(model, statistics=["self_weight", "entropy"])
    with observer:
        model(tokens)
    snapshot = observer.snapshot()
    assert (snapshot["(root)", "self_weight"][0] is not None) == call.is_square
    assert snapshot["(root)", "entropy"][0] is not None
    return call.is_square


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("is_fused", [False, True], ids=["written out", "fused"])
@pytest.mark.parametrize("change", [by_an_index, by_indices_of_all_axes, by_gather, by_index_select])
def test_queries_in_an_order_of_their_own_are_not_the_tokens_of_the_keys(change: Change, is_fused: bool) -> None:
    assert not is_square(unchanged, change, is_fused)


@pytest.mark.parametrize("is_fused", [False, True], ids=["written out", "fused"])
def test_tokens_that_were_all_put_into_another_order_are(is_fused: bool) -> None:
    assert is_square(lambda tokens: tokens[:, ORDER], unchanged, is_fused)
    assert is_square(lambda tokens: tokens.roll(2, 1), lambda heads: heads[..., :2, :, :], is_fused)


@pytest.mark.parametrize("is_fused", [False, True], ids=["written out", "fused"])
def test_what_is_added_to_queries_may_have_been_looked_up(is_fused: bool) -> None:
    table = nn.Linear(CHANNELS, WIDTH)(torch.randn(TOKENS, CHANNELS))
    assert is_square(unchanged, lambda heads: heads + table[ORDER], is_fused)
