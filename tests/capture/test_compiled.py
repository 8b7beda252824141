"""Compiled models run eagerly while they are watched, or are left alone; and as they were compiled after that."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from models import Attention, LanguageModel, fit
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AttentionMonitor, AttentionObserver, AttentionWarning, record
from lightning_attn.capture.isolation import compiled_modules


class WrittenOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(tokens).chunk(3, dim=-1)
        return (query @ key.mT / 32**0.5).softmax(-1) @ value


class Stack(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Attention(is_causal=True), WrittenOut(), nn.MultiheadAttention(32, 4, batch_first=True))

    def forward(self, tokens: Tensor) -> Tensor:
        fused, written, packaged = self
        tokens = tokens + fused(tokens)
        tokens = tokens + written(tokens)
        return tokens + packaged(tokens, tokens, tokens, need_weights=False)[0]


Compile = Callable[[nn.Module, Any], nn.Module]


def as_a_whole(model: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)


def without_a_break(model: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def block_by_block(model: nn.Module, backend: Any) -> nn.Module:
    for block in model:
        block.compile(backend=backend)
    return model


CELLS: list[Compile] = [as_a_whole, without_a_break, in_place, block_by_block]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("statistics", ["max_logit", None], ids=["one statistic", "all statistics"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("compile_", CELLS, ids=lambda cell: cell.__name__)
def test_a_compiled_model_is_seen_and_not_compiled_again(
    compile_: Compile, training: bool, statistics: str | None
) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    model = Stack().train(training)
    model[0].eval()  # no dropout
    compiled, tokens = compile_(model, counter), torch.randn(2, 8, 32)
    before = compiled(tokens)
    compiled(tokens).sum().backward()
    frames, operations = counter.frame_count, counter.op_count
    assert frames
    observer = AttentionObserver(compiled, statistics=statistics)
    for _ in range(3):
        with observer:
            compiled(tokens).sum().backward()
        assert observer.snapshot().sites == ("0", "1", "2")
        torch.testing.assert_close(compiled(tokens), before)
        compiled(tokens).sum().backward()
    assert (counter.frame_count, counter.op_count) == (frames, operations)


@pytest.mark.parametrize("compile_", CELLS, ids=lambda cell: cell.__name__)
def test_torch_does_not_complain_of_a_hook_that_the_user_never_set(compile_: Compile) -> None:
    """Statistics of hidden states take one hook for the process, of which compiled modules warn at every call."""
    model = compile_(Stack().eval(), "eager")
    observer = AttentionObserver(model, statistics="token_similarity", strict=True)
    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as said, observer:
        model(torch.randn(2, 12, 32))
    assert observer.snapshot().summary("token_similarity") is not None
    assert not [warning for warning in said if "hook" in str(warning.message)]
    assert warnings.filters == filters


@pytest.mark.parametrize("first", ["watched", "plain"])
def test_a_model_that_is_first_called_while_it_is_watched_is_compiled_later_without_the_watching(first: str) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    model = Stack().eval()
    compiled, tokens = without_a_break(model, counter), torch.randn(2, 8, 32)
    if first == "watched":
        with record(compiled) as recording:
            compiled(tokens)
        assert len(recording.calls) == 3
        assert counter.frame_count == 0
    compiled(tokens)
    operations = counter.op_count
    torch._dynamo.reset()
    alone = torch._dynamo.testing.CompileCounter()
    without_a_break(model, alone)(tokens)
    assert operations == alone.op_count


def test_inductor() -> None:
    model, tokens = Stack().eval(), torch.randn(2, 8, 32)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        before = compiled(tokens)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        observer = AttentionObserver(model)
        with observer:
            watched = compiled(tokens)
        after = compiled(tokens)
    assert observer.snapshot().sites == ("0", "1", "2")
    assert torch.equal(before, after)
    torch.testing.assert_close(watched, before, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


# A Trainer with a compiled LightningModule.


class Compilable(LanguageModel):
    """Nothing in its step changes from one batch to the next, so that it is compiled once."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: dict[str, Tensor], *_: object) -> None:
        self.losses.append(outputs["loss"].item())


