"""Models of Hugging Face that ranks divide by the plans that come with them."""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import transformers
from rank_pool import RankPool
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_attn import AttentionObserver, AttentionWarning

parallel = pytest.importorskip(
    "transformers.distributed.tensor_parallel", reason="this transformers divides models in another way"
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
}
CONFIGURATIONS: dict[str, Any] = {
    "llama": (transformers.LlamaConfig, {}),
    # Twice as wide as its states, so that a rank's part of the queries is as wide as what they are made of.
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 8}),
    "gpt_oss": (transformers.GptOssConfig, {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {
            **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4},
            **{"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 2, "n_group": 1, "topk_group": 1},
            **{"num_experts_per_tok": 1, "first_k_dense_replace": 2},
        },
    ),
}


def model_of(name: str, attention: str) -> Any:
    kind, arguments = CONFIGURATIONS[name]
    torch.manual_seed(0)
    configuration = kind(**{**SIZES, **arguments})
    configuration._experts_implementation = "eager"  # others have no double precision
    return transformers.AutoModelForCausalLM.from_config(configuration, attn_implementation=attention).double()


def divided(name: str, attention: str) -> Any:
    model = model_of(name, attention)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    names = [*(name for name, _ in model.named_modules()), *(name for name, _ in model.named_parameters())]
    plan = {n: style for n in names for pattern, style in model.tp_plan.items() if fnmatchcase(n, pattern)}
    weights = {
        weight: style
        for module, style in plan.items()
        if "self_attn" in module
        for weight, _ in model.named_parameters()
        if weight.startswith(f"{module}.")
    }
    attention_plan = {n: style for n, style in plan.items() if "self_attn" in n}
    return parallel.apply_tensor_parallelism(model, mesh, {**attention_plan, **weights})


def observed(model: Any, needs_gradients: bool) -> dict[str, Any]:
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    observer = AttentionObserver(model, spectral_sequences=None)
    with warnings.catch_warnings(), torch.set_grad_enabled(needs_gradients):
        warnings.simplefilter("error", AttentionWarning)
        with observer:
            model(input_ids=tokens)
        return observer.snapshot().to_dict()


def of_rank(name: str, attention: str, needs_gradients: bool) -> dict[str, Any]:
    return observed(divided(name, attention), needs_gradients)


@pytest.mark.parametrize("needs_gradients", [True, False])
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, attention) for name in ("llama", "qwen3", "deepseek_v3") for attention in ("sdpa", "eager")),
        *(("gemma2", "eager"), ("gpt_oss", "eager")),  # which have nothing else on a CPU
    ],
)
def test_all_heads_are_seen(ranks: RankPool, name: str, attention: str, needs_gradients: bool) -> None:
    expected = observed(model_of(name, attention), needs_gradients)
    found = ranks(of_rank, name, attention, needs_gradients)
    assert found[0] == found[1]
    assert found[0].keys() == expected.keys()
    for site, statistics in expected.items():
        for statistic, heads in statistics.items():
            found_heads = found[0][site][statistic]
            assert len(found_heads) == len(heads)
            for mine, whole in zip(found_heads, heads, strict=True):
                assert mine == pytest.approx(whole, rel=1e-6, abs=1e-9), (site, statistic)
