"""What is found to make queries does, and what does not is refused with its cause; the search leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from temperature.exactness import assert_same, found, nothing_left, outputs_and_gradients, written_in
from temperature.own_attention import (
    FOUND,
    HEAD,
    HEADS,
    TEMPERATURES,
    WIDTH,
    Attention,
    Fused,
    Model,
    Parts,
    Separate,
    WithNorm,
    batch,
    made,
)
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import record
from lightning_attn.capture.met import Met
from lightning_attn.temperature.attention_temperature import AttentionTemperature

FIRST = "blocks.0.attention"


def run(model: nn.Module) -> Any:
    return model(batch())


# Whatever is accepted is right.


class Drawn(nn.Module):
    """One projection whose channels are queries, keys, values and others in a drawn order."""

    def __init__(self, heads: int, width: int, channels: Tensor, others: int, written_out: bool) -> None:
        super().__init__()
        self.heads, self.width, self.written_out = heads, width, written_out
        self.channels = channels
        self.norm = nn.LayerNorm(10)
        self.mixed = nn.Linear(10, 3 * heads * width + others)
        self.out = nn.Linear(heads * width + others, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        everything = self.mixed(self.norm(tokens))
        size = self.heads * self.width
        used = everything[..., self.channels]
        query, key, value = (
            part.unflatten(-1, (self.heads, self.width)).transpose(1, 2) for part in used.split(size, dim=-1)[:3]
        )
        if self.written_out:
            mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value)
        gates = everything[..., self.channels[3 * size :]]
        return self.out(torch.cat([mixed.transpose(1, 2).flatten(2), gates], dim=-1))


ORDERS = ("qkv h d", "qkv d h", "h qkv d", "h d qkv", "d qkv h", "d h qkv")


@st.composite
def layouts(draw: Callable[..., Any]) -> Drawn:
    heads, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    others = draw(st.sampled_from([0, 0, heads, heads * width, 3]))
    sizes = {"qkv": 3, "h": heads, "d": width}
    if draw(st.booleans()):
        axes = draw(st.sampled_from(ORDERS)).split()
        number = torch.arange(3 * heads * width).view([sizes[axis] for axis in axes])
        number = number.permute([axes.index(axis) for axis in ("qkv", "h", "d")])
        order = torch.tensor(draw(st.permutations(range(3))))
        channels = torch.cat([number[order].flatten(), torch.arange(3 * heads * width, 3 * heads * width + others)])
    else:
        seed = draw(st.integers(0, 1000))
        channels = torch.randperm(3 * heads * width + others, generator=torch.Generator().manual_seed(seed))
    if draw(st.booleans()):
        channels = (channels + others) % len(channels)
    torch.manual_seed(0)
    return Drawn(heads, width, channels, others, draw(st.booleans())).double()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(layouts())
def test_whatever_is_accepted_divides_the_logits_of_its_heads_and_nothing_else(model: Drawn) -> None:
    tokens = torch.randn(2, 5, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    temperature = found(model, lambda model: model(tokens))
    if not temperature.sites:
        assert "no module of it was proven" in temperature.refused["(root)"]
        return
    assert len(temperature["(root)"]) == model.heads
    with record(model) as recording:
        model(tokens)
    plain = recording.calls[0]
    temperatures = [1.0 + head for head in range(model.heads)]
    temperature.set_temperatures("(root)", temperatures)
    with record(model) as recording:
        hot = model(tokens)
    call = recording.calls[0]
    expected = plain.logits()[0] / torch.tensor(temperatures)[:, None, None]
    assert torch.allclose(call.logits()[0], expected, atol=1e-6)
    assert torch.equal(call.value, plain.value)
    temperature.detach()
    assert torch.allclose(model(tokens), hot, atol=1e-12)


class InTwoParts(Separate):
    """Half of each query and key is not turned, and values are as wide as a half (multi-head latent attention)."""

    def __init__(self) -> None:
        super().__init__("softmax")
        self.value = nn.Linear(WIDTH, WIDTH // 2)
        self.out = nn.Linear(WIDTH // 2, WIDTH)

    def parts(self, tokens: Tensor) -> Parts:
        query, key = (layer(tokens).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for layer in (self.query, self.key))
        return query, key, self.value(tokens).unflatten(-1, (HEADS, HEAD // 2)).transpose(1, 2)


def test_all_channels_of_queries_are_found_where_their_number_is_not_known() -> None:
    temperature = found(made(InTwoParts), run)
    assert temperature.sites[FIRST].projection.rows.shape == (HEADS, HEAD)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_channels_is_found(order: str) -> None:
    sizes = {"qkv": 3, "h": 3, "d": 4}
    axes = order.split()
    number = torch.arange(36).view([sizes[axis] for axis in axes]).permute([axes.index(a) for a in ("qkv", "h", "d")])
    model = Drawn(3, 4, number.flatten(), 0, True).double()
    tokens = torch.randn(2, 5, 10, dtype=torch.float64)
    assert list(found(model, lambda model: model(tokens)).sites) == ["(root)"]


# What is refused, and why.


class Cosine(Separate):
    def parts(self, tokens: Tensor) -> Parts:
        query, key, value = super().parts(tokens)
        return functional.normalize(query, dim=-1), functional.normalize(key, dim=-1), value


class Bare(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)
        del self.query

    def parts(self, tokens: Tensor) -> Parts:
        key, value = (layer(tokens).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for layer in (self.key, self.value))
        return (tokens @ self.weight).unflatten(-1, (HEADS, HEAD)).transpose(1, 2), key, value


class OneForQueriesAndKeys(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.key = self.query


class OffsetLater(Separate):
    """A bias is added to queries behind their layer, as layers do that hand it on."""

    def __init__(self, form: str = "sdpa") -> None:
        super().__init__(form)
        self.offset = nn.Parameter(torch.randn(HEAD))

    def parts(self, tokens: Tensor) -> Parts:
        query, key, value = super().parts(tokens)
        return query + self.offset, key, value


class ReadsTheWeight(Separate):
    def parts(self, tokens: Tensor) -> Parts:
        _, key, value = super().parts(tokens)
        query = functional.linear(tokens, self.query.weight, self.query.bias)
        return query.unflatten(-1, (HEADS, HEAD)).transpose(1, 2), key, value


class Squared(Separate):
    def parts(self, tokens: Tensor) -> Parts:
        query, key, value = super().parts(tokens)
        return query * query.abs(), key, value


@pytest.mark.parametrize(
    "attention",
    [Cosine, Bare, OneForQueriesAndKeys, OffsetLater, ReadsTheWeight, Squared],
    ids=lambda kind: kind.__name__,
)
def test_what_no_layer_makes_alone_is_refused(attention: type[Attention]) -> None:
    model = made(attention)
    with nothing_left(model):
        temperature = found(model, run)
    assert temperature.sites == {}
    assert set(temperature.refused) == {FIRST, "blocks.1.attention"}
    assert "normalised by no module after their projection" in temperature.refused[FIRST]
    assert "make them by one `nn.Linear`" in temperature.refused[FIRST]


class ReadElsewhere(Separate):
    """What leaves the attention depends on its queries in another way as well.

    Args:
        way: ``"added"`` (Set Transformer), ``"gate"``, ``"gate before zeros"``, or ``"given too"``.
        form: see `Attention`.
    """

    def __init__(self, way: str, form: str = "sdpa") -> None:
        super().__init__(form)
        self.way = way
        if way == "gate before zeros":
            nn.init.zeros_(self.out.weight)

    def forward(self, tokens: Tensor) -> Any:
        query, key, value = self.parts(tokens)
        if self.form == "sdpa":
            query = query / self.temperature_H[:, None, None].to(query.dtype)
            mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        else:
            logits = query @ key.mT / self.temperature_H[:, None, None].to(query.dtype) / HEAD**0.5
            weights = logits.softmax(-1) if self.form == "softmax" else logits.exp() / logits.exp().sum(-1, True)
            mixed = functional.dropout(weights, self.dropout, self.training) @ value
        if self.way == "added":
            mixed = mixed + query
        elif self.way.startswith("gate"):
            mixed = mixed * query.sigmoid()
        mixed = self.out(mixed.transpose(1, 2).flatten(2))
        return (mixed, query.transpose(1, 2).flatten(2)) if self.way == "given too" else mixed


@pytest.mark.parametrize("way", ["added", "gate", "gate before zeros"])
def test_queries_that_something_else_reads_are_refused(way: str) -> None:
    model = made(lambda: ReadElsewhere(way))
    with nothing_left(model):
        temperature = found(model, run)
    assert temperature.sites == {}
    assert "read by something else than its attention" in temperature.refused[FIRST]
    assert "an `nn.Linear` of its own" in temperature.refused[FIRST]


def test_queries_that_are_given_beside_what_is_computed_are_refused() -> None:
    attention = made(lambda: ReadElsewhere("given too")).blocks[0].attention
    temperature = found(attention, run)
    assert "read by something else than its attention" in temperature.refused["(root)"]


@pytest.mark.parametrize("form", ["softmax", "exponentials"])
@pytest.mark.parametrize("way", ["added", "gate"])
def test_where_logits_are_written_out_keys_serve_in_the_place_of_such_queries(way: str, form: str) -> None:
    model = made(lambda: ReadElsewhere(way, form))
    hot = made(lambda: ReadElsewhere(way, form))
    temperature = found(model, run)
    for site in temperature.sites:
        assert temperature.sites[site].projection.name == f"{site}.key"
        temperature.set_temperatures(site, TEMPERATURES)
        hot.get_submodule(site).temperature_H = torch.tensor(TEMPERATURES)
    ours, theirs = (outputs_and_gradients(one, run) for one in (model, hot))
    assert len(temperature.sites) == 2
    assert_same(ours, theirs, 1e-10)


class TellsItsLogits(Separate):
    """Gives its logits, and its keys for a cache, beside what it computes, as x-transformers does."""

    def __init__(self) -> None:
        super().__init__("softmax")

    def forward(self, tokens: Tensor) -> Any:
        query, key, value = self.parts(tokens)
        logits = query @ key.mT
        return self.out((logits.softmax(-1) @ value).transpose(1, 2).flatten(2)), {"logits": logits, "cache": (key,)}


def test_logits_and_keys_that_are_given_are_nothing_else() -> None:
    attention = made(TellsItsLogits).blocks[0].attention
    assert list(found(attention, run).sites) == ["(root)"]


def test_a_weight_of_several_modules_is_refused() -> None:
    model = made(Separate)
    model.blocks[1].attention.query.weight = model.blocks[0].attention.query.weight
    temperature = found(model, run)
    assert temperature.sites == {}
    assert all("also that of another module" in reason for reason in temperature.refused.values())


def test_a_layer_of_several_sites_has_one_temperature() -> None:
    model = made(Separate)
    model.blocks[1].attention.query = model.blocks[0].attention.query
    temperature = found(model, run)
    assert list(temperature.sites) == [FIRST]
    assert f"also that of {FIRST!r}" in temperature.refused["blocks.1.attention"]


def test_quantised_queries_are_refused_by_name() -> None:
    model = made(Separate, torch.float32).eval()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    temperature = found(quantised, lambda model: model(batch(torch.float32)))
    assert temperature.sites == {}
    assert all("quantised" in reason for reason in temperature.refused.values())


class WholeNumbers(nn.Module):
    """A layer with weights of eight bits, as several packages make them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.scale = layer.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((layer.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens @ (self.weight.to(tokens.dtype) * self.scale).T


def test_weights_of_whole_numbers_are_refused_by_name() -> None:
    model = made(Separate)
    for block in model.blocks:
        block.attention.query = WholeNumbers(block.attention.query)
    temperature = found(model, run)
    assert all("quantised" in reason for reason in temperature.refused.values()) and temperature.sites == {}


@pytest.mark.parametrize("adapted", ["query", "value"])
def test_adapters_are_refused_by_name(adapted: str) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(made(Separate), peft.LoraConfig(target_modules=[adapted], init_lora_weights=False))
    temperature = found(model, run)
    assert temperature.sites == {} and len(temperature.refused) == 2
    reason = next(iter(temperature.refused.values()))
    assert ("leave the query projection out of `target_modules`" if adapted == "query" else "frozen") in reason


def test_adapters_elsewhere_with_queries_that_train_are_no_obstacle() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(made(Separate), peft.LoraConfig(target_modules=["value"]))
    for block in model.base_model.model.blocks:
        block.attention.query.requires_grad_()
    temperature = found(model, run)
    assert len(temperature.sites) == 2


class FullyShardedDataParallel(nn.Module):
    """Called as torch's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, *args: Any) -> Any:
        return self._fsdp_wrapped_module(*args)


def test_flat_parameters_are_refused_by_name() -> None:
    model = nn.Sequential(FullyShardedDataParallel(made(Separate)))
    temperature = found(model, run)
    assert temperature.sites == {} and all("ModelParallelStrategy" in text for text in temperature.refused.values())


# What can be told later.


@pytest.mark.parametrize("attention", [Separate, lambda: Separate("softmax"), lambda: Fused("qkv h d")])
@pytest.mark.parametrize("bias", ["as it is", "none"])
def test_queries_of_zeros_are_for_later(attention: Callable[[], Attention], bias: str) -> None:
    model = made(attention)
    if bias == "none":
        for block in model.blocks:
            block.attention.bias = lambda tokens: torch.zeros((), dtype=tokens.dtype)
    with torch.no_grad():
        for block in model.blocks:
            layer = block.attention.query if hasattr(block.attention, "query") else block.attention.qkv
            layer.weight[:WIDTH] = 0
            layer.bias[:WIDTH] = 0
    met = {site: Met.of(site, model.get_submodule(site), (batch(),), {}) for site in (FIRST, "blocks.1.attention")}
    temperature = AttentionTemperature(model)
    assert temperature.find_among(met) == set(met)
    assert temperature.sites == {} and "zero" in temperature.refused[FIRST]
    with torch.no_grad():
        for block in model.blocks:
            layer = block.attention.query if hasattr(block.attention, "query") else block.attention.qkv
            layer.weight[:WIDTH].normal_()
    assert temperature.find_among(met) == set()
    assert list(temperature.sites) == list(met) and temperature.refused == {}


def test_logits_that_are_not_finite_are_for_later() -> None:
    model = made(Separate)
    met = {FIRST: Met.of(FIRST, model.blocks[0].attention, (batch() * torch.inf,), {})}
    temperature = AttentionTemperature(model)
    assert temperature.find_among(met) == {FIRST}
    assert "not finite" in temperature.refused[FIRST]


def test_a_site_that_fails_when_it_runs_again_is_refused_with_the_error() -> None:
    model = made(Separate)
    met = {FIRST: Met.of(FIRST, model.blocks[0].attention, (batch()[..., 1:],), {})}
    temperature = AttentionTemperature(model)
    assert temperature.find_among(met) == set()
    assert "running it again failed: RuntimeError" in temperature.refused[FIRST]


# No trace.


class Remembering(Separate):
    """Changes buffers, attributes and containers whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls, self.lengths, self.by_length, self.last = 0, [], {}, None

    def parts(self, tokens: Tensor) -> Parts:
        self.seen += 1
        self.mean = self.mean * 0.9 + tokens.detach().mean((0, 1)) * 0.1
        self.calls += 1
        self.lengths.append(tokens.shape[1])
        self.by_length[len(self.by_length)] = tokens.detach()
        self.last = tokens.detach()
        if self.calls == 1:
            self.made_late = True
        return super().parts(tokens)


@pytest.mark.parametrize("layout", ["separate", "a shared norm", "h d qkv, written out"])
def test_a_search_leaves_no_trace(layout: str) -> None:
    model = made(FOUND[layout])
    outputs_and_gradients(model, run)  # so that there are gradients
    plain = copy.deepcopy(model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    copies = {name: gradient.clone() for name, gradient in gradients.items()}
    parameters = list(model.parameters())
    versions = [parameter._version for parameter in parameters]
    torch.manual_seed(5)
    found(model, run)
    after = torch.rand(3)
    torch.manual_seed(5)
    plain(batch())
    assert torch.equal(after, torch.rand(3)), "random numbers were drawn"
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name] and torch.equal(parameter.grad, copies[name])
    assert [parameter._version for parameter in parameters] == versions
    assert all(ours is theirs for ours, theirs in zip(parameters, model.parameters(), strict=True))


def test_what_a_site_remembers_is_what_it_was_before_the_search() -> None:
    model, plain = made(Remembering).eval(), made(Remembering).eval()
    temperature = found(model, run)
    run(plain)
    assert len(temperature.sites) == 2
    for ours, theirs in ((model.blocks[i].attention, plain.blocks[i].attention) for i in range(2)):
        assert ours.calls == theirs.calls == 1 and ours.lengths == theirs.lengths
        assert ours.by_length.keys() == theirs.by_length.keys() and torch.equal(ours.last, theirs.last)
        assert torch.equal(ours.seen, theirs.seen) and torch.equal(ours.mean, theirs.mean)
        assert ours.made_late


def test_a_cache_of_keys_is_not_written_to() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    cache = transformers.DynamicCache()
    tokens = torch.randint(60, (2, 7))
    temperature = found(model, lambda model: model(tokens, past_key_values=cache, use_cache=True))
    assert len(temperature.sites) == 2
    assert cache.get_seq_length() == 7


class Tuples(nn.Linear):
    """A layer that gives its bias beside what it computes, as Megatron's do."""

    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens), self.bias


class WithTuples(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.query = Tuples(WIDTH, WIDTH)

    def parts(self, tokens: Tensor) -> Parts:
        query = self.query(tokens)[0].unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        key, value = (layer(tokens).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for layer in (self.key, self.value))
        return query, key, value


class ByName(Model):
    """Hands everything to its attention by name."""

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = tokens + block.attention(tokens=block.norm(tokens))
        return tokens


class Monitored(Separate):
    """Has a hook that reads what leaves its queries, and one that gives something else."""

    def __init__(self) -> None:
        super().__init__()
        self.query.register_forward_hook(lambda module, args, output: output * 0.5)


@pytest.mark.parametrize("attention", [WithTuples, Remembering, Monitored], ids=lambda kind: kind.__name__)
def test_unusual_sites(attention: type[Attention]) -> None:
    model = made(attention)
    untouched = copy.deepcopy(model)
    temperature = found(model, run)
    assert len(temperature.sites) == 2, temperature.refused
    for site in temperature.sites:
        temperature.set_temperatures(site, TEMPERATURES)
    hot, _ = written_in(untouched, dict.fromkeys(temperature.sites, TEMPERATURES))
    ours, theirs = (outputs_and_gradients(m, run) for m in (model, hot))
    assert_same(ours, theirs, 1e-10)
    temperature.detach()
    assert_same((outputs_and_gradients(model, run)[0], {}), (theirs[0], {}), 1e-10)


def test_arguments_by_name() -> None:
    model = ByName(Separate).double()
    assert len(found(model, run).sites) == 2


def test_what_a_bias_adds_to_the_logits_of_each_head_is_known() -> None:
    temperature = found(made(Separate), run)
    bias = Separate().bias(batch())
    bias = bias.masked_fill(bias.isinf(), torch.nan)
    centred = bias - bias.nanmean(-1, keepdim=True)
    expected = centred.square().nanmean(-1).sqrt().mean(-1)
    assert torch.allclose(temperature.sites[FIRST].bias_std.double(), expected, atol=1e-6)


def test_only_sites_that_match_are_found() -> None:
    model = made(Separate)
    temperature = AttentionTemperature(model, sites="blocks.1.*")
    temperature.find(lambda: run(model))
    assert list(temperature.sites) == ["blocks.1.attention"] and temperature.refused == {}
    with pytest.raises(ValueError, match="nowhere"):
        AttentionTemperature(model, sites="nowhere.*")


def test_a_guess_is_taken_back_where_it_was_wrong() -> None:
    class Misleading(WithNorm):
        """A norm behind the layer that looks as if it made the queries."""

        def __init__(self) -> None:
            super().__init__("shared")
            self.scale = self.q_norm
            del self.q_norm

        def parts(self, tokens: Tensor) -> Parts:
            query, key, value = super(WithNorm, self).parts(tokens)
            return self.scale(query), key, value

    model = made(Misleading)
    temperature = AttentionTemperature(model)
    temperature.guess()
    guessed = temperature.sites[FIRST].projection.name
    for site in temperature.sites:
        temperature.set_temperatures(site, 2.0)
    temperature.find(lambda: run(model))
    assert guessed == f"{FIRST}.query" and temperature.sites[FIRST].projection.name == f"{FIRST}.scale"
    assert temperature[FIRST] == pytest.approx([2.0] * 4)
    assert not model.blocks[0].attention.query._forward_hooks