def trained(compile_: Callable[[Compilable, Any], Any], compiled: str) -> tuple[Compilable, int, AttentionMonitor]:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    torch.manual_seed(1)
    model = Compilable()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, Attention):
            module.eval()
    monitor = AttentionMonitor(every_n_steps=2, compiled=compiled, print_summary=False)
    fit(compile_(model, counter), monitor, steps=7)
    return model, counter.frame_count, monitor


def whole_step(model: Compilable, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def every_block(model: Compilable, backend: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def not_at_all(model: Compilable, backend: Any) -> Any:
    return model


@pytest.mark.parametrize("compile_", [whole_step, every_block])
@pytest.mark.filterwarnings("ignore:The model is compiled")
def test_a_compiled_lightning_module_is_watched(compile_: Callable[..., Any]) -> None:
    model, frames, monitor = trained(compile_, "eager")
    assert monitor.history.steps == [0, 2, 4, 6]
    assert monitor.snapshot.sites == ("blocks.0.attention", "blocks.1.attention")
    alone, frames_alone, _ = trained(compile_, "skip")
    assert frames == frames_alone
    torch.testing.assert_close(torch.tensor(model.losses), torch.tensor(alone.losses))


@pytest.mark.parametrize("compile_", [whole_step, every_block])
def test_a_compiled_model_is_left_out_on_request_and_that_is_said_once(compile_: Callable[..., Any]) -> None:
    with pytest.warns(AttentionWarning) as said:
        _, _, monitor = trained(compile_, "skip")
    messages = [str(warning.message) for warning in said if warning.category is AttentionWarning]
    assert len(messages) == 1
    assert "is compiled (" in messages[0] and "`compiled='eager'`" in messages[0]
    assert not monitor.history


def test_a_model_that_is_not_compiled_is_watched_whatever_was_asked() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttentionWarning)
        _, _, monitor = trained(not_at_all, "skip")
    assert monitor.history.steps == [0, 2, 4, 6]


def test_a_compiled_function_that_nobody_can_tell_of_is_not_compiled_again_while_compiled_modules_are_skipped() -> None:
    counter = torch._dynamo.testing.CompileCounter()
    functions = [torch.compile(functional.scaled_dot_product_attention, backend=counter)]

    class CallsIt(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return functions[0](tokens, tokens, tokens)

    model, tokens = CallsIt(), torch.randn(2, 4, 8, 16)
    model(tokens)
    frames = counter.frame_count
    with AttentionObserver(model, compiled="skip"):
        model(tokens)
    model(tokens)
    assert counter.frame_count == frames


@pytest.mark.parametrize("compile_", CELLS, ids=lambda cell: cell.__name__)
def test_compiled_modules_are_told(compile_: Compile) -> None:
    assert not compiled_modules(Stack())
    expected = ["0", "1", "2"] if compile_ is block_by_block else ["the model"]
    assert compiled_modules(compile_(Stack(), "eager")) == expected


compiled_globally = torch.compile(functional.scaled_dot_product_attention, backend="eager")


def test_compiled_methods_and_functions_are_told() -> None:
    compiled_outside = torch.compile(functional.scaled_dot_product_attention, backend="eager")

    class Global(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return compiled_globally(x, x, x)

    class Outside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return compiled_outside(x, x, x)

    class Method(nn.Module):
        @torch.compile(backend="eager")
        def forward(self, x: Tensor) -> Tensor:
            return x

    holder = nn.Sequential(nn.Identity(), Method(), Global(), Outside(), nn.ReLU())
    holder[0].attend = torch.compile(functional.scaled_dot_product_attention, backend="eager")
    assert compiled_modules(holder) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("make", [AttentionMonitor, lambda **given: AttentionObserver(nn.Identity(), **given)])
def test_a_wrong_choice_is_refused(make: Callable[..., object]) -> None:
    with pytest.raises(Exception, match="`compiled` must be 'eager' or 'skip', got 'always'"):
        make(compiled="always")
