"""Vision transformers of Hugging Face transformers, alone and beside text, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cell import Arguments, Cell, cells_of, check
from support.hugging_face import SMALL, attention_of, made, padded, sharpened
from support.truth import Attention, Tape, causal, products, split_heads, tokens
from torch import Tensor, nn

FAMILY = "Hugging Face transformers, vision"
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
ALL = torch.ones(1, 1, 1, 1, dtype=torch.bool)
Names = dict[str, Any]
NAMES: Names = {"query": "q_proj", "key": "k_proj", "output": "o_proj", "heads": 4}


def vision(model: str, config: str, way: str, **settings: Any) -> nn.Module:
    return sharpened(made(model, config, way, **{**VISION, **settings}), "q_proj", "k_proj")


def with_biases(model: nn.Module) -> nn.Module:
    """The same with biases for relative positions that are not zero, as they are at first."""
    for name, parameter in model.named_parameters():
        if name.endswith("relative_position_bias_table"):
            nn.init.normal_(parameter)
    return model


def beit(way: str) -> nn.Module:
    return with_biases(vision("BeitModel", "BeitConfig", way, use_relative_position_bias=True))


def swin(way: str) -> nn.Module:
    """Windows of 4 x 4, which every second layer shifts by two as long as there are several."""
    stages = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4]}
    model = made("SwinModel", "SwinConfig", way, image_size=16, patch_size=2, window_size=4, **stages)
    return with_biases(sharpened(model, "q_proj", "k_proj"))


def sam(way: str) -> nn.Module:
    """Windows of 2 x 2 in the first layer, the whole picture in the second; a bias for each query's row and column."""
    settings = {"window_size": 2, "global_attn_indexes": [1], "output_channels": 8, "mlp_dim": 48}
    model = made("SamVisionModel", "SamVisionConfig", way, **VISION, **settings, initializer_range=0.1)
    for name, parameter in model.named_parameters():
        if "rel_pos" in name:
            nn.init.normal_(parameter)
    return sharpened(model, "qkv")


def detr(way: str) -> nn.Module:
    """Its backbone makes 2 x 3 places of a picture, of which the second picture has 2 x 2."""
    transformers = pytest.importorskip("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    stacks = {
        f"{part}_{size}": number
        for part in ("encoder", "decoder")
        for size, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    }
    config = transformers.DetrConfig(
        **stacks,
        d_model=32,
        num_queries=5,
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
        backbone_config=backbone,
        attn_implementation={"": way, "backbone_config": "eager"},
    )
    model: nn.Module = transformers.DetrModel(config)
    for name, parameter in model.named_parameters():
        if name.endswith("v_proj.bias"):
            nn.init.normal_(parameter)
    return sharpened(model, "q_proj", "k_proj")


def beside_text(model: str, config: str, way: str, **text: Any) -> nn.Module:
    text = {**SMALL, "max_position_embeddings": 12, "eos_token_id": 2, "bos_token_id": 1, **text}
    settings = {"text_config": text, "vision_config": VISION}
    # These initialise their weights large enough.
    return made(model, config, way, **settings)


def pictures(model: nn.Module, height: int = 16, width: int = 16, **more: Any) -> Arguments:
    return {"pixel_values": torch.randn(2, 3, height, width), **more}


def larger_pictures(model: nn.Module) -> Arguments:
    return pictures(model, height=24, interpolate_pos_encoding=True)


def pictures_of_two_sizes(model: nn.Module) -> Arguments:
    mask = torch.ones(2, 64, 96, dtype=torch.long)
    mask[1, :, 64:] = 0
    return {"pixel_values": torch.randn(2, 3, 64, 96), "pixel_mask": mask}


def pictures_and_text(side: str, model: nn.Module) -> Arguments:
    return {**padded(side)(model), **pictures(model)}


