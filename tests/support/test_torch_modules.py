"""PyTorch's own modules and functions: `nn.MultiheadAttention`, `nn.Transformer`, the fused functions, nested tensors.

The output projections of `nn.MultiheadAttention` are orthogonal here, so that what it attended to can be had back from
its output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cell import Arguments, Cell, Refused, Seen, cells_of, check
from support.truth import Attention, Tape, products, split_heads
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

MODULES = "torch.nn"
FUNCTIONS = "torch.nn.functional"
B, N, M, WIDTH, HEADS = 2, 6, 9, 16, 4
LENGTHS = (6, 4)
PADDING = torch.arange(N) >= torch.tensor(LENGTHS)[:, None]
FUTURE = torch.ones(N, N).triu(1).bool()


def sharpened(model: nn.Module) -> nn.Module:
    """Queries and keys large enough that no head is uniform, and output projections that can be undone."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            nn.init.orthogonal_(module.out_proj.weight)
            for name, parameter in module.named_parameters():
                if "bias" in name and "bias_k" not in name and "bias_v" not in name:
                    nn.init.normal_(parameter, std=0.1)
                elif "out_proj" not in name and "v_proj" not in name:
                    parameter.data.mul_(3)
    return model


def projections(module: Any) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of the projections to queries, keys and values, in float64."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = [weights[0].new_zeros(module.embed_dim)] * 3
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.chunk(3)
    return [(weight.double(), bias.double()) for weight, bias in zip(weights, biases, strict=True)]


def attended(module: Any, output_BNL: Tensor) -> Tensor:
    """What entered the output projection, which is orthogonal."""
    bias = 0.0 if module.out_proj.bias is None else module.out_proj.bias.double()
    return (output_BNL.double() - bias) @ module.out_proj.weight.double()


def attention_of(
    site: str,
    module: Any,
    query_BNL: Tensor,
    key_BML: Tensor,
    output_BNL: Tensor | None,
    *,
    hidden: Tensor | None = None,
    bias: Tensor | None = None,
    is_self: bool = True,
) -> Attention:
    """The definition of `nn.MultiheadAttention`; ``hidden`` and ``bias`` are of the keys that are given."""
    (query_weight, query_bias), (key_weight, key_bias), _ = projections(module)
    query = split_heads(query_BNL.double() @ query_weight.T + query_bias, module.num_heads)
    keys = key_BML.double() @ key_weight.T + key_bias
    if module.bias_k is not None:
        keys = torch.cat([keys, module.bias_k.double().expand(len(keys), 1, -1)], dim=1)
    if module.add_zero_attn:
        keys = torch.cat([keys, torch.zeros_like(keys[:, :1])], dim=1)
    extra = keys.shape[1] - key_BML.shape[1]
    logits = products(query, split_heads(keys, module.num_heads))
    if bias is not None:
        logits = logits + functional.pad(bias.double(), (0, extra))
    visible = torch.ones(1, 1, 1, keys.shape[1], dtype=torch.bool)
    if hidden is not None:
        visible = visible & ~functional.pad(hidden, (0, extra))
    output = None if output_BNL is None else attended(module, output_BNL)
    return Attention(site, logits, visible, output, self_attention=is_self)


# nn.MultiheadAttention


