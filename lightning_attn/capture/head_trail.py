"""Telling which heads a rank computes, from the projections that made them (tensor parallelism).

A model that is divided so computes with plain tensors where its attention is: each rank with some of the heads, and
nothing in them tells which. The projections do. What each of them makes is followed from there to the attention.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn.capture.call_stack import innermost_module
from lightning_attn.capture.head_share import HeadShare
from lightning_attn.capture.module_tree import modules_of, parameters_of
from lightning_attn.capture.notes import Notes
from lightning_attn.capture.refusals import HEADS_OF_OTHER_RANKS, Refusal
from lightning_attn.capture.spread import (
    Part,
    held,
    is_spread,
    part_of,
    refusal_of_call,
    sharded_axes,
    sharding,
)

#: These make channels anew: what entered them tells nothing of the heads that leave. By the axis of the weight that has
#: the channels.
_LAYERS: dict[Any, int] = {functional.linear: 0, torch.addmm: 1, Tensor.addmm: 1}

#: What libraries call the exchange of tokens for heads between ranks: each rank has other heads afterwards, and which
#: of them only the library knows.
_EXCHANGES = re.compile(r"AllToAll|all_to_all")
#: Putting together what ranks hold, of which that is as true where it is heads.
_GATHERS = re.compile(r"AllGather|all_gather")
#: And an attention whose keys travel from rank to rank.
_TRAVELLING_KEYS = re.compile(r"Ring\w*Att|(ZigZag|Stripe)\w*Att|ContextParallel|WithCP|AttnFuncWith\w*KV")


@dataclass(frozen=True)
class _Holding:
    """What is known of a tensor: the share of heads in it, and why they cannot be read, if they cannot."""

    share: HeadShare | None = None
    refusal: Refusal | None = None


_WHOLE = _Holding()


class HeadTrail:
    """Follows the share of heads that a rank has, from the projections on, for as long as tensors live.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known: Notes[_Holding] = Notes()
        #: The weights that are spread over ranks, by the modules that have some.
        self._weights = {module: weights for module in modules_of(model) if (weights := _spread_weights(module))}
        self._is_divided = bool(self._weights) or any(_is_marked(weight) for weight in parameters_of(model))
        self._fault: Exception | None = None

    def see(self, function: Any, operands: list[Tensor], result: object) -> None:
        """Note what a torch function made, or an operation that brings its own gradient."""
        is_exchange = bool(_EXCHANGES.search(getattr(function, "__name__", "")))
        if not (self._is_divided or self._known or is_exchange or any(map(is_spread, (*operands, result)))):
            return  # data parallelism, where every rank has all heads
        try:
            self._follow(function, operands, result)
        except Exception as error:
            self._fault = error

    def _follow(self, function: Any, operands: list[Tensor], result: object) -> None:
        holding = _of_marked(operands) or self._of_layer(function, operands, result)
        if holding is None:
            holding = next(filter(None, map(self._get, operands)), None)
        name = getattr(function, "__name__", "")
        is_share = holding is not None and holding.share is not None
        if _EXCHANGES.search(name) or (is_share and _GATHERS.search(name)):
            holding = _Holding(refusal=HEADS_OF_OTHER_RANKS)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._note(tensor, holding)

    def of(self, operands: Sequence[Tensor]) -> HeadShare | None:
        """The share of the heads of an attention.

        Args:
            operands: its queries, keys and values (…, H, N, D), or its weights (…, H, N, M) and values, as the model
                computes with them. The first of which anything is known tells.

        Raises:
            UnreadableError: if a rank holds a part of the tokens, or it is known that the heads cannot be told.
            Exception: what went wrong while they were followed.
        """
        if self._fault is not None:
            raise self._fault
        refusal = refusal_of_call(operands)
        holdings = [self._get(operand) for operand in operands]
        refusals = [holding.refusal for holding in holdings if holding is not None]
        for reason in (refusal, *refusals):
            if reason is not None:
                raise reason.error()
        query = operands[0] if operands else None
        if is_spread(query) and query is not None and query.dim() > 3:
            return HeadShare.of(part_of(query, -3))
        return next((holding.share for holding in holdings if holding is not None), None)

    def _of_layer(self, function: Any, operands: list[Tensor], result: object) -> _Holding | None:
        """What a layer made of plain tensors; ``None`` for what is no layer."""
        if function not in _LAYERS or not isinstance(result, Tensor) or is_spread(result) or not result.numel():
            return None
        of_weight = next(filter(None, map(self._get, operands[1:])), None)
        if of_weight is not None and of_weight.share is not None:
            return of_weight
        module = innermost_module() if self._weights else None
        weights = [] if module is None else self._weights.get(module, [])
        width, axis = result.shape[-1], _LAYERS[function]
        if any(width == weight.shape[axis] for weight in weights):
            return _WHOLE
        # Some libraries compute with what a rank holds of its weights where no gradient is wanted.
        part = next((part for part in (part_of(weight, axis) for weight in weights) if part.held == width), None)
        if part is not None:
            return _Holding(HeadShare.of(part))
        # Divided twice, by heads and to shard it, of which one is undone.
        is_unclear = any(len(sharding(weight, axis)) > 1 and weight.shape[axis] % width == 0 for weight in weights)
        return _Holding(refusal=HEADS_OF_OTHER_RANKS) if is_unclear else _WHOLE

    def _note(self, tensor: Tensor, holding: _Holding | None) -> None:
        if is_spread(tensor):
            holding = _of_spread(tensor, holding)
            if holding is not None:
                self._known.set(held(tensor), holding)  # which is what leaves it, where no gradient is wanted
        if holding is not None:
            self._known.set(tensor, holding)

    def _get(self, tensor: Tensor) -> _Holding | None:
        known = self._known.get(tensor)
        if known is None and isinstance(tensor, nn.Parameter) and tensor.dim() > 1 and is_spread(tensor):
            return _Holding(HeadShare.of(part_of(tensor, 0)))
        return known


def is_attention_of_travelling_keys(called: Any) -> bool:
    """Whether an operation with a gradient of its own computes attention with keys that travel between ranks."""
    return isinstance(called, type) and bool(_TRAVELLING_KEYS.search(called.__name__))


def _spread_weights(module: nn.Module) -> list[Any]:
    weights = [weight for weight in module._parameters.values() if weight is not None and is_spread(weight)]
    return [weight for weight in weights if weight.dim() == 2]


def _of_spread(tensor: Tensor, inherited: _Holding | None) -> _Holding | None:
    """What a tensor that is spread over ranks holds: its layout tells, unless it divides heads or tokens."""
    axes = sharded_axes(tensor)
    if tensor.dim() - 1 in axes:
        return _Holding(HeadShare.of(part_of(tensor, -1)))
    return inherited if axes else _WHOLE


def _is_marked(weight: Tensor) -> bool:
    return bool(getattr(weight, "tensor_model_parallel", False)) and getattr(weight, "partition_dim", None) == 0


def _of_marked(operands: list[Tensor]) -> _Holding | None:
    """What is made with a weight that Megatron-LM has marked as divided by what it gives."""
    if not any(map(_is_marked, operands)):
        return None
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None:
        return _Holding(refusal=HEADS_OF_OTHER_RANKS)
    rank, ranks = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    return _Holding(HeadShare.of(Part(rank, 1, ranks)))
