"""Attention that is known by its numbers: distances for products, weights after a detour, exponentials of many keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_attn import AttentionWarning, record

SEQUENCES, HEADS, WIDTH = 2, 3, 4

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.project = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.codes = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.project(tokens).chunk(3, dim=-1)
        return self.attend(*(part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in parts))


def tokens(number: int = 7) -> Tensor:
    return torch.randn(SEQUENCES, number, HEADS * WIDTH)


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT / math.sqrt(WIDTH)


def by_distances(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (-torch.cdist(query, key).square()).softmax(-1) @ value


def by_distances_of_another_order(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """With fewer queries than keys, whose axes are then known by their order alone."""
    return (-torch.cdist(query[:, :, :4], key, p=1.0)).softmax(-1) @ value


def largest_keys_with_a_gradient_of_all(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scores_of(query, key)
    kept = scores.masked_fill(scores < scores.topk(3, dim=-1).values[..., -1:], -1e9).softmax(-1)
    others = scores.softmax(-1)
    return (kept.detach() + others - others.detach()) @ value


def taken_away_again(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    return (weights * 2 - weights.detach()) @ value


@pytest.mark.filterwarnings("error::lightning_attn.AttentionWarning")
@pytest.mark.parametrize(
    "attend",
    [by_distances, by_distances_of_another_order, largest_keys_with_a_gradient_of_all, taken_away_again],
    ids=lambda attend: attend.__name__,
)
def test_what_is_seen_is_what_the_model_computed(attend: Attend) -> None:
    model = Model(attend)
    with record(model) as recording:
        output = model(tokens())
    (call,) = recording.calls
    torch.testing.assert_close(call.output(), output.detach(), rtol=0, atol=1e-5)


def test_hard_weights_are_not_those_of_the_softmax() -> None:
    def hard(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = scores_of(query, key).softmax(-1)
        largest = nn.functional.one_hot(weights.argmax(-1), weights.shape[-1]).to(weights)
        return (largest + weights - weights.detach()) @ value

    model = Model(hard)
    with pytest.warns(AttentionWarning, match="changes its weights after the softmax"), record(model) as recording:
        model(tokens())
    (call,) = recording.calls
    assert call.value is None


@pytest.mark.parametrize("number", [7, 400])
def test_exponentials_that_were_masked_are_refused_whatever_the_number_of_keys(number: int) -> None:
    """Of many keys each has a small weight, so that its error is small too."""

    def of_the_first_half(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        exponentials = scores_of(query, key).exp() * (torch.arange(number) < number // 2)
        return (exponentials / exponentials.sum(-1, keepdim=True)) @ value

    model = Model(of_the_first_half)
    with pytest.warns(AttentionWarning, match="over something else than their sum"), record(model) as recording:
        model(tokens(number))
    assert not recording.calls


def test_distances_to_codes_are_a_codebook() -> None:
    model = Model(lambda query, key, value: query)
    model.attend = lambda query, key, value: (-torch.cdist(query, model.codes)).softmax(-1) @ model.codes
    with pytest.warns(AttentionWarning, match="No attention was seen"), record(model) as recording:
        model(tokens())
    assert not recording.calls
