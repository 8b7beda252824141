"""Capture stands in the middle of somebody's training step, and nobody there notices it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_attn import AttentionCall, AttentionObserver, AttentionWarning, Recording, record
from lightning_attn.capture import Capture
from lightning_attn.capture.sites import SitePatterns
from lightning_attn.statistics import known_statistics

WIDTH, HEADS, LENGTH = 16, 4, 8


class Attention(nn.Module):
    def __init__(self, heads: int = HEADS, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class ByHand(Attention):
    """As products and a softmax, which a selective checkpoint can save one by one; the fused call is seen as well."""

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        fused = functional.scaled_dot_product_attention(query, key, value)
        mixed = (query @ key.transpose(-1, -2) * 0.5).softmax(-1) @ value
        return (mixed + fused).permute(0, 2, 1, 3).flatten(2)


class MultiheadSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens, tokens, tokens, need_weights=False)[0]


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(tokens)
        return tokens + self.feed_forward(tokens)


class Model(nn.Module):
    """Two blocks; `run` says how a block is run, as models do that checkpoint activations."""

    def __init__(
        self,
        attention: Callable[[], nn.Module] = Attention,
        run: Callable[[nn.Module, Tensor], Tensor] = lambda block, tokens: block(tokens),
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attention()) for _ in range(2))
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = self.run(block, tokens)
        return tokens


KINDS = {"function": Attention, "module": MultiheadSelfAttention}


def mode_depth() -> int:
    return torch._C._len_torch_function_stack()


def tokens(batch: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH)


def capture(
    model: nn.Module, receive: Callable[[AttentionCall], None], strict: bool = False, sites: str | None = None
) -> Capture:
    return Capture(model, receive, sites=SitePatterns(sites), strict=strict)


def ignore(call: AttentionCall) -> None:
    """A receiver that wants nothing."""


@contextmanager
def everything_watched(model: nn.Module) -> Iterator[AttentionObserver]:
    """Statistics are computed and calls are kept; a fault in either is raised."""
    observer = AttentionObserver(model, strict=True)
    with record(model), observer:
        yield observer


WATCHERS: dict[str, Callable[[nn.Module], AbstractContextManager[object]]] = {
    "record": record,
    "observer": AttentionObserver,
    "capture": lambda model: capture(model, ignore),
}


# Nothing is left behind


@pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS)
def test_no_mode_is_left_on(watch: Callable[[nn.Module], AbstractContextManager[object]]) -> None:
    model = Model()
    for _ in range(3):
        with watch(model):
            assert mode_depth() == 1
            model(tokens())
            assert mode_depth() == 1
        assert mode_depth() == 0


@pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS)
def test_no_mode_is_left_on_after_an_exception(watch: Callable[[nn.Module], AbstractContextManager[object]]) -> None:
    model = Model()
    with pytest.raises(ZeroDivisionError), watch(model):
        model(tokens())
        1 / 0  # noqa: B018
    assert mode_depth() == 0
    with pytest.raises(RuntimeError, match="shape"), watch(model):
        model(torch.randn(1, 2, 3))
    assert mode_depth() == 0


@pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS)
def test_an_exception_that_attention_itself_raises_passes_through(
    watch: Callable[[nn.Module], AbstractContextManager[object]],
) -> None:
    class Wrong(nn.Module):
        def forward(self) -> Tensor:
            return functional.scaled_dot_product_attention(torch.ones(2, 3), torch.ones(2, 4), torch.ones(2, 4))

    with pytest.raises(RuntimeError), watch(model := Wrong()):
        model()
    assert mode_depth() == 0


def test_an_exception_is_not_followed_by_the_complaint_that_nothing_was_seen(
    recwarn: pytest.WarningsRecorder,
) -> None:
    with pytest.raises(ZeroDivisionError), record(Model()):
        1 / 0  # noqa: B018
    assert not recwarn.list


@pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS)
@pytest.mark.parametrize("inside", [False, True])
def test_a_device_context_of_the_user_is_left_as_it_was(
    watch: Callable[[nn.Module], AbstractContextManager[object]], inside: bool
) -> None:
    model = Model()
    contexts = [partial(watch, model), partial(torch.device, "cpu")]
    with ExitStack() as stack:
        for enter in contexts if inside else reversed(contexts):
            stack.enter_context(enter())
        assert mode_depth() == 2
        model(tokens())
        assert mode_depth() == 2
    assert mode_depth() == 0


@pytest.mark.filterwarnings("ignore:No attention was seen")
@pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS)
def test_a_device_context_around_the_block_is_on_after_it(
    watch: Callable[[nn.Module], AbstractContextManager[object]],
) -> None:
    model = Model().to("meta")
    with torch.device("meta"):
        with watch(model):
            model(tokens())
        assert torch.empty(1).device.type == "meta"


@pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS)
def test_a_default_device_may_be_set_inside(watch: Callable[[nn.Module], AbstractContextManager[object]]) -> None:
    model = Model()
    try:
        with watch(model):
            torch.set_default_device("cpu")
            model(tokens())
        assert mode_depth() == 1  # the user's
        with watch(model):
            model(tokens())
            torch.set_default_device(None)
        assert mode_depth() == 0
    finally:
        torch.set_default_device(None)


class Listening(TorchFunctionMode):
    """A mode of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.heard.append(resolve_name(func) or str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [*KINDS.values()], ids=KINDS)
