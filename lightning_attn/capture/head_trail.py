"""Telling which heads a rank computes, from the projections that made them (tensor parallelism).

A model that is divided so computes with plain tensors where its attention is: each rank with some of the heads, and
nothing in them tells which. The projections do. What each of them makes is followed from there to the attention.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn.capture.call_stack import innermost_module
from lightning_attn.capture.head_share import HeadShare
from lightning_attn.capture.holding import WHOLE, Holding
from lightning_attn.capture.module_tree import modules_of, parameters_of
from lightning_attn.capture.notes import Notes
from lightning_attn.capture.refusals import HEADS_OF_OTHER_RANKS, SUMS_OF_RANKS
from lightning_attn.capture.spread import Part, held, is_spread, is_sum, sharding


class _Layer(NamedTuple):
    """Which operand of a layer is its weight, and which axis of that has the channels that it gives."""

    weight: int
    axis: int


#: These make channels anew: what entered them tells nothing of the heads that leave.
_LAYERS: dict[Any, _Layer] = {
    functional.linear: _Layer(1, 0),
    torch.addmm: _Layer(2, 1),
    Tensor.addmm: _Layer(2, 1),
}
#: And so do these, where they multiply with a weight of two axes.
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}

#: These only take the shape or the type of what they are given.
_NEW = re.compile(r"new_|.*_like$")
#: What libraries call the exchange of tokens for heads between ranks: each rank has other heads afterwards, and which
#: of them only the library knows.
_EXCHANGES = re.compile(r"AllToAll|all_to_all")
#: Putting together what ranks hold, of which that is as true where it is heads.
_GATHERS = re.compile(r"AllGather|all_gather")
#: And an attention whose keys travel from rank to rank.
_TRAVELLING_KEYS = re.compile(r"Ring\w*Att|(ZigZag|Stripe)\w*Att|ContextParallel|WithCP|AttnFuncWith\w*KV")


class HeadTrail:
    """Follows the share of heads that a rank has, from the projections on, for as long as tensors live.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known: Notes[Holding] = Notes()
        #: The weights that are spread over ranks, by the modules that have some, and by the memory of what is held.
        self._weights = {module: weights for module in modules_of(model) if (weights := _spread_weights(module))}
        self._memory = {_memory_of(held(weight)): weight for weights in self._weights.values() for weight in weights}
        #: The modules that made a share of the heads.
        self._dividing: set[nn.Module] = set()
        self._is_divided = bool(self._weights) or any(map(_is_marked, parameters_of(model)))
        self._fault: Exception | None = None

    def see(self, function: Any, args: Sequence[Any], operands: Sequence[Tensor], result: object) -> None:
        """Note what a torch function made, or an operation that brings its own gradient."""
        is_exchange = bool(_EXCHANGES.search(getattr(function, "__name__", "")))
        if not (self._is_divided or self._known or is_exchange or any(map(is_spread, (*operands, result)))):
            return  # data parallelism, where every rank has all heads
        try:
            if function is Tensor.__setitem__:
                result = operands[0]
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor):
                    self._note(tensor, self._made(function, args, operands, tensor), function)
        except Exception as error:
            self._fault = error

    def of(self, operands: Sequence[Tensor], module: nn.Module) -> HeadShare | None:
        """The share of the heads of an attention.

        Args:
            operands: its queries, keys and values (…, H, N, D), or its weights (…, H, N, M), as the model computes with
                them.
            module: the module that computes it.

        Raises:
            UnreadableError: if a rank holds a part of the tokens, or the heads cannot be told.
            Exception: what went wrong while they were followed.
        """
        if self._fault is not None:
            raise self._fault
        if any(is_spread(operand) and is_sum(operand) for operand in operands):
            raise SUMS_OF_RANKS.error()
        known = [(operand, self._get(operand)) for operand in operands]
        shares = {holding.heads_of(operand) for operand, holding in known if holding is not None} - {None}
        refusals = [holding.refusal for _, holding in known if holding is not None and holding.refusal is not None]
        is_unknown = all(holding is None for _, holding in known)
        if not shares and refusals:
            raise refusals[0].error()
        if len(shares) > 1 or (is_unknown and any(part in self._dividing for part in modules_of(module))):
            raise HEADS_OF_OTHER_RANKS.error()
        return next(iter(shares), None)

    def _made(self, function: Any, args: Sequence[Any], operands: Sequence[Tensor], result: Tensor) -> Holding | None:
        """What is known of what a function made; ``None`` for nothing."""
        name = getattr(function, "__name__", "")
        if _NEW.match(name):
            return None
        if isinstance(function, type) and any(map(_is_marked, operands)):
            return Holding(HeadShare.of(_part_by_mark(1)))
        holding = self._of_layer(function, operands, result) or self._inherited(function, args, operands, result)
        has_share = holding is not None and holding.share is not None
        if _EXCHANGES.search(name) or (has_share and _GATHERS.search(name)):
            return Holding(refusal=HEADS_OF_OTHER_RANKS)
        return holding

    def _of_layer(self, function: Any, operands: Sequence[Tensor], result: Tensor) -> Holding | None:
        """What a layer made of plain tensors; ``None`` for what is no layer."""
        layer = _LAYERS.get(function)
        if layer is None and function in _PRODUCTS and operands[-1].dim() == 2 and self._get(operands[-1]):
            layer = _Layer(1, 1)
        if layer is None or is_spread(result) or not result.numel():
            return None
        entering, weight = operands[layer.weight - 1], operands[layer.weight]
        of_weight, of_entering = self._get(weight), self._get(entering)
        if of_weight is not None and layer.axis in of_weight.layout:
            return Holding.of_channels(of_weight.layout[layer.axis])
        if of_weight is not None and of_weight.refusal is not None:
            return Holding(refusal=of_weight.refusal)
        if of_weight is None and self._is_half_together(layer.axis, result.shape[-1]):
            return Holding(refusal=HEADS_OF_OTHER_RANKS)
        if of_entering is None:
            return WHOLE
        if of_entering.share is not None and (entering.dim() > 3 or entering.shape[-1] != of_entering.width):
            return of_entering  # a layer within each head
        return Holding(layout={axis: part for axis, part in of_entering.layout.items() if axis < entering.dim() - 1})

    def _is_half_together(self, axis: int, width: int) -> bool:
        """Whether a weight of the module that computes is divided by heads and to shard it, and one of these undone."""
        module = innermost_module() if self._weights else None
        weights = [] if module is None else self._weights.get(module, [])
        if any(width == weight.shape[axis] for weight in weights):
            return False
        return any(len(sharding(weight, axis)) > 1 and weight.shape[axis] % width == 0 for weight in weights)

    def _inherited(
        self, function: Any, args: Sequence[Any], operands: Sequence[Tensor], result: Tensor
    ) -> Holding | None:
        """What is known of the operands: a share before a layout, a layout before a refusal, anything before whole."""
        known = [(operand, holding) for operand in operands if (holding := self._get(operand)) is not None]
        for is_telling in (_has_share, _has_layout, _is_refused, bool):
            for operand, holding in known:
                if is_telling(holding):
                    return holding.after(function, args, operand, result)
        return None

    def _note(self, tensor: Tensor, holding: Holding | None, function: Any) -> None:
        if is_spread(tensor):
            is_laid_out_anew = getattr(function, "__name__", "") == "Redistribute"
            holding = Holding.of_spread(tensor, None if is_laid_out_anew else holding)
            self._known.set(held(tensor), holding)  # which is what leaves it, where no gradient is wanted
        if holding is None:
            return
        self._known.set(tensor, holding)
        if holding.share is not None and holding.width == tensor.shape[-1]:
            module = innermost_module()
            if module is not None:
                self._dividing.add(module)

    def _get(self, tensor: Tensor) -> Holding | None:
        known = self._known.get(tensor)
        if known is not None:
            return known
        if is_spread(tensor):
            return Holding.of_spread(tensor, None)
        if _is_marked(tensor):
            return Holding(layout={0: _part_by_mark(tensor.shape[0])})
        # What a rank holds of a weight leaves it without a function where no gradient is wanted.
        weight = self._memory.get(_memory_of(tensor)) if self._memory else None
        return None if weight is None or held(weight).shape != tensor.shape else Holding.of_spread(weight, None)


