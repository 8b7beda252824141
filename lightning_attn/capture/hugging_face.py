"""Seeing attention that Hugging Face models compute with a kernel of their registry: flash-attn, paged, a user's own.

Models look their attention function up at every call, so that the registry's functions are wrapped for the time of a
capture. What a function computes by torch functions is seen anyway, and is not counted again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.capture.flex import IndexRule
from lightning_attn.capture.reader import Sampling, Sightings, UnreadableError, intercepts

_AttentionFunction = Callable[..., Any]


@intercepts
@contextmanager
def registered_functions(sightings: Sightings) -> Iterator[None]:
    """Watch the functions of the registry, where transformers is in use."""
    registry = _registry()
    wrapped = dict(registry)
    try:
        for name, function in wrapped.items():
            registry[name] = _watched(function, sightings)
        yield
    finally:
        for name, function in wrapped.items():
            del registry[name]  # what was set on the registry itself; beneath it is what all registries share
            if registry.get(name) is not function:
                registry[name] = function


def _registry() -> MutableMapping[str, _AttentionFunction]:
    modeling = sys.modules.get("transformers.modeling_utils")
    return cast(MutableMapping[str, _AttentionFunction], getattr(modeling, "ALL_ATTENTION_FUNCTIONS", {}))


def _watched(function: _AttentionFunction, sightings: Sightings) -> _AttentionFunction:
    @wraps(function)
    def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = sightings.count
        result = function(module, query, key, value, *args, **kwargs)
        if sightings.count == before:
            sightings.take(lambda sampling: _read(sampling, module, query, key, value, *args, **kwargs), query.device)
        return result

    return watched


def _read(
    sampling: Sampling,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> AttentionCall:
    if kwargs.get("cu_seq_lens_q") is not None:
        raise UnreadableError(
            "its sequences are packed into one (`cu_seq_lens_q`); use padded batches on the steps to be watched"
        )
    sampling.check_tokens(query, key)
    query_BHND, key_BKMD, value_BKME = (tensor[: sampling.max_sequences] for tensor in (query, key, value))
    queries, keys = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    return AttentionCall(
        site=sampling.site,
        query=query_BHND,
        key=key_BKMD,
        value=value_BKME if sampling.with_values else None,
        scale=1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling),
        visibility=_visibility(attention_mask, query_BHND, keys, is_causal, sliding_window),
        self_attention=queries == keys,
        soft_cap=softcap,
        sink_logits=s_aux,
    )


def _visibility(mask: Any, query_BHND: Tensor, keys: int, is_causal: bool, window: int | None) -> Visibility:
    """What a mask of two dimensions (padding), of four, of blocks, or none stands for.

    Masks of four dimensions and of blocks hold causality and the window; beside the others they are the kernel's
    business, which lines up the last query with the last key.
    """
    sequences, heads, queries, _ = query_BHND.shape
    if isinstance(mask, Tensor) and mask.dim() == 4:
        mask = mask[:sequences, ..., :keys]
        return Visibility(mask=mask) if mask.dtype == torch.bool else Visibility(bias=mask)
    if mask is not None and not isinstance(mask, Tensor):
        numbers = (torch.arange(sequences, device=query_BHND.device), torch.arange(heads, device=query_BHND.device))
        return Visibility(rule=IndexRule(mask.mask_mod, *numbers))
    visible: Tensor | None = None if mask is None else mask[:sequences, None, None, -keys:].bool()
    if is_causal and window is not None and window < keys:
        last_N1 = torch.arange(queries, device=query_BHND.device)[:, None] + (keys - queries)
        near = (last_N1 - torch.arange(keys, device=query_BHND.device) < window)[None, None]
        visible = near if visible is None else visible & near
    return Visibility(causal_offset=keys - queries if is_causal else None, mask=visible)
