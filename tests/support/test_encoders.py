"""Text encoders of Hugging Face transformers, with random weights from small configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.cell import Arguments, Cell, Refused, Seen, cells_of, check
from support.hugging_face import IDS, SMALL, attention_of, made, padded, sharpened
from support.truth import Attention, Tape, products, rotated, split_heads, tokens
from torch import nn

FAMILY = "Hugging Face transformers, encoders"
BERT = {**SMALL, "attention_probs_dropout_prob": 0.0}
BERT_SITES = "encoder.layer.*.attention.self"


def bert(model: str, config: str, way: str, **settings: Any) -> nn.Module:
    return sharpened(made(model, config, way, **{**BERT, **settings}), "query", "key")


def distilbert(way: str) -> nn.Module:
    settings = {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "attention_dropout": 0.0}
    return sharpened(made("DistilBertModel", "DistilBertConfig", way, **settings), "q_lin", "k_lin")


def deberta(way: str, **settings: Any) -> nn.Module:
    relative = {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 4,
        "max_relative_positions": 16,
        "type_vocab_size": 0,
    }
    model = made("DebertaV2Model", "DebertaV2Config", way, **{**BERT, **relative, **settings})
    nn.init.normal_(model.get_parameter("encoder.rel_embeddings.weight"))
    return sharpened(model, "query_proj", "key_proj")


def modernbert(way: str) -> nn.Module:
    settings = {**SMALL, "num_hidden_layers": 3, "local_attention": 4, "global_attn_every_n_layers": 2}
    return sharpened(made("ModernBertModel", "ModernBertConfig", way, **settings), "Wqkv")


def wav2vec(way: str) -> nn.Module:
    """Two convolutions make 19 tokens of 200 samples, and 9 of 100. Nothing is masked or skipped at random."""
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    chance = {"apply_spec_augment": False, "layerdrop": 0.0, "attention_dropout": 0.0}
    settings = {**SMALL, **convolutions, **positions, **chance}
    return sharpened(made("Wav2Vec2Model", "Wav2Vec2Config", way, **settings), "q_proj", "k_proj")


def speech(model: nn.Module) -> Arguments:
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[1, 100:] = 0
    return {"input_values": torch.randn(2, 200), "attention_mask": mask}


def longformer(way: str) -> nn.Module:
    settings = {**BERT, "attention_window": 4, "max_position_embeddings": 64}
    return bert("LongformerModel", "LongformerConfig", way, **settings)


def bigbird(way: str, kind: str) -> nn.Module:
    """Blocks of one token, so that a sequence of twelve is long enough for them."""
    settings = {"attention_type": kind, "block_size": 1, "num_random_blocks": 1, "max_position_embeddings": 64}
    return bert("BigBirdModel", "BigBirdConfig", way, **settings)


def reformer(way: str) -> nn.Module:
    heads = {"vocab_size": 60, "hidden_size": 32, "feed_forward_size": 48, "num_attention_heads": 4}
    kinds = {"attn_layers": ["local", "lsh"], "num_hashes": 2, "num_buckets": 4}
    chunks = {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "attention_head_size": 8}
    positions = {"axial_pos_shape": (4, 3), "axial_pos_embds_dim": (16, 16)}
    return made("ReformerModel", "ReformerConfig", way, **heads, **kinds, **chunks, **positions, is_decoder=False)


def nystromformer(way: str) -> nn.Module:
    settings = {"segment_means_seq_len": 12, "num_landmarks": 4, "conv_kernel_size": 3}
    return bert("NystromformerModel", "NystromformerConfig", way, **settings)


def nothing(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    return []


def truth_of_bert(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    visible = tokens(arguments["attention_mask"])
    return [
        attention_of(tape, f"encoder.layer.{i}.attention.self", visible, query="query", key="key", output=None, heads=4)
        for i in range(2)
    ]


def truth_of_distilbert(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    visible = tokens(arguments["attention_mask"])
    return [
        attention_of(
            tape,
            f"transformer.layer.{i}.attention",
            visible,
            query="q_lin",
            key="k_lin",
            output="out_lin",
            heads=4,
        )
        for i in range(2)
    ]


def truth_of_wav2vec(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    visible = (torch.arange(19) < torch.tensor([[19], [9]]))[:, None, None]
    names = {"query": "q_proj", "key": "k_proj", "output": "out_proj", "heads": 4}
    return [attention_of(tape, f"encoder.layers.{i}.attention", visible, **names) for i in range(2)]


def truth_of_albert(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    """One layer, run three times."""
    return [
        attention_of(
            tape,
            "encoder.albert_layer_groups.0.albert_layers.0.attention",
            tokens(arguments["attention_mask"]),
            query="query",
            key="key",
            output="dense",
            heads=4,
            call=i,
            key_calls=slice(i, i + 1),
        )
        for i in range(3)
    ]


def bucket_of_deberta(distance: int, buckets: int, longest: int) -> int:
    """Distances of up to half the buckets as they are, and longer ones by their logarithm (He et al. 2021)."""
    middle = buckets // 2
    if abs(distance) <= middle:
        return distance
    ratio = torch.tensor(abs(distance) / middle).log() / torch.tensor((longest - 1) / middle).log()
    return int(torch.ceil(ratio * (middle - 1)) + middle) * (1 if distance > 0 else -1)


def truth_of_deberta(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    """Disentangled attention: content to content, content to position and position to content, scaled by sqrt(3 D)."""
    mask_BN = arguments["attention_mask"].bool()
    visible = (mask_BN[:, None, :] & mask_BN[:, :, None])[:, None]
    span, shares = model.config.position_buckets, getattr(model.config, "share_att_key", False)
    bucket_NM = torch.tensor([[bucket_of_deberta(i - j, span, 16) for j in range(12)] for i in range(12)])
    found = []
    for layer in range(2):
        site = f"encoder.layer.{layer}.attention.self"
        query_BHND, key_BHMD = (split_heads(tape.gave_at(f"{site}.{name}_proj", 0), 4) for name in ("query", "key"))
        logits_BHNM = products(query_BHND, key_BHMD, 1.0)
        # Positions go through layers of their own, or once more through those of the tokens.
        query_of_position, key_of_position = (
            split_heads(
                tape.gave_at(f"{site}.{name}_proj", 1) if shares else tape.gave_at(f"{site}.pos_{name}_proj", 0), 4
            )
            for name in ("query", "key")
        )
        for i in range(12):
            for j in range(12):
                place = int((bucket_NM[i, j] + span).clamp(0, 2 * span - 1))
                logits_BHNM[:, :, i, j] += (query_BHND[:, :, i] * key_of_position[:, :, place]).sum(-1)
                logits_BHNM[:, :, i, j] += (key_BHMD[:, :, j] * query_of_position[:, :, place]).sum(-1)
        found.append(Attention(site, logits_BHNM / (3 * 8) ** 0.5, visible, tape.gave_at(site, 0)))
    return found


def truth_of_modernbert(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    """Every second layer sees two tokens to each side, and has positions of another base."""
    positions = torch.arange(12)[None]
    near = ((positions - positions.T).abs() <= 2)[None, None]
    found = []
    for layer in range(3):
        site, is_local = f"layers.{layer}.attn", layer % 2 == 1
        query, key, _ = tape.gave_at(f"{site}.Wqkv", 0).chunk(3, dim=-1)
        query, key = (
            rotated(split_heads(projection, 4), positions, 1e4 if is_local else 1.6e5) for projection in (query, key)
        )
        visible = tokens(arguments["attention_mask"])
        found.append(
            Attention(
                site, products(query, key), visible & near if is_local else visible, tape.given_at(f"{site}.Wo", 0)
            )
        )
    return found


ALL = Seen()


def cells(
    model: str,
    make: Callable[[str], nn.Module],
    truth: Callable[[nn.Module, Tape, Arguments], list[Attention]],
    site: str,
    ways: tuple[str, ...] = ("eager", "sdpa"),
    outcome: Seen | Refused = ALL,
    modes: tuple[str, ...] = ("train", "eval"),
    **more: Any,
) -> list[Cell]:
    return [
        Cell(
            FAMILY,
            model,
            way,
            f"{mode}, {side} padding",
            partial(make, way),
            padded(side, **more),
            truth,
            (site,),
            outcome,
            training=mode == "train",
        )
        for way in ways
        for mode in modes
        for side in ("left", "right")
    ]


OVERLAPPING = Refused("rearranged on their way .*observe", "its windows overlap; `observe` beside it tells of it")
CHUNKS = Refused(
    "(keys of its own that were put together|several of its axes may be|columns without a value).*observe",
    "it comes in chunks; `observe` beside it tells of it",
)
LANDMARKS = Refused(
    "cannot be followed from their softmax to their product .*observe",
    "queries and keys are compared with landmarks, and no matrix of queries and keys is computed",
)
CELLS = [
    *cells("BERT", partial(bert, "BertModel", "BertConfig"), truth_of_bert, BERT_SITES),
    *cells(
        "BERT with `output_attentions`",
        partial(bert, "BertModel", "BertConfig"),
        truth_of_bert,
        BERT_SITES,
        ("eager",),
        output_attentions=True,
    ),
    *cells("RoBERTa", partial(bert, "RobertaModel", "RobertaConfig"), truth_of_bert, BERT_SITES),
    *cells("ELECTRA", partial(bert, "ElectraModel", "ElectraConfig"), truth_of_bert, BERT_SITES),
    *cells("DistilBERT", distilbert, truth_of_distilbert, "transformer.layer.*.attention"),
    *cells(
        "ALBERT",
        partial(bert, "AlbertModel", "AlbertConfig", embedding_size=16, num_hidden_layers=3),
        truth_of_albert,
        "encoder.albert_layer_groups.0.albert_layers.0.attention",
    ),
    *cells("DeBERTa-v2", deberta, truth_of_deberta, BERT_SITES, ("eager",)),
    *cells(
        "DeBERTa-v3",
        partial(deberta, share_att_key=True, norm_rel_ebd="layer_norm"),
        truth_of_deberta,
        BERT_SITES,
        ("eager",),
    ),
    *cells("ModernBERT", modernbert, truth_of_modernbert, "layers.*.attn"),
    *cells("BigBird, full", partial(bigbird, kind="original_full"), truth_of_bert, BERT_SITES, ("eager",)),
    *cells("BigBird, sparse", partial(bigbird, kind="block_sparse"), nothing, BERT_SITES, ("eager",), CHUNKS),
    *cells("Longformer", longformer, nothing, BERT_SITES, ("eager",), OVERLAPPING),
    *cells(
        "Longformer with global tokens",
        longformer,
        nothing,
        BERT_SITES,
        ("eager",),
        OVERLAPPING,
        global_attention_mask=torch.tensor([[1] + 11 * [0]]).expand(2, -1),
    ),
    # In training it seeds itself anew, so that no two runs are alike.
    *(
        Cell(
            FAMILY,
            "Nyströmformer",
            "eager",
            mode,
            partial(nystromformer, "eager"),
            lambda model: {"input_ids": IDS},
            nothing,
            (BERT_SITES,),
            LANDMARKS,
            training=mode == "train",
        )
        for mode in ("train", "eval")
    ),
    *cells("Reformer", reformer, nothing, "encoder.layers.*.attention.self_attention", ("eager",), CHUNKS, ("eval",)),
]
CELLS += [
    Cell(
        FAMILY,
        "Wav2Vec2",
        way,
        f"{mode}, right padding",
        partial(wav2vec, way),
        speech,
        truth_of_wav2vec,
        ("encoder.layers.*.attention",),
        training=mode == "train",
    )
    for way in ("eager", "sdpa")
    for mode in ("train", "eval")
]


@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
