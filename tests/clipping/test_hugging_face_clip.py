"""Models of Hugging Face: what of them is clipped, and that it brings the largest logits to the threshold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from test_attention_clip import between_heads, changed_channels, clipped, max_logits
from torch import nn

from lightning_attn.clipping import AttentionClip

SMALL = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
ROTARY = {**SMALL, "max_position_embeddings": 32, "pad_token_id": 0}


def model_of(kind: str, attention: str, **values: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**values)
    config._attn_implementation = attention
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(12)
            elif not parameter.any():
                parameter.normal_(std=0.5)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(1, 32, (2, 8))


CASES: dict[str, tuple[str, dict[str, Any], dict[str, int], bool]] = {
    # Class, its configuration, channels changed for each clipped head, and whether keys are clipped too.
    "GPT-2": (
        "GPT2",
        {"vocab_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16},
        {"h.0.attn.c_attn.weight": 16, "h.0.attn.c_attn.bias": 16},
        True,
    ),
    "Llama": (
        "Llama",
        {**ROTARY, "num_key_value_heads": 4},
        {"layers.0.self_attn.q_proj.weight": 8, "layers.0.self_attn.k_proj.weight": 8},
        True,
    ),
    "Llama, grouped": (
        "Llama",
        {**ROTARY, "num_key_value_heads": 2},
        {"layers.0.self_attn.q_proj.weight": 8},
        False,
    ),
    "BERT": (
        "Bert",
        {**SMALL, "max_position_embeddings": 32},
        {
            f"encoder.layer.0.attention.self.{name}.{part}": 8
            for name in ("query", "key")
            for part in ("weight", "bias")
        },
        True,
    ),
    "GPT-NeoX": (
        "GPTNeoX",
        {**ROTARY, "rotary_pct": 0.25},
        {"layers.0.attention.query_key_value.weight": 16, "layers.0.attention.query_key_value.bias": 16},
        True,
    ),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            **ROTARY,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
        {"layers.0.self_attn.q_b_proj.weight": 8},
        False,
    ),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_largest_logits_come_to_the_threshold(
    case: tuple[str, dict[str, Any], dict[str, int], bool], attention: str
) -> None:
    kind, values, channels, has_keys = case
    model, inputs = model_of(kind, attention, **values), tokens()
    clip, clips, changed = clipped(model, lambda: model(inputs))
    (held,) = clip.sites.values()
    assert (held.keys is not None) is has_keys
    assert changed == {name: len(clips) * count for name, count in channels.items()}


def test_the_bias_of_t5_is_not_clipped() -> None:
    model = transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    ).eval()
    inputs = tokens()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    largest = max_logits(model, lambda: model(inputs))
    threshold = 0.5 * between_heads(largest)
    clip = AttentionClip(model)
    clip.find(lambda: model(inputs))
    clips = clip.clips(1, largest, threshold)
    clip.apply(clips)
    attention = "encoder.block.0.layer.0.SelfAttention"
    expected = {f"{attention}.{name}.weight" for name in "qk"}
    assert set(changed_channels(before, model)) == expected


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "Qwen3": ("Qwen3", "sdpa", {**ROTARY, "num_key_value_heads": 2, "head_dim": 8}, "normalised"),
    "OLMo 2": ("Olmo2", "sdpa", {**ROTARY, "num_key_value_heads": 4}, "normalised"),
    "Gemma 2, eager": (
        "Gemma2",
        "eager",
        {**ROTARY, "num_key_value_heads": 4, "head_dim": 8, "attn_logit_softcapping": 5.0},
        "soft-capped",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_has_a_bound_of_its_own_is_left_alone(case: tuple[str, str, dict[str, Any], str]) -> None:
    kind, attention, values, reason = case
    model, inputs = model_of(kind, attention, **values), tokens()
    clip = AttentionClip(model)
    clip.find(lambda: model(inputs))
    assert not clip.sites
    (said,) = clip.refused.values()
    assert reason in said


def test_adapters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    inputs = tokens()
    config = transformers.LlamaConfig(**ROTARY, num_key_value_heads=4)
    for target, is_refused in (("q_proj", True), ("k_proj", True), ("v_proj", True)):
        model = peft.get_peft_model(
            transformers.LlamaForCausalLM(config), peft.LoraConfig(target_modules=[target], r=2)
        )
        clip = AttentionClip(model)
        clip.find(lambda model=model: model(inputs))
        assert (not clip.sites) is is_refused  # elsewhere than at the queries: these are frozen then
        assert all("adapter" in reason for reason in clip.refused.values())
