"""x-transformers, option by option: what every option does to the logits, written from its paper's formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.cell import Arguments, Cell, NoAttention, Refused, Seen, cells_of, check
from support.truth import Attention, Tape, causal, products, rotated, split_heads, tokens
from torch import Tensor, nn
from torch.nn import functional

FAMILY = "x-transformers"
HEADS, HEAD_WIDTH, TOKENS = 4, 8, 12
IDS = torch.randint(0, 50, (2, TOKENS), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, TOKENS, dtype=torch.bool)
MASK[1, 9:] = False
MEMORY = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
MEMORY_MASK = torch.ones(2, 7, dtype=torch.bool)
MEMORY_MASK[1, 5:] = False

# Making the models.


def stack(kind: str, **options: Any) -> nn.Module:
    """The layers of a transformer, two blocks deep."""
    package = pytest.importorskip("x_transformers")
    settings = {"dim": 32, "depth": 2, "heads": HEADS, "attn_dim_head": HEAD_WIDTH, "ff_dropout": 0.1, "verbose": False}
    return lively(getattr(package, kind)(**settings | options))


def transformer(kind: str, **options: Any) -> nn.Module:
    """The same over tokens."""
    package = pytest.importorskip("x_transformers")
    of_wrapper = {name: options.pop(name) for name in ("max_mem_len", "num_memory_tokens") if name in options}
    if "attn_softclamp_logits" in options:
        warm_up(package.attend.softclamp)
    return lively(
        package.TransformerWrapper(
            num_tokens=50, max_seq_len=16, emb_dropout=0.1, attn_layers=stack(kind, **options), **of_wrapper
        )
    )


def warm_up(script: Any) -> None:
    """Let torch.jit compile what it does: its first gradients differ in the last digit from those that follow."""
    for _ in range(3):
        script(torch.ones(2, HEADS, TOKENS, TOKENS, requires_grad=True), 5.0).sum().backward()


def lively(model: nn.Module) -> nn.Module:
    """Make heads differ: projections are large, and what begins at zero or the identity does not stay there."""
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("to_q.weight", "to_k.weight")):
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=random))
            elif name.endswith(("attn_sink", "gamma", "talking_heads.weight", "pos_emb", "head_scale_params")):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=random))
            elif name.endswith(("learned_bias", "distance_bank", "relative_attention_bias.weight", "qk_norm_k_scale")):
                parameter.copy_(-2 * torch.rand(parameter.shape, generator=random))
    return model


# What they compute.


@dataclass(frozen=True)
class Layer:
    """One attention layer on the tape.

    Args:
        model, module: the model and the layer in it.
        name: what the layer is called.
        number: the how manyeth attention of its kind it is.
        tape: what its modules were given and gave.
        mask_BM: which keys are no padding.
        is_causal: whether queries see earlier keys only.
        query_BHND, key_BHMD: as they were projected, every key head as often as query heads read it.
    """

    model: Any
    module: Any
    name: str
    number: int
    tape: Tape
    mask_BM: Tensor | None
    is_causal: bool
    query_BHND: Tensor
    key_BHMD: Tensor

    @property
    def layers(self) -> Any:
        return getattr(self.model, "attn_layers", self.model)

    def gave(self, part: str) -> Tensor:
        """What a module of the layer gave; the last time, since a cache may have been filled before."""
        return self.tape.gave_at(f"{self.name}.{part}", -1)

    @property
    def output_BNX(self) -> Tensor:
        return self.gave("attend").transpose(1, 2).flatten(2)

    @property
    def products_BHNM(self) -> Tensor:
        return products(self.query_BHND, self.key_BHMD)

    def distances_NM(self) -> Tensor:
        """How many tokens ago a key was, seen from a query; the last query is the last key."""
        queries, keys = self.query_BHND.shape[2], self.key_BHMD.shape[2]
        return torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)

    def seen(self, logits_BHNM: Tensor, first_keys: int = 0, **more: Any) -> Attention:
        """The attention of some logits; so many first keys stand for no token."""
        queries, keys = logits_BHNM.shape[-2:]
        visible = causal(queries, keys) if self.is_causal else torch.ones(1, 1, queries, keys, dtype=torch.bool)
        if self.mask_BM is not None:
            visible = visible & tokens(functional.pad(self.mask_BM, (first_keys, 0), value=True))
        visible = visible & more.pop("visible", torch.ones((), dtype=torch.bool))
        given = {"output_BNX": self.output_BNX, "self_attention": queries == keys} | more
        return Attention(self.name + given.pop("within", ""), logits_BHNM, visible, **given)


def layers_of(model: Any, tape: Tape, mask_BM: Tensor | None, is_causal: bool) -> list[Layer]:
    """The attention layers, in the order in which they run."""
    package = pytest.importorskip("x_transformers")
    found: list[Layer] = []
    for name, module in model.named_modules():
        if isinstance(module, package.Attention):
            rotated_apart = ("to_rotateable_k",) * (module.to_rotateable_k is not None)
            query, *keys = (
                split_heads(projected, projected.shape[-1] // HEAD_WIDTH)
                for projected in (tape.gave_at(f"{name}.{part}", -1) for part in ("to_q", "to_k", *rotated_apart))
            )
            key = torch.cat(keys, dim=1)
            # Query head h reads key head h mod K.
            key = key.repeat(1, HEADS // key.shape[1], 1, 1)
            found.append(Layer(model, module, name, len(found), tape, mask_BM, is_causal, query, key))
    return found


def plain(layer: Layer) -> Attention:
    return layer.seen(layer.products_BHNM)


def with_bias(bias_of: Callable[[Layer], Tensor]) -> Callable[[Layer], Attention]:
    return lambda layer: layer.seen(layer.products_BHNM + bias_of(layer))


def turned(layer: Layer, width: int = HEAD_WIDTH // 2, decay: bool = False) -> tuple[Tensor, Tensor]:
    """The first elements of every head are turned by their position, in pairs of neighbours, the others are not.

    With xPos (Sun et al. 2022) each pair also decays with the distance.
    """
    found = []
    for tensor, sign in ((layer.query_BHND, 1), (layer.key_BHMD, -1)):
        positions = torch.arange(layer.key_BHMD.shape[2])[-tensor.shape[2] :]
        pairs = rotated(tensor[..., :width], positions[None], 1e4, interleaved=True)
        if decay:
            rate = (torch.arange(0, width, 2).double() + 0.4 * width) / (1.4 * width)
            power = (positions.double() - TOKENS // 2) / 512
            pairs = pairs * (rate ** (sign * power)[:, None]).repeat_interleave(2, dim=-1)
        found.append(torch.cat([pairs, tensor[..., width:]], dim=-1))
    return found[0], found[1]


def rotary(layer: Layer) -> Attention:
    return layer.seen(products(*turned(layer)))


def rotary_of_whole_heads(layer: Layer) -> Attention:
    return layer.seen(products(*turned(layer, HEAD_WIDTH)))


def rotary_with_decay(layer: Layer) -> Attention:
    return layer.seen(products(*turned(layer, decay=True)))


def rotary_of_some_heads(layer: Layer) -> Attention:
    """Of latent attention: only the last two heads know of positions."""
    query, key = turned(layer)
    queries, keys = (
        (torch.cat([a[:, :2], b[:, 2:]], 1)) for a, b in ((layer.query_BHND, query), (layer.key_BHMD, key))
    )
    return layer.seen(products(queries, keys))


def polar(layer: Layer) -> Attention:
    """Positive magnitudes, and angles of the positions alone (2025)."""
    rates = 1e4 ** (-torch.arange(HEAD_WIDTH, dtype=torch.float64) / HEAD_WIDTH)
    angles_ND = torch.arange(TOKENS).double()[:, None] * rates
    shift_H1D = layer.layers.polar_pos_emb.learned_bias.double().clamp(-2 * math.pi, 0)
    query, key = functional.softplus(layer.query_BHND), functional.softplus(layer.key_BHMD)
    found = []
    for tensor, angles in ((query, angles_ND), (key, angles_ND + shift_H1D)):
        found.append(torch.cat([tensor * angles.cos(), tensor * angles.sin()], dim=-1))
    return layer.seen(products(*found, scale=HEAD_WIDTH**-0.5))


def slopes(layer: Layer, heads: int = HEADS) -> Tensor:
    """ALiBi (Press et al. 2022): the slopes fall geometrically to 2^-8; further heads have none."""
    slopes_H = torch.tensor([2 ** (-8 * (h + 1) / heads) if h < heads else 0.0 for h in range(HEADS)]).double()
    return -slopes_H[:, None, None] * layer.distances_NM().abs()


def buckets(layer: Layer) -> Tensor:
    """T5 (Raffel et al. 2020): a number for each near distance, and for logarithmic ranges of the others."""
    distance = layer.distances_NM()
    count, first = (32, 0) if layer.is_causal else (16, 16 * (distance < 0))
    distance = distance.clamp(min=0) if layer.is_causal else distance.abs()
    exact = count // 2
    far = exact + ((distance.clamp(min=1) / exact).log() / math.log(128 / exact) * (count - exact)).long()
    number_NM = first + torch.where(distance < exact, distance, far.clamp(max=count - 1))
    table = layer.layers.rel_pos.relative_attention_bias.weight.double()
    return table[number_NM].permute(2, 0, 1) * HEAD_WIDTH**0.5


def of_distances(layer: Layer) -> Tensor:
    """A small network gives each distance a bias."""
    given = layer.tape.gave_at("attn_layers.rel_pos.mlp.2", layer.number).double()
    return given[layer.distances_NM() + TOKENS - 1].permute(2, 0, 1)


def forgetting(layer: Layer) -> Tensor:
    """The forgetting transformer (Lin et al. 2025): what was forgotten at all tokens in between."""
    gates_BHN = layer.gave("data_dependent_alibi.to_forget_gates.0").double().transpose(1, 2)
    forgotten_BHN = functional.logsigmoid(gates_BHN).cumsum(-1)
    bias_BHNM = forgotten_BHN[:, :HEADS, :, None] - forgotten_BHN[:, :HEADS, None]
    if layer.is_causal:
        return bias_BHNM
    backwards_BHN = forgotten_BHN[:, HEADS:]
    return torch.where(layer.distances_NM() >= 0, bias_BHNM, backwards_BHN[:, :, None] - backwards_BHN[..., None])


def forgetting_by_row(layer: Layer) -> Tensor:
    """What each query forgets of the tokens between a key and itself."""
    projected = layer.gave("data_dependent_alibi.to_forget_gates.0").double()
    query, key = projected.unflatten(-1, (2, HEADS, 8)).permute(2, 0, 3, 1, 4)
    forgotten_BHNM = functional.logsigmoid(products(query, key)) * (layer.distances_NM() > 0)
    return forgotten_BHNM.flip(-1).cumsum(-1).flip(-1)


def of_projected_distances(layer: Layer) -> Tensor:
    weights = split_heads(layer.gave("rel_proj_pos_bias.to_distance_weights.0"), HEADS)
    curves = weights @ layer.module.rel_proj_pos_bias.distance_bank.double()
    distance = layer.distances_NM()
    return curves.gather(-1, distance.clamp(min=0).expand(2, HEADS, -1, -1)) * (distance >= 0)


def contextual(layer: Layer) -> Attention:
    """CoPE (Golovneva et al. 2024): a key's position is the sum of gates from it to the query."""
    cope = layer.module.attend.cope
    logits_BHNM = layer.products_BHNM
    hidden = layer.distances_NM() < 0
    if layer.mask_BM is not None:
        hidden = hidden | ~tokens(layer.mask_BM)
    position = logits_BHNM.sigmoid().masked_fill(hidden, 0.0).flip(-1).cumsum(-1).flip(-1).clamp(max=cope.max_pos - 1)
    at_whole_BHNP = layer.query_BHND @ cope.pos_emb.double().mT
    below = position.floor().long()
    share = position - below
    above = at_whole_BHNP.gather(-1, position.ceil().long())
    bias = above * share + at_whole_BHNP.gather(-1, below) * (1 - share)
    return layer.seen(logits_BHNM + bias, within=".attend")


