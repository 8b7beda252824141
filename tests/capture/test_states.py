"""The hidden states around attention are those that the module got and gave, whatever its shapes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_attn import AttentionObserver, AttentionWarning
from lightning_attn.capture import AttentionCall, Capture, HiddenStates
from lightning_attn.capture.sites import SitePatterns

WIDTH, HEADS, LENGTH = 16, 4, 8
OF_STATES = ["token_similarity", "similarity_contraction", "leader_distance", "rank_residual", "massive_activation"]


def split_heads(tokens: Tensor) -> Tensor:
    return tokens.unflatten(-1, (HEADS, -1)).transpose(-2, -3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = split_heads(hidden_states)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.attention(self.norm(tokens))


def ignore(call: AttentionCall) -> None:
    """A receiver that wants nothing."""


@contextmanager
def states_of(model: nn.Module, max_sequences: int | None = None) -> Iterator[list[HiddenStates]]:
    found: list[HiddenStates] = []
    with Capture(
        model,
        ignore,
        sites=SitePatterns(None),
        max_sequences=max_sequences,
        receive_states=found.append,
        strict=True,
    ):
        yield found


def only_states(model: nn.Module, *args: Any, max_sequences: int | None = None, **kwargs: Any) -> HiddenStates:
    with states_of(model, max_sequences) as found:
        model(*args, **kwargs)
    (states,) = found
    return states


def assert_states(states: HiddenStates, entering: Tensor, leaving: Tensor) -> None:
    assert torch.equal(states.entering, entering)
    assert states.leaving is not None and torch.equal(states.leaving, leaving)


# Which tensors they are


def test_in_a_block() -> None:
    model, tokens = nn.Sequential(Block(), Block()), torch.randn(3, LENGTH, WIDTH)
    with states_of(model) as found:
        model(tokens)
    assert [states.site for states in found] == ["0.attention", "1.attention"]
    for block, states in zip(model, found, strict=True):
        assert_states(states, block.norm(tokens), block.attention(block.norm(tokens)))
        assert states.real is None
        tokens = block(tokens)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [(LENGTH, LENGTH), (1, 1, LENGTH, LENGTH)])
def test_given_by_name(batch: int, shape: tuple[int, ...]) -> None:
    model, tokens = Attention(), torch.randn(batch, LENGTH, WIDTH)
    states = only_states(model, mask=torch.zeros(shape), hidden_states=tokens)
    assert_states(states, tokens, model(tokens))


@pytest.mark.parametrize(("given", "taken"), [(None, 5), (2, 2), (9, 5)])
def test_of_the_first_sequences(given: int | None, taken: int) -> None:
    model, tokens = Attention(), torch.randn(5, LENGTH, WIDTH)
    states = only_states(model, tokens, max_sequences=given)
    assert_states(states, tokens[:taken], model(tokens)[:taken])


@pytest.mark.parametrize("batch", [1, 3, LENGTH])
@pytest.mark.parametrize("batch_first", [True, False])
def test_of_multihead_attention(batch_first: bool, batch: int) -> None:
    """Also where there are as many sequences as tokens."""
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
    tokens = torch.randn(batch, LENGTH, WIDTH)
    given = tokens if batch_first else tokens.transpose(0, 1)
    output = model(given, given, given)[0]
    output = output if batch_first else output.transpose(0, 1)
    assert_states(only_states(model, given, given, given), tokens, output)


def test_of_one_sequence_without_a_batch() -> None:
    model, tokens = nn.MultiheadAttention(WIDTH, HEADS), torch.randn(LENGTH, WIDTH)
    assert_states(only_states(model, tokens, tokens, tokens), tokens[None], model(tokens, tokens, tokens)[0][None])


def test_of_cross_attention_they_are_the_queries() -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    queries, keys = torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[:, 4:] = True
    states = only_states(model, queries, keys, keys, key_padding_mask=padding)
    assert_states(states, queries, model(queries, keys, keys, key_padding_mask=padding)[0])
    assert states.real is None


class Latents(Attention):
    """Perceiver: the first argument is what is read, the second what reads it."""

    def forward(self, media: Tensor, latents: Tensor) -> Tensor:  # type: ignore[override]
        query, key = split_heads(latents), split_heads(media)
        mixed = functional.scaled_dot_product_attention(query, key, key)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_they_have_as_many_tokens_as_there_are_queries() -> None:
    model, media, latents = Latents(), torch.randn(2, 12, WIDTH), torch.randn(2, 4, WIDTH)
    assert_states(only_states(model, media, latents), latents, model(media, latents))


class TokensFirst(Attention):
    """(N, B, L), as in fairseq and Megatron."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens.transpose(0, 1)).transpose(0, 1)


