"""While a graph is made of a model inside a capture, the capture stands aside: the graph is the one without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from lightning_attn import AttentionObserver, AttentionWarning, observe, record

WIDTH = 8


class WrittenOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.project(tokens).chunk(3, -1)
        return torch.softmax(query @ key.transpose(-1, -2) / WIDTH**0.5, -1) @ value


class Fused(WrittenOut):
    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.project(tokens)[:, None].chunk(3, -1)
        return functional.scaled_dot_product_attention(query, key, value)[:, 0]


class Telling(WrittenOut):
    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.project(tokens)[:, None].chunk(3, -1)
        observe(query, key, value)
        return functional.softsign(query @ key.mT) @ value


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        attended: Tensor = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return attended


MODELS = {kind.__name__: kind for kind in (WrittenOut, Fused, Telling, Multihead)}


def tokens() -> Tensor:
    return torch.randn(2, 5, WIDTH)


def operations(graph: torch.Graph) -> list[str]:
    """What a script computes, without the names that torch makes anew for every one."""
    return [node.kind() for node in graph.nodes()]


def with_fake_tensors(model: nn.Module, given: Tensor) -> str:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        return str(model(mode.from_tensor(given)).shape)


GRAPHS: dict[str, Callable[[nn.Module, Tensor], str]] = {
    "torch.jit.trace": lambda model, given: str(
        operations(torch.jit.trace(model, given, check_trace=False).inlined_graph)
    ),
    "torch.export": lambda model, given: torch.export.export(model, (given,)).graph_module.code,
    "make_fx": lambda model, given: make_fx(model)(given).code,
    "make_fx, symbolic": lambda model, given: (
        make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(given).code
    ),
    "fake tensors": with_fake_tensors,
}


@pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", GRAPHS)
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_is_the_same_inside_a_capture_which_sees_what_comes_after(name: str, how: str) -> None:
    model, given = MODELS[name](), tokens()
    without = GRAPHS[how](model, given)
    with warnings.catch_warnings(record=True) as said, record(model) as recording:
        warnings.simplefilter("always")
        model(given)
        inside = GRAPHS[how](model, given)
        model(given)
    assert inside == without
    assert len(recording.calls) == 2
    mine = [str(warning.message) for warning in said if issubclass(warning.category, AttentionWarning)]
    assert len(mine) == 1 and "while a graph is made of it" in mine[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_that_is_made_before_dispatch_has_nothing_of_the_capture_in_it(name: str) -> None:
    model, given = MODELS[name](), tokens()
    without = make_fx(model, pre_dispatch=True)(given).code
    with record(model) as recording:
        assert make_fx(model, pre_dispatch=True)(given).code == without
    assert len(recording.calls) == 1  # its tensors have numbers


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_of_the_compiler_has_nothing_of_the_capture_in_it(name: str) -> None:
    model, given = MODELS[name](), tokens()
    _, without = (torch.export.export(model, (given,), strict=True).graph_module.code for _ in range(2))  # names differ
    with record(model) as recording:
        assert torch.export.export(model, (given,), strict=True).graph_module.code == without
        model(given)
    assert len(recording.calls) == 1


@pytest.mark.parametrize("kind", [WrittenOut, Fused])
def test_symbolic_tracing(kind: type[nn.Module]) -> None:
    model, given = kind(), tokens()
    without = torch.fx.symbolic_trace(model).code
    with pytest.warns(AttentionWarning, match="while a graph is made of it"), record(model) as recording:
        inside = torch.fx.symbolic_trace(model).code
        model(given)
    assert inside == without
    assert len(recording.calls) == 1


@pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
def test_nothing_is_said_of_another_model_that_is_traced() -> None:
    other = WrittenOut()

    class Outer(Fused):
        def forward(self, tokens: Tensor) -> Tensor:
            torch.jit.trace(other, tokens, check_trace=False)
            return super().forward(tokens)

    with warnings.catch_warnings(), record(model := Outer()) as recording:
        warnings.simplefilter("error", AttentionWarning)
        model(tokens())
    assert recording.sites == ("(root)",)


@pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
def test_a_site_that_is_not_chosen_is_traced_in_silence() -> None:
    model = nn.ModuleDict({"traced": Fused(), "watched": Fused()})
    with warnings.catch_warnings(), record(model, sites="watched") as recording:
        warnings.simplefilter("error", AttentionWarning)
        torch.jit.trace(model["traced"], tokens(), check_trace=False)
        model["watched"](tokens())
    assert recording.sites == ("watched",)


@pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
def test_it_is_said_once_and_hidden_states_are_left_alone() -> None:
    model, given = Multihead(), tokens()
    observer = AttentionObserver(model, statistics=["token_similarity", "entropy"])
    with pytest.warns(AttentionWarning, match="while a graph is made of it") as said:
        for _ in range(2):
            with observer:
                torch.jit.trace(model, given, check_trace=False)
                model(given)
    assert len([warning for warning in said if issubclass(warning.category, AttentionWarning)]) == 1
    assert len(observer.snapshot()["attention", "token_similarity"]) == 1