class OneAttention(nn.Module):
    """A model that is one `nn.MultiheadAttention`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})

    def forward(self, **arguments: Any) -> Any:
        return self.attention(**arguments)


def of_itself(tokens: Callable[[], Tensor], **given: Any) -> Callable[[nn.Module], Arguments]:
    def arguments(model: nn.Module) -> Arguments:
        same = tokens()
        return {"query": same, "key": same, "value": same, **given}

    return arguments


def of_others(width: int = WIDTH, value_width: int = WIDTH, **given: Any) -> Callable[[nn.Module], Arguments]:
    def arguments(model: nn.Module) -> Arguments:
        return {
            "query": torch.randn(B, N, WIDTH),
            "key": torch.randn(B, M, width),
            "value": torch.randn(B, M, value_width),
            **given,
        }

    return arguments


def truth_of_attention(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    module, query, key = model.attention, arguments["query"], arguments["key"]
    output = tape.gave_at("attention", 0)
    if query.dim() == 2:
        query, key, output = query[None], key[None], output[None]
    elif not module.batch_first:
        query, key, output = (part.transpose(0, 1) for part in (query, key, output))
    hidden, bias = torch.zeros(1, 1, 1, 1, dtype=torch.bool), None
    mask, padding = arguments.get("attn_mask"), arguments.get("key_padding_mask")
    if padding is not None:
        hidden = hidden | padding.view(-1, 1, 1, padding.shape[-1])
    if mask is not None:
        mask = mask.unflatten(0, (-1, HEADS)) if mask.dim() == 3 else mask[None, None]
        hidden = hidden | (mask if mask.dtype == torch.bool else mask == -math.inf)
        bias = None if mask.dtype == torch.bool else mask.masked_fill(mask == -math.inf, 0.0)
    hidden = hidden.expand(*hidden.shape[:-1], key.shape[1])
    is_self = arguments["query"] is arguments["key"]
    return [attention_of("attention", module, query, key, output, hidden=hidden, bias=bias, is_self=is_self)]


def tokens() -> Tensor:
    return torch.randn(B, N, WIDTH)


ATTENTIONS: dict[str, tuple[dict[str, Any], Callable[[nn.Module], Arguments]]] = {
    "self attention": ({}, of_itself(tokens)),
    "without weights": ({}, of_itself(tokens, need_weights=False)),
    "weights of each head": ({}, of_itself(tokens, average_attn_weights=False)),
    "no bias": ({"bias": False}, of_itself(tokens)),
    "sequences second": ({"batch_first": False}, of_itself(lambda: torch.randn(N, B, WIDTH))),
    "unbatched": ({}, of_itself(lambda: torch.randn(N, WIDTH))),
    "unbatched, padding": ({}, of_itself(lambda: torch.randn(N, WIDTH), key_padding_mask=PADDING[1])),
    "cross attention": ({}, of_others()),
    "kdim and vdim": ({"kdim": 10, "vdim": 7}, of_others(10, 7)),
    "add_bias_kv": ({"add_bias_kv": True}, of_itself(tokens, key_padding_mask=PADDING)),
    "add_zero_attn": ({"add_zero_attn": True}, of_itself(tokens, attn_mask=FUTURE)),
    "both extra keys": ({"add_bias_kv": True, "add_zero_attn": True}, of_others(attn_mask=torch.randn(N, M))),
    "padding": ({}, of_itself(tokens, key_padding_mask=PADDING)),
    "causal": ({}, of_itself(tokens, attn_mask=FUTURE)),
    "causal, is_causal": ({}, of_itself(tokens, attn_mask=FUTURE, is_causal=True, need_weights=False)),
    "causal, additive": (
        {},
        of_itself(tokens, attn_mask=nn.Transformer.generate_square_subsequent_mask(N), need_weights=False),
    ),
    "bias of each head": ({}, of_itself(tokens, attn_mask=2 * torch.randn(B * HEADS, N, N))),
    "causal and padding": ({}, of_itself(tokens, attn_mask=FUTURE, key_padding_mask=PADDING)),
}

CELLS = [
    Cell(
        MODULES,
        "`MultiheadAttention`",
        name,
        mode,
        lambda options=options: sharpened(OneAttention(**options)),
        arguments,
        truth_of_attention,
        ("attention",),
        training=mode == "train",
    )
    for name, (options, arguments) in ATTENTIONS.items()
    for mode in ("train", "eval")
]


# nn.Transformer


class Whole(nn.Module):
    """A model that is one module of `nn.Transformer`, with dropout everywhere but in its attention."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0

    def forward(self, **arguments: Any) -> Any:
        return self.inner(**arguments)


def transformer(**options: Any) -> nn.Module:
    return sharpened(Whole(nn.Transformer(WIDTH, HEADS, 2, 2, 24, **{"batch_first": True, **options})))


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, **{"batch_first": True, **options})
    return sharpened(Whole(nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH))))


def first(tensor_BNL: Tensor, batch_first: bool) -> Tensor:
    return tensor_BNL if batch_first else tensor_BNL.transpose(0, 1)


def source_and_target(**given: Any) -> Callable[[nn.Module], Arguments]:
    def arguments(model: Any) -> Arguments:
        source, target = torch.randn(B, N, WIDTH), torch.randn(B, N - 1, WIDTH)
        is_first = model.inner.batch_first
        return {"src": first(source, is_first), "tgt": first(target, is_first), **given}

    return arguments


