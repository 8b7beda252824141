"""`nn.MultiheadAttention` and the layers around it, in training and on their fused paths in evaluation."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from temperature.exactness import assert_different, assert_same, check, found, nothing_left, outputs_and_gradients
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, HEADS, B, N, M = 24, 4, 2, 6, 9
TEMPERATURES = [0.5, 1.0, 1.75, 3.0]
PADDING = torch.arange(N) >= torch.tensor([6, 4])[:, None]
FUTURE = torch.ones(N, N).triu(1).bool()


class ByHand(nn.Module):
    """The definition of `nn.MultiheadAttention`, with temperatures."""

    def __init__(self, plain: nn.MultiheadAttention, temperature: list[float]) -> None:
        super().__init__()
        self.plain, self.temperature = plain, torch.tensor(temperature, dtype=torch.float64)

    def __getattr__(self, name: str) -> Any:
        """The layer around it asks its attention for more than to attend."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["plain"], name)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        plain: Any = self.plain
        if not plain.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        if plain.in_proj_weight is not None:
            weights = plain.in_proj_weight.chunk(3)
        else:
            weights = (plain.q_proj_weight, plain.k_proj_weight, plain.v_proj_weight)
        parts = [tensor @ weight.T for tensor, weight in zip((query, key, value), weights, strict=True)]
        if plain.in_proj_bias is not None:
            parts = [part + bias for part, bias in zip(parts, plain.in_proj_bias.chunk(3), strict=True)]
        query, key, value = parts
        if plain.bias_k is not None:
            key = torch.cat([key, plain.bias_k.expand(len(key), 1, -1)], 1)
            value = torch.cat([value, plain.bias_v.expand(len(value), 1, -1)], 1)
        if plain.add_zero_attn:
            key, value = (torch.cat([part, torch.zeros_like(part[:, :1])], 1) for part in (key, value))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (query, key, value))
        logits = query @ key.mT / query.shape[-1] ** 0.5 / self.temperature.to(query.dtype)[:, None, None]
        more = key.shape[2] - (0 if attn_mask is None else attn_mask.shape[-1])
        if attn_mask is not None:
            attn_mask = nn.functional.pad(attn_mask, (0, more))
            logits = logits.masked_fill(attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
        if key_padding_mask is not None:
            hidden = nn.functional.pad(key_padding_mask, (0, key.shape[2] - key_padding_mask.shape[1]))
            hidden = hidden if hidden.dtype == torch.bool else hidden < -1
            logits = logits.masked_fill(hidden[:, None, None], -torch.inf)
        weights = logits.softmax(-1)
        mixed = plain.out_proj((weights @ value).transpose(1, 2).flatten(2))
        mixed = mixed if plain.batch_first else mixed.transpose(0, 1)
        return mixed, weights.mean(1) if need_weights else None


def by_hand(model: nn.Module, temperature: dict[str, list[float]]) -> tuple[nn.Module, Any]:
    """A copy of a model whose attention is written by hand."""
    hot = copy.deepcopy(model)
    for site, heads in temperature.items():
        parent, _, name = site.rpartition(".")
        setattr(hot.get_submodule(parent), name, ByHand(getattr(hot.get_submodule(parent), name), heads))
    return hot, nullcontext()


def named_as_plain(result: tuple[list[Tensor], dict[str, Tensor]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    return result[0], {name.replace(".plain.", "."): gradient for name, gradient in result[1].items()}


def lively(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


class One(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})

    def forward(self, *given: Any, **options: Any) -> Any:
        return self.attention(*given, **options)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


SELF = (drawn(B, N, WIDTH),) * 3
CROSS = (drawn(B, N, WIDTH), drawn(B, M, WIDTH), drawn(B, M, WIDTH))
MULTIHEADS: dict[str, tuple[dict[str, Any], tuple[Tensor, ...], dict[str, Any]]] = {
    "itself": ({}, SELF, {}),
    "without weights": ({}, SELF, {"need_weights": False}),
    "cross": ({}, CROSS, {}),
    "no bias": ({"bias": False}, SELF, {}),
    "sequences second": ({"batch_first": False}, SELF, {}),
    "other widths": (
        {"kdim": 10, "vdim": 14},
        (drawn(B, N, WIDTH), drawn(B, M, 10), drawn(B, M, 14)),
        {"need_weights": False},
    ),
    "other widths, no bias": (
        {"kdim": 10, "bias": False},
        (drawn(B, N, WIDTH), drawn(B, M, 10), drawn(B, M, WIDTH)),
        {},
    ),
    "bias of keys": ({"add_bias_kv": True}, SELF, {}),
    "a key of zeros": ({"add_zero_attn": True}, CROSS, {}),
    "both": ({"add_bias_kv": True, "add_zero_attn": True}, SELF, {"need_weights": False}),
    "padding": ({}, SELF, {"key_padding_mask": PADDING}),
    "causal": ({}, SELF, {"attn_mask": FUTURE, "need_weights": False}),
    "a bias": ({}, SELF, {"attn_mask": drawn(N, N)}),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", MULTIHEADS)
def test_outputs_and_gradients_are_those_of_a_temperature_by_hand(case: str, training: bool) -> None:
    options, given, more = MULTIHEADS[case]
    model = lively(One(**options)).double().train(training)
    untouched = copy.deepcopy(model)

    def run(model: nn.Module) -> Any:
        return model(*given, **more)

    check(model, run, lambda temperature: by_hand(untouched, temperature), 1e-10, renamed=named_as_plain)


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lively(nn.TransformerEncoder(layer, 2))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_an_encoder(training: bool, norm_first: bool) -> None:
    model = encoder(dropout=0.0, norm_first=norm_first).double().train(training)
    untouched = copy.deepcopy(model)
    check(
        model,
        lambda model: model(SELF[0]),
        lambda temperature: by_hand(untouched, temperature),
        1e-10,
        renamed=named_as_plain,
    )


def test_a_decoder() -> None:
    model = lively(
        nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True), 2)
    ).double()
    untouched = copy.deepcopy(model)
    check(
        model,
        lambda model: model(CROSS[0], CROSS[1], tgt_mask=FUTURE, tgt_is_causal=True),
        lambda temperature: by_hand(untouched, temperature),
        1e-10,
        renamed=named_as_plain,
    )


class FusedLayers(TorchDispatchMode):
    """Counts layers that are computed at once."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_transformer_encoder_layer_fwd" in str(function) or "_native_multi_head_attention" in str(
            function
        )
        return function(*args, **(kwargs or {}))


def on_the_fast_path(model: nn.Module, *given: Any, **options: Any) -> tuple[Tensor, int]:
    with torch.no_grad(), FusedLayers() as fused:
        output = model(*given, **options)
    output = output[0] if isinstance(output, tuple) else output
    return output.to_padded_tensor(0.0) if output.is_nested else output, fused.count


@pytest.mark.parametrize("options", [{}, {"src_key_padding_mask": PADDING}], ids=["whole", "padding"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fused_path_of_an_encoder_in_evaluation_is_taken_and_hot(options: dict[str, Any], norm_first: bool) -> None:
    model, tokens = encoder(norm_first=norm_first).eval(), SELF[0].float()
    plain, fused = on_the_fast_path(model, tokens, **options)
    assert fused == 2
    with nothing_left(model):
        with torch.no_grad():
            temperature = found(model, lambda model: model(tokens, **options))
        assert list(temperature.sites) == ["layers.0.self_attn", "layers.1.self_attn"]
        for site in temperature.sites:
            temperature.set_temperatures(site, TEMPERATURES)
        hot, fused = on_the_fast_path(model, tokens, **options)
        assert fused == 2
        folded = encoder(norm_first=norm_first).eval()
        folded.load_state_dict(model.state_dict())
        assert torch.equal(hot, on_the_fast_path(folded, tokens, **options)[0])
        assert not torch.allclose(hot, plain, atol=1e-2)
        temperature.detach()
    assert torch.equal(hot, on_the_fast_path(model, tokens, **options)[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_on_the_fused_path_of_the_attention_itself() -> None:
    model = lively(One()).eval()
    nested = torch.nested.nested_tensor([SELF[0][0].float(), SELF[0][1, :4].float()])
    temperature = found(model, lambda model: model(*(tensor.float() for tensor in SELF)))
    assert list(temperature.sites) == ["attention"], temperature.refused
    temperature.set_temperatures("attention", TEMPERATURES)
    hot, fused = on_the_fast_path(model, nested, nested, nested, need_weights=False)
    assert fused == 1
    temperature.detach()
    assert torch.equal(hot, on_the_fast_path(model, nested, nested, nested, need_weights=False)[0])


def test_parameters_are_where_optimisers_and_strategies_look_for_them() -> None:
    model = lively(One())
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    temperature = found(model, lambda model: model(*(tensor.float() for tensor in SELF)))
    temperature.set_temperatures("attention", TEMPERATURES)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert isinstance(model.attention, nn.MultiheadAttention)
    model.to(torch.float64)
    outputs_and_gradients(model, lambda model: model(*SELF))
    assert all(parameter.grad is not None for parameter in model.parameters())


class Shaken(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_it_is_hot_under_a_function_mode_as_well() -> None:
    """Which keeps layers from being computed at once."""
    model, tokens = encoder().eval(), SELF[0].float()
    temperature = found(model, lambda model: model(tokens))
    for site in temperature.sites:
        temperature.set_temperatures(site, TEMPERATURES)
    hot, _ = on_the_fast_path(model, tokens)
    with Shaken(), torch.no_grad():
        assert torch.allclose(model(tokens), hot, atol=1e-5)
    temperature.detach()
    assert_same(([model(tokens).detach()], {}), ([hot], {}), 1e-5)
    assert_different(([model(tokens)],), ([encoder().eval()(tokens)],))
