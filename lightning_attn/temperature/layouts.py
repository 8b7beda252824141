"""In which ways a module may make the queries of a site.

What follows are guesses, the likeliest first; which of them is true is proven by `lightning_attn.temperature.proof`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_attn.capture.module_tree import modules_of
from lightning_attn.temperature.projection import QueryProjection, ScaledParameter
from lightning_attn.temperature.writable import writable

#: What people call what makes queries, and what makes queries, keys and values together.
_QUERY = re.compile(r"(^|_)(q|wq|query|queries|q\w*proj\w*|to_q|q_lin|q_b_proj|wq_b)($|_)|query|^q", re.IGNORECASE)
_FUSED = re.compile(r"qkv|query_key_value|c_attn|in_proj|project_in", re.IGNORECASE)
_NORM = re.compile(r"norm", re.IGNORECASE)
_KEY = re.compile(r"(^|_)(k|wk|key|keys|to_k)($|_)|key(?!_value)|^k_", re.IGNORECASE)


def guesses(
    site: nn.Module, names: dict[nn.Module, str], heads: int, width: int | None, value_width: int | None = None
) -> Iterator[QueryProjection]:
    """The ways in which the modules of a site may make its queries.

    Args:
        site: the module that computes attention.
        names: the names of its modules in the model.
        heads: how many heads it has.
        width: of one head's queries; ``None`` where that is not known.
        value_width: of one head's values, which is very probably that of its queries.
    """
    if isinstance(site, nn.MultiheadAttention):
        yield packed(site, names[site])
        return
    below = sorted((module for module in modules_of(site) if module in names), key=lambda part: _rank(names[part]))
    norms = {norm: writable(norm) for norm in below if is_norm(norm)}
    for norm, parameters in norms.items():
        weight = norm._parameters.get("weight")
        if weight is not None and heads > 1 and weight.shape[0] == heads * (width or weight.shape[0] // heads):
            rows = torch.arange(weight.shape[0]).view(heads, -1)
            yield QueryProjection(norm, names[norm], "layer", rows, parameters)
    for layer in filter(is_layer, below):
        parameters = writable(layer, axis_of(layer))
        for rows in _rows(channels_of(layer), heads, width, value_width):
            yield QueryProjection(layer, names[layer], "layer", rows, parameters)
    for norm, parameters in norms.items():
        yield QueryProjection(norm, names[norm], "shared", None, parameters)


def packed(attention: nn.MultiheadAttention, name: str) -> QueryProjection:
    """The projection of a `torch.nn.MultiheadAttention`."""
    rows = torch.arange(attention.embed_dim).view(attention.num_heads, -1)
    names = ("in_proj_weight", "q_proj_weight", "in_proj_bias")
    held = [name for name in names if attention._parameters.get(name) is not None]
    return QueryProjection(attention, name, "packed", rows, tuple(ScaledParameter(name, 0) for name in held))


def likely(site: nn.Module, names: dict[nn.Module, str]) -> QueryProjection | None:
    """What very probably makes a module's queries, told before anything has run; all heads as one.

    Serves only temperatures that all heads share, until the first forward pass proves what is true.
    """
    if isinstance(site, nn.MultiheadAttention):
        return packed(site, names[site])
    children = [child for child in site.children() if child in names]
    own = {child: names[child].rpartition(".")[2] for child in children}
    norms = [child for child in children if is_norm(child) and _QUERY.search(own[child])]
    if norms:
        return QueryProjection(norms[0], names[norms[0]], "shared", None, writable(norms[0]))
    layers = [child for child in children if is_layer(child)]
    has_keys = any(_KEY.search(own[layer]) for layer in layers)
    separate = [layer for layer in layers if _QUERY.search(own[layer]) and not _FUSED.search(own[layer])]
    if separate and has_keys:
        rows = torch.arange(channels_of(separate[0]))[None]
        return QueryProjection(
            separate[0], names[separate[0]], "layer", rows, writable(separate[0], axis_of(separate[0]))
        )
    for layer in layers:
        channels, axis = channels_of(layer), axis_of(layer)
        if _FUSED.search(own[layer]) and channels == 3 * layer._parameters["weight"].shape[1 - axis]:  # type: ignore[union-attr]
            return QueryProjection(
                layer, names[layer], "layer", torch.arange(channels // 3)[None], writable(layer, axis)
            )
    return None


def is_layer(module: nn.Module) -> bool:
    """Whether a module multiplies with a matrix of weights."""
    weight = module._parameters.get("weight")
    is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return weight is not None and weight.dim() == 2 and weight.is_floating_point() and not is_table


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises each token by itself, by the name of its class.

    Norms over the batch are none of queries, whose size would be that of others.
    """
    if "running_mean" in module._buffers:
        return False
    weight = module._parameters.get("weight")
    return bool(_NORM.search(type(module).__name__)) and not module._modules and (weight is None or weight.dim() == 1)


def axis_of(layer: nn.Module) -> int:
    """Which axis of a layer's weight holds what leaves it: the first, but the last in GPT-2's ``Conv1D``."""
    return 1 if type(layer).__name__ == "Conv1D" else 0


def channels_of(layer: nn.Module) -> int:
    """How many channels leave a layer."""
    weight = layer._parameters["weight"]
    assert weight is not None
    return int(weight.shape[axis_of(layer)])


def _rank(name: str) -> int:
    """What is called as queries are comes first."""
    last = name.rpartition(".")[2]
    return 0 if _QUERY.search(last) and not _FUSED.search(last) else 1 if _FUSED.search(last) else 2


def _rows(channels: int, heads: int, width: int | None, value_width: int | None) -> Iterator[Tensor]:
    """The channels (H, D) that may be queries among those of a layer."""
    number = torch.arange(channels)
    known: set[tuple[int, ...]] = set()
    for rows in _all_rows(number, heads, width, value_width):
        key = tuple(rows.flatten().tolist())
        if key not in known:
            known.add(key)
            yield rows


def _all_rows(number: Tensor, heads: int, width: int | None, value_width: int | None) -> Iterator[Tensor]:
    channels = len(number)
    for d in [width] if width else _widths(channels, heads, value_width):
        own = heads * d
        if channels < own:
            continue
        for start in dict.fromkeys((0, channels - own, own, 2 * own)):  # queries first, last, or between the others
            if start + own <= channels:
                yield number[start : start + own].view(heads, d)
        if channels == own:
            yield number.view(d, heads).T
        for parts in (2, 3):  # queries, keys, values head by head; or queries and their gates
            if channels == parts * own:
                for part in range(parts):
                    yield number.view(heads, parts, d)[:, part]
                    yield number.view(heads, d, parts)[..., part]
                    yield number.view(parts, d, heads)[part].T
                    yield number.view(d, parts, heads)[:, part].T
                    yield number.view(d, heads, parts)[..., part].T
        for groups in (k for k in range(1, heads) if heads % k == 0):
            if channels == (heads + 2 * groups) * d:  # group by group
                yield number.view(groups, heads // groups + 2, d)[:, :-2].reshape(heads, d)


def _widths(channels: int, heads: int, value_width: int | None) -> list[int]:
    """The widths that a head may have where that is not known."""
    groups = [k for k in range(1, heads + 1) if heads % k == 0]
    wholes = [heads, 2 * heads, 3 * heads, *(heads + 2 * k for k in groups)]
    # One channel for each head is a bias, as of positions.
    widths = [channels // whole for whole in wholes if channels % whole == 0 and channels > whole]
    return sorted(dict.fromkeys(widths), key=lambda d: d != value_width)