@pytest.mark.parametrize("inside", [True, False])
def test_a_mode_of_the_user_hears_the_model_and_not_the_capture(kind: type[nn.Module], inside: bool) -> None:
    model, source = Model(kind), tokens()
    with Listening() as alone:
        model(source)
    listening = Listening()
    contexts = [everything_watched(model), listening]
    with ExitStack() as stack:
        for context in contexts if inside else reversed(contexts):
            stack.enter_context(context)
        model(source)
    assert listening.heard == alone.heard


def attributes_and_hooks(model: nn.Module) -> list[tuple[str, dict[str, int | None]]]:
    """Everything that hangs on the modules, with the number of entries where it can be counted."""
    holders = [("torch", nn.modules.module), *model.named_modules()]
    return [
        (name, {key: len(value) if isinstance(value, dict) else None for key, value in vars(holder).items()})
        for name, holder in holders
    ]


def test_no_hook_is_put_anywhere() -> None:
    """None on any module; while hidden states are watched, there is one of the process."""
    model = Model()
    before = attributes_and_hooks(model)
    with everything_watched(model) as observer:
        of_torch, *of_modules = attributes_and_hooks(model)
        assert of_modules == before[1:]
        assert of_torch[1]["_global_forward_hooks"] == 1
        model(tokens()).sum().backward()
    observer.snapshot()
    assert attributes_and_hooks(model) == before


