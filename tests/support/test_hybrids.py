"""Latent attention, and decoders of which only some layers are attention: Hugging Face transformers, random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.cell import Arguments, Cell, cells_of, check
from support.hugging_face import IDS, SMALL, made, padded, padding, sharpened
from support.truth import Attention, Tape, causal, products, rotated, split_heads, tokens
from torch import Tensor, nn

FAMILY = "Hugging Face transformers, latent attention and hybrids"
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
GROUPED = {**SMALL, **ROPE, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
#: The state space layers of Mamba 2.
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
#: So many tokens have been decoded before the next one.
DECODED = 6


def deepseek(way: str, query_rank: int | None = 16) -> nn.Module:
    latent = {"q_lora_rank": query_rank, "kv_lora_rank": 16}
    widths = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    experts = {**EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    model = made(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        way,
        **{**SMALL, **ROPE, **latent, **widths, **experts, "num_key_value_heads": 4},
    )
    return sharpened(model, "q_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa")


def jamba(way: str) -> nn.Module:
    layers = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
    mamba = {"num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    return sharpened(made("JambaForCausalLM", "JambaConfig", way, **{**GROUPED, **layers, **mamba}), "q_proj", "k_proj")


def bamba(way: str) -> nn.Module:
    settings = {**GROUPED, **MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}
    return sharpened(made("BambaForCausalLM", "BambaConfig", way, **settings), "q_proj", "k_proj")


def falcon(way: str) -> nn.Module:
    settings = {**GROUPED, **MAMBA, "mamba_d_ssm": 64, "key_multiplier": 0.5}
    return sharpened(made("FalconH1ForCausalLM", "FalconH1Config", way, **settings), "q_proj", "k_proj")


def zamba(way: str) -> nn.Module:
    layers = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1}
    mamba = {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 4}
    settings = {**SMALL, **ROPE, **layers, **mamba, "num_key_value_heads": 4, "use_mem_rope": True}
    return sharpened(made("Zamba2ForCausalLM", "Zamba2Config", way, **settings), "q_proj", "k_proj")


def qwen_next(way: str) -> nn.Module:
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    experts = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    settings = {
        **GROUPED,
        **linear,
        **experts,
        **rope,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "linear_value_head_dim": 8,
    }
    return sharpened(made("Qwen3NextForCausalLM", "Qwen3NextConfig", way, **settings), "q_norm", "k_norm")


def lfm(way: str) -> nn.Module:
    settings = {**GROUPED, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    return sharpened(made("Lfm2ForCausalLM", "Lfm2Config", way, **settings), "q_layernorm", factor=2.0)


def whole(side: str, model: nn.Module) -> Arguments:
    return padded(side, use_cache=False)(model)


def packed(model: nn.Module) -> Arguments:
    """Two documents in one sequence, told by positions that begin anew."""
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    return {"input_ids": IDS, "position_ids": positions, "use_cache": False}


def next_token(side: str | None, model: nn.Module) -> Arguments:
    """One token more than a cache holds."""
    prompt = {} if side is None else {"attention_mask": padding(side, DECODED)}
    cache = model(input_ids=IDS[:, :DECODED], **prompt, use_cache=True).past_key_values
    longer = {name: torch.cat([mask, mask.new_ones(2, 1)], 1) for name, mask in prompt.items()}
    token = {"input_ids": IDS[:, DECODED : DECODED + 1], "position_ids": torch.full((2, 1), DECODED)}
    return {**token, **longer, "cache": cache, "use_cache": True}


def positions_of(arguments: Arguments) -> Tensor:
    """The positions of all keys."""
    if "cache" in arguments:
        return torch.arange(DECODED + 1)[None]
    positions: Tensor = arguments.get("position_ids", torch.arange(12)[None])
    return positions


def visible_in(arguments: Arguments) -> Tensor:
    positions_BM = positions_of(arguments)
    queries = arguments["input_ids"].shape[1]
    visible = causal(queries, positions_BM.shape[1])
    if "attention_mask" in arguments:
        return visible & tokens(arguments["attention_mask"])
    document_BM = (positions_BM == 0).cumsum(-1)
    return visible & (document_BM[:, -queries:, None] == document_BM[:, None])[:, None]


def normalised(tensor_BHND: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Divided by its root mean square (Zhang and Sennrich 2019)."""
    return tensor_BHND / (tensor_BHND.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight_D.double()


def truth_of_deepseek(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    """Latent attention (DeepSeek-V2, 2024): 8 of each head's width know no position; 4 do, in a key for all heads."""
    positions = positions_of(arguments)
    queries = arguments["input_ids"].shape[1]
    found = []
    for layer in range(2):
        site = f"model.layers.{layer}.self_attn"
        is_low_rank = f"{site}.q_b_proj" in dict(model.named_modules())
        query_BHND = split_heads(tape.gave_at(f"{site}.{'q_b_proj' if is_low_rank else 'q_proj'}", -1), 4)
        # Keys are made of all latents at each step; what a cache holds is latents.
        key_BHMD = split_heads(tape.gave_at(f"{site}.kv_b_proj", -1).flatten(1, -2), 4)[..., :8]
        shared_BKMD = tape.gave(f"{site}.kv_a_proj_with_mqa").double()[:, None, :, 16:]
        query_BHND = torch.cat(
            [query_BHND[..., :8], rotated(query_BHND[..., 8:], positions[:, -queries:], 1e4, interleaved=True)], -1
        )
        turned_BKMD = rotated(shared_BKMD, positions, 1e4, interleaved=True)
        key_BHMD = torch.cat([key_BHMD, turned_BKMD.expand(-1, 4, -1, -1)], -1)
        found.append(
            Attention(
                site,
                products(query_BHND, key_BHMD),
                visible_in(arguments),
                tape.given_at(f"{site}.o_proj", -1),
                self_attention=queries == positions.shape[1],
            )
        )
    return found


def truth_of_attention_layers(
    layers: tuple[int, ...],
    model: nn.Module,
    tape: Tape,
    arguments: Arguments,
    *,
    site: str = "model.layers.*.self_attn",
    output: str = "o_proj",
    key_heads: int = 2,
    rotary_width: int = 8,
    norms: tuple[str, str] | None = None,
    norm_offset: float = 0.0,
    epsilon: float = 1e-6,
    key_factor: float = 1.0,
    scale: float | None = None,
    is_gated: bool = False,
) -> list[Attention]:
    """Grouped heads of width 8, and what the families do to queries and keys before they are compared.

    Args:
        rotary_width: how much of a head is turned by its position.
        norms: the layers whose weights normalise each head.
        norm_offset, epsilon: what is added to these weights, and to mean squares.
        key_factor: what keys are multiplied with.
        scale: what products are multiplied with.
        is_gated: whether the layer of the queries makes, for each head, a gate beside them, through which what the
            attention computes goes on.
    """
    positions = positions_of(arguments)
    queries = arguments["input_ids"].shape[1]
    found = []
    for name in (site.replace("*", str(layer)) for layer in layers):
        query_BHND = split_heads(tape.gave_at(f"{name}.q_proj", -1), 4)
        key_BKMD = split_heads(tape.gave(f"{name}.k_proj"), key_heads) * key_factor
        computed_BNX = tape.given_at(f"{name}.{output}", -1).double()
        if is_gated:
            query_BHND, gate_BHND = query_BHND.chunk(2, dim=-1)
            computed_BNX = computed_BNX / gate_BHND.transpose(1, 2).flatten(2).sigmoid()
        if norms is not None:
            query_BHND, key_BKMD = (
                normalised(heads, model.get_parameter(f"{name}.{norm}.weight") + norm_offset, epsilon)
                for heads, norm in zip((query_BHND, key_BKMD), norms, strict=True)
            )

        def turned(heads: Tensor, places: Tensor) -> Tensor:
            return torch.cat([rotated(heads[..., :rotary_width], places, 1e4), heads[..., rotary_width:]], -1)

        logits = products(turned(query_BHND, positions[:, -queries:]), turned(key_BKMD, positions), scale)
        is_square = queries == positions.shape[1]
        found.append(Attention(name, logits, visible_in(arguments), computed_BNX, self_attention=is_square))
    return found


def nothing(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    return []


Arguer = Callable[[nn.Module], Arguments]
PADDED: dict[str, Arguer] = {f"{side} padding": partial(whole, side) for side in ("left", "right")}
NEXT: dict[str, Arguer] = {"one token with a cache": partial(next_token, None)}
NEXT_PADDED: dict[str, Arguer] = {
    f"one token with a cache, {side} padding": partial(next_token, side) for side in ("left", "right")
}
CONTINUED = {**NEXT, **NEXT_PADDED}


def cells(
    model: str,
    make: Callable[[str], nn.Module],
    truth: Callable[[nn.Module, Tape, Arguments], list[Attention]],
    site: str,
    trained: dict[str, Arguer] = PADDED,
    decoded: dict[str, Arguer] = CONTINUED,
    **more: Any,
) -> list[Cell]:
    return [
        Cell(
            FAMILY,
            model,
            way,
            f"{mode}, {case}",
            partial(make, way),
            arguments,
            truth,
            (site,),
            training=mode == "train",
            **more,
        )
        for way in ("eager", "sdpa")
        for mode in ("train", "eval")
        for case, arguments in {**trained, **(decoded if mode == "eval" else {})}.items()
    ]


SITE = "model.layers.*.self_attn"
CELLS = [
    *cells("DeepSeek-V3", deepseek, truth_of_deepseek, SITE, {**PADDED, "packed": packed}),
    *cells("DeepSeek-V3 without a low rank of queries", partial(deepseek, query_rank=None), truth_of_deepseek, SITE),
    *cells("Jamba", jamba, partial(truth_of_attention_layers, (1, 3), rotary_width=0), SITE),
    *cells(
        "Bamba", bamba, partial(truth_of_attention_layers, (1,), rotary_width=4), SITE, {**PADDED, "packed": packed}
    ),
    *cells("Falcon-H1", falcon, partial(truth_of_attention_layers, (0, 1), key_factor=0.5), SITE),
    *cells(
        "Zamba2",
        zamba,
        partial(
            truth_of_attention_layers,
            (1, 3),
            site="model.layers.*.shared_transformer.self_attn",
            key_heads=4,
            rotary_width=16,
            scale=8**-0.5,
        ),
        "model.layers.*.shared_transformer.self_attn",
    ),
    *cells(
        "Qwen3-Next",
        qwen_next,
        partial(
            truth_of_attention_layers,
            (3,),
            rotary_width=4,
            norms=("q_norm", "k_norm"),
            norm_offset=1.0,
            is_gated=True,
        ),
        SITE,
    ),
    *cells(
        "LFM2",
        lfm,
        partial(truth_of_attention_layers, (1,), output="out_proj", norms=("q_layernorm", "k_layernorm"), epsilon=1e-5),
        SITE,
    ),
]


@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