def truth_of_layers(pattern: str, names: Names, model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    return [attention_of(tape, pattern.replace("*", str(layer)), ALL, **names) for layer in range(2)]


def regions_of_swin(side: int, window: int, shift: int) -> Tensor:
    """The parts of a picture that were not beside each other before it was shifted: three along each axis."""
    place = torch.arange(side)
    part = (place >= side - window).long() + (place >= side - shift).long()
    return in_windows((3 * part[:, None] + part)[None, :, :, None], window)[..., 0]


def in_windows(picture_BYXC: Tensor, window: int) -> Tensor:
    """The windows of pictures, one after the other."""
    batch, height, width, channels = picture_BYXC.shape
    return torch.stack(
        [
            picture_BYXC[b, y : y + window, x : x + window].reshape(window * window, channels)
            for b in range(batch)
            for y in range(0, height, window)
            for x in range(0, width, window)
        ]
    )


def truth_of_swin(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    """Windows in the batch; a bias for the offset of two tokens, and -100 between tokens of different regions."""
    window, place = 4, torch.arange(16)
    row, column = place // window, place % window
    offset = (row[:, None] - row + window - 1) * (2 * window - 1) + column[:, None] - column + window - 1
    found = []
    for stage, (side, heads) in enumerate(((8, 2), (4, 4))):
        for block in range(2):
            site = f"encoder.layers.{stage}.blocks.{block}.attention"
            table_PH = model.get_parameter(f"{site}.relative_position_bias.relative_position_bias_table").double()
            bias_BHNM = table_PH[offset].permute(2, 0, 1)[None]
            if block == 1 and side > window:
                region_WN = regions_of_swin(side, window, window // 2)
                is_apart_WNM = region_WN[:, :, None] != region_WN[:, None, :]
                bias_BHNM = bias_BHNM - 100.0 * is_apart_WNM.double().repeat(2, 1, 1)[:, None]
            found.append(attention_of(tape, site, ALL, **{**NAMES, "heads": heads}, bias=bias_BHNM))
    return found


def truth_of_beit(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    """A bias for the offset of two patches, and three for the class token: with it, to it and from it."""
    offsets_NM = torch.empty(17, 17, dtype=torch.long)
    place = torch.arange(16)
    row, column = place // 4, place % 4
    offsets_NM[1:, 1:] = (row[:, None] - row + 3) * 7 + column[:, None] - column + 3
    offsets_NM[0, :], offsets_NM[:, 0], offsets_NM[0, 0] = 49, 50, 51
    found = []
    for layer in range(2):
        table_PH = model.get_parameter(f"layers.{layer}.relative_position_bias.relative_position_bias_table").double()
        bias = table_PH[offsets_NM].permute(2, 0, 1)[None]
        found.append(attention_of(tape, f"layers.{layer}.attention", ALL, **NAMES, bias=bias))
    return found


def truth_of_detr(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    """Learned queries are compared with each other in the decoder, at first before they have read the picture."""
    in_picture = torch.ones(2, 2, 3, dtype=torch.bool)
    in_picture[1, :, 2] = False
    picture = tokens(in_picture.flatten(1))
    found = [attention_of(tape, f"encoder.layers.{i}.self_attn", picture, **NAMES) for i in range(2)]
    for i in range(2):
        own, cross = f"decoder.layers.{i}.self_attn", f"decoder.layers.{i}.encoder_attn"
        found += [
            attention_of(tape, own, ALL, **NAMES),
            attention_of(tape, cross, picture, **NAMES, self_attention=False),
        ]
    return found


def truth_of_sam(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    """What a query adds for a key is its product with an embedding of the rows between them, and of the columns."""
    found = []
    for layer, side in enumerate((2, 4)):
        site = f"vision_encoder.layers.{layer}.attn"
        query, key, _ = (split_heads(part.flatten(1, 2), 4) for part in tape.gave_at(f"{site}.qkv", 0).chunk(3, -1))
        place = torch.arange(side * side)
        logits = products(query, key)
        for axis, coordinate in (("h", place // side), ("w", place % side)):
            embedded_PD = model.get_parameter(f"{site}.rel_pos_{axis}").double()
            of_pair_NMD = embedded_PD[coordinate[:, None] - coordinate + side - 1]
            logits = logits + torch.einsum("bhnd,nmd->bhnm", query, of_pair_NMD)
        found.append(Attention(site, logits, ALL, tape.given_at(f"{site}.proj", 0).flatten(1, 2)))
    return found


def truth_of_clip(is_causal: bool, model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    names = {**NAMES, "output": "out_proj"}
    visible = tokens(arguments["attention_mask"])
    if is_causal:
        visible = visible & causal(12, 12)
    found = [attention_of(tape, f"vision_model.encoder.layers.{i}.self_attn", ALL, **names) for i in range(2)]
    if "vision_model.head.attention" in dict(model.named_modules()):
        found.append(truth_of_pooling(model, tape))
    return found + [attention_of(tape, f"text_model.encoder.layers.{i}.self_attn", visible, **names) for i in range(2)]


def truth_of_pooling(model: nn.Module, tape: Tape) -> Attention:
    """One learned query, whose attention gives a summary of the picture."""
    attention = model.get_submodule("vision_model.head.attention")
    assert isinstance(attention, nn.MultiheadAttention)
    weights, biases = attention.in_proj_weight.double().chunk(3), attention.in_proj_bias.double().chunk(3)
    picture_BNL = tape.gave_at("vision_model.post_layernorm", 0).double()
    probe_BNL = model.get_parameter("vision_model.head.probe").double().expand(2, -1, -1)
    query, key, value = (
        split_heads(given @ weight.T + bias, 4)
        for given, weight, bias in zip((probe_BNL, picture_BNL, picture_BNL), weights, biases, strict=True)
    )
    logits_BHNM = products(query, key)
    output_BNX = (logits_BHNM.softmax(-1) @ value).transpose(1, 2).flatten(2)
    # What it gives is this after its last layer.
    projected_BNX = output_BNX @ attention.out_proj.weight.double().T + attention.out_proj.bias.double()
    assert torch.allclose(projected_BNX, tape.gave_at("vision_model.head.attention", 0).double(), atol=1e-5)
    return Attention("vision_model.head.attention", logits_BHNM, ALL, output_BNX, self_attention=False)


def cells(
    model: str,
    make: Callable[[str], nn.Module],
    truth: Callable[[nn.Module, Tape, Arguments], list[Attention]],
    sites: tuple[str, ...],
    cases: dict[str, Callable[[nn.Module], Arguments]] | None = None,
) -> list[Cell]:
    return [
        Cell(
            FAMILY,
            model,
            way,
            ", ".join(part for part in (mode, case) if part),
            partial(make, way),
            arguments,
            truth,
            sites,
            training=mode == "train",
        )
        for way in ("eager", "sdpa")
        for mode in ("train", "eval")
        for case, arguments in ({"": pictures} if cases is None else cases).items()
    ]


LAYERS = "layers.*.attention"
TOWERS = ("vision_model.encoder.layers.*.self_attn", "text_model.encoder.layers.*.self_attn")
ON_BOTH_SIDES = {f"text with {side} padding": partial(pictures_and_text, side) for side in ("left", "right")}
CELLS = [
    *cells(
        "ViT",
        partial(vision, "ViTModel", "ViTConfig"),
        partial(truth_of_layers, LAYERS, NAMES),
        (LAYERS,),
        {"": pictures, "larger pictures": larger_pictures},
    ),
    *cells(
        "DINOv2",
        partial(vision, "Dinov2Model", "Dinov2Config"),
        partial(truth_of_layers, "encoder.layer.*.attention", NAMES),
        ("encoder.layer.*.attention",),
    ),
    *cells("BEiT", beit, truth_of_beit, (LAYERS,)),
    *cells("Swin", swin, truth_of_swin, ("encoder.layers.*.blocks.*.attention",)),
    *cells("SAM", sam, truth_of_sam, ("vision_encoder.layers.*.attn",)),
    *cells(
        "DETR",
        detr,
        truth_of_detr,
        ("encoder.layers.*.self_attn", "decoder.layers.*.self_attn", "decoder.layers.*.encoder_attn"),
        {"pictures of two sizes": pictures_of_two_sizes},
    ),
    *cells(
        "CLIP", partial(beside_text, "CLIPModel", "CLIPConfig"), partial(truth_of_clip, True), TOWERS, ON_BOTH_SIDES
    ),
    *cells(
        "SigLIP",
        partial(beside_text, "SiglipModel", "SiglipConfig"),
        partial(truth_of_clip, False),
        (*TOWERS, "vision_model.head.attention"),
        ON_BOTH_SIDES,
    ),
]


@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