def test_the_graph_is_not_kept_alive() -> None:
    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()  # else the graph would hold itself
            in_graphs.add(self)

    in_graphs: weakref.WeakSet[Saved] = weakref.WeakSet()
    model = Model()
    observer = AttentionObserver(model)
    hooks = torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor)
    with hooks, record(model) as recording, observer:
        output = model(tokens())
    assert in_graphs
    del output
    gc.collect()
    assert not in_graphs
    assert recording.calls


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_receiver_gets_detached_tensors(kind: type[nn.Module]) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = kind()
            self.bias = nn.Parameter(torch.zeros(1, HEADS, LENGTH, LENGTH))

        def forward(self, tokens: Tensor) -> Tensor:
            heads = self.attention(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return functional.scaled_dot_product_attention(heads, heads, heads, self.bias)

    model, calls = Biased(), []
    with Capture(model, calls.append, sites=SitePatterns(None), with_values=True):
        model(tokens())
    assert len(calls) == 2
    for call in calls:
        parts = (call.query, call.key, call.value, call.visibility.bias)
        assert not any(part.requires_grad for part in parts if part is not None)


# The model's numbers are untouched


def backward_with_modes_on(loss: Tensor) -> None:
    """What `loss.backward()` does, but that is itself a function which modes see, and inside of which they are off."""
    run = torch.autograd.Variable._execution_engine.run_backward
    run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def train_step(
    model: nn.Module, source: Tensor, cast: torch.dtype | None = None
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Output, gradients and what the random numbers are afterwards."""
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cpu", cast) if cast else nullcontext():
        output = model(source)
        loss = output.float().square().mean()
    backward_with_modes_on(loss)
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return output.detach(), gradients, torch.get_rng_state()


def assert_bit_identical(
    first: tuple[Tensor, list[Tensor], Tensor], second: tuple[Tensor, list[Tensor], Tensor]
) -> None:
    assert torch.equal(first[0], second[0])
    assert len(first[1]) == len(second[1]) > 0
    assert all(torch.equal(one, other) for one, other in zip(first[1], second[1], strict=True))
    assert torch.equal(first[2], second[2]), "random numbers were consumed"


@contextmanager
def watched_during_forward(model: nn.Module) -> Iterator[Callable[[], int]]:
    """`train_step` with everything watched; gives the number of calls that were seen."""
    with record(model) as recording, AttentionObserver(model, strict=True) as observer:
        yield lambda: len(recording.calls)
    assert observer.snapshot().sites == recording.sites


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=["fp32", "bf16 autocast"])
def test_outputs_gradients_and_random_numbers_are_bit_identical(
    kind: type[nn.Module], cast: torch.dtype | None
) -> None:
    model, source = Model(kind), tokens()
    alone = train_step(model, source, cast)
    with watched_during_forward(model) as count:
        assert_bit_identical(train_step(model, source, cast), alone)
    assert count() == 2


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_weight_that_autocast_cast_for_the_model_is_used_again(kind: type[nn.Module]) -> None:
    """Twice in one region: the gradient of a shared cast is summed in bfloat16, that of two casts in float32."""
    model, source = Model(kind), tokens()
    twice = nn.Sequential(model, model)
    alone = train_step(twice, source, torch.bfloat16)
    with watched_during_forward(twice) as count:
        assert_bit_identical(train_step(twice, source, torch.bfloat16), alone)
    assert count() == 4


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_autocast_switched_on_without_a_context(kind: type[nn.Module]) -> None:
    """Leaving the outermost autocast context clears the cache of casts: a capture must not have that one."""
    model, source = Model(kind), tokens()
    twice = nn.Sequential(model, model)

    def step() -> tuple[Tensor, list[Tensor], Tensor]:
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.set_autocast_enabled("cpu", True)
        try:
            return train_step(twice, source)
        finally:
            torch.set_autocast_enabled("cpu", False)
            torch.clear_autocast_cache()

    alone = step()
    with watched_during_forward(twice):
        assert_bit_identical(step(), alone)


SAVED = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default]


#: What an observer would do, in the middle of the pass, to look at tensors.
LOOKS = {"view", "permute", "transpose", "expand", "unsqueeze", "slice", "select", "clone", "mul", "le", "where"}


def save_views(context: object, function: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    name = function._overloadpacket.__name__
    return CheckpointPolicy.MUST_SAVE if function in SAVED or name in LOOKS else CheckpointPolicy.PREFER_RECOMPUTE


def save_products(context: object, function: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if function in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "selective by list": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, SAVED)
    ),
    "selective by policy": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_products)
    ),
    "selective, with views": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_views)
    ),
    "nested": lambda block, x: checkpoint(lambda x: checkpoint(block, x, use_reentrant=False), x, use_reentrant=False),
}


@pytest.mark.parametrize("kind", [Attention, ByHand, MultiheadSelfAttention])
@pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=["fp32", "bf16 autocast"])
def test_activation_checkpointing(
    kind: type[nn.Module], run: Callable[[nn.Module, Tensor], Tensor], cast: torch.dtype | None
) -> None:
    """Gradients stay bit-identical, and what is computed again in the backward pass is not counted again."""
    model, source = Model(kind, run), tokens().requires_grad_()
    alone = train_step(model, source, cast)
    with watched_during_forward(model) as count:
        assert_bit_identical(train_step(model, source, cast), alone)
    assert count() == (4 if kind is ByHand else 2)


@pytest.mark.parametrize("backward", [Tensor.backward, torch.autograd.backward, backward_with_modes_on])
def test_a_call_inside_backward_is_not_counted(backward: Callable[[Tensor], None]) -> None:
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(gradient, gradient, gradient)

    model = Model()
    with record(model) as recording:
        output = Backward.apply(model(tokens()))
        output.register_hook(lambda gradient: functional.scaled_dot_product_attention(gradient, gradient, gradient))
        assert len(recording.calls) == 2
        backward(output.sum())
    assert len(recording.calls) == 2


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_without_gradients(kind: type[nn.Module], without_gradients: type) -> None:
    model, source = Model(kind).eval(), tokens()
    with record(model) as with_gradients:
        model(source)
    observer = AttentionObserver(model, strict=True)
    with without_gradients(), record(model) as recording, observer:
        model(source)
        model(source)
    # Outside again, what was kept can be used, added to and changed.
    assert len(recording.calls) == 4
    assert torch.allclose(recording.calls[0].weights(), with_gradients.calls[0].weights(), atol=1e-6)
    recording.calls[0].query.add_(1)
    with observer:
        model(source)
    assert len(observer.snapshot().sites) == 2


@pytest.mark.parametrize("gradients", [True, False])
def test_grad_mode_and_inference_mode_are_what_they_were(gradients: bool) -> None:
    model, modes = Model(), []
    model.blocks[1].register_forward_pre_hook(
        lambda *_: modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    )
    with everything_watched(model), torch.inference_mode(not gradients):
        model(tokens())
    assert modes == [(gradients, not gradients)]


# Settings


@pytest.fixture
def float32_precision() -> Iterator[None]:
    yield
    for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        if hasattr(backend, "fp32_precision"):
            backend.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


def precisions() -> dict[str, object]:
    """What torch says of products in float32, in its older and in its newer words."""
    said: dict[str, object] = {}
    for name, backend in (("cuda", torch.backends.cuda.matmul), ("mkldnn", torch.backends.mkldnn.matmul)):
        said[name] = getattr(backend, "fp32_precision", None)
    try:
        said["older"] = torch.get_float32_matmul_precision()
    except RuntimeError:  # newer words were used
        said["older"] = "refused"
    return said


def is_full(precisions: dict[str, object]) -> bool:
    return precisions["older"] in ("highest", "refused") and all(
        precisions[backend] in ("ieee", "none", None) for backend in ("cuda", "mkldnn")
    )


def seen_precisions(model: nn.Module) -> dict[str, object]:
    """The settings as they are for statistics; those of the model must be the same before, in the model and after."""
    seen, before, in_model = [], precisions(), []
    model.blocks[1].register_forward_pre_hook(lambda *_: in_model.append(precisions()))
    with capture(model, lambda call: seen.append(precisions()), strict=True):
        model(tokens())
    assert in_model == [before]
    assert precisions() == before
    return seen[0]


@pytest.mark.usefixtures("float32_precision")
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_products_are_in_full_precision_whatever_the_user_set(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    assert is_full(seen_precisions(Model()))
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.usefixtures("float32_precision")
def test_a_precision_set_for_one_backend_alone_stays_so() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    assert is_full(seen_precisions(Model()))


@pytest.mark.usefixtures("float32_precision")
@pytest.mark.skipif(not hasattr(torch.backends.mkldnn.matmul, "fp32_precision"), reason="torch has older words only")
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_a_precision_set_in_the_newer_words(precision: str) -> None:
    """torch refuses to say in the older words what is set then."""
    torch.backends.mkldnn.matmul.fp32_precision = precision
    assert is_full(seen_precisions(Model()))


@pytest.mark.usefixtures("float32_precision")
def test_settings_are_restored_after_a_fault() -> None:
    def fail(call: AttentionCall) -> None:
        raise ValueError

    torch.set_float32_matmul_precision("medium")
    with pytest.warns(AttentionWarning), capture(model := Model(), fail), torch.autocast("cpu", torch.bfloat16):
        model(tokens())
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()


def test_a_receiver_runs_without_autocast_and_gradients_and_modes() -> None:
    seen = []

    def look(call: AttentionCall) -> None:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.ones(1).device.type))

    with torch.device("cpu"), torch.autocast("cpu", torch.bfloat16), capture(model := Model(), look):
        model(tokens())
    assert seen == [(False, False, "cpu")] * 2


# Function transforms


class Mixing(nn.Module):
    """Works on any number of dimensions, as `vmap` takes one away."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(self.query(tokens), tokens, tokens)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones_like(x)),
    "grad of each sample": lambda model, x: torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[:1]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("batch_dimensions", [1, 2])
def test_inside_a_function_transform_nothing_is_recorded_and_that_is_said_once(
    transform: Callable[[nn.Module, Tensor], object], batch_dimensions: int, recwarn: pytest.WarningsRecorder
) -> None:
    model, source = Mixing(), torch.randn(*[2] * batch_dimensions, LENGTH, WIDTH)
    alone = transform(model, source)
    recwarn.clear()
    with AttentionObserver(model, strict=False) as observer:
        watched = transform(model, source)
        transform(model, source)
    for one, other in zip(
        torch.utils._pytree.tree_leaves(alone), torch.utils._pytree.tree_leaves(watched), strict=True
    ):
        assert torch.equal(one, other)
    assert observer.snapshot().sites == ()
    (said,) = [warning for warning in recwarn.list if issubclass(warning.category, AttentionWarning)]
    assert "(root)" in str(said.message) and "torch.func" in str(said.message)


# Faults


def fail_at(site: str, error: Exception) -> Callable[[AttentionCall], None]:
    def receive(call: AttentionCall) -> None:
        if call.site == site:
            raise error

    return receive


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_fault_is_reported_once_for_its_site_and_the_model_goes_on(
    kind: type[nn.Module], recwarn: pytest.WarningsRecorder
) -> None:
    model, source = Model(kind), tokens()
    site = next(name for name, module in model.named_modules() if type(module) in (Attention, nn.MultiheadAttention))
    alone = train_step(model, source)
    recwarn.clear()
    receive, others = fail_at(site, ArithmeticError("the head is on fire")), []
    with capture(model, lambda call: (receive(call), others.append(call.site))):
        for _ in range(3):
            assert_bit_identical(train_step(model, source), alone)
    (warning,) = recwarn.list
    assert warning.category is AttentionWarning
    for part in (repr(site), "ArithmeticError", "the head is on fire", "test_capture.py", "strict=True"):
        assert part in str(warning.message)
    assert len(others) == 3, "the other site is still seen"


def test_a_fault_at_every_site_is_reported_for_each(recwarn: pytest.WarningsRecorder) -> None:
    def fail(call: AttentionCall) -> None:
        raise ValueError(call.site)

    with capture(model := Model(), fail):
        model(tokens())
        model(tokens())
    assert [f"'blocks.{i}.attention'" in str(w.message) for i, w in enumerate(recwarn.list)] == [True, True]


def test_strict_raises_the_fault_itself() -> None:
    error = ArithmeticError("the head is on fire")
    with (
        pytest.raises(ArithmeticError) as raised,
        capture(model := Model(), fail_at("blocks.1.attention", error), strict=True),
    ):
        model(tokens())
    assert raised.value is error
    assert mode_depth() == 0


def test_a_fault_in_a_statistic(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:

    def fail(self: object, rows: object) -> None:
        raise RuntimeError("out of numbers")

    monkeypatch.setattr(known_statistics()["entropy"], "values", fail)
    model = Model()
    observer = AttentionObserver(model)
    with observer:
        model(tokens())
        model(tokens())
    assert observer.snapshot().sites == ()
    assert ["out of numbers" in str(warning.message) for warning in recwarn.list] == [True, True]  # once for each site
    with observer:  # a site that failed stays quiet
        model(tokens())
    observer.snapshot()
    assert len(recwarn.list) == 2
    with pytest.raises(RuntimeError, match="out of numbers"), AttentionObserver(model, strict=True):
        model(tokens())


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_fault(kind: type[BaseException]) -> None:
    def interrupt(call: AttentionCall) -> None:
        raise kind

    with pytest.raises(kind), capture(model := Model(), interrupt):
        model(tokens())
    assert mode_depth() == 0


def test_no_attention_is_said_aloud() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(-1))
    expected = (
        r"No attention was seen.*\['\*'\] of Sequential.*scaled_dot_product_attention.*MultiheadAttention.*observe"
    )
    with pytest.warns(AttentionWarning, match=expected), record(model) as recording:
        model(tokens())
    assert recording.calls == [] and recording.sites == ()
    with AttentionObserver(model) as observer:
        model(tokens())
    with pytest.warns(AttentionWarning, match=expected):
        assert not observer.snapshot()


def test_no_attention_is_said_once_by_an_observer(recwarn: pytest.WarningsRecorder) -> None:
    observer = AttentionObserver(nn.Linear(WIDTH, WIDTH))
    for _ in range(3):
        with observer:
            observer.model(tokens())
        observer.snapshot()
    assert len(recwarn.list) == 1


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_model_on_the_meta_device_has_shapes_but_no_attention_to_see(kind: type[nn.Module]) -> None:
    model = Model(kind).to("meta")
    observer = AttentionObserver(model, strict=True)
    with observer:
        assert model(tokens().to("meta")).device.type == "meta"
    with pytest.warns(AttentionWarning):
        assert not observer.snapshot()


# Recording


def test_a_recording_keeps_copies() -> None:
    """A cache of keys is written to again; a record of it must not change with it."""

    class Cached(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            output = functional.scaled_dot_product_attention(query, key, value, mask)
            for tensor in (query, key, value, mask):
                tensor.fill_(7)
            return output

    given = [torch.randn(2, 2, 4, 4) for _ in range(3)] + [torch.randn(4, 4)]
    kept = [tensor.clone() for tensor in given]
    with record(model := Cached()) as recording:
        output = model(*given)
    (call,) = recording.calls
    for copy, original in zip((call.query, call.key, call.value, call.visibility.bias[0, 0]), kept, strict=True):
        assert torch.equal(copy, original)
    torch.testing.assert_close(call.output(), output, rtol=0, atol=1e-5)


def test_a_recording_keeps_no_more_memory_than_it_says() -> None:
    class Sliced(nn.Module):
        def forward(self, everything: Tensor) -> Tensor:
            query, key, value = everything[:, :, :, :4], everything[:, :, :, 4:8], everything[:, :, :, 8:12]
            return functional.scaled_dot_product_attention(query, key, value)

    with record(model := Sliced(), max_sequences=1) as recording:
        model(torch.randn(8, 2, 4, 1000))
    (call,) = recording.calls
    for tensor in (call.query, call.key, call.value):
        assert tensor.untyped_storage().nbytes() == 4 * tensor.numel() == 4 * 2 * 4 * 4


def test_a_recording_is_read_by_site() -> None:
    model = Model()
    with record(model, sites="blocks.1.*") as recording:
        model(tokens())
        model(tokens())
    assert isinstance(recording, Recording)
    assert recording.sites == ("blocks.1.attention",)
    assert recording["blocks.1.attention"] == recording.calls and len(recording.calls) == 2
    with pytest.raises(KeyError, match=r"'blocks\.0\.attention' made no call.*blocks\.1\.attention"):
        recording["blocks.0.attention"]


def test_values_are_kept_by_a_recording_alone() -> None:
    calls: list[AttentionCall] = []
    with capture(model := Model(), calls.append):
        model(tokens())
    assert all(call.value is None for call in calls)
    with pytest.raises(ValueError, match=r"'blocks\.0\.attention' holds no values"):
        calls[0].output()


@pytest.mark.parametrize("number", [0, -1, 2.0, 1.5, "4", True, [1]])
def test_bad_numbers_of_sequences(number: object) -> None:
    expected = "`max_sequences` must be a positive integer, or None for all sequences, got"
    with pytest.raises(ValueError, match=expected), record(Model(), max_sequences=number):
        pytest.fail("the block must not be entered")
    with pytest.raises(ValueError, match=expected):
        AttentionObserver(Model(), max_sequences=number)
    with pytest.raises(ValueError, match="`spectral_sequences` must be a positive integer"):
        AttentionObserver(Model(), spectral_sequences=number)
    assert mode_depth() == 0


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (3, 3), (100, 3), (None, 3)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_max_sequences(kind: type[nn.Module], number: int | None, expected: int) -> None:
    model = Model(kind)
    with record(model, max_sequences=number) as recording:
        model(tokens(batch=3))
    assert [call.sequences for call in recording.calls] == [expected] * 2


def test_two_recordings_of_one_model_both_see_it() -> None:
    model = Model()
    with record(model) as outer:
        model(tokens())
        with record(model, sites="blocks.0.*") as inner:
            model(tokens())
    assert len(outer.calls) == 4
    assert len(inner.calls) == 1
    assert torch.equal(inner.calls[0].query, outer.calls[2].query)


def test_recordings_of_two_models_see_their_own() -> None:
    first, second = Model(), nn.Sequential(Model())
    both = nn.ModuleList([first, second])
    with record(both) as of_both, record(first) as of_first, record(second) as of_second:
        first(tokens())
        second(tokens())
    assert of_both.sites == tuple(f"{i}{'.0' * i}.blocks.{j}.attention" for i in range(2) for j in range(2))
    assert of_first.sites == ("blocks.0.attention", "blocks.1.attention")
    assert of_second.sites == ("0.blocks.0.attention", "0.blocks.1.attention")


def test_what_the_receiver_computes_is_not_captured_by_an_outer_capture() -> None:
    model = Model()

    def attend(call: AttentionCall) -> None:
        functional.scaled_dot_product_attention(call.query, call.key, call.query)

    with record(model) as recording, capture(model, attend, strict=True):
        model(tokens())
    assert len(recording.calls) == 2


# Observer


def test_an_observer_adds_up_over_blocks_until_it_is_asked() -> None:
    model = Model().eval()
    once, twice = AttentionObserver(model), AttentionObserver(model)
    first, second = tokens(batch=1), tokens(batch=1)
    with once:
        model(torch.cat([first, second]))
    for part in (first, second):
        with twice:
            model(part)
    together = twice.snapshot()
    # Spectral statistics are taken of the first sequence of each call, and sequences are compared within a call.
    known = known_statistics()
    names = [n for n in together.statistics if not (known[n].is_spectral or known[n].compares_sequences)]
    torch.testing.assert_close(
        together.select(statistics=names).values, once.snapshot().select(statistics=names).values, equal_nan=True
    )
    assert twice.snapshot().sites == (), "a snapshot begins anew"


def test_an_observer_forgets() -> None:
    model = Model().eval()
    observer, alone = AttentionObserver(model), AttentionObserver(model)
    with observer:
        model(tokens())
    observer.forget()
    with observer:
        model(source := tokens())
    with alone:
        model(source)
    assert observer.snapshot() == alone.snapshot()


def test_an_observer_that_is_watching_refuses_to_be_entered() -> None:
    observer = AttentionObserver(Model())
    with observer, pytest.raises(RuntimeError, match="watching already"), observer:
        pytest.fail("the block must not be entered")
    assert mode_depth() == 0
    with observer:
        observer.model(tokens())
    assert observer.snapshot()


def test_calls_with_another_number_of_heads_within_a_snapshot_are_left_out() -> None:
    model, source = Model().eval(), tokens()
    observer, first_alone = AttentionObserver(model), AttentionObserver(model)
    with first_alone:
        model(source)
    with observer:
        model(source)
        model.blocks[1].attention.heads = 2
        with pytest.warns(
            AttentionWarning, match=r"'blocks\.1\.attention' is not watched: .*4 heads .* with 2 "
        ) as said:
            model(source)
            model(source)
            snapshot = observer.snapshot()
    assert len(said) == 1
    site = SitePatterns("blocks.1.attention")
    expected = first_alone.snapshot().select(site)
    torch.testing.assert_close(snapshot.select(site).values, expected.values, equal_nan=True)


def test_a_number_of_heads_that_changes_between_snapshots_is_followed() -> None:
    model = Model()
    observer = AttentionObserver(model, strict=True)
    for heads in (4, 2, 8, 4):
        model.blocks[1].attention.heads = heads
        with observer:
            model(tokens())
        assert observer.snapshot().heads == {"blocks.0.attention": HEADS, "blocks.1.attention": heads}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_empty_batch_has_heads_and_no_values(kind: type[nn.Module]) -> None:
    model = Model(kind)
    observer = AttentionObserver(model, strict=True)
    with record(model) as recording, observer:
        model(tokens(batch=0))
    assert [call.weights().shape for call in recording.calls] == [(0, HEADS, LENGTH, LENGTH)] * 2
    snapshot = observer.snapshot()
    assert list(snapshot.heads.values()) == [HEADS] * 2
    assert snapshot.summary("entropy") is None and snapshot.summary("max_logit") is None


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_empty_batch_beside_a_full_one_changes_nothing(kind: type[nn.Module]) -> None:
    model, source = Model(kind).eval(), tokens()
    observer, alone = AttentionObserver(model, strict=True), AttentionObserver(model, strict=True)
    with observer:
        model(tokens(batch=0))
        model(source)
    with alone:
        model(source)
    assert observer.snapshot() == alone.snapshot()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_one_token_has_nothing_to_choose_from(kind: type[nn.Module]) -> None:
    model = Model(kind)
    observer = AttentionObserver(model, strict=True)
    with observer:
        model(tokens(length=1))
    snapshot = observer.snapshot()
    assert snapshot.summary("entropy") is None
    assert snapshot.summary("self_weight") == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", [*KINDS.values(), ByHand], ids=[*KINDS, "by hand"])
def test_another_default_of_floating_point_numbers(kind: type[nn.Module], default: torch.dtype) -> None:
    model, source = Model(kind).eval(), tokens()
    observer = AttentionObserver(model, strict=True)
    with observer:
        model(source)
    expected = observer.snapshot()
    torch.set_default_dtype(default)
    try:
        with observer:
            model(source)
        assert torch.get_default_dtype() == default
        torch.testing.assert_close(observer.snapshot().values, expected.values, equal_nan=True)
    finally:
        torch.set_default_dtype(torch.float32)