def truth_of_transformer(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    inner = model.inner
    is_encoder = isinstance(inner, nn.TransformerEncoder)
    prefix = "inner.layers" if is_encoder else "inner.encoder.layers"
    is_first = inner.layers[0].self_attn.batch_first if is_encoder else inner.batch_first

    def seen(site: str, keys: Tensor | None, hidden: Tensor | None) -> Attention:
        given, gave = (first(part, is_first) for part in (tape.given_at(site, 0), tape.gave_at(site, 0)))
        memory = given if keys is None else keys
        module = model.get_submodule(site)
        return attention_of(site, module, given, memory, gave, hidden=hidden, is_self=keys is None)

    def masks(mask: str, padding: str) -> Tensor | None:
        attention, of_keys = arguments.get(mask), arguments.get(padding)
        found = None
        if attention is not None:
            found = (attention if attention.dtype == torch.bool else attention == -math.inf)[None, None]
        if of_keys is not None:
            found = of_keys[:, None, None] if found is None else found | of_keys[:, None, None]
        return found

    source = masks("mask" if is_encoder else "src_mask", "src_key_padding_mask")
    found = [seen(f"{prefix}.{layer}.self_attn", None, source) for layer in range(2)]
    if is_encoder:
        return found
    memory = first(tape.gave_at("inner.encoder", 0), is_first)
    for layer in range(2):
        site = f"inner.decoder.layers.{layer}"
        found.append(seen(f"{site}.self_attn", None, masks("tgt_mask", "tgt_key_padding_mask")))
        found.append(seen(f"{site}.multihead_attn", memory, masks("memory_mask", "memory_key_padding_mask")))
    return found


TARGET_FUTURE = torch.ones(N - 1, N - 1).triu(1).bool()
TRANSFORMERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no mask": ({}, {}),
    "norm first": ({"norm_first": True}, {"tgt_mask": TARGET_FUTURE, "tgt_is_causal": True}),
    "sequences second": ({"batch_first": False}, {"tgt_mask": TARGET_FUTURE}),
    "all masks": (
        {"activation": "gelu"},
        {
            "tgt_mask": TARGET_FUTURE,
            "src_mask": FUTURE,
            "memory_key_padding_mask": PADDING,
            "tgt_key_padding_mask": PADDING[:, : N - 1],
        },
    ),
    "additive causal mask": (
        {},
        {
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(N - 1),
            "memory_key_padding_mask": PADDING,
            "tgt_is_causal": True,
        },
    ),
}
SITES = (
    "inner.encoder.layers.*.self_attn",
    "inner.decoder.layers.*.self_attn",
    "inner.decoder.layers.*.multihead_attn",
)
CELLS += [
    Cell(
        MODULES,
        "`Transformer`",
        name,
        mode,
        lambda options=options: transformer(**options),
        source_and_target(**masks),
        truth_of_transformer,
        SITES,
        training=mode == "train",
    )
    for name, (options, masks) in TRANSFORMERS.items()
    for mode in ("train", "eval")
]

ENCODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no mask": ({}, {}),
    "norm first": ({"norm_first": True}, {"mask": FUTURE, "is_causal": True}),
    "sequences second": ({"batch_first": False}, {"mask": FUTURE}),
    "additive causal mask": ({}, {"mask": nn.Transformer.generate_square_subsequent_mask(N)}),
    "norm first, padding": ({"norm_first": True}, {"src_key_padding_mask": PADDING}),
    "causal and padding": ({}, {"mask": FUTURE, "src_key_padding_mask": PADDING}),
}


FAST = Seen("on its fast path")


def source(**given: Any) -> Callable[[nn.Module], Arguments]:
    def arguments(model: Any) -> Arguments:
        return {"src": first(torch.randn(B, N, WIDTH), model.inner.layers[0].self_attn.batch_first), **given}

    return arguments


CELLS += [
    Cell(
        MODULES,
        "`TransformerEncoder`",
        name,
        mode,
        lambda options=options: encoder(**options),
        source(**masks),
        truth_of_transformer,
        ("inner.layers.*.self_attn",),
        FAST if mode == "eval" and options.get("batch_first", True) else Seen(),
        training=mode == "train",
    )
    for name, (options, masks) in ENCODERS.items()
    for mode in ("train", "eval")
]


# Nested tensors through the modules


def normalised(tensor: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = tensor - tensor.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + norm.eps).sqrt() * norm.weight.double() + norm.bias.double()


