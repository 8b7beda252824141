"""Architectures with attention written out: exactly their sites, and what the model computed.

Weights are random and configurations small. What a model computed is read off a hook on the layer after its attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_attn import Recording, record

transformers = pytest.importorskip("transformers")

IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones(2, 12, dtype=torch.long)
PADDING[1, 9:] = 0
TEXT = {"input_ids": IDS, "attention_mask": PADDING}
SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attn_implementation": "eager",
}
GROUPED = {**SMALL, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Architecture:
    """How to make it, its inputs, its sites, and the layer that takes what a site computed (from the site, or none)."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    sites: tuple[str, ...]
    layer_after: str | None


def from_config(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return module

    return make


def text() -> dict[str, Any]:
    return TEXT


def x_transformers() -> nn.Module:
    package = pytest.importorskip("x_transformers")
    layers = package.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash=False)
    model: nn.Module = package.TransformerWrapper(num_tokens=60, max_seq_len=32, attn_layers=layers)
    return model


def layers(pattern: str, count: int = 2) -> tuple[str, ...]:
    return tuple(pattern.format(number) for number in range(count))


ARCHITECTURES = {
    "GPT-2": Architecture(
        from_config(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=60,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            attn_implementation="eager",
        ),
        text,
        layers("transformer.h.{}.attn"),
        "c_proj",
    ),
    "Llama": Architecture(
        from_config("LlamaForCausalLM", "LlamaConfig", **GROUPED), text, layers("model.layers.{}.self_attn"), "o_proj"
    ),
    "Gemma 2": Architecture(
        from_config("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=8, sliding_window=4),
        text,
        layers("model.layers.{}.self_attn"),
        "o_proj",
    ),
    "gpt-oss": Architecture(
        from_config(
            "GptOssForCausalLM",
            "GptOssConfig",
            **GROUPED,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
        ),
        text,
        layers("model.layers.{}.self_attn"),
        "o_proj",
    ),
    "Mixtral": Architecture(
        from_config("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4),
        text,
        layers("model.layers.{}.self_attn"),
        "o_proj",
    ),
    "x-transformers": Architecture(
        x_transformers,
        lambda: {"x": IDS},
        ("attn_layers.layers.0.1", "attn_layers.layers.2.1"),
        "to_out",
    ),
}


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "attention_dropout_prob", "dropout_prob", "drop_out"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def run(architecture: Architecture, training: bool) -> tuple[Recording, dict[str, Tensor]]:
    """The recorded calls, and what each site computed, (B, N, H E)."""
    torch.manual_seed(0)
    model = architecture.make().train(training)
    without_dropout(model)
    inputs = architecture.inputs()
    computed: dict[str, Tensor] = {}

    def keep(site: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Tensor, ...], output: Any = None) -> None:
            tensor = given[0] if output is None else output[0] if isinstance(output, tuple) else output
            computed[site] = tensor.detach()

        return hook

    for site in architecture.sites:
        module = model.get_submodule(site)
        if architecture.layer_after is None:
            module.register_forward_hook(keep(site))
        else:
            module.get_submodule(architecture.layer_after).register_forward_pre_hook(keep(site))
    with torch.set_grad_enabled(training), record(model) as recording:
        model(**inputs)
    return recording, computed


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_exactly_its_sites_and_what_they_computed(name: str, training: bool) -> None:
    architecture = ARCHITECTURES[name]
    recording, computed = run(architecture, training)
    assert sorted(call.site for call in recording.calls) == sorted(architecture.sites)
    for call in recording.calls:
        output_BNX = call.output().transpose(1, 2).flatten(2)
        sees_a_key_BN1 = call.logits()[1].any(-1).any(1)[..., None]
        model_s_BNX = computed[call.site].reshape(output_BNX.shape)
        # What a row without a visible key becomes depends on the kernel.
        difference = (output_BNX - model_s_BNX).masked_fill(~sees_a_key_BN1, 0.0)
        assert difference.abs().max() < 1e-5
        assert model_s_BNX.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "gpt-oss"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_padding_is_hidden(name: str) -> None:
    recording, _ = run(ARCHITECTURES[name], training=False)
    for call in recording.calls:
        visible = call.logits()[1]
        assert not visible[1, :, :, 9:].any()
        assert visible[0].any(-1).all()


@pytest.mark.parametrize(("name", "layer"), [("Gemma 2", 0), ("gpt-oss", 0)])
def test_a_sliding_window_is_seen(name: str, layer: int) -> None:
    recording, _ = run(ARCHITECTURES[name], training=False)
    visible = recording.calls[layer].logits()[1]
    window = torch.ones(12, 12, dtype=torch.bool).tril().triu(-3)
    assert torch.equal(visible[0], window.expand(4, -1, -1))


def test_learned_sinks_of_gpt_oss() -> None:
    torch.manual_seed(0)
    model = ARCHITECTURES["gpt-oss"].make().eval()
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    with torch.no_grad(), record(model) as recording:
        model(**TEXT)
    for call, layer in zip(recording.calls, model.model.layers, strict=True):
        assert call.sink_logits is not None
        torch.testing.assert_close(call.sink_logits, layer.self_attn.sinks.detach(), rtol=1e-5, atol=1e-5)
        sees_a_key = call.logits()[1].any(-1)
        assert (call.weights().sum(-1)[sees_a_key] < 1).all()
