"""Heads that weights of their own project, ahead of the sequences; names that are no arguments."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_attn import record

WIDTH, TOKENS = 4, 5


class Layer(nn.Module):
    def __init__(self, heads: int, project: Callable[[Tensor, Tensor], Tensor], is_fused: bool) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, heads, heads * WIDTH, WIDTH) / 2)
        self.project, self.is_fused = project, is_fused

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = (self.project(tokens, weight) for weight in self.weights)
        if self.is_fused:
            return scaled_dot_product_attention(query, key, value)
        return (query @ key.mT / math.sqrt(WIDTH)).softmax(-1) @ value


def by_batches(x: Tensor, weight: Tensor) -> Tensor:
    heads = len(weight)
    return torch.bmm(x.repeat(heads, 1, 1).view(heads, -1, x.shape[-1]), weight).view(-1, TOKENS, WIDTH)


def by_broadcasting(x: Tensor, weight: Tensor) -> Tensor:
    return (x.reshape(1, -1, x.shape[-1]) @ weight).view(-1, TOKENS, WIDTH)


def by_broadcasting_of_sequences(x: Tensor, weight: Tensor) -> Tensor:
    return (x.unsqueeze(0) @ weight.unsqueeze(1)).reshape(-1, TOKENS, WIDTH)


@pytest.mark.parametrize("is_fused", [False, True], ids=["written out", "fused"])
@pytest.mark.parametrize(("sequences", "heads"), [(3, 4), (4, 4), (2, 2), (1, 3)])
@pytest.mark.parametrize("project", [by_batches, by_broadcasting, by_broadcasting_of_sequences])
def test_heads_are_ahead_of_the_sequences(
    project: Callable[[Tensor, Tensor], Tensor], sequences: int, heads: int, is_fused: bool
) -> None:
    model = Layer(heads, project, is_fused)
    tokens = torch.randn(sequences, TOKENS, heads * WIDTH)
    with record(model) as recording:
        model(tokens)
    (call,) = recording.calls
    query, key, _ = torch.einsum("bnd,phde->pbhne", tokens.double(), model.weights.detach().double())
    expected = (query @ key.mT / math.sqrt(WIDTH)).softmax(-1)
    torch.testing.assert_close(call.weights().double(), expected, rtol=0, atol=1e-5)


def test_a_single_sequence_whose_heads_nothing_tells() -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 24)

        def forward(self, tokens: Tensor) -> Tensor:
            parts = self.project(tokens).chunk(3, dim=-1)
            query, key, value = (torch.stack([part[..., :4].sin(), part[..., 4:].cos()], dim=1) for part in parts)
            return scaled_dot_product_attention(query, key, value)

    with record(model := Stacked()) as recording:
        model(torch.randn(1, TOKENS, 8))
    (call,) = recording.calls
    assert (call.sequences, call.heads) == (1, 2)


def test_a_variable_of_the_name_is_no_argument() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 24)

        def forward(self, tokens: Tensor) -> Tensor:
            outputs = []
            for part in self.project(tokens).split(12, dim=-1):
                query, key, value = part.chunk(3, dim=-1)
                context = (query @ key.mT).softmax(-1) @ value
                outputs.append(context)
            return torch.cat(outputs, dim=-1)

    with record(model := Loop()) as recording:
        model(torch.randn(2, TOKENS, 8))
    assert [call.self_attention for call in recording.calls] == [True, True]
