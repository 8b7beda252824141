"""Seeing attention that Hugging Face models compute with a function of their registry.

Models look their attention function up at every call, so that the registry's functions are wrapped for the time of a
capture. What a function computes by torch functions is seen by those, for that is what is really computed, whatever the
function makes of its arguments; the wrapper only tells how the model laid out its queries, since a function may fold
the heads of a group into them. Of a kernel that nothing can see into (flash-attn, a user's own) the wrapper reads the
call itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.capture.flex import IndexRule
from lightning_attn.capture.reader import Sampling, Sightings, intercepts
from lightning_attn.capture.refusals import UnreadableError
from lightning_attn.capture.softmax.operation import tensors_among
from lightning_attn.capture.spread import held_by_rank
from lightning_attn.capture.token_order import order_of_one_sequence, order_of_packed_sequences

_AttentionFunction = Callable[..., Any]
_Registry = MutableMapping[str, _AttentionFunction]


@intercepts
@contextmanager
def registered_functions(sightings: Sightings) -> Iterator[None]:
    """Watch the functions of the registry, where transformers is in use."""
    with ExitStack() as stack:
        for registry in _registries(len(sys.modules)):
            stack.enter_context(_wrapped(registry, sightings))
        yield


@contextmanager
def _wrapped(registry: _Registry, sightings: Sightings) -> Iterator[None]:
    functions = dict(registry)
    try:
        for name, function in functions.items():
            registry[name] = _watched(function, sightings)
        yield
    finally:
        for name, function in functions.items():
            del registry[name]  # what was set on the registry itself; beneath it is what all registries share
            if registry.get(name) is not function:
                registry[name] = function


@lru_cache(maxsize=1)
def _registries(modules: int) -> tuple[_Registry, ...]:
    """The registry of transformers, and those of models that have functions of their own (Doge).

    Args:
        modules: how many are loaded. To look at all takes a millisecond, and is done again where there are more.
    """
    name = "ALL_ATTENTION_FUNCTIONS"
    registry = getattr(sys.modules.get("transformers.modeling_utils"), name, None)
    if registry is None:
        return ()
    # `vars`, since asking a lazy module for what it does not have yet would import it.
    found = (vars(module).get(name) for module in list(sys.modules.values()) if isinstance(module, ModuleType))
    return tuple({id(other): other for other in found if isinstance(other, type(registry))}.values())


def _watched(function: _AttentionFunction, sightings: Sightings) -> _AttentionFunction:
    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before = sightings.count
        query = kwargs["query"] if "query" in kwargs else args[1] if len(args) > 1 else None
        if not isinstance(query, Tensor):  # a function of other arguments than the registry asks for
            return function(*args, **kwargs)
        with sightings.laid_out_as(query):
            result = function(*args, **kwargs)
        if sightings.count == before:
            operands = tensors_among(args[1:], kwargs)  # queries, keys and values come first
            held_args, held_kwargs = held_by_rank(args, kwargs)
            sightings.take(lambda sampling: _read(sampling, *held_args, **held_kwargs), query.device, operands)
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
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> AttentionCall:
    if kwargs.get("block_table") is not None:
        raise UnreadableError(
            "its keys are in a paged cache (`block_table`); watch forward passes or `generate` without continuous "
            "batching"
        )
    sampling.check_tokens(query, key)
    query_BHND, key_BKMD, value_BKME = (tensor[: sampling.max_sequences] for tensor in (query, key, value))
    queries, keys = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    ends = _ends_of_packed_sequences(query, key, **kwargs) if attention_mask is None else None
    if ends is not None:
        visibility = order_of_packed_sequences(
            queries, ends[0], keys, ends[1], is_causal=is_causal, window=sliding_window
        )
    else:
        visibility = _visibility(attention_mask, query_BHND, keys, is_causal, sliding_window)
    if position_bias is not None:
        bias = position_bias[: sampling.max_sequences, ..., :keys]
        visibility = replace(visibility, bias=bias if visibility.bias is None else visibility.bias + bias)
    return AttentionCall(
        site=sampling.site,
        query=query_BHND,
        key=key_BKMD,
        value=value_BKME if sampling.with_values else None,
        scale=1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling),
        visibility=visibility,
        self_attention=queries == keys,
        soft_cap=softcap,
        sink_logits=s_aux,
    )


def _ends_of_packed_sequences(
    query: Tensor,
    key: Tensor,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor] | None:
    """Where packed sequences end, after a zero, of queries and of keys; ``None`` where nothing is packed.

    Without a mask transformers' kernels go by these numbers; without these by positions that begin again.
    """
    if cu_seq_lens_q is not None:
        if query.shape[0] > 1:
            raise UnreadableError(
                "its sequences are packed (`cu_seq_lens_q`) over several rows of the batch; pack them into one row, or "
                "use padded batches on the steps to be watched"
            )
        return cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    queries = query.shape[2]
    if position_ids is None or position_ids.shape != (1, queries) or query.shape[0] > 1 or key.shape[2] != queries:
        return None
    starts = (position_ids[0] == position_ids.min()).nonzero()[:, 0]
    if len(starts) == 1:
        return None
    ends = torch.cat([starts, starts.new_tensor([queries])])
    return ends, ends


def _visibility(mask: Any, query_BHND: Tensor, keys: int, is_causal: bool, window: int | None) -> Visibility:
    """What a mask of two dimensions (padding), of four, of blocks, or none stands for.

    Masks of four dimensions and of blocks hold causality and the window; beside the others they are the kernel's
    business.
    """
    sequences, heads, queries, _ = query_BHND.shape
    device = query_BHND.device
    if isinstance(mask, Tensor) and mask.dim() == 4:
        mask = mask[:sequences, ..., :keys]
        return Visibility(mask=mask) if mask.dtype == torch.bool else Visibility(bias=mask)
    if mask is not None and not isinstance(mask, Tensor):
        numbers = (torch.arange(sequences, device=device), torch.arange(heads, device=device))
        return Visibility(rule=IndexRule(mask.mask_mod, *numbers))
    visibility = order_of_one_sequence(queries, keys, device, is_causal=is_causal, window=window)
    return visibility if mask is None else replace(visibility, mask=mask[:sequences, None, None, -keys:].bool())
