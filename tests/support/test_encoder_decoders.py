"""Encoder-decoders of Hugging Face transformers, with random weights from small configurations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from support.cell import Arguments, Cell, Seen, cells_of, check
from support.hugging_face import IDS, SMALL, attention_of, made, padded, padding, sharpened
from support.truth import Attention, Tape, causal, tokens
from torch import Tensor, nn

FAMILY = "Hugging Face transformers, encoder-decoders"
#: BART and all that were made of it.
BART = {
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
BART_SITES = ("encoder.layers.*.self_attn", "decoder.layers.*.self_attn", "decoder.layers.*.encoder_attn")
T5_SITES = (
    "encoder.block.*.layer.0.SelfAttention",
    "decoder.block.*.layer.0.SelfAttention",
    "decoder.block.*.layer.1.EncDecAttention",
)
#: So many tokens have been decoded before the next one.
DECODED = 6


def bart(way: str) -> nn.Module:
    return sharpened(made("BartModel", "BartConfig", way, **BART, max_position_embeddings=32), "q_proj", "k_proj")


def whisper(way: str) -> nn.Module:
    model = made(
        "WhisperModel", "WhisperConfig", way, **BART, num_mel_bins=8, max_source_positions=10, max_target_positions=20
    )
    return sharpened(model, "q_proj", "k_proj")


def t5(way: str) -> nn.Module:
    settings = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    few_buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6, "dropout_rate": 0.0}
    model = made("T5Model", "T5Config", way, **settings, **few_buckets)
    return sharpened(model, "q", "relative_attention_bias", factor=2.0)


def led(way: str) -> nn.Module:
    longest = {"max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32}
    model = made("LEDModel", "LEDConfig", way, **BART, **longest, attention_window=4)
    return sharpened(model, "q_proj", "k_proj")


def bert_decoder(way: str) -> nn.Module:
    settings = {**SMALL, "attention_probs_dropout_prob": 0.0, "is_decoder": True, "add_cross_attention": True}
    return sharpened(made("BertModel", "BertConfig", way, **settings), "query", "key")


def after_the_first_tokens(prompt: Arguments, model: nn.Module) -> Arguments:
    """One more token for a decoder, with a cache of what it has decoded and of the keys of the encoder."""
    output = model(**prompt, use_cache=True)
    rest = {name: tensor for name, tensor in prompt.items() if name not in ("decoder_input_ids", "input_ids")}
    if "decoder_input_ids" in prompt:
        rest |= {"decoder_input_ids": IDS[:, DECODED : DECODED + 1], "encoder_outputs": (output[-1],)}
        rest.pop("input_features", None)
    else:
        rest |= {"input_ids": IDS[:, DECODED : DECODED + 1]}
    return {**rest, "cache": output.past_key_values, "use_cache": True}


def text(side: str, model: nn.Module, decoded: int = 7) -> Arguments:
    return padded(side, decoder_input_ids=IDS[:, :decoded], use_cache=False)(model)


def text_of_one_length(side: str, model: nn.Module) -> Arguments:
    """As many tokens are decoded as the source has: no query is the token of a key for that."""
    return text(side, model, decoded=12)


def text_with_padded_targets(side: str, model: nn.Module) -> Arguments:
    return {**text(side, model), "decoder_attention_mask": padding(side, 7)}


def next_token_of_text(side: str, model: nn.Module) -> Arguments:
    prompt = padded(side, decoder_input_ids=IDS[:, :DECODED])(model)
    return after_the_first_tokens(prompt, model)


def speech(model: nn.Module) -> Arguments:
    return {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": IDS[:, :7], "use_cache": False}


def next_token_of_speech(model: nn.Module) -> Arguments:
    prompt = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": IDS[:, :DECODED]}
    return after_the_first_tokens(prompt, model)


def beside_an_encoder(side: str, model: nn.Module) -> Arguments:
    """What an encoder gave, of which some is padding, and tokens of which some are, too."""
    return {
        "input_ids": IDS[:, :7],
        "attention_mask": padding("left", 7),
        "encoder_hidden_states": torch.randn(2, 12, 32),
        "encoder_attention_mask": padding(side),
        "use_cache": False,
    }


def next_token_beside_an_encoder(side: str, model: nn.Module) -> Arguments:
    prompt = {
        "input_ids": IDS[:, :DECODED],
        "encoder_hidden_states": torch.randn(2, 12, 32),
        "encoder_attention_mask": padding(side),
    }
    return after_the_first_tokens(prompt, model)


def is_decoding(arguments: Arguments) -> bool:
    return "cache" in arguments


def visible_to_targets(arguments: Arguments, queries: int, keys: int) -> Tensor:
    visible = causal(queries, keys)
    return visible & tokens(arguments["decoder_attention_mask"]) if "decoder_attention_mask" in arguments else visible


def truth_of_bart(model: nn.Module, tape: Tape, arguments: Arguments, is_encoder_seen: bool = True) -> list[Attention]:
    names = {"query": "q_proj", "key": "k_proj", "output": "out_proj", "heads": 4}
    queries = arguments["decoder_input_ids"].shape[1]
    keys = 7 if is_decoding(arguments) else queries
    source = tokens(arguments["attention_mask"]) if "attention_mask" in arguments else torch.ones(1, 1, 1, 10) > 0
    found = []
    if is_encoder_seen and not is_decoding(arguments):
        found += [attention_of(tape, f"encoder.layers.{i}.self_attn", source, **names) for i in range(2)]
    for layer in (f"decoder.layers.{i}" for i in range(2)):
        own, cross = f"{layer}.self_attn", f"{layer}.encoder_attn"
        found += [
            attention_of(tape, own, visible_to_targets(arguments, queries, keys), **names),
            attention_of(tape, cross, source, **names, self_attention=False),
        ]
    return found


def truth_of_bert_decoder(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    names = {"query": "query", "key": "key", "output": None, "heads": 4}
    own = causal(1 if is_decoding(arguments) else 7, 7)
    if "attention_mask" in arguments:
        own = own & tokens(arguments["attention_mask"])
    source = tokens(arguments["encoder_attention_mask"])
    found = []
    for layer in (f"encoder.layer.{i}" for i in range(2)):
        found += [
            attention_of(tape, f"{layer}.attention.self", own, **names),
            attention_of(tape, f"{layer}.crossattention.self", source, **names, self_attention=False),
        ]
    return found


def bucket_of_t5(offset: int, both_ways: bool) -> int:
    """Short distances one by one, long ones by their logarithm (Raffel et al. 2020), in 8 buckets up to 6 tokens."""
    buckets, longest = 4 if both_ways else 8, 6
    first = buckets if both_ways and offset > 0 else 0
    distance = abs(offset) if both_ways else max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    steps = math.log(distance / exact) / math.log(longest / exact) * (buckets - exact)
    return first + min(exact + int(steps), buckets - 1)


def bias_of_t5(model: nn.Module, stack: str, queries: int, keys: int) -> Tensor:
    """The bias that the first layer of a stack learns for all of its layers."""
    table_PH = model.get_parameter(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight").double()
    bucket_NM = torch.tensor(
        [[bucket_of_t5(j - i, stack == "encoder") for j in range(keys)] for i in range(keys - queries, keys)]
    )
    return table_PH[bucket_NM].permute(2, 0, 1)[None]


def truth_of_t5(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    names = {"query": "q", "key": "k", "output": "o", "heads": 4, "scale": 1.0}
    queries = arguments["decoder_input_ids"].shape[1]
    keys = 7 if is_decoding(arguments) else queries
    source = tokens(arguments["attention_mask"])
    found = []
    if not is_decoding(arguments):
        bias = bias_of_t5(model, "encoder", 12, 12)
        sites = (f"encoder.block.{i}.layer.0.SelfAttention" for i in range(2))
        found += [attention_of(tape, site, source, **names, bias=bias) for site in sites]
    for layer in (f"decoder.block.{i}.layer" for i in range(2)):
        own, cross = f"{layer}.0.SelfAttention", f"{layer}.1.EncDecAttention"
        bias = bias_of_t5(model, "decoder", queries, keys)
        found += [
            attention_of(tape, own, visible_to_targets(arguments, queries, keys), **names, bias=bias),
            attention_of(tape, cross, source, **names, self_attention=False),
        ]
    return found


ALL = Seen()
Arguer = Callable[[nn.Module], Arguments]


def cells(
    model: str,
    make: Callable[[str], nn.Module],
    truth: Callable[[nn.Module, Tape, Arguments], list[Attention]],
    sites: tuple[str, ...],
    whole: dict[str, Arguer],
    decoding: dict[str, Arguer],
    ways: tuple[str, ...] = ("eager", "sdpa"),
    outcome: Seen = ALL,
) -> list[Cell]:
    """What is trained is whole sequences; decoding reads a cache."""
    return [
        Cell(
            FAMILY,
            model,
            way,
            ", ".join(part for part in (mode, case) if part),
            partial(make, way),
            arguments,
            truth,
            tuple(site for site in sites if not (case in decoding and site.startswith("encoder.") and len(sites) == 3)),
            outcome=outcome,
            training=mode == "train",
        )
        for way in ways
        for mode in ("train", "eval")
        for case, arguments in {**whole, **(decoding if mode == "eval" else {})}.items()
    ]


def on_both_sides(arguments: Callable[[str, nn.Module], Arguments], prefix: str = "") -> dict[str, Arguer]:
    return {f"{prefix}{side} padding": partial(arguments, side) for side in ("left", "right")}


TEXT = {
    **on_both_sides(text),
    **on_both_sides(text_of_one_length, "as many tokens as the source, "),
    **on_both_sides(text_with_padded_targets, "source and target with "),
}
NEXT_OF_TEXT = on_both_sides(next_token_of_text, "one token with a cache, ")
CELLS = [
    *cells("T5", t5, truth_of_t5, T5_SITES, TEXT, NEXT_OF_TEXT),
    *cells("BART", bart, truth_of_bart, BART_SITES, TEXT, NEXT_OF_TEXT),
    *cells(
        "Whisper", whisper, truth_of_bart, BART_SITES, {"": speech}, {"one token with a cache": next_token_of_speech}
    ),
    *cells(
        "LED",
        led,
        partial(truth_of_bart, is_encoder_seen=False),
        BART_SITES[1:],
        on_both_sides(text_of_one_length),
        {},
        ("eager",),
        Seen("the encoder, whose windows overlap, is refused; `observe` beside it tells of it", warning="rearranged"),
    ),
    *cells(
        "BERT as a decoder",
        bert_decoder,
        truth_of_bert_decoder,
        ("encoder.layer.*.attention.self", "encoder.layer.*.crossattention.self"),
        on_both_sides(beside_an_encoder),
        on_both_sides(next_token_beside_an_encoder, "one token with a cache, "),
    ),
]


@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
