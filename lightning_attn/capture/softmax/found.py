"""Telling of an attention once its weights have multiplied its values."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_attn.capture.axes import KEY, SHARED
from lightning_attn.capture.refusals import REARRANGED
from lightning_attn.capture.softmax.by_numbers import are_softmax_of
from lightning_attn.capture.softmax.open_trails import place_of
from lightning_attn.capture.softmax.trail import Softmax, Weights
from lightning_attn.capture.softmax.walk import Walk
from lightning_attn.capture.softmax.written import WrittenAttention


def tell(walk: Walk, weights: Weights, tensor: Tensor, value: Tensor | None) -> None:
    """Tell of every attention whose weights have now multiplied values.

    Args:
        walk: the forward pass.
        weights: what is known of the weights.
        tensor: the weights.
        value: (shared axes, M, E); ``None`` where it cannot be told.
    """
    if any(softmax.changed_by for softmax in weights.softmaxes):
        weights = _without_detours(weights, tensor)
    sizes = [size for size, axis in zip(tensor.shape, weights.axes, strict=True) if axis == SHARED]
    is_grouped = value is not None and len(sizes) > 2 and value.shape[-3] == 1 != sizes[-1]
    columns = slice(weights.first_column, weights.first_column + tensor.shape[weights.axes.index(KEY)])
    rows = tensor.numel() // max(1, tensor.shape[weights.axes.index(KEY)])
    modules = walk.modules()
    for softmax in weights.softmaxes:
        if softmax.is_done:
            continue
        softmax.is_done = True
        walk.open.end_weights(place_of(softmax.modules, softmax.logits.shape))
        own = [size for size, axis in zip(softmax.logits.shape, softmax.axes, strict=True) if axis == SHARED]
        is_whole = rows == softmax.logits.numel() // max(1, softmax.logits.shape[softmax.axes.index(KEY)])
        walk.found(
            WrittenAttention(
                softmax,
                tuple(module for module in softmax.modules if module in modules),
                _with_leading(value, sizes, own) if is_whole else None,
                is_grouped and len(own) > 2,
                columns,
            )
        )
        softmax.let_go()


def tell_of_rearranged(walk: Walk, softmaxes: tuple[Softmax, ...]) -> None:
    """Tell of attentions whose weights, in a layout that could not be followed, have now multiplied values."""
    modules = walk.modules()
    for softmax in softmaxes:
        if not softmax.is_done:
            softmax.is_done = True
            softmax.refuse(REARRANGED)
            both = tuple(module for module in softmax.modules if module in modules)
            walk.found(WrittenAttention(softmax, both, None, False, slice(0, 0)))
            softmax.let_go()


def _without_detours(weights: Weights, tensor: Tensor) -> Weights:
    """Weights that are what one softmax gave after all: what was added was subtracted again, as for its gradient."""
    for softmax in weights.softmaxes:
        is_alike = softmax.axes == weights.axes and softmax.logits.shape == tensor.shape
        if is_alike and are_softmax_of(softmax.logits, tensor, softmax.axes.index(KEY)):
            for other in weights.softmaxes:
                other.is_done = True
            softmax.is_done, softmax.changed_by = False, None
            return replace(weights, softmaxes=(softmax,))
    return weights


def _with_leading(value: Tensor | None, sizes: list[int], own: list[int]) -> Tensor | None:
    """A value of the weights' shared axes with those of the logits, where they differ by merging."""
    if value is None:
        return None
    value = value.expand(*sizes, -1, -1)
    if sizes == own:
        return value
    if own[: len(sizes)] == sizes:  # heads were merged with the queries: all of them read the same values
        beside = (1,) * (len(own) - len(sizes))
        return value.reshape(*sizes, *beside, *value.shape[-2:]).expand(*own, -1, -1)
    count = torch.Size(own).numel()
    return value.reshape(*own, *value.shape[-2:]) if count == torch.Size(sizes).numel() else None