def unit(tensor: Tensor) -> Tensor:
    return functional.normalize(tensor, dim=-1)


def cosine(layer: Layer) -> Attention:
    return layer.seen(products(unit(layer.query_BHND), unit(layer.key_BHMD), scale=10.0))


def cosine_in_groups(layer: Layer) -> Attention:
    query, key = (unit(t.unflatten(-1, (2, 4))).flatten(-2) for t in (layer.query_BHND, layer.key_BHMD))
    return layer.seen(products(query, key, scale=10.0))


def cosine_scaled(layer: Layer) -> Attention:
    query = unit(layer.query_BHND) * layer.module.qk_norm_q_scale.double()
    return layer.seen(products(query, unit(layer.key_BHMD) * layer.module.qk_norm_k_scale.double()))


def root_mean_square(layer: Layer) -> Attention:
    query, key = (
        unit(tensor) * HEAD_WIDTH**0.5 * (norm.gamma.double() + 1)
        for tensor, norm in ((layer.query_BHND, layer.module.q_rmsnorm), (layer.key_BHMD, layer.module.k_rmsnorm))
    )
    return layer.seen(products(query, key))


def soft_capped(layer: Layer) -> Attention:
    return layer.seen(5 * (layer.products_BHNM / 5).tanh())


def soft_capped_after_its_bias(layer: Layer) -> Attention:
    return layer.seen(5 * ((layer.products_BHNM + slopes(layer)) / 5).tanh())


