"""Attention that goes through functions into which nothing can see: scripts, one's own operations, foreign memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_attn import AttentionObserver, AttentionWarning, record
from lightning_attn.capture.opaque import opaque_calls

SEQUENCES, HEADS, TOKENS, WIDTH = 2, 3, 7, 4
MODEL_WIDTH = HEADS * WIDTH
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()

Attend = Callable[["Model", Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Projects tokens to queries, keys and values of several heads, and has a function attend."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.project = nn.Linear(MODEL_WIDTH, 3 * MODEL_WIDTH)
        self.experts = nn.Parameter(torch.randn(4, WIDTH))
        self.scripted, self.fused = torch.jit.script(Clamp()), torch.jit.script(Fused())
        self.told: list[tuple[Tensor, Tensor]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attend(self, *self.project(tokens).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4))


class Clamp(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return (scores / 2.0).tanh() * 2.0


class Fused(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


@torch.jit.script
def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.transpose(-1, -2), dim=-1) @ value


@torch.jit.script
def soft_clamp(scores: Tensor, value: float) -> Tensor:
    return (scores / value).tanh() * value


@torch.jit.script
def softmax(scores: Tensor, dim: int) -> Tensor:
    """What it is called says nothing of what it does."""
    return scores * 2.0


@torch.jit.script
def hide(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(visible.logical_not(), -1e9)


@torch.jit.script
def fused_softmax(scores: Tensor) -> Tensor:
    return (0.5 * scores).softmax(-1)


@torch.jit.script
def drop_some(weights: Tensor) -> Tensor:
    return weights * (torch.arange(weights.shape[-1]) != 2) * 1.25


@torch.jit.script
def normalised(codes: Tensor) -> Tensor:
    return torch.nn.functional.normalize(codes, dim=-1)


@torch.jit.script
def mixed(first: Tensor, second: Tensor) -> Tensor:
    return first * second + first


@torch.jit.script
def weigh(weights: Tensor, value: Tensor) -> Tensor:
    return torch.matmul(weights, value)


@torch.library.custom_op("lightning_attn_tests::halved", mutates_args=())
def halved(scores: Tensor) -> Tensor:
    return scores / 2


@torch.library.custom_op("lightning_attn_tests::scores", mutates_args=())
def scores_by_an_operator(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT


halved.register_autograd(lambda ctx, gradient: gradient / 2)


class Halved(torch.autograd.Function):
    """As a kernel of one's own is given its gradient; what it does is not shown."""

    @staticmethod
    def forward(ctx: object, scores: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return scores / 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient / 2


class HalvedInMemoryOfItsOwn(Halved):
    @staticmethod
    def forward(ctx: object, scores: Tensor) -> Tensor:
        result = torch.empty_like(scores)
        with torch._C.DisableTorchFunction():
            return result.copy_(scores / 2)


class HalvedInSight(Halved):
    @staticmethod
    def forward(ctx: object, scores: Tensor) -> Tensor:
        return scores / 2


class RoundedProduct(torch.autograd.Function):
    """As products of low precision are computed."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor) -> Tensor:
        ctx.save_for_backward(query, key)
        with torch._C.DisableTorchFunction():
            return (query.bfloat16() @ key.mT.bfloat16()).float() / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        query, key = ctx.saved_tensors
        return gradient @ key / 2, (gradient.mT @ query / 2).sum_to_size(key.shape)


class SoftmaxInSight(torch.autograd.Function):
    """As DeBERTa has had it: the mask is applied before and after."""

    @staticmethod
    def forward(ctx: object, scores: Tensor) -> Tensor:
        hidden = ~CAUSAL
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0.0)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class FusedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, scores: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return scores.softmax(-1)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


BOUND_EARLIER = Halved.apply
TRACED = torch.jit.trace(lambda scores: scores / 2, torch.randn(3))


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.transpose(-1, -2) / math.sqrt(WIDTH)


def told(model: Model, scores: Tensor, value: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    output = weights @ value
    with torch._C.DisableTorchFunction():
        model.told.append((weights.detach().clone(), output.detach().clone()))
    return output


def through(change: Callable[[Model, Tensor], Tensor]) -> Callable[[Attend], Attend]:
    """An attention whose scores go through something."""

    def attend(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return told(model, change(model, scores_of(query, key)), value)

    return attend  # type: ignore[return-value]


def in_foreign_memory(tensor: Tensor) -> Tensor:
    return torch.from_numpy(tensor.detach().numpy() / 2)


CHANGES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "script": lambda model, scores: soft_clamp(scores, 2.0),
    "script with a name that means something else": lambda model, scores: softmax(scores, -1),
    "scripted module": lambda model, scores: model.scripted(scores),
    "trace": lambda model, scores: TRACED(scores),
    "mask in a script": lambda model, scores: hide(scores, CAUSAL),
    "mask before a script": lambda model, scores: soft_clamp(scores.masked_fill(~CAUSAL, -1e9), 1e5),
    "mask after a script": lambda model, scores: soft_clamp(scores, 2.0).masked_fill(~CAUSAL, -math.inf),
    "function": lambda model, scores: Halved.apply(scores),
    "function bound earlier": lambda model, scores: BOUND_EARLIER(scores),
    "function with memory of its own": lambda model, scores: HalvedInMemoryOfItsOwn.apply(scores),
    "function in sight": lambda model, scores: HalvedInSight.apply(scores),
    "operator": lambda model, scores: halved(scores),
    "operator by its name": lambda model, scores: torch.ops.lightning_attn_tests.halved.default(scores),
    "aten by its name": lambda model, scores: torch.ops.aten.tanh.default(scores),
}


@pytest.mark.filterwarnings("error::lightning_attn.AttentionWarning")
@pytest.mark.parametrize("training", [True, False], ids=["train", "no_grad"])
@pytest.mark.parametrize("name", CHANGES)
def test_logits_are_followed_through_it(name: str, training: bool) -> None:
    model = Model(through(CHANGES[name]))
    with torch.set_grad_enabled(training), record(model) as recording:
        model(2 * torch.randn(SEQUENCES, TOKENS, MODEL_WIDTH))
    (call,), ((weights, output),) = recording.calls, model.told
    assert call.site == "(root)"
    torch.testing.assert_close(call.weights(), weights, rtol=0, atol=1e-5)
    torch.testing.assert_close(call.output(), output, rtol=0, atol=1e-5)
    assert torch.equal(call.logits()[1], weights != 0)


def by_operators(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.ops.aten.bmm.default(query.flatten(0, 1), key.flatten(0, 1).mT).unflatten(0, (SEQUENCES, HEADS))
    weights = torch.ops.aten.softmax.int(scores, -1)
    return torch.ops.aten.matmul(weights, value)


def fused_by_its_name(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.ops.aten.scaled_dot_product_attention.default(query, key, value, None, 0.0, True, scale=1.0)


def dropped_in_a_script(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return drop_some(scores_of(query, key).softmax(-1)) @ value


def everything_in_functions(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Operations on queries, keys and values are none on logits."""
    weights = Halved.apply(scores_of(Halved.apply(query), soft_clamp(key, 2.0))).softmax(-1)
    return weights @ Halved.apply(value)


def product_in_a_function(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return RoundedProduct.apply(query, key).softmax(-1) @ value


def product_in_an_operator(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with torch.no_grad():
        return scores_by_an_operator(query, key).softmax(-1) @ value


def product_in_a_script(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return weigh(query, key.mT).masked_fill(~CAUSAL, -1e9).softmax(-1) @ value


def softmax_in_sight(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return SoftmaxInSight.apply(scores_of(query, key)) @ value


WHOLE = [
    by_operators,
    fused_by_its_name,
    dropped_in_a_script,
    everything_in_functions,
    softmax_in_sight,
    product_in_a_function,
    product_in_an_operator,
    product_in_a_script,
]


@pytest.mark.filterwarnings("error::lightning_attn.AttentionWarning")
@pytest.mark.parametrize("attend", WHOLE, ids=lambda attend: attend.__name__)
def test_whole_attentions_are_seen(attend: Attend) -> None:
    model = Model(attend)
    with record(model) as recording:
        output = model(torch.randn(SEQUENCES, TOKENS, MODEL_WIDTH))
    (call,) = recording.calls
    assert call.heads == HEADS
    if attend is not dropped_in_a_script:
        torch.testing.assert_close(call.output(), output.detach(), rtol=0, atol=1e-5)
    assert call.value is not None


# What cannot be read.


def softmax_in_a_function(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return FusedSoftmax.apply(scores_of(query, key)) @ value


def softmax_in_a_script(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return fused_softmax(scores_of(query, key)) @ value


def values_in_a_script(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return weigh(scores_of(query, key).softmax(-1), value)


def logits_and_values_in_a_script(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return weigh(scores_of(query, key), value)


def logits_in_foreign_memory(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return in_foreign_memory(scores_of(query, key)).softmax(-1) @ value


def weights_in_foreign_memory(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return in_foreign_memory(scores_of(query, key).softmax(-1)) @ value


def whole_in_a_script(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value)


def whole_in_a_scripted_module(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return model.fused(query, key, value)


REFUSED: dict[Attend, str] = {
    whole_in_a_script: "it is computed in 'attention', which `torch.jit` compiled",
    whole_in_a_scripted_module: "it is computed in 'forward', which `torch.jit` compiled",
    softmax_in_a_function: "its weights come out of 'FusedSoftmax'",
    softmax_in_a_script: "its weights come out of 'fused_softmax'",
    values_in_a_script: "its weights and values enter 'weigh'",
    logits_and_values_in_a_script: "its logits and values enter 'weigh'",
    logits_in_foreign_memory: "its logits cannot be followed",
    weights_in_foreign_memory: "its weights cannot be followed",
}


@pytest.mark.parametrize("attend", REFUSED, ids=lambda attend: attend.__name__)
def test_what_is_lost_is_said_by_name_and_once(attend: Attend) -> None:
    model = nn.Sequential(Model(attend))
    with pytest.warns(AttentionWarning) as warned, record(model) as recording:
        for _ in range(2):
            model(torch.randn(SEQUENCES, TOKENS, MODEL_WIDTH))
    assert not recording.calls
    (message,) = [str(each.message) for each in warned if each.category is AttentionWarning]
    assert f"he attention at '0' is not watched: {REFUSED[attend]}" in message
    assert "observe" in message


# What is none.


def scripted_codebook(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    codes = normalised(model.experts)
    return (query @ codes.T).softmax(-1) @ codes


def codebook_of_rounded_codes(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    codes = Halved.apply(model.experts)
    return (query @ codes.T).softmax(-1) @ codes


def linear_attention(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query.softmax(-1) @ Halved.apply(key.softmax(-2).mT @ value)


def scripted_router(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    shares = soft_clamp(query @ model.experts.T, 2.0).softmax(-1)
    return shares @ value[:, :, :4]


def mixture_in_a_script(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A script of two activations that is no product of them."""
    return mixed(query[..., :TOKENS, :], key).softmax(-1) @ value[:, :, :WIDTH]


def router_in_a_function(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return RoundedProduct.apply(query, model.experts).softmax(-1) @ value[:, :, :4]


def signs(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Weights that may be negative are no distribution."""
    return soft_clamp(scores_of(query, key), 2.0) @ value


def pointer_and_a_product(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scores_of(query, key).softmax(-1).sum() + Halved.apply(query) @ key.mT


NONE = [
    scripted_codebook,
    codebook_of_rounded_codes,
    linear_attention,
    scripted_router,
    router_in_a_function,
    mixture_in_a_script,
    signs,
    pointer_and_a_product,
]


@pytest.mark.parametrize("attend", NONE, ids=lambda attend: attend.__name__)
def test_what_is_not_attention_stays_out(attend: Attend) -> None:
    model = Model(attend)
    with pytest.warns(AttentionWarning) as warned, record(model) as recording:
        model(torch.randn(SEQUENCES, TOKENS, MODEL_WIDTH))
    assert not recording.calls
    assert [str(each.message)[:21] for each in warned if each.category is AttentionWarning] == ["No attention was seen"]


# Nothing changes, and nothing is left.


@pytest.mark.filterwarnings("ignore::lightning_attn.AttentionWarning")
@pytest.mark.parametrize("attend", [*REFUSED, *NONE, everything_in_functions], ids=lambda attend: attend.__name__)
def test_outputs_and_gradients_are_bit_identical(attend: Attend) -> None:
    model, source = Model(attend), torch.randn(SEQUENCES, TOKENS, MODEL_WIDTH, requires_grad=True)

    def step() -> list[Tensor]:
        output = model(source)
        gradients = torch.autograd.grad(output.square().sum(), model.parameters(), allow_unused=True)
        return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]

    for _ in range(3):
        alone = step()  # torch.jit compiles what it has seen some times
    with AttentionObserver(model):
        watched = step()
    assert all(torch.equal(*pair) for pair in zip(alone, watched, strict=True))


def methods() -> tuple[object, ...]:
    return (
        torch._C.ScriptFunction.__dict__["__call__"],
        torch._C.ScriptMethod.__dict__["__call__"],
        torch.autograd.function._SingleLevelFunction.__dict__.get("apply"),
        torch.autograd.Function.__dict__["apply"],
    )


def test_the_methods_of_torch_are_what_they_were() -> None:
    before = methods()
    first, second = opaque_calls(lambda *_: None), opaque_calls(lambda *_: None)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert all(now is not then for now, then in zip(methods()[:3], before[:3], strict=True))
    second.__exit__(None, None, None)
    assert methods() == before
    with pytest.raises(ZeroDivisionError), AttentionObserver(Model(through(CHANGES["script"]))):
        raise ZeroDivisionError
    assert methods() == before


@pytest.mark.filterwarnings("error::lightning_attn.AttentionWarning")
def test_another_thread_is_not_heard() -> None:
    model, other = Model(through(CHANGES["function"])), Model(softmax_in_a_function)
    source = torch.randn(SEQUENCES, TOKENS, MODEL_WIDTH)
    with record(model) as recording:
        thread = threading.Thread(target=other, args=(source,))
        thread.start()
        thread.join()
        model(source)
    assert len(recording.calls) == 1
