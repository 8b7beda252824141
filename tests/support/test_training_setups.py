"""The ways in which people train: what must be seen where parts are frozen, shared, skipped, adapted or computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support.cell import Arguments, Cell, Refused, Seen, cells_of, check
from support.training_models import (
    HEADS,
    WIDTH,
    Averaged,
    Checkpointed,
    CopiesFromBefore,
    Distilled,
    Ensemble,
    Frozen,
    Functional,
    Hypernetwork,
    LearnsInside,
    LowRank,
    ManyTasks,
    Quantised,
    SharesWeights,
    Skips,
    Tied,
    TorchAttention,
    Vectorised,
    WeightsBySequence,
    by_matrix_products,
    every_layer,
    in_eight_bits,
    parametrized,
    quantisation_aware,
)
from support.truth import Attention, Tape, causal, products, rotated, split_heads, tokens
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from lightning_attn import record

FAMILY = "Ways to train"
LENGTH = 6


def hidden_states(model: nn.Module) -> Arguments:
    return {"hidden": torch.randn(2, LENGTH, WIDTH)}


def of_own(tape: Tape, site: str, call: int = 0) -> Attention:
    """What a call of `OwnAttention` computes."""
    query, key = (split_heads(tape.gave_at(f"{site}.{name}", call), HEADS) for name in ("query", "key"))
    length = query.shape[2]
    return Attention(site, products(query, key), causal(length, length), tape.given_at(f"{site}.out", call))


def in_order(*sites: str) -> Callable[[nn.Module, Tape, Arguments], list[Attention]]:
    """The truth where each of these sites makes a call, in this order; a site may be there several times."""

    def truth(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
        return [of_own(tape, site, call=sites[:place].count(site)) for place, site in enumerate(sites)]

    return truth


def of_blocks_that_ran(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    """The truth where some blocks of a model are left out."""
    sites = [f"blocks.{number}.attention" for number in range(4)]
    ran = [site for site in sites if tape.calls(site)]
    assert 0 < len(ran) < len(sites), "a test that shows nothing"
    return [of_own(tape, site) for site in ran]


BOTH = ("blocks.0.attention", "blocks.1.attention")


def of_torch_attention(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    attention = model.eval().attention  # a norm that is estimated would go on with its estimate in training
    weight, bias = attention.in_proj_weight.double(), attention.in_proj_bias.double()
    hidden = arguments["hidden"].double()
    query, key, value = (split_heads(part, HEADS) for part in (hidden @ weight.T + bias).chunk(3, dim=-1))
    logits = products(query, key)
    mixed = (logits.softmax(-1) @ value).transpose(1, 2).flatten(2)
    given = mixed @ attention.out_proj.weight.double().T + attention.out_proj.bias.double()
    assert (given - tape.gave_at("attention", 0)).abs().max() < 1e-5
    everything = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    return [Attention("attention", logits, everything, mixed)]


def of_weights_by_sequence(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    weights = tape.gave_at("weights", 0).double().view(-1, 3, WIDTH, WIDTH)
    query, key = (split_heads(arguments["hidden"].double() @ weights[:, place], HEADS) for place in (0, 1))
    everything = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    return [Attention("(root)", products(query, key), everything, tape.given_at("out", 0))]


def own_cells(
    case: str,
    make: Callable[[str], nn.Module],
    calls: Sequence[str] = BOTH,
    ways: Sequence[str] = ("written out", "sdpa"),
    modes: Sequence[str] = ("train", "eval"),
    note: str = "",
    truth: Callable[[nn.Module, Tape, Arguments], list[Attention]] | None = None,
) -> list[Cell]:
    """The cells of a setup in which these sites make calls in this order, or those that a truth of its own tells."""
    return [
        Cell(
            FAMILY,
            case,
            way,
            mode,
            partial(make, way),
            hidden_states,
            truth or in_order(*calls),
            tuple(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", site) for site in calls)),
            Seen(note),
            training=mode == "train",
        )
        for way in ways
        for mode in modes
    ]


INSIDE = tuple(f"model.{site}" for site in BOTH)

OWN = [
    *own_cells("frozen layers under no_grad", lambda way: Frozen(way, torch.no_grad)),
    *own_cells("frozen layers under inference_mode", lambda way: Frozen(way, torch.inference_mode)),
    *own_cells(
        "teacher and student",
        Distilled,
        ("teacher.blocks.0.attention", "teacher.blocks.1.attention", "student.blocks.0.attention"),
        note="choose by `sites`",
    ),
    *own_cells("one layer at all depths", Tied, ("first.attention",) * 3, note="its calls add up"),
    *own_cells("layers that share weights", SharesWeights),
    *own_cells("layers skipped at random", partial(Skips, blocks=4), truth=of_blocks_that_ran, modes=["train"]),
    *own_cells("ensemble", Ensemble, tuple(f"members.{number}.blocks.0.attention" for number in range(3))),
    *own_cells(
        "heads for several tasks",
        ManyTasks,
        ("blocks.0.attention", "tasks.translate.attention", "tasks.tag.attention"),
        note="those that ran",
    ),
    *own_cells("average of the weights", Averaged, tuple(f"online.{site}" for site in BOTH), note="those that ran"),
    *own_cells("checkpoint, reentrant", lambda way: Checkpointed(way, use_reentrant=True), modes=["train"]),
    *own_cells("checkpoint, not reentrant", lambda way: Checkpointed(way, use_reentrant=False), modes=["train"]),
    *own_cells("weight norm", lambda way: every_layer(parametrizations.weight_norm, way)),
    *own_cells("spectral norm", lambda way: every_layer(parametrizations.spectral_norm, way)),
    *own_cells("orthogonal weights", lambda way: every_layer(parametrizations.orthogonal, way)),
    *own_cells("weights of low rank, parametrized", lambda way: every_layer(parametrized(LowRank), way)),
    *own_cells("weights of low rank, by matrix products", by_matrix_products),
    *own_cells("training in low precision (quantised weights)", lambda way: every_layer(parametrized(Quantised), way)),
    *own_cells("weights in eight bits", in_eight_bits),
    *own_cells("quantisation-aware training (torch.ao)", quantisation_aware),
    *(
        Cell(
            FAMILY,
            f"nn.MultiheadAttention, {case}",
            "fused",
            "train",  # in evaluation torch has another way of its own, and rounds otherwise
            partial(TorchAttention, change),
            hidden_states,
            of_torch_attention,
            ("attention",),
            training=True,
        )
        for case, change in (
            ("weights of low rank", parametrized(LowRank, "in_proj_weight")),
            ("spectral norm", partial(parametrizations.spectral_norm, name="in_proj_weight")),
        )
    ),
    *own_cells("functional_call", lambda way: Functional(way, lambda parameter: 0.9 * parameter), INSIDE),
    *own_cells("functional_call, tensors from before", CopiesFromBefore, INSIDE, modes=["eval"]),
    *own_cells("hypernetwork", Hypernetwork, INSIDE),
    Cell(
        FAMILY,
        "weights of each sequence from its data",
        "written out",
        "train",
        WeightsBySequence,
        hidden_states,
        of_weights_by_sequence,
        ("(root)",),
        training=True,
    ),
    *(
        Cell(
            FAMILY,
            "ensemble, by torch.vmap",
            way,
            "eval",
            partial(Vectorised, way),
            hidden_states,
            in_order(),
            outcome=Refused("inside a torch.func transform", "run the members one by one on the steps to be watched"),
        )
        for way in ("written out", "sdpa")
    ),
    *own_cells(
        "meta-learning",
        LearnsInside,
        ("model.blocks.0.attention",) * 2,
        ways=["written out"],  # torch differentiates its fused function once
        note="the calls of all passes add up",
    ),
]  # fmt: skip


# Models of Hugging Face

IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(12) < torch.tensor([[12], [9]])


def bert(way: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        attention_probs_dropout_prob=0.0,
        attn_implementation=way,
    )
    return _hotter(transformers.BertModel(config, add_pooling_layer=False), "query", "key")


def llama(way: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=way,
        use_cache=False,
    )
    return _hotter(transformers.LlamaForCausalLM(config), "q_proj", "k_proj")


def _hotter(model: nn.Module, *layers: str) -> nn.Module:
    """The model with larger logits, so that its attention is not uniform."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in layers:
            assert isinstance(module, nn.Linear)
            nn.init.normal_(module.weight, std=0.3)
    return model


