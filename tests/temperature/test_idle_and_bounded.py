"""What is inactive, bounded or no query, and would be taken for queries by a proof that looks less closely."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from temperature.exactness import found
from temperature.own_attention import HEADS, WIDTH, Parts, Separate, batch, made
from torch import Tensor, nn
from torch.nn import functional

FIRST = "blocks.0.attention"


def run(model: nn.Module) -> Any:
    return model(batch())


class Clamped(Separate):
    """Queries are clamped behind their projection, at a bound that nothing comes to yet."""

    def parts(self, tokens: Tensor) -> Parts:
        query, key, value = super().parts(tokens)
        return query.clamp(-20, 20), key, value


class Bent(Separate):
    def parts(self, tokens: Tensor) -> Parts:
        query, key, value = super().parts(tokens)
        return torch.tanh(query), key, value


class WithAdapter(Separate):
    """A second layer adds to the queries, of which nothing is to be seen before it is trained."""

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self.added = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.added.weight)

    def parts(self, tokens: Tensor) -> Parts:
        query, key, value = super().parts(tokens)
        return query + self.added(tokens).view_as(query.transpose(1, 2)).transpose(1, 2), key, value


class LowRankLinear(nn.Linear):
    """A layer with an adapter inside, which is zero at first."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.down = nn.Parameter(torch.randn(2, width))
        self.up = nn.Parameter(torch.zeros(width, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + tokens @ self.down.T @ self.up.T


class OfLowRank(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.query = LowRankLinear(WIDTH)


class PairBias(Separate):
    """Cosine attention whose only layer with a channel for each head makes a bias of positions (Swin V2)."""

    def __init__(self) -> None:
        super().__init__("softmax")
        self.position = nn.Linear(2, HEADS)

    def parts(self, tokens: Tensor) -> Parts:
        query, key, value = super().parts(tokens)
        return functional.normalize(query, dim=-1), functional.normalize(key, dim=-1), value

    def bias(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], dtype=tokens.dtype)
        distance = place - place[:, None]
        bias_HNN = self.position(torch.stack([distance, distance.abs()], -1)).permute(2, 0, 1)
        return bias_HNN.masked_fill(distance > 0, -torch.inf)


@pytest.mark.parametrize("kind", [Clamped, Bent])
def test_what_bounds_queries_is_noticed_before_anything_comes_to_the_bound(kind: type[Separate]) -> None:
    temperature = found(made(kind), run)
    assert temperature.sites == {} and FIRST in temperature.refused


@pytest.mark.parametrize("form", ["sdpa", "softmax"])
def test_a_layer_that_may_add_to_the_queries_is_waited_for(form: str) -> None:
    model = made(lambda: WithAdapter(form))
    temperature = found(model, run)
    assert temperature.sites == {} and "zero still" in temperature.refused[FIRST]


def test_when_it_is_trained_the_queries_have_two_makers() -> None:
    model = made(lambda: WithAdapter("sdpa"))
    for block in model.blocks:
        nn.init.normal_(block.attention.added.weight)
    temperature = found(model, run)
    assert temperature.sites == {} and "zero still" not in temperature.refused[FIRST]


def test_an_adapter_within_the_layer_is_refused_also_while_it_is_zero() -> None:
    temperature = found(made(OfLowRank), run)
    assert temperature.sites == {} and "does more than multiply by its weight" in temperature.refused[FIRST]


def test_a_bias_of_positions_is_not_taken_for_queries() -> None:
    temperature = found(made(PairBias), run)
    assert temperature.sites == {} and FIRST in temperature.refused


class TellsPrecision(nn.Linear):
    """Keeps in which precision it multiplies."""

    precisions: ClassVar[set[str]] = set()

    def forward(self, tokens: Tensor) -> Tensor:
        self.precisions.add(torch.get_float32_matmul_precision())
        return super().forward(tokens)


class OfTellsPrecision(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.query = TellsPrecision(WIDTH, WIDTH)


def test_what_is_written_into_weights_is_tried_in_full_precision() -> None:
    """On a GPU lower precision rounds by more than what the trial allows."""
    model = made(OfTellsPrecision)
    temperature = found(model, run)
    temperature.set_temperatures(FIRST, 3.0)
    torch.set_float32_matmul_precision("high")
    try:
        TellsPrecision.precisions.clear()
        assert temperature.fold() == {}
    finally:
        torch.set_float32_matmul_precision("highest")
    assert TellsPrecision.precisions == {"highest"}