def is_attention_of_travelling_keys(called: Any) -> bool:
    """Whether an operation with a gradient of its own computes attention with keys that travel between ranks."""
    return isinstance(called, type) and bool(_TRAVELLING_KEYS.search(called.__name__))


def _has_share(holding: Holding) -> bool:
    return holding.share is not None


def _has_layout(holding: Holding) -> bool:
    return bool(holding.layout)


def _is_refused(holding: Holding) -> bool:
    return holding.refusal is not None


def _spread_weights(module: nn.Module) -> list[Any]:
    weights = [weight for weight in module._parameters.values() if weight is not None and is_spread(weight)]
    return [weight for weight in weights if weight.dim() > 1]


def _memory_of(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # tensors without memory of their own
        return None


def _is_marked(weight: Tensor) -> bool:
    """Whether Megatron-LM has marked a weight as divided by what it gives."""
    return bool(getattr(weight, "tensor_model_parallel", False)) and getattr(weight, "partition_dim", None) == 0


def _part_by_mark(size: int) -> Part:
    """The part of an axis, of which a rank holds so much, that Megatron-LM has given to this rank.

    Raises:
        UnreadableError: if there is no Megatron-LM.
    """
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None:
        raise HEADS_OF_OTHER_RANKS.error()
    rank, ranks = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    return Part(rank * size, size, ranks * size)