def test_where_tokens_come_before_sequences() -> None:
    model, tokens = TokensFirst(), torch.randn(LENGTH, 3, WIDTH)
    states = only_states(model, tokens, max_sequences=2)
    assert_states(states, tokens.transpose(0, 1)[:2], model(tokens).transpose(0, 1)[:2])


class Windows(Attention):
    """Swin: the places of an image are the tokens, and attend within windows of 2 x 2."""

    def forward(self, image: Tensor) -> Tensor:  # type: ignore[override]
        height, width = (size // 2 for size in image.shape[1:3])
        windows = image.unflatten(2, (width, 2)).unflatten(1, (height, 2)).transpose(2, 3).flatten(3, 4).flatten(0, 2)
        mixed = super().forward(windows).unflatten(0, (-1, height, width)).unflatten(3, (2, 2))
        return mixed.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def test_of_an_image_in_windows() -> None:
    model, image = Windows(), torch.randn(3, 4, 6, WIDTH)
    assert model(image).shape == image.shape
    states = only_states(model, image, max_sequences=2)
    assert_states(states, image[:2].flatten(1, 2), model(image)[:2].flatten(1, 2))
    assert states.real is None


class ChannelsFirst(Attention):
    def forward(self, image: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(image.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, image.shape[2:])


@pytest.mark.parametrize("size", [(4, 2), (4, WIDTH)])
def test_an_image_whose_channels_come_first_is_left_out(size: tuple[int, int]) -> None:
    model = ChannelsFirst()
    with states_of(model) as found:
        model(torch.randn(3, WIDTH, *size))
    assert found == []


class InADictionary(Attention):
    def forward(self, states: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        hidden = super().forward(states["hidden"])
        return {"weights": torch.ones(2), "hidden": (None, [hidden])}


def test_inside_containers() -> None:
    model, tokens = InADictionary(), torch.randn(3, LENGTH, WIDTH)
    states = only_states(model, {"ids": torch.arange(LENGTH).expand(3, LENGTH), "hidden": tokens})
    assert_states(states, tokens, Attention.forward(model, tokens))


class AddsInside(Attention):
    """A block that computes attention without a module of its own for it."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return tokens + super().forward(tokens)


def test_of_a_block_without_an_attention_module() -> None:
    model, tokens = AddsInside(), torch.randn(2, LENGTH, WIDTH)
    assert_states(only_states(model, tokens), tokens, model(tokens))


class Pools(Attention):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens).mean(1)


def test_of_a_module_that_gives_no_tokens_back() -> None:
    tokens = torch.randn(2, LENGTH, WIDTH)
    states = only_states(Pools(), tokens)
    assert torch.equal(states.entering, tokens)
    assert states.leaving is None


class PartOfTensors(Attention):
    def forward(self, tokens: object) -> Tensor:  # type: ignore[override]
        return super().forward(torch.ones(2, LENGTH, WIDTH))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_tensors_that_stand_for_others_are_left_out() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model, plain = PartOfTensors(), torch.randn(2, LENGTH, WIDTH)
    nested = torch.nested.nested_tensor([plain[0], plain[1]])
    with states_of(model) as found:
        model(TwoTensor(plain, plain))
        model(nested)
        model(torch.ones(2, LENGTH, WIDTH, dtype=torch.long))
    assert found == []


@pytest.mark.parametrize("kind", [Attention, nn.MultiheadAttention])
def test_an_empty_batch(kind: type[nn.Module]) -> None:
    model = Attention() if kind is Attention else nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    tokens = torch.randn(0, LENGTH, WIDTH)
    observer = AttentionObserver(model, strict=True)
    with observer:
        model(*[tokens] * (1 if kind is Attention else 3))
    snapshot = observer.snapshot()
    assert snapshot.sites == ("(root)",)
    assert all(snapshot["(root)", name] == [None] for name in OF_STATES)


# Padding


def padding_mask(*lengths: int, side: str = "right") -> Tensor:
    """True where a token is real."""
    place, length = torch.arange(LENGTH), torch.tensor(lengths)[:, None]
    return place < length if side == "right" else place >= LENGTH - length


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["boolean", "additive", "boolean of each query"])
def test_padding_of_a_mask(kind: str, side: str) -> None:
    real = padding_mask(8, 5, 3, side=side)
    mask = real[:, None, None]
    if kind == "additive":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    elif kind == "boolean of each query":
        mask = mask & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    states = only_states(Attention(), torch.randn(3, LENGTH, WIDTH), mask)
    assert states.real is not None and torch.equal(states.real, real)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_padding_of_an_encoder(training: bool, norm_first: bool) -> None:
    real = padding_mask(8, 5, 3)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    tokens = torch.randn(3, LENGTH, WIDTH)
    with states_of(model, max_sequences=2) as found, torch.set_grad_enabled(training):
        model(tokens, src_key_padding_mask=~real)
    assert [states.site for states in found] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert all(states.real is not None and torch.equal(states.real, real[:2]) for states in found)
    assert torch.equal(found[0].entering, (model.layers[0].norm1(tokens) if norm_first else tokens)[:2])


def test_padding_beside_an_extra_key() -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True, batch_first=True)
    real, tokens = padding_mask(8, 5, 3), torch.randn(3, LENGTH, WIDTH)
    states = only_states(model, tokens, tokens, tokens, key_padding_mask=~real)
    assert states.real is not None and torch.equal(states.real, real)


def test_padding_that_is_the_same_for_all() -> None:
    real = padding_mask(5)
    states = only_states(Attention(), torch.randn(3, LENGTH, WIDTH), real[:, None, None])
    assert states.real is not None and torch.equal(states.real.expand(3, -1), real.expand(3, -1))


class FoldedHeads(Attention):
    """(B x heads, N, D): every head is a sequence of its own to the kernel."""

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = split_heads(hidden_states).flatten(0, 1)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return self.out(mixed.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("max_sequences", [None, 2])
def test_padding_where_heads_are_in_the_batch(max_sequences: int | None) -> None:
    real, tokens = padding_mask(8, 5), torch.randn(2, LENGTH, WIDTH)
    mask = real.repeat_interleave(HEADS, 0)[:, None]
    states = only_states(FoldedHeads(), tokens, mask, max_sequences=max_sequences)
    assert states.real is not None and torch.equal(states.real, real)
    assert torch.equal(states.entering, tokens)


def test_padding_is_in_no_statistic() -> None:
    model, tokens, real = Attention(), torch.randn(2, LENGTH, WIDTH), padding_mask(6, 6)
    snapshots = []
    for filling in (0.0, 100.0):
        observer = AttentionObserver(model, statistics=OF_STATES)
        with observer:
            model(torch.where(real[..., None], tokens, filling), real[:, None, None])
        snapshots.append(observer.snapshot())
    alone = AttentionObserver(model, statistics=OF_STATES)
    with alone:
        model(tokens[:, :6])
    expected = alone.snapshot().to_dict()["(root)"]
    for snapshot in snapshots:
        for name, (value,) in snapshot.to_dict()["(root)"].items():
            assert value == pytest.approx(expected[name][0], rel=1e-5), name


def test_after_left_padding_the_first_real_token_leads() -> None:
    model, tokens = Attention(), torch.randn(1, 5, WIDTH)
    observer = AttentionObserver(model, statistics="leader_distance")
    with observer:
        model(tokens)
    (expected,) = observer.snapshot()["(root)", "leader_distance"]
    with observer:
        padded = torch.cat([torch.randn(1, LENGTH - 5, WIDTH), tokens], dim=1)
        model(padded, padding_mask(5, side="left")[:, None, None])
    assert observer.snapshot()["(root)", "leader_distance"] == [pytest.approx(expected, rel=1e-12)]


# A model of a library


@pytest.mark.parametrize("padding", ["none", "left"])
def test_gpt2(padding: str) -> None:
    transformers = pytest.importorskip("transformers", reason="belongs to the examples")
    config = transformers.GPT2Config(
        n_layer=2, n_head=HEADS, n_embd=WIDTH, n_positions=LENGTH, vocab_size=11, attn_implementation="sdpa"
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(11, (2, LENGTH))
    real = padding_mask(8, 5, side="left") if padding == "left" else torch.ones(2, LENGTH, dtype=torch.bool)
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        block.attn.register_forward_hook(lambda _, args, output: seen.append((args[0], output[0])))
        for block in model.transformer.h
    ]
    with states_of(model) as found, torch.no_grad():
        model(ids, attention_mask=real.long())
    for hook in hooks:
        hook.remove()
    assert [states.site for states in found] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    for states, (entered, left) in zip(found, seen, strict=True):
        assert_states(states, entered, left)
        if padding == "left":
            assert states.real is not None and torch.equal(states.real, real)


# How often


class OneHeadAfterTheOther(Attention):
    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = split_heads(hidden_states).unbind(1)
        mixed = [functional.scaled_dot_product_attention(*[head[:, None]] * 3) for head in heads]
        return self.out(torch.cat(mixed, dim=1).transpose(1, 2).flatten(2))


def test_once_for_each_call_of_a_module_however_many_calls_it_makes() -> None:
    model, tokens = OneHeadAfterTheOther(), torch.randn(3, LENGTH, WIDTH)
    assert_states(only_states(model, tokens), tokens, model(tokens))


def test_each_call_of_a_module() -> None:
    shared, tokens = Block(), torch.randn(3, LENGTH, WIDTH)
    with states_of(shared) as found:
        shared(shared(tokens))
    assert_states(found[0], shared.norm(tokens), shared.attention(shared.norm(tokens)))
    tokens = shared(tokens)
    assert_states(found[1], shared.norm(tokens), shared.attention(shared.norm(tokens)))


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attention.forward(tokens)


def test_a_forward_that_is_called_by_name_shows_none() -> None:
    model = ByName()
    observer = AttentionObserver(model, strict=True)
    with observer:
        model(torch.randn(3, LENGTH, WIDTH))
    snapshot = observer.snapshot()
    assert snapshot.sites == ("attention",)
    assert all(snapshot["attention", name] == [None] for name in OF_STATES)
    assert None not in snapshot["attention", "entropy"]


CHECKPOINTS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
    ),
}


@pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_what_a_checkpoint_computes_again_is_not_seen_again(run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    block, tokens = Block(), torch.randn(3, LENGTH, WIDTH, requires_grad=True)
    run(block, tokens).square().sum().backward()
    alone = [tokens.grad, *(parameter.grad for parameter in block.parameters())]
    tokens.grad = None
    block.zero_grad()
    with states_of(block) as found, AttentionObserver(block, statistics=OF_STATES, strict=True):
        run(block, tokens).square().sum().backward()
    assert len(found) == 1
    for one, other in zip([tokens.grad, *(parameter.grad for parameter in block.parameters())], alone, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


class FailsOnce(Block):
    has_failed = False

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.attention(self.norm(tokens))
        if not self.has_failed:
            self.has_failed = True
            raise ArithmeticError("once")
        return tokens + mixed


class FailsInside(Attention):
    has_failed = False

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        mixed = super().forward(hidden_states)
        if not self.has_failed:
            self.has_failed = True
            raise ArithmeticError("once")
        return mixed


@pytest.mark.parametrize(("kind", "seen"), [(FailsOnce, 2), (FailsInside, 1)])
def test_a_model_that_fails_and_tries_again(kind: type[nn.Module], seen: int) -> None:
    model, tokens = kind(), torch.randn(3, LENGTH, WIDTH)
    with states_of(model) as found:
        with pytest.raises(ArithmeticError, match="once"):
            model(tokens)
        model(tokens)
    assert len(found) == seen


# Without a trace


def global_hooks() -> dict[str, int]:
    names = [name for name in vars(torch_module) if name.startswith("_global") and "hook" in name]
    return {name: len(hooks) for name in names if (hooks := getattr(torch_module, name))}


@pytest.mark.parametrize(
    ("statistics", "hooks"), [(None, 1), ("leader_distance", 1), (["entropy", "max_logit"], 0)], ids=str
)
def test_there_is_a_hook_where_states_are_asked_for_and_none_after(statistics: Any, hooks: int) -> None:
    observer = AttentionObserver(model := Block(), statistics=statistics)
    for _ in range(2):
        assert global_hooks() == {}
        with observer:
            assert global_hooks().get("_global_forward_hooks", 0) == hooks
            model(torch.randn(3, LENGTH, WIDTH))
        assert global_hooks() == {}
    with pytest.raises(ArithmeticError), observer:
        raise ArithmeticError
    assert global_hooks() == {}


def test_the_hooks_of_others_stay() -> None:
    def hook(*_: object) -> None:
        heard.append(1)

    heard: list[int] = []
    handle = torch_module.register_module_forward_hook(hook, with_kwargs=True)
    before = global_hooks()
    with AttentionObserver(model := Attention()):
        model(torch.randn(3, LENGTH, WIDTH))
    assert global_hooks() == before
    assert len(heard) == 2  # the attention and its projection
    handle.remove()
    torch_module._global_forward_hooks_with_kwargs.pop(handle.id)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_hook_does_not_change_what_an_encoder_computes(training: bool, nested: bool) -> None:
    """The fast path of evaluation is off while anything is watched; the hook changes nothing beyond that."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).train(training)
    tokens, padding = torch.randn(3, LENGTH, WIDTH), ~padding_mask(8, 5, 3)

    def output(statistics: str) -> Tensor:
        torch.manual_seed(1)
        observer = AttentionObserver(model, statistics=statistics, strict=True)
        with observer, torch.set_grad_enabled(training):
            result: Tensor = model(tokens, src_key_padding_mask=padding)
        observer.snapshot()
        return result

    assert torch.equal(output("token_similarity"), output("entropy"))


def test_states_are_detached_and_not_kept() -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Watched(Attention):
        def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
            output = super().forward(hidden_states)
            kept.append(weakref.ref(output))
            return output

    model = Watched()
    observer = AttentionObserver(model, strict=True)
    with observer:
        model(torch.randn(3, LENGTH, WIDTH, requires_grad=True))
        gc.collect()
        assert kept[0]() is None
    with states_of(model) as found:
        model(torch.randn(3, LENGTH, WIDTH, requires_grad=True))
    assert not found[0].entering.requires_grad
    assert found[0].leaving is not None and not found[0].leaving.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_low_precision(dtype: torch.dtype) -> None:
    """States are taken as the model has them; what is computed of them is not rounded again."""
    model, tokens = Attention().to(dtype), torch.randn(3, LENGTH, WIDTH).to(dtype)
    low, high = (AttentionObserver(model, statistics=OF_STATES, strict=True) for _ in range(2))
    with low:
        model(tokens)
    model.double()
    with high:
        model(tokens.double())
    of_low, of_high = low.snapshot().to_dict()["(root)"], high.snapshot().to_dict()["(root)"]
    for name in OF_STATES:
        tolerance = 0.05 if name == "similarity_contraction" else 1e-12  # what leaves is as the model rounded it
        assert of_low[name][0] == pytest.approx(of_high[name][0], rel=tolerance), name


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_without_gradients(without_gradients: Callable[[], Any]) -> None:
    model, tokens, real = Attention(), torch.randn(3, LENGTH, WIDTH), padding_mask(8, 5, 3)
    observer = AttentionObserver(model, statistics=OF_STATES, strict=True)
    with observer:
        model(tokens, real[:, None, None])
    expected = observer.snapshot()
    with observer, without_gradients():
        model(torch.empty_like(tokens).copy_(tokens), real[:, None, None])
    assert observer.snapshot() == expected


def test_under_autocast() -> None:
    model, tokens = Block(), torch.randn(3, LENGTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        alone = model(tokens)
        observer = AttentionObserver(model, strict=True)
        with observer:
            assert torch.equal(model(tokens), alone)
    assert all(None not in observer.snapshot()["attention", name] for name in OF_STATES[:1])


# Faults


def test_a_fault_is_reported_once_and_the_model_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_attn.statistics import known_statistics

    def fail(entering: object, leaving: object) -> None:
        raise RuntimeError("out of numbers")

    monkeypatch.setattr(known_statistics()["leader_distance"], "result", fail)
    model, tokens = Block(), torch.randn(3, LENGTH, WIDTH)
    alone = model(tokens)
    observer = AttentionObserver(model)
    with pytest.warns(AttentionWarning, match="attention at 'attention' failed.*out of numbers") as said, observer:
        assert torch.equal(model(tokens), alone)
        assert torch.equal(model(tokens), alone)
        assert observer.snapshot().sites == ()  # the site is quiet
    assert len(said) == 1
    with pytest.raises(RuntimeError, match="out of numbers"), AttentionObserver(model, strict=True):
        model(tokens)


def test_a_snapshot_in_the_middle_of_a_module() -> None:
    class Impatient(Attention):
        def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
            output = super().forward(hidden_states)
            snapshots.append(observer.snapshot())
            return output

    snapshots: list[Any] = []
    observer = AttentionObserver(model := Impatient(), strict=True)
    with observer:
        model(torch.randn(3, LENGTH, WIDTH))
    assert snapshots[0]["(root)", "token_similarity"] == [None]
    assert not observer.snapshot()