def layer_by_hand(layer: Any, tokens_NL: Tensor) -> tuple[Attention, Tensor]:
    """`nn.TransformerEncoderLayer` of one sequence without padding: its attention, and what it gives."""
    entering = normalised(tokens_NL, layer.norm1) if layer.norm_first else tokens_NL
    found = attention_of("", layer.self_attn, entering[None], entering[None], None)
    weight, bias = projections(layer.self_attn)[2]
    values = split_heads((entering @ weight.T + bias)[None], HEADS)
    attended_NL = (found.weights_BHNM() @ values).transpose(1, 2).flatten(2)[0]
    out = layer.self_attn.out_proj
    mixed = attended_NL @ out.weight.double().T + out.bias.double()

    def feed_forward(tensor: Tensor) -> Tensor:
        hidden = (tensor @ layer.linear1.weight.double().T + layer.linear1.bias.double()).clamp(min=0)
        return hidden @ layer.linear2.weight.double().T + layer.linear2.bias.double()

    if layer.norm_first:
        between = tokens_NL + mixed
        leaving = between + feed_forward(normalised(between, layer.norm2))
    else:
        between = normalised(tokens_NL + mixed, layer.norm1)
        leaving = normalised(between + feed_forward(between), layer.norm2)
    return Attention("", found.logits_BHNM, found.visible, attended_NL[None]), leaving


def put_together(site: str, parts: list[Attention], is_self: bool = True) -> Attention:
    """Calls of one sequence each as one of several that are padded."""
    queries, keys = (max(part.logits_BHNM.shape[axis] for part in parts) for axis in (2, 3))
    padding = torch.tensor([[i >= part.logits_BHNM.shape[2] for i in range(queries)] for part in parts])

    def padded(tensor: Tensor, columns: int) -> Tensor:
        return functional.pad(tensor, (0, columns - tensor.shape[-1], 0, queries - tensor.shape[-2]))

    outputs = [part.output_BNX for part in parts if part.output_BNX is not None]
    return Attention(
        site,
        torch.cat([padded(part.logits_BHNM, keys) for part in parts]),
        torch.cat([padded(part.visible_BHNM, keys) for part in parts]),
        torch.cat([padded(output, output.shape[-1]) for output in outputs]) if outputs else None,
        self_attention=is_self,
        padding_BN=padding,
    )


def truth_of_sequences(sequences: list[Tensor], layers: list[tuple[str, Any]]) -> list[Attention]:
    found: list[Attention] = []
    states = [sequence.double() for sequence in sequences]
    for site, layer in layers:
        computed = [layer_by_hand(layer, sequence) for sequence in states]
        found.append(put_together(site, [attention for attention, _ in computed]))
        states = [leaving for _, leaving in computed]
    return found