def with_sinks(layer: Layer) -> Attention:
    sinks_H = layer.module.attend.head_attn_sink.double()
    return layer.seen(layer.products_BHNM, within=".attend", sink_logits_H=sinks_H)


def with_memories(layer: Layer) -> Attention:
    """Keys and values that are parameters come before those of tokens."""
    memories = layer.module.mem_k.double().repeat(HEADS // layer.module.mem_k.shape[0], 1, 1)
    key = torch.cat([memories.expand(2, -1, -1, -1), layer.key_BHMD], dim=2)
    return layer.seen(products(layer.query_BHND, key), first_keys=3)


def with_zeros(layer: Layer) -> Attention:
    return layer.seen(functional.pad(layer.products_BHNM, (1, 0)), first_keys=1)


def with_zeros_and_slopes(layer: Layer) -> Attention:
    return layer.seen(functional.pad(layer.products_BHNM + slopes(layer), (1, 0)), first_keys=1)


def mixed_before(layer: Layer) -> Attention:
    logits = layer.products_BHNM
    mix_HG = layer.module.attend.pre_softmax_talking_heads.weight[:, :, 0, 0].double()
    mixed = logits + torch.einsum("gh,bhnm->bgnm", mix_HG, logits)
    return layer.seen(mixed, within=".attend")


def mixed_after(layer: Layer) -> Attention:
    return layer.seen(layer.products_BHNM, within=".attend", output_BNX=None)


def without_output(layer: Layer) -> Attention:
    return layer.seen(layer.products_BHNM, output_BNX=None)


def of_absolute_values(layer: Layer) -> Attention:
    return layer.seen(layer.products_BHNM.abs(), output_BNX=None)


def largest_three(layer: Layer) -> Attention:
    visible = layer.seen(layer.products_BHNM).visible
    kept = layer.products_BHNM.masked_fill(~visible, -torch.inf)
    return layer.seen(layer.products_BHNM, visible=kept >= kept.topk(3, dim=-1).values[..., -1:])


def window(layer: Layer) -> Attention:
    return layer.seen(layer.products_BHNM, visible=layer.distances_NM() <= 3)


def selective(layer: Layer) -> Attention:
    """Leviathan et al. 2024: the first head tells which keys later queries need no more, never the first token."""
    logits_BHNM = layer.products_BHNM
    gate_BNM = logits_BHNM[:, 0].masked_fill(~layer.seen(logits_BHNM).visible[:, 0], 0.0).relu()
    gate_BNM = gate_BNM * (layer.distances_NM() > 0)
    gate_BNM[..., 0] = 0.0
    taken_BNM = functional.pad(gate_BNM, (0, 0, 1, -1)).cumsum(-2)
    return layer.seen(logits_BHNM - taken_BNM[:, None])


def of_distance_squared(layer: Layer) -> Attention:
    difference = layer.query_BHND[:, :, :, None] - layer.key_BHMD[:, :, None]
    return layer.seen(-difference.square().sum(-1) * HEAD_WIDTH**-0.5)


def added_to_the_last(layer: Layer) -> Attention:
    """RealFormer (He et al. 2020): the logits of all layers so far."""
    layers = layers_of(layer.model, layer.tape, layer.mask_BM, layer.is_causal)
    return layer.seen(sum((each.products_BHNM for each in layers[: layer.number + 1]), torch.zeros(())))


SEEN = Seen()


@dataclass(frozen=True)
class Option:
    """An option of the package, or several: its name on the page, how it is asked for, what it makes of logits."""

    name: str
    options: dict[str, Any]
    truth: Callable[[Layer], Attention] = plain
    outcome: Seen | Refused | NoAttention = SEEN
    kinds: tuple[str, ...] = ("Decoder",)
    sites: tuple[str, ...] = ("attn_layers.layers.*.1",)

    def cells(self) -> list[Cell]:
        return [
            Cell(
                FAMILY,
                ", ".join(f"`{name}={value}`" for name, value in self.options.items()) or "no options",
                self.name,
                f"{kind}, {case}",
                lambda kind=kind: transformer(kind, **self.options),  # type: ignore[misc]
                lambda model, mask=mask: {"x": IDS, "mask": mask},  # type: ignore[misc]
                lambda model, tape, given, kind=kind: [  # type: ignore[misc]
                    self.truth(layer) for layer in layers_of(model, tape, given["mask"], kind == "Decoder")
                ],
                () if isinstance(self.outcome, NoAttention) else self.sites,
                self.outcome,
                training=mask is None,
            )
            for kind in self.kinds
            for case, mask in (("train", None), ("eval, right padding", MASK))
        ]


CHANGED = Seen("the softmax itself", with_values=False, warning="changes its weights after the softmax")
DECODER = ("Decoder",)
EITHER = ("Decoder", "Encoder")
ATTEND = ("attn_layers.layers.*.1.attend",)
FUSED = {"attn_flash": True}
LATENT = {"attn_use_latent_q": True, "attn_dim_latent_q": 16, "attn_use_latent_kv": True, "attn_dim_latent_kv": 16}
CLAMP = {"attn_softclamp_logits": True, "attn_logit_softclamp_value": 5.0}

OPTIONS = [
    Option("written out", {}, kinds=EITHER),
    Option("sdpa", FUSED, kinds=EITHER),
    *(
        Option("sdpa" if fused else "written out", heads | fused)
        for heads in ({"attn_kv_heads": 2}, {"attn_one_kv_head": True})
        for fused in ({}, FUSED)
    ),
    Option("learned sinks", {"attn_head_learned_sink": True}, with_sinks, sites=ATTEND, kinds=EITHER),
    Option("soft-capped logits", CLAMP, soft_capped, kinds=EITHER),
    Option("soft-capped logits and ALiBi", CLAMP | {"alibi_pos_bias": True}, soft_capped_after_its_bias),
    *(
        Option(f"{name}, sdpa" if fused else name, options | fused, truth, kinds=kinds)
        for name, options, truth, kinds in (
            ("half rotary", {"rotary_pos_emb": True}, rotary, EITHER),
            ("rotary", {"rotary_pos_emb": True, "rotary_emb_dim": 8}, rotary_of_whole_heads, DECODER),
            ("xPos", {"rotary_xpos": True}, rotary_with_decay, DECODER),
            ("ALiBi", {"alibi_pos_bias": True}, with_bias(slopes), EITHER),
            (
                "ALiBi of some heads",
                {"alibi_pos_bias": True, "alibi_num_heads": 2},
                with_bias(lambda layer: slopes(layer, 2)),
                DECODER,
            ),
            ("memory keys", {"attn_num_mem_kv": 3}, with_memories, EITHER),
            ("memory keys, grouped", {"attn_num_mem_kv": 3, "attn_kv_heads": 2}, with_memories, DECODER),
            ("a key of zeros", {"attn_add_zero_kv": True}, with_zeros, EITHER),
            (
                "a key of zeros and ALiBi",
                {"attn_add_zero_kv": True, "alibi_pos_bias": True},
                with_zeros_and_slopes,
                DECODER,
            ),
            ("cosine similarity", {"attn_qk_norm": True}, cosine, EITHER),
            ("window", {"attn_max_attend_past": 3}, window, EITHER),
            ("forgetting", {"attn_data_dependent_alibi": True}, with_bias(forgetting), EITHER),
            ("LASER", {"attn_laser": True}, plain, DECODER),
            ("distances", {"attn_l2_distance": True}, of_distance_squared, EITHER),
            ("latent", LATENT, plain, DECODER),
            ("values of another width", {"attn_value_dim_head": 12}, plain, DECODER),
        )
        for fused in ({}, FUSED)
    ),
    Option("positions by a network", {"dynamic_pos_bias": True}, with_bias(of_distances)),
    Option("T5's positions", {"rel_pos_bias": True}, with_bias(buckets), kinds=EITHER),
    Option("cosine similarity in groups", {"attn_qk_norm": True, "attn_qk_norm_groups": 2}, cosine_in_groups),
    Option("cosine similarity, scaled", {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True}, cosine_scaled),
    Option("root mean square norm", {"attn_qk_rmsnorm": True}, root_mean_square),
    Option("talking heads before", {"attn_pre_talking_heads": True}, mixed_before, sites=ATTEND),
    Option("talking heads after", {"attn_post_talking_heads": True}, mixed_after, CHANGED, sites=ATTEND),
    Option("scaled by logits after", {"attn_pre_scale_post_talking_heads": True}, mixed_after, CHANGED, sites=ATTEND),
    Option("the largest keys only", {"attn_sparse_topk": 3}, largest_three, kinds=EITHER),
    Option(
        "the largest keys, straight-through",
        {"attn_sparse_topk": 3, "attn_sparse_topk_straight_through": True},
        largest_three,
    ),
    Option("gated values", {"attn_gate_values": True}),
    Option("gated heads", {"attn_gate_value_heads": True, "attn_head_scale": True}),
    Option("attention on attention", {"attn_on_attn": True}),
    Option("value residual", {"add_value_residual": True}),
    Option("orthogonal to its values", {"attn_orthog_projected_values": True}),
    Option("forgetting, by row", {"attn_data_dependent_alibi": True, "attn_data_dependent_alibi_per_row": True},
           with_bias(forgetting_by_row)),
    Option("selective", {"attn_selective": True}, selective),
    Option("contextual positions", {"attn_use_cope": True}, contextual, sites=ATTEND),
    Option("latent, some heads rotary", LATENT | {"attn_latent_rope_subheads": 2, "rotary_pos_emb": True},
           rotary_of_some_heads),
    Option("projected distances", {"attn_use_rel_proj_pos_bias": True}, with_bias(of_projected_distances)),
    Option("polar positions", {"polar_pos_emb": True}, polar),
    Option("logits of all layers", {"residual_attn": True}, added_to_the_last),
    Option("shifted tokens", {"shift_tokens": 1}, sites=("attn_layers.layers.*.1.fn",)),
    Option("hyper-connections", {"num_residual_streams": 2}),
    Option("signed", {"attn_cog_signed": True}, of_absolute_values, CHANGED),
    Option("hard", {"attn_hard": True}, without_output, CHANGED),
    Option("drawn", {"attn_gumbel_softmax": True}, plain, Refused("drawn at random", "`observe` tells of its softmax")),
    Option("sigmoid", {"attn_sigmoid": True}, plain, NoAttention("a sigmoid has no distribution over keys")),
]  # fmt: skip

CELLS = [cell for option in OPTIONS for cell in option.cells()]


# More than one sequence of tokens.


def of_context(model: Any, tape: Tape, given: Arguments) -> list[Attention]:
    """Self-attention of each block, and then its attention to the context."""
    found = []
    for layer in layers_of(model, tape, None, True):
        is_cross = layer.key_BHMD.shape[2] == MEMORY.shape[1]
        mask = given["context_mask"] if is_cross else given["mask"]
        found.append(plain(Layer(**vars(layer) | {"mask_BM": mask, "is_causal": not is_cross})))
    return found


def cross_attender(model: Any, tape: Tape, given: Arguments) -> list[Attention]:
    return [plain(layer) for layer in layers_of(model, tape, given["context_mask"], False)]


def images(model: Any, tape: Tape, given: Arguments) -> list[Attention]:
    return [plain(layer) for layer in layers_of(model, tape, None, False)]


def vision_transformer(**options: Any) -> nn.Module:
    package = pytest.importorskip("x_transformers")
    return lively(
        package.ViTransformerWrapper(
            image_size=12, patch_size=4, num_classes=5, attn_layers=stack("Encoder", **options)
        )
    )


def encoder_and_decoder(**options: Any) -> nn.Module:
    package = pytest.importorskip("x_transformers")
    both = {"num_tokens": 50, "max_seq_len": 16, "depth": 1, "heads": HEADS, "attn_dim_head": HEAD_WIDTH} | options
    return lively(
        package.XTransformer(dim=32, **{f"{side}_{k}": v for side in ("enc", "dec") for k, v in both.items()})
    )


def of_both(model: Any, tape: Tape, given: Arguments) -> list[Attention]:
    encoder, decoder, cross = layers_of(model, tape, None, False)
    changes = ((encoder, given["mask"], False), (decoder, None, True), (cross, given["mask"], False))
    return [plain(Layer(**vars(layer) | {"mask_BM": mask, "is_causal": way})) for layer, mask, way in changes]


def after_a_prefix(model: Any, tape: Tape, given: Arguments) -> list[Attention]:
    sees_prefix = torch.arange(TOKENS) < 5
    return [
        Layer(**vars(layer)).seen(layer.products_BHNM, visible=(layer.distances_NM() >= 0) | sees_prefix)
        for layer in layers_of(model, tape, None, False)
    ]


def with_cache(model: Any) -> Arguments:
    _, filled = model(IDS[:, :8], return_intermediates=True)
    return {"x": IDS[:, :9], "cache": filled}


def one_more_token(truth: Callable[[Layer], Attention]) -> Callable[[Any, Tape, Arguments], list[Attention]]:
    def of(model: Any, tape: Tape, given: Arguments) -> list[Attention]:
        found = []
        for layer in layers_of(model, tape, None, True):
            key, _ = given["cache"].attn_intermediates[layer.number].cached_kv
            key = torch.cat([key.double().repeat(1, HEADS // key.shape[1], 1, 1), layer.key_BHMD], dim=2)
            found.append(truth(Layer(**vars(layer) | {"key_BHMD": key})))
        return found

    return of


def with_memory_of_the_last(model: Any) -> Arguments:
    _, memories = model(IDS, return_mems=True)
    return {"x": IDS, "mems": memories}


def after_memories(model: Any, tape: Tape, given: Arguments) -> list[Attention]:
    return [plain(layer) for layer in layers_of(model, tape, None, True)]


def by_inverted_attention(model: Any, tape: Tape, given: Arguments) -> list[Attention]:
    return of_context(model, tape, given)[::2]


BOTH_MASKS = {"x": IDS, "mask": MASK, "context": MEMORY, "context_mask": MEMORY_MASK}
NO_MASKS = {"x": IDS, "mask": None, "context": MEMORY, "context_mask": None}
PICTURES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(3))
LAYERS = ("attn_layers.layers.*.1",)

for fused in ({}, FUSED):
    way = "sdpa" if fused else "written out"
    for training in (True, False):
        mode = "train" if training else "eval"
        masks, case = (NO_MASKS, mode) if training else (BOTH_MASKS, f"{mode}, right padding of both")
        CELLS += [
            Cell(FAMILY, "Decoder `cross_attend=True`", way, case,
                 lambda fused=fused: transformer("Decoder", cross_attend=True, **fused),
                 lambda model, masks=masks: dict(masks), of_context, LAYERS, training=training),
            Cell(FAMILY, "Decoder `cross_attend=True`, `attn_kv_heads=2`", way, case,
                 lambda fused=fused: transformer("Decoder", cross_attend=True, attn_kv_heads=2, **fused),
                 lambda model, masks=masks: dict(masks), of_context, LAYERS, training=training),
            Cell(FAMILY, "CrossAttender", way, case,
                 lambda fused=fused: stack("CrossAttender", **fused),
                 lambda model, masks=masks: {**masks, "x": MEMORY.repeat(1, 2, 1)[:, :TOKENS]}, cross_attender,
                 ("layers.*.1",), training=training),
            Cell(FAMILY, "ViTransformerWrapper", way, mode, lambda fused=fused: vision_transformer(**fused),
                 lambda model: {"img": PICTURES}, images, LAYERS, training=training),
            Cell(FAMILY, "XTransformer", way, case, lambda fused=fused: encoder_and_decoder(**fused),
                 lambda model, masks=masks: {"src": IDS, "tgt": IDS[:, :8], "mask": masks["mask"]}, of_both,
                 ("encoder.attn_layers.layers.*.1", "decoder.net.attn_layers.layers.*.1"), training=training),
            Cell(FAMILY, "PrefixDecoder", way, mode, lambda fused=fused: transformer("PrefixDecoder", **fused),
                 lambda model: {"x": IDS, "prefix_attn_len": 5}, after_a_prefix, LAYERS, training=training),
        ]  # fmt: skip
    CELLS += [
        Cell(FAMILY, f"Decoder{options}", way, "eval, one more token with a cache",
             lambda fused=fused, more=more: transformer("Decoder", **more, **fused), with_cache,
             one_more_token(truth), sites)
        for options, more, truth, sites in (
            ("", {}, plain, LAYERS),
            (" `attn_kv_heads=2`", {"attn_kv_heads": 2}, plain, LAYERS),
            (" `rotary_pos_emb=True`", {"rotary_pos_emb": True}, rotary, LAYERS),
            (" `alibi_pos_bias=True`", {"alibi_pos_bias": True}, with_bias(slopes), LAYERS),
            (" `attn_num_mem_kv=3`", {"attn_num_mem_kv": 3}, with_memories, LAYERS),
        )
    ]  # fmt: skip
CELLS += [
    Cell(FAMILY, "Decoder `max_mem_len=12`", "written out", "eval, memories of the last segment",
         lambda: transformer("Decoder", max_mem_len=12), with_memory_of_the_last, after_memories, LAYERS),
    Cell(FAMILY, "Decoder `cross_attend=True`, `cross_attn_inverted_attention=True`", "written out", "eval",
         lambda: transformer("Decoder", cross_attend=True, cross_attn_inverted_attention=True),
         lambda model: dict(NO_MASKS), by_inverted_attention, LAYERS,
         Seen("self-attention; a softmax over queries is no attention over keys")),
]  # fmt: skip


@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