def gpt2(way: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, use_cache=False, attn_implementation=way
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    for name, parameter in model.named_parameters():
        if "c_attn.weight" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def with_padding(model: nn.Module) -> Arguments:
    return {"input_ids": IDS, "attention_mask": MASK.long()}


def truth_of_bert(model: nn.Module, tape: Tape, arguments: Arguments, prefix: str = "") -> list[Attention]:
    found = []
    for layer in range(2):
        site = f"encoder.layer.{layer}.attention.self"
        query, key = (split_heads(tape.gave_at(f"{prefix}{site}.{name}", 0), 4) for name in ("query", "key"))
        output = tape.gave_at(f"{prefix}{site}", 0)
        found.append(Attention(site, products(query, key), tokens(MASK), output))
    return found


def truth_of_llama(model: nn.Module, tape: Tape, arguments: Arguments, prefix: str = "") -> list[Attention]:
    found = []
    for layer in range(2):
        site = f"model.layers.{layer}.self_attn"
        query, key = (
            rotated(split_heads(tape.gave_at(f"{prefix}{site}.{name}_proj", 0), heads), torch.arange(12)[None], 1e4)
            for name, heads in (("q", 4), ("k", 2))
        )
        output = tape.given_at(f"{prefix}{site}.o_proj", 0)
        found.append(Attention(site, products(query, key), causal(12, 12) & tokens(MASK), output))
    return found


def truth_of_gpt2(model: nn.Module, tape: Tape, arguments: Arguments, prefix: str = "") -> list[Attention]:
    found = []
    for layer in range(2):
        site = f"transformer.h.{layer}.attn"
        query, key, _ = (split_heads(part, 4) for part in tape.gave_at(f"{prefix}{site}.c_attn", 0).chunk(3, dim=-1))
        output = tape.given_at(f"{prefix}{site}.c_proj", 0)
        found.append(Attention(site, products(query, key), causal(12, 12) & tokens(MASK), output))
    return found


def _with_lora(make: Callable[[str], nn.Module], way: str) -> nn.Module:
    """The model with adapters that have learned something."""
    peft = pytest.importorskip("peft")
    targets = {llama: ["q_proj", "v_proj"], bert: ["query", "value"], gpt2: ["c_attn"]}[make]
    adapted: nn.Module = peft.get_peft_model(
        make(way), peft.LoraConfig(target_modules=targets, lora_dropout=0.1, fan_in_fan_out=make is gpt2)
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return adapted


def _checkpointing(use_reentrant: bool, make: Callable[[str], nn.Module], way: str) -> nn.Module:
    model: Any = make(way)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    return model  # type: ignore[no-any-return]


def _checkpointed_lora(make: Callable[[str], nn.Module], way: str) -> nn.Module:
    return _checkpointing(False, partial(_with_lora, make), way)


def hugging_face_cells(
    case: str, make: Callable[[Callable[[str], nn.Module], str], nn.Module], prefix: str, modes: Sequence[str]
) -> list[Cell]:
    """The cells of a setup of decoders and an encoder, with padding."""
    models = (
        ("Llama", llama, truth_of_llama, "model.layers.*.self_attn"),
        ("BERT", bert, truth_of_bert, "encoder.layer.*.attention.self"),
        ("GPT-2", gpt2, truth_of_gpt2, "transformer.h.*.attn"),
    )
    return [
        Cell(
            FAMILY,
            f"{name}, {case}",
            way,
            mode,
            partial(make, bare, way),
            with_padding,
            partial(truth, prefix=prefix),
            (sites,),
            training=mode == "train",
        )
        for name, bare, truth, sites in models
        for way in ("eager", "sdpa")
        for mode in modes
    ]


HUGGING_FACE = [
    *hugging_face_cells("LoRA by peft", _with_lora, "base_model.model.", ["train", "eval"]),
    *(
        cell
        for kind, use_reentrant in (("reentrant", True), ("not reentrant", False))
        for cell in hugging_face_cells(
            f"gradient_checkpointing_enable, {kind}",
            partial(_checkpointing, use_reentrant),
            "",
            ["train"],
        )
    ),
    *hugging_face_cells("LoRA and gradient checkpointing", _checkpointed_lora, "base_model.model.", ["train"]),
]

CELLS = [*OWN, *HUGGING_FACE]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing", "ignore:Please use quant_min and quant_max")
@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("way", ["written out", "sdpa"])
def test_weights_that_were_computed_before_anybody_watched(way: str) -> None:
    model, hidden = every_layer(parametrized(LowRank), way), torch.randn(2, LENGTH, WIDTH)
    with parametrize.cached():
        model(hidden)
        with record(model) as recording:
            model(hidden)
    assert recording.sites == BOTH


#: Weights that a hook computes before each call and leaves on the layer, as no parameter.
HOOKED: dict[str, Callable[[nn.Module], object]] = {
    "pruned": partial(prune.l1_unstructured, name="weight", amount=0.3),
    "weight norm of old": torch.nn.utils.weight_norm,
    "spectral norm of old": torch.nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("way", ["written out", "sdpa"])
@pytest.mark.parametrize("kind", HOOKED)
def test_weights_that_a_hook_leaves_on_a_layer(kind: str, way: str) -> None:
    model, hidden = every_layer(HOOKED[kind], way), torch.randn(2, LENGTH, WIDTH)
    tape = Tape()
    with record(model) as recording, tape.running(model):
        model(hidden).sum().backward()
    assert recording.sites == BOTH
    for call, site in zip(recording.calls, BOTH, strict=True):
        truth = of_own(tape, site)
        difference = (call.logits()[0].double() - truth.logits_BHNM).masked_fill(~truth.visible_BHNM, 0.0)
        assert difference.abs().max() < 1e-5
        assert truth.output_BNX is not None
        assert (call.output().transpose(1, 2).flatten(2) - truth.output_BNX).abs().max() < 1e-5