def truth_of_packed_encoder(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    """In evaluation `nn.TransformerEncoder` makes a nested tensor of padded sequences."""
    sequences = [row[:length] for row, length in zip(arguments["src"], LENGTHS, strict=True)]
    layers = [(f"inner.layers.{number}.self_attn", layer) for number, layer in enumerate(model.inner.layers)]
    return truth_of_sequences(sequences, layers)


def nested_source(model: nn.Module) -> Arguments:
    return {"src": torch.nested.nested_tensor([torch.randn(length, WIDTH) for length in LENGTHS])}


def truth_of_nested_encoder(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    layers = [(f"inner.layers.{number}.self_attn", layer) for number, layer in enumerate(model.inner.layers)]
    return truth_of_sequences(list(arguments["src"].unbind()), layers)


def truth_of_nested_layer(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    return truth_of_sequences(list(arguments["src"].unbind()), [("inner.self_attn", model.inner)])


def one_layer(**options: Any) -> nn.Module:
    return sharpened(Whole(nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True, **options)))


def nested_tokens(model: nn.Module) -> Arguments:
    nested = torch.nested.nested_tensor([torch.randn(length, WIDTH) for length in LENGTHS])
    return {"query": nested, "key": nested, "value": nested, "need_weights": False}


def truth_of_nested_attention(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    parts = [
        attention_of("attention", model.attention, sequence[None], sequence[None], None)
        for sequence in arguments["query"].unbind()
    ]
    weight, bias = projections(model.attention)[2]
    for number, (part, sequence) in enumerate(zip(parts, arguments["query"].unbind(), strict=True)):
        values = split_heads((sequence.double() @ weight.T + bias)[None], HEADS)
        output = (part.weights_BHNM() @ values).transpose(1, 2).flatten(2)
        parts[number] = Attention("attention", part.logits_BHNM, part.visible, output)
    return [put_together("attention", parts)]


CELLS += [
    Cell(
        MODULES,
        "`TransformerEncoder`",
        "padding",
        "eval",
        encoder,
        source(src_key_padding_mask=PADDING),
        truth_of_packed_encoder,
        ("inner.layers.*.self_attn",),
        Seen("on its fast path, which packs sequences into a nested tensor"),
        listened=False,
    ),
    Cell(
        MODULES,
        "`TransformerEncoder`",
        "padding",
        "train",
        encoder,
        source(src_key_padding_mask=PADDING),
        truth_of_transformer,
        ("inner.layers.*.self_attn",),
        training=True,
    ),
    Cell(
        MODULES,
        "`TransformerEncoder`",
        "nested tensor",
        "eval",
        encoder,
        nested_source,
        truth_of_nested_encoder,
        ("inner.layers.*.self_attn",),
        listened=False,
    ),
    *(
        Cell(
            MODULES,
            "`TransformerEncoderLayer`",
            f"nested tensor{', norm first' * norm_first}",
            "eval",
            lambda norm_first=norm_first: one_layer(norm_first=norm_first),
            nested_source,
            truth_of_nested_layer,
            ("inner.self_attn",),
            listened=False,
        )
        for norm_first in (False, True)
    ),
    Cell(
        MODULES,
        "`MultiheadAttention`",
        "nested tensor",
        "eval",
        lambda: sharpened(OneAttention()),
        nested_tokens,
        truth_of_nested_attention,
        ("attention",),
        listened=False,
    ),
]


# The fused functions, with projections around them


class Projected(nn.Module):
    """Projects tokens to queries, keys and values and calls a function with them."""

    def __init__(self, attend: Callable[..., Tensor], heads: int = HEADS, key_heads: int | None = None) -> None:
        super().__init__()
        self.attend, self.heads, self.key_heads = attend, heads, heads if key_heads is None else key_heads
        width = WIDTH // HEADS
        self.query = nn.Linear(WIDTH, heads * width)
        self.key, self.value = (nn.Linear(WIDTH, self.key_heads * width) for _ in range(2))
        self.output = nn.Linear(heads * width, WIDTH)
        for layer in (self.query, self.key):
            layer.weight.data.mul_(3)

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = tokens if memory is None else memory
        query = self.query(tokens).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        key, value = (
            layer(memory).unflatten(-1, (self.key_heads, -1)).transpose(-2, -3) for layer in (self.key, self.value)
        )
        result: Tensor = self.output(self.attend(query, key, value).transpose(-2, -3).flatten(-2))
        return result


def truth_of_function(
    visible: Callable[[int, int], Tensor] = lambda queries, keys: torch.ones(1, 1, queries, keys, dtype=torch.bool),
    bias: Callable[[int, int], Tensor] | None = None,
    scale: float | None = None,
) -> Callable[[nn.Module, Tape, Arguments], list[Attention]]:
    def truth(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
        query, key, output = tape.gave("query"), tape.gave("key"), tape.given("output")
        if query.dim() > 3:  # more than one axis of sequences
            query, key, output = (part.flatten(0, -3) for part in (query, key, output))
        if query.dim() == 2:
            query, key, output = query[None], key[None], output[None]
        logits = products(split_heads(query, model.heads), split_heads(key, model.key_heads), scale)
        queries, keys = logits.shape[2:]
        if bias is not None:
            logits = logits + bias(queries, keys).double()
        return [Attention("(root)", logits, visible(queries, keys), output, self_attention=queries == keys)]

    return truth


def lower_left(queries: int, keys: int) -> Tensor:
    """Causality that starts at the first query and the first key."""
    return (torch.arange(keys) <= torch.arange(queries)[:, None])[None, None]


def lower_right(queries: int, keys: int) -> Tensor:
    """Causality that ends at the last query and the last key."""
    return (torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries)[None, None]


def slopes() -> Tensor:
    return 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]


def alibi(queries: int, keys: int) -> Tensor:
    return -slopes() * (torch.arange(queries)[:, None] - torch.arange(keys)).abs()


def fused(**given: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, **given)

    return attend


def with_mask(mask: Callable[[int, int], Any]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, mask(query.shape[-2], key.shape[-2]))

    return attend


def tokens_of(*shape: int) -> Callable[[nn.Module], Arguments]:
    return lambda model: {"tokens": torch.randn(*shape, WIDTH)}


def tokens_and_memory(queries: int = N, keys: int = M) -> Callable[[nn.Module], Arguments]:
    return lambda model: {"tokens": torch.randn(B, queries, WIDTH), "memory": torch.randn(B, keys, WIDTH)}


Function = tuple[Callable[[], nn.Module], Callable[[nn.Module], Arguments], Any]
FUSED: dict[str, Function] = {
    "self attention": (lambda: Projected(fused()), tokens_of(B, N), truth_of_function()),
    "cross attention": (lambda: Projected(fused()), tokens_and_memory(), truth_of_function()),
    "causal": (lambda: Projected(fused(is_causal=True)), tokens_of(B, N), truth_of_function(lower_left)),
    "causal, more keys than queries": (
        lambda: Projected(fused(is_causal=True)),
        tokens_and_memory(),
        truth_of_function(lower_left),
    ),
    "causal, more queries than keys": (
        lambda: Projected(fused(is_causal=True)),
        tokens_and_memory(M, N),
        truth_of_function(lower_left),
    ),
    "`causal_upper_left`": (
        lambda: Projected(with_mask(causal_upper_left)),
        tokens_and_memory(),
        truth_of_function(lower_left),
    ),
    "`causal_lower_right`": (
        lambda: Projected(with_mask(causal_lower_right)),
        tokens_and_memory(),
        truth_of_function(lower_right),
    ),
    "`enable_gqa`": (
        lambda: Projected(fused(enable_gqa=True, is_causal=True), 8, 2),
        tokens_of(B, N),
        truth_of_function(lower_left),
    ),
    "`enable_gqa`, 3 dimensions": (
        lambda: Projected(fused(enable_gqa=True), 8, 2),
        tokens_of(N),
        truth_of_function(),
    ),
    "one key head, broadcast": (lambda: Projected(fused(), HEADS, 1), tokens_of(B, N), truth_of_function()),
    "5 dimensions": (lambda: Projected(fused(), 2), tokens_of(B, 3, N), truth_of_function()),
    "a bias": (lambda: Projected(with_mask(alibi)), tokens_of(B, N), truth_of_function(bias=alibi)),
    "a scale": (lambda: Projected(fused(scale=0.25)), tokens_of(B, N), truth_of_function(scale=0.25)),
}
CELLS += [
    Cell(
        FUNCTIONS,
        "`scaled_dot_product_attention`",
        name,
        mode,
        make,
        arguments,
        truth,
        ("(root)",),
        training=mode == "train",
    )
    for name, (make, arguments, truth) in FUSED.items()
    for mode in ("train", "eval")
]


def without_batch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(heads, tokens, width): the first of three dimensions is known to be made of channels."""
    return functional.scaled_dot_product_attention(query, key, value)


def truth_in_three_dimensions(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    query, key, output = (
        split_heads(part[None], HEADS) for part in (tape.gave("query"), tape.gave("key"), tape.given("output"))
    )
    visible = torch.ones(1, 1, 1, N, dtype=torch.bool)
    return [Attention("(root)", products(query, key), visible, output.transpose(1, 2).flatten(2))]


CELLS += [
    Cell(
        FUNCTIONS,
        "`scaled_dot_product_attention`",
        "3 dimensions",
        mode,
        lambda: Projected(without_batch),
        tokens_of(N),
        truth_in_three_dimensions,
        ("(root)",),
        Seen("one sequence of heads, where a layer made them"),
        training=mode == "train",
    )
    for mode in ("train", "eval")
]


# flex_attention, which knows no gradients on a CPU


def by_flex(score: Any = None, mask: Any = None, **given: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sizes = query.shape[-2], key.shape[-2]
        blocks = None if mask is None else create_block_mask(mask, None, None, *sizes, device="cpu")
        result: Tensor = flex_attention(query, key, value, score_mod=score, block_mask=blocks, **given)
        return result

    return attend


def distance_penalty(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - 2.0 ** -(h + 1) * (i - j).abs()


def within_a_window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 3)


def window(queries: int, keys: int) -> Tensor:
    distance = torch.arange(queries)[:, None] - torch.arange(keys)
    return ((distance >= 0) & (distance < 3))[None, None]


FLEX: dict[str, Function] = {
    "plain": (lambda: Projected(by_flex()), tokens_of(B, N), truth_of_function()),
    "a score function": (
        lambda: Projected(by_flex(distance_penalty)),
        tokens_of(B, N),
        truth_of_function(bias=alibi),
    ),
    "a mask function": (
        lambda: Projected(by_flex(mask=within_a_window)),
        tokens_of(B, N),
        truth_of_function(window),
    ),
    "both, grouped heads": (
        lambda: Projected(by_flex(distance_penalty, within_a_window, enable_gqa=True), HEADS, 2),
        tokens_of(B, N),
        truth_of_function(window, alibi),
    ),
    "cross attention, a scale": (
        lambda: Projected(by_flex(scale=0.3)),
        tokens_and_memory(),
        truth_of_function(scale=0.3),
    ),
}
CELLS += [
    Cell(FUNCTIONS, "`flex_attention`", name, "eval", make, arguments, truth, ("(root)",))
    for name, (make, arguments, truth) in FLEX.items()
]


# Nested tensors through the functions


class Ragged(Projected):
    """The same with nested tensors, which know fewer operations if they are strided."""

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = tokens if memory is None else memory

        def heads_of(layer: nn.Module, given: Tensor, heads: int) -> Tensor:
            split: Tensor = layer(given).view(given.size(0), -1, heads, WIDTH // HEADS).transpose(1, 2)
            return split.contiguous() if split.layout == torch.strided else split

        query = heads_of(self.query, tokens, self.heads)
        key, value = (heads_of(layer, memory, self.key_heads) for layer in (self.key, self.value))
        merged = self.attend(query, key, value).transpose(1, 2)
        if merged.layout == torch.strided:
            merged = merged.contiguous()
        result: Tensor = self.output(merged.reshape(merged.size(0), -1, self.heads * (WIDTH // HEADS)))
        return result


def nested(layout: torch.layout, *lengths: tuple[int, ...]) -> Callable[[nn.Module], Arguments]:
    def arguments(model: nn.Module) -> Arguments:
        names = ("tokens", "memory")[: len(lengths)]
        tensors = (
            torch.nested.nested_tensor([torch.randn(length, WIDTH) for length in each], layout=layout)
            for each in lengths
        )
        return dict(zip(names, tensors, strict=True))

    return arguments


def truth_of_nested(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    parts = []
    queries, keys, outputs = (
        part.unbind() for part in (tape.gave_at("query", 0), tape.gave_at("key", 0), tape.given_at("output", 0))
    )
    for query, key, output in zip(queries, keys, outputs, strict=True):
        logits = products(split_heads(query[None], model.heads), split_heads(key[None], model.key_heads))
        parts.append(Attention("(root)", logits, torch.ones(1, 1, 1, len(key), dtype=torch.bool), output[None]))
    return [put_together("(root)", parts, is_self="memory" not in arguments)]


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.matmul((torch.matmul(query, key.transpose(-1, -2)) / 2).softmax(-1), value)


CELLS += [
    Cell(
        FUNCTIONS,
        "`scaled_dot_product_attention`",
        f"nested tensors, {'jagged' if layout == torch.jagged else 'strided'}, {name}",
        mode,
        lambda: Ragged(fused()),
        nested(layout, *lengths),
        truth_of_nested,
        ("(root)",),
        Seen("as padded sequences"),
        training=mode == "train",
    )
    for layout in (torch.jagged, torch.strided)
    for name, lengths in {
        "self attention": ((3, 5, 1),),
        "cross attention": ((3, 5, 1), (4, 2, 7)),
        "cross attention, lengths exchanged": ((3, 5, 1), (5, 1, 3)),
    }.items()
    for mode in ("train", "eval")
] + [
    Cell(
        FUNCTIONS,
        "written out",
        "nested tensors, strided",
        mode,
        lambda: Ragged(written_out),
        nested(torch.strided, (3, 5, 1)),
        truth_of_nested,
        ("(root)",),
        Refused(
            r"is not watched: it is written out with nested tensors; `scaled_dot_product_attention` can be read",
            "call `scaled_dot_product_attention` with them, or pad them on the steps to be watched",
        ),
        training=mode == "train",
    )
    for mode in ("train", "eval")
]


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors",
    "ignore:enable_nested_tensor is True",
    "ignore:Support for mismatched key_padding_mask",
    "ignore:flex_attention called without torch.compile",
)
@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
