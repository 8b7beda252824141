"""In which ways a module may make the keys of a site; which of them is true is proven, as for queries."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_attn.capture.module_tree import modules_of
from lightning_attn.clipping.key_projection import KeyProjection, pairings
from lightning_attn.temperature.layouts import axis_of, channels_of, is_layer
from lightning_attn.temperature.projection import ScaledParameter
from lightning_attn.temperature.writable import writable

#: What people call what makes keys, alone or with values or queries.
_KEY = re.compile(r"(^|_)(k|wk|key|keys|to_k|kv|to_kv|qkv|qk)($|_)|key|^k|qkv|c_attn|in_proj|project_in", re.IGNORECASE)


def key_guesses(
    site: nn.Module, names: dict[nn.Module, str], heads: int, width: int | None, value_width: int | None = None
) -> Iterator[KeyProjection]:
    """The ways in which the modules of a site may make its keys.

    Norms are none of them: where keys are normalised after their projection, its weights do not change their size.

    Args:
        site: the module that computes attention.
        names: the names of its modules in the model.
        heads: how many heads it has.
        width: of one head's keys; ``None`` where that is not known.
        value_width: of one head's values; where keys do not tell theirs, it is tried first.
    """
    if isinstance(site, nn.MultiheadAttention):
        yield _packed(site, names[site])
        return
    layers = [module for module in modules_of(site) if module in names and is_layer(module)]
    for layer in sorted(layers, key=lambda part: not _KEY.search(names[part].rpartition(".")[2])):
        parameters = writable(layer, axis_of(layer))
        for key_heads in (count for count in range(heads, 0, -1) if heads % count == 0):
            for rows in _rows(channels_of(layer), heads, key_heads, width, value_width):
                for pairing in pairings(heads, key_heads):
                    yield KeyProjection(layer, names[layer], "layer", rows, parameters, pairing)


def _packed(attention: nn.MultiheadAttention, name: str) -> KeyProjection:
    """Those of a `torch.nn.MultiheadAttention`: behind its queries, but its weight where that is one of its own."""
    width, heads = attention.embed_dim, attention.num_heads
    rows = torch.arange(width, 2 * width).view(heads, -1)
    firsts = {"in_proj_weight": 0, "k_proj_weight": width, "in_proj_bias": 0}
    held = [part for part in firsts if attention._parameters.get(part) is not None]
    parameters = tuple(ScaledParameter(part, 0, first=firsts[part]) for part in held)
    return KeyProjection(attention, name, "packed", rows, parameters, torch.arange(heads))


def _rows(channels: int, heads: int, key_heads: int, width: int | None, value_width: int | None) -> Iterator[Tensor]:
    """The channels (K, D) that may be keys among those of a layer."""
    known: set[tuple[int, ...]] = set()
    wholes = (key_heads, 2 * key_heads, heads + key_heads, heads + 2 * key_heads)
    likely = [value_width] if value_width else []
    widths = [width] if width else likely + [channels // whole for whole in wholes if channels % whole == 0]
    for d in dict.fromkeys(widths):
        for rows in _rows_of_width(channels, heads, key_heads, d):
            key = tuple(rows.flatten().tolist())
            if key not in known:
                known.add(key)
                yield rows


def _rows_of_width(channels: int, heads: int, key_heads: int, d: int) -> Iterator[Tensor]:
    number = torch.arange(channels)
    queries, own = heads * d, key_heads * d
    starts = {
        own: (0,),  # keys alone
        2 * own: (0, own),  # keys and values
        queries + own: (queries, 0),  # queries and keys
        queries + 2 * own: (queries, own, 0, queries + own),  # and values
    }
    for start in starts.get(channels, ()):
        yield number[start : start + own].view(key_heads, d)
    if channels == own:
        yield number.view(d, key_heads).T
    for parts in (2, 3):  # head by head
        if channels == parts * own and (parts == 2 or key_heads == heads):
            for part in range(parts):
                yield number.view(key_heads, parts, d)[:, part]
                yield number.view(key_heads, d, parts)[..., part]
                yield number.view(parts, d, key_heads)[part].T
                yield number.view(d, parts, key_heads)[:, part].T
                yield number.view(d, key_heads, parts)[..., part].T
    if channels == queries + 2 * own:  # group by group
        yield number.view(key_heads, heads // key_heads + 2, d)[:, -2]
