"""Models of timm, with random weights, small.

Shape suffixes as in `support.truth`; W: windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.cell import Arguments, Cell, NoAttention, Refused, Seen, cells_of, check
from support.truth import Attention, Tape, products, split_heads
from support.with_timm import every_key, linear, projected, tiny
from torch import Tensor, nn

FAMILY = "timm"
DROPOUT = {"proj_drop_rate": 0.1, "drop_path_rate": 0.1}
#: 4 by 4 tokens.
IMAGE = {"img_size": 16, "patch_size": 4, "num_classes": 3}
SMALL = {**IMAGE, "embed_dim": 16, "depth": 2, "num_heads": 2, **DROPOUT}
CHANNELS_REFUSED = "is not watched: it attends over channels"

Truth = Callable[[Any, Tape, Arguments], list[Attention]]


def images(side: int) -> Callable[[nn.Module], Arguments]:
    return lambda model: {"x": torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(3))}


def of_kind(model: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """The modules of a class, by its name, with their own names."""
    return ((name, module) for name, module in model.named_modules() if type(module).__name__ == kind)


def seen(site: str, logits_BHNM: Tensor, output_BNX: Tensor | None) -> Attention:
    return Attention(
        site, logits_BHNM, every_key(logits_BHNM), output_BNX, self_attention=len(set(logits_BHNM.shape[-2:])) == 1
    )


def normalised(tensor: Tensor, norm: Any) -> Tensor:
    """A layer norm, or none."""
    if isinstance(norm, nn.Identity):
        return tensor
    centred = tensor - tensor.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + norm.eps).sqrt() * norm.weight.double() + norm.bias.double()


# Vision transformers.


def truth_of_vit(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    found = []
    for site, module in of_kind(model, "Attention"):
        query, key = projected(tape.given(site), module, 2)
        logits = products(normalised(query, module.q_norm), normalised(key, module.k_norm))
        found.append(seen(site, logits, tape.given(f"{site}.norm")))
    for site, module in of_kind(model, "AttentionPoolLatent"):
        query = split_heads(linear(module.latent, module.q), 2).expand(2, -1, -1, -1)
        key, _ = linear(tape.given(site), module.kv).chunk(2, dim=-1)
        found.append(seen(site, products(query, split_heads(key, 2)), tape.given(f"{site}.proj")))
    return found


def vit(**options: Any) -> Callable[[Any], nn.Module]:
    return lambda timm: timm.models.VisionTransformer(**{**SMALL, **options})


def two_dimensional_rotary(tensor_BHND: Tensor, side: int, base: float) -> Tensor:
    """One half of a head is turned by the row of its token, the other by its column; pairs are neighbours."""
    tokens, width = tensor_BHND.shape[-2:]
    frequencies = base ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    position_N = torch.arange(tokens, dtype=torch.float64)
    angles = torch.cat([(place[:, None] * frequencies) for place in (position_N // side, position_N % side)], dim=-1)
    turned = torch.view_as_complex(tensor_BHND.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2)


def truth_of_eva(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    found = []
    for site, module in of_kind(model, "EvaAttention"):
        if module.qkv is not None:
            query, key = projected(tape.given(site), module, 2)
        else:
            query, key = (split_heads(tape.gave(f"{site}.{name}_proj"), 2) for name in "qk")
        query, key = (
            torch.cat([part[:, :, :1], two_dimensional_rotary(part[:, :, 1:], 4, 1e4)], dim=2) for part in (query, key)
        )
        found.append(seen(site, products(query, key), tape.given(f"{site}.norm")))
    return found


def eva(**options: Any) -> Callable[[Any], nn.Module]:
    return lambda timm: timm.models.eva.Eva(**{**SMALL, "use_rot_pos_emb": True, **options})


def table_bias(table_XH: Tensor, side: int) -> Tensor:
    """A learned bias for each offset of two tokens in a square, (H, N, N)."""
    row, column = torch.arange(side * side) // side, torch.arange(side * side) % side
    down, right = (place[:, None] - place + side - 1 for place in (row, column))
    return table_XH.double()[down * (2 * side - 1) + right].permute(2, 0, 1)


def truth_of_beit(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    """The class token has three biases of its own: as a query, as a key, and of itself."""
    found = []
    for site, module in of_kind(model, "Attention"):
        query, key = projected(tape.given(site), module, 2)
        owner = model.rel_pos_bias if module.relative_position_bias_table is None else module
        table_XH = owner.relative_position_bias_table.double()
        bias_HNM = torch.empty(2, 17, 17, dtype=torch.float64)
        bias_HNM[:, 1:, 1:] = table_bias(table_XH[:-3], 4)
        bias_HNM[:, 0, 1:], bias_HNM[:, 1:, 0], bias_HNM[:, 0, 0] = (
            table_XH[-3, :, None],
            table_XH[-2, :, None],
            table_XH[-1],
        )
        found.append(seen(site, products(query, key) + bias_HNM, tape.given(f"{site}.proj")))
    return found


def beit(**options: Any) -> Callable[[Any], nn.Module]:
    return lambda timm: timm.models.beit.Beit(**{**SMALL, **options})


def truth_of_cait(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    """In the trunk the logits of all heads are mixed, and so are their weights, of which the output is made."""
    found = []
    for site, module in of_kind(model, "TalkingHeadAttn"):
        logits = products(*projected(tape.given(site), module, 2))
        found.append(seen(site, linear(logits.movedim(1, -1), module.proj_l).movedim(-1, 1), None))
    return found + truth_of_class_attention(model, tape, arguments)


def truth_of_class_attention(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    """The class token alone asks."""
    found = []
    for site, module in (*of_kind(model, "ClassAttn"), *of_kind(model, "ClassAttention")):
        if hasattr(module, "qkv"):
            query, key = projected(tape.given(site), module, 2)
        else:
            query, key = (split_heads(linear(tape.given(site), getattr(module, name)), 2) for name in "qk")
        output_BNX = tape.given(f"{site}.proj")
        found.append(seen(site, products(query[:, :, :1], key), output_BNX))
    return found


def truth_of_parallel_blocks(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    """One layer projects queries and keys, beside values and what enters the feed-forward part."""
    found = []
    for site, module in of_kind(model, "ParallelScalingBlock"):
        _, query, key, _ = tape.gave(f"{site}.in_proj").split(module.in_split, dim=-1)
        query, key = normalised(split_heads(query, 2), module.q_norm), normalised(split_heads(key, 2), module.k_norm)
        found.append(seen(site, products(query, key), tape.given(f"{site}.attn_out_proj")))
    return found


def parallel(timm: Any) -> nn.Module:
    model: nn.Module = vit(block_fn=timm.models.vision_transformer.ParallelScalingBlock, qk_norm=True)(timm)
    return model


def truth_of_differential(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    """Two softmaxes for each head. Fused, they are two calls, each with its values; else they are twice the heads."""
    found = []
    for site, module in of_kind(model, "DiffAttention"):
        query, key, value = tape.gave(f"{site}.qkv").chunk(3, dim=-1)
        logits = products(split_heads(query, 4), split_heads(key, 4))
        if module.fused_attn:
            for part in (logits[:, 0::2], logits[:, 1::2]):
                output = torch.einsum("bhnm,bhmd->bnhd", part.softmax(-1), split_heads(value, 2))
                found.append(seen(site, part, output))
        else:
            found.append(seen(site, logits, None))
    return found


class Convolutional(nn.Module):
    """Attention of an image, whose queries and keys are made by convolutions; one key head for all."""

    def __init__(self, timm: Any) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, 16, 4, 4)
        self.attention = timm.layers.MultiQueryAttention2d(16, num_heads=2, kv_stride=2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(self.embedding(x))
        return output


def truth_of_convolutional(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    query = tape.gave("attention.query.proj").double().flatten(2).unflatten(1, (2, -1)).transpose(2, 3)
    key = tape.gave("attention.key.proj").double().flatten(2).transpose(1, 2)[:, None]
    output = tape.given("attention.output.proj").flatten(2).transpose(1, 2)
    return [seen("attention", products(query, key), output)]


# Windows.


def border_penalty(tokens: int, window: int, shift: int) -> Tensor:
    """What shifted windows add where a token was rolled in from the other side and another was not, (W, N, N)."""
    rolled = torch.arange(tokens) >= tokens - shift
    side_XY = (2 * rolled[:, None] + rolled).unflatten(0, (-1, window)).unflatten(-1, (-1, window))
    side_WN = side_XY.transpose(1, 2).flatten(2).flatten(0, 1)
    return -100.0 * (side_WN[:, :, None] != side_WN[:, None]).double()


def truth_of_swin(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    found = []
    for site, module in of_kind(model, "WindowAttention"):
        query_BHND, key_BHND = projected(tape.given(site), module, 2)
        if hasattr(module, "logit_scale"):
            query_BHND, key_BHND = (part / part.norm(dim=-1, keepdim=True) for part in (query_BHND, key_BHND))
            scale = module.logit_scale.double().clamp(max=math.log(100)).exp()
            logits_BHNM = products(query_BHND, key_BHND, 1.0) * scale + continuous_bias(module)
        else:
            logits_BHNM = products(query_BHND, key_BHND) + table_bias(module.relative_position_bias_table, 4)
        if site.endswith("blocks.1.attn") and len(query_BHND) > 2:
            penalty_WNM = border_penalty(8, 4, 2)
            logits_BHNM = logits_BHNM + penalty_WNM.repeat(len(query_BHND) // len(penalty_WNM), 1, 1)[:, None]
        found.append(seen(site, logits_BHNM, tape.given(f"{site}.proj")))
    return found


def continuous_bias(module: Any) -> Tensor:
    """The bias that a small network makes of the logarithm of each offset (Liu et al. 2022), (H, N, N)."""
    offset = torch.arange(-3, 4, dtype=torch.float64) / 3 * 8
    offset = offset.sign() * (1 + offset.abs()).log2() / math.log2(8)
    offsets_X2 = torch.cartesian_prod(offset, offset)
    first, last = module.cpb_mlp[0], module.cpb_mlp[-1]
    return 16 * table_bias(linear(linear(offsets_X2, first).relu(), last), 4).sigmoid()


SWIN = {
    **{"img_size": 32, "patch_size": 4, "num_classes": 3, "embed_dim": 8, "window_size": 4, **DROPOUT},
    **{"depths": (2, 2), "num_heads": (2, 2)},
}


def truth_of_windows_in_an_axis(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    """Tokens (B, W, N, L): every window is a sequence. What its heads give is put together with the heads last."""
    found = []
    for site, module in of_kind(model, "Attention"):
        query, key = projected(tape.given(site).flatten(0, 1), module, 2)
        output = tape.given(f"{site}.proj").flatten(0, 1).unflatten(-1, (-1, 2)).transpose(-1, -2)
        found.append(seen(site, products(query, key), output))
    return found


def nest(timm: Any) -> nn.Module:
    sizes = {"num_levels": 2, "embed_dims": (8, 16), "num_heads": (2, 2), "depths": (1, 1)}
    model: nn.Module = timm.models.nest.Nest(**{**IMAGE, **sizes, **DROPOUT, "patch_size": 2})
    return model


def truth_of_twins(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    """In turn within windows, and of all tokens with those of a convolution with strides."""
    found = []
    for site, module in model.named_modules():
        if type(module).__name__ == "LocallyGroupedAttn":
            query, key, _ = linear(tape.given(site), module.qkv).chunk(3, dim=-1)
            output = tape.given(f"{site}.proj")
            query, key, output = (as_windows(part, module.ws) for part in (query, key, output))
            found.append(seen(site, products(split_heads(query, 2), split_heads(key, 2)), output))
        elif type(module).__name__ == "GlobalSubSampleAttn":
            query, key = tape.gave(f"{site}.q"), tape.gave(f"{site}.kv").chunk(2, dim=-1)[0]
            found.append(seen(site, products(split_heads(query, 2), split_heads(key, 2)), tape.given(f"{site}.proj")))
    return found


def as_windows(image_BNL: Tensor, window: int) -> Tensor:
    """The tokens of a square image as those of its windows, (B W, N, L)."""
    side = math.isqrt(image_BNL.shape[1])
    grid = image_BNL.unflatten(1, (side // window, window, side // window, window))
    return grid.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def twins(timm: Any) -> nn.Module:
    sizes = {"depths": (2, 2), "embed_dims": (8, 16), "num_heads": (2, 2), "sr_ratios": (4, 2), "wss": (4, 2)}
    model: nn.Module = timm.models.Twins(**{**IMAGE, **DROPOUT, **sizes, "img_size": 32}, mlp_ratios=(2, 2))
    return model


def truth_of_hiera(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    """Tokens of a window lie `windows` apart; queries are the largest of those that are pooled."""
    found = []
    for site, module in of_kind(model, "MaskUnitAttention"):
        x_BNL = tape.given(site)
        windows = x_BNL.shape[1] // (module.q_stride * module.window_size) if module.use_mask_unit_attn else 1
        x_BNL = x_BNL.unflatten(1, (-1, windows)).transpose(1, 2).flatten(0, 1)
        query, key = projected(x_BNL, module, module.heads)
        query = query.unflatten(2, (module.q_stride, -1)).amax(2)
        output = tape.given(f"{site}.proj").unflatten(1, (-1, windows)).transpose(1, 2).flatten(0, 1)
        found.append(seen(site, products(query, key), output))
    return found


def hiera(timm: Any) -> nn.Module:
    model: nn.Module = timm.models.hiera.Hiera(
        img_size=(32, 32),
        embed_dim=8,
        num_heads=1,
        num_classes=3,
        stages=(1, 1, 1),
        q_pool=1,
        mask_unit_size=(4, 4),
        mask_unit_attn=(True, True, False),
        drop_path_rate=0.1,
    )
    return model


def truth_of_pvt(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    """Keys are fewer than queries, of a convolution with strides."""
    found = []
    for site, _ in of_kind(model, "Attention"):
        query = split_heads(tape.gave(f"{site}.q"), 2)
        key = split_heads(tape.gave(f"{site}.kv").chunk(2, dim=-1)[0], 2)
        found.append(seen(site, products(query, key), tape.given(f"{site}.proj")))
    return found


def pvt(timm: Any) -> nn.Module:
    sizes = {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (2, 2), "sr_ratios": (2, 1), "mlp_ratios": (2, 2)}
    model: nn.Module = timm.models.pvt_v2.PyramidVisionTransformerV2(num_classes=3, **sizes, **DROPOUT)
    return model


# Channels.


def xcit(timm: Any) -> nn.Module:
    """As many tokens as a head has channels, where sizes tell nothing."""
    model: nn.Module = timm.models.Xcit(**{**SMALL, "embed_dim": 32, "patch_size": 8, "img_size": 32, "depth": 1})
    return model


def edgenext(timm: Any) -> nn.Module:
    sizes = {"dims": (8, 8, 8, 16), "depths": (1, 1, 1, 1), "global_block_counts": (0, 1, 1, 1), "heads": (2, 2, 2, 2)}
    model: nn.Module = timm.models.EdgeNeXt(num_classes=3, drop_path_rate=0.1, d2_scales=(2, 2, 2, 2), **sizes)
    return model


def davit(channel_attn_v2: bool) -> Callable[[Any], nn.Module]:
    sizes = {"depths": (1,), "embed_dims": (8,), "num_heads": (2,), "window_size": 4}
    return lambda timm: timm.models.DaVit(num_classes=3, **sizes, channel_attn_v2=channel_attn_v2)


def truth_of_davit(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    found = []
    for site, module in of_kind(model, "WindowAttention"):
        found.append(seen(site, products(*projected(tape.given(site), module, 2)), tape.given(f"{site}.proj")))
    return found


class Pooling(nn.Module):
    """Attention pooling alone, with queries that are parameters themselves."""

    def __init__(self, timm: Any) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, 16, 4, 4)
        self.pool = timm.layers.AttentionPoolLatent(16, num_heads=2, q_proj=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.pool(self.embedding(x).flatten(2).transpose(1, 2))
        return output


def truth_of_pooling(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    query = split_heads(model.pool.latent, 2).expand(2, -1, -1, -1)
    key, _ = linear(tape.given("pool"), model.pool.kv).chunk(2, dim=-1)
    return [seen("pool", products(query, split_heads(key, 2)), tape.given("pool.proj"))]


def nothing(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    return []


def cells(
    model: str,
    make: Callable[[Any], nn.Module],
    truth: Truth,
    *sites: str,
    side: int = 16,
    outcome: Seen | Refused | NoAttention | None = None,
    fused: tuple[bool, ...] = (False, True),
    case: str = "",
) -> list[Cell]:
    """Fused and written out, in training and evaluation."""
    return [
        Cell(
            FAMILY,
            model,
            "sdpa" if is_fused else "written out",
            mode + (f", {case}" if case else ""),
            lambda is_fused=is_fused: tiny(make, is_fused),
            images(side),
            truth,
            sites,
            outcome or Seen(),
            training=mode == "train",
        )
        for is_fused in fused
        for mode in ("train", "eval")
    ]


BLOCKS = "blocks.*.attn"
MIXED_HEADS = Seen("the softmax itself, of mixed logits", with_values=False, warning="changes its weights after the")
CHANNELS = Refused(CHANNELS_REFUSED, "it attends over channels; choose `sites` without it")
BESIDE_CHANNELS = Seen("what attends over channels is refused by name", warning=CHANNELS_REFUSED)

CELLS = [
    *cells("ViT, DeiT", vit(), truth_of_vit, BLOCKS),
    *cells("ViT, DeiT", vit(patch_drop_rate=0.5), truth_of_vit, BLOCKS, case="patches dropped"),
    *cells("ViT, DeiT", vit(qk_norm=True, reg_tokens=2), truth_of_vit, BLOCKS, case="q and k norm, registers"),
    *cells(
        *("ViT, SigLIP", vit(global_pool="map", class_token=False), truth_of_vit, BLOCKS, "attn_pool"),
        case="attention pooling",
    ),
    *cells("ViT, parallel blocks", parallel, truth_of_parallel_blocks, "blocks.*", case="q and k norm"),
    *cells(
        *("ViT, differential", vit(attn_layer="diff"), truth_of_differential, BLOCKS),
        outcome=Seen("each softmax", with_values=False, warning="changes its weights after the"),
        fused=(False,),
    ),
    *cells(
        *("ViT, differential", vit(attn_layer="diff"), truth_of_differential, BLOCKS),
        outcome=Seen("each of the two softmaxes is a call"),
        fused=(True,),
    ),
    *cells("MultiQueryAttention2d", Convolutional, truth_of_convolutional, "attention"),
    *cells("EVA", eva(), truth_of_eva, BLOCKS, case="rotary"),
    *cells("EVA", eva(qkv_fused=False, scale_attn_inner=True), truth_of_eva, BLOCKS, case="rotary, norm inside"),
    *cells("BEiT", beit(use_rel_pos_bias=True), truth_of_beit, BLOCKS, case="relative position bias"),
    *cells("BEiT", beit(use_shared_rel_pos_bias=True), truth_of_beit, BLOCKS, case="shared relative position bias"),
    *cells("Swin", lambda timm: timm.models.SwinTransformer(**SWIN), truth_of_swin, "layers.*.blocks.*.attn", side=32),
    *cells(
        *("Swin V2", lambda timm: timm.models.SwinTransformerV2(**SWIN), truth_of_swin, "layers.*.blocks.*.attn"),
        side=32,
        fused=(False,),
    ),
    *cells(
        *("CaiT", lambda timm: timm.models.Cait(**SMALL), truth_of_cait, BLOCKS, "blocks_token_only.*.attn"),
        outcome=MIXED_HEADS,
    ),
    *cells("NesT", nest, truth_of_windows_in_an_axis, "levels.*.transformer_encoder.*.attn"),
    *cells("Twins-SVT", twins, truth_of_twins, "blocks.*.*.attn", side=32),
    *cells("Hiera", hiera, truth_of_hiera, BLOCKS, side=32),
    *cells("PVT v2", pvt, truth_of_pvt, "stages.*.blocks.*.attn", side=32),
    *cells("XCiT", xcit, truth_of_class_attention, "cls_attn_blocks.*.attn", side=32, outcome=BESIDE_CHANNELS),
    *cells("EdgeNeXt", edgenext, nothing, outcome=CHANNELS, side=64, fused=(False,)),
    *cells("DaViT", davit(False), truth_of_davit, "stages.*.attn", outcome=BESIDE_CHANNELS),
    *cells("DaViT", davit(True), truth_of_davit, "stages.*.attn", outcome=BESIDE_CHANNELS, case="second version"),
    *cells(
        *("AttentionPoolLatent", Pooling, truth_of_pooling, "pool"),
        outcome=NoAttention("queries that are parameters themselves are taken for a codebook"),
        fused=(False,),
        case="without a query projection",
    ),
    *cells(
        *("AttentionPoolLatent", Pooling, truth_of_pooling, "pool"),
        fused=(True,),
        case="without a query projection",
    ),
]


@pytest.mark.filterwarnings("ignore:Importing from timm")
@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
