"""Every call of a torch function that a forward pass makes, and who follows what it was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.nn import functional

from lightning_attn.capture.contraction import contraction, is_contraction, is_einsum_of_several
from lightning_attn.capture.isolation import unheard
from lightning_attn.capture.opaque import is_opaque
from lightning_attn.capture.softmax import assembly, logits, normalisation, values
from lightning_attn.capture.softmax.constants import TAKE_THE_SHAPE, follow_constants, meet_replaced_parameters
from lightning_attn.capture.softmax.layout import keep
from lightning_attn.capture.softmax.lost import follow_softmax_of_unknown
from lightning_attn.capture.softmax.normalisation import SOFTMAXES
from lightning_attn.capture.softmax.operation import Operation, name_of, tensors_among
from lightning_attn.capture.softmax.products import follow_channels, follow_product
from lightning_attn.capture.softmax.ragged import follow_ragged, is_ragged
from lightning_attn.capture.softmax.rearranged import follow_rearranged, loses_layout
from lightning_attn.capture.softmax.several_factors import follow_einsum_of_several
from lightning_attn.capture.softmax.trail import CONSTANT, Followed
from lightning_attn.capture.softmax.unseen import begin_unseen_product, follow_unseen, nothing_is_known
from lightning_attn.capture.softmax.walk import Walk

#: Operations that do more than to keep the layout, by their plain names.
_STEPS = {**logits.STEPS, **assembly.STEPS, **normalisation.STEPS, **values.STEPS}

#: What a torch function gives that only tells something of a tensor, which stays what it is.
_TELLS_OF_TENSORS = frozenset({Size, int, bool, float, str, torch.device, torch.dtype, torch.layout})


class SoftmaxFollower:
    """Follows the tensors of a forward pass, and tells of every attention that is written out with a softmax.

    Args:
        walk: the forward pass, of which nothing was followed yet.
    """

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._known = walk.trail.get
        self._channels = walk.channels

    def see(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Look at one call of a torch function and its result."""
        # Most calls have nothing to do with attention: these first lines decide what watching costs.
        if type(result) in _TELLS_OF_TENSORS:
            return
        operands = tensors_among(args, kwargs)
        known = [self._known(operand) for operand in operands]
        self._channels.follow(function, operands, result, args, kwargs)
        if known.count(None) + known.count(CONSTANT) == len(known):
            if is_contraction(function):
                factors = known[:2] if function is functional.linear else known[-2:]
                if len(known) > 2 and known.count(None) == 2 and is_einsum_of_several(function):
                    factors = [None, None]
                if CONSTANT in factors and None in factors:
                    if function is not functional.linear and isinstance(result, Tensor):
                        with unheard():
                            follow_channels(self._walk, contraction(function, args, kwargs), result)
                    return
            elif None in known:
                self._see_data(function, args, kwargs, operands, known, result)
                return
        with unheard():
            self._look(Operation(name_of(function), function, args, kwargs, operands, known, result))

    def see_opaque(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Look at one call of a function into which nothing can see, or not into all of it, and at its result."""
        operands = tensors_among(args, kwargs)
        known = [self._known(operand) for operand in operands]
        if known.count(None) < len(known) or known.count(None) > 1:
            with unheard():
                follow_unseen(self._walk, Operation(name, nothing_is_known, args, kwargs, operands, known, result))

    def _see_data(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: list[Tensor],
        known: list[Followed | None],
        result: object,
    ) -> None:
        """Look at a call that computes something of data and of constants, and is no product."""
        written = result is operands[0] or function is Tensor.__setitem__
        # As keys into a cache. A parameter stays one: an optimiser that steps writes into every one of them.
        if written and known[0] is CONSTANT and type(operands[0]) is not nn.Parameter:
            with unheard():
                self._walk.trail.write_data(operands[0])
        elif function in TAKE_THE_SHAPE and isinstance(result, Tensor):
            self._walk.trail.set(result, CONSTANT)
        elif function in SOFTMAXES and self._walk.open.has_logits:
            with unheard():
                call = Operation("softmax", function, args, kwargs, operands, known, result)
                follow_softmax_of_unknown(self._walk, call)
        elif len(known) > 1 and is_opaque(function):
            with unheard():
                call = Operation(name_of(function), function, args, kwargs, operands, known, result)
                begin_unseen_product(self._walk, call)

    def _look(self, call: Operation) -> None:
        """Look closely at a call of which some operand is known, or that may be a product of two activations."""
        walk = self._walk
        if is_ragged(call):
            follow_ragged(walk, call)
            return
        if is_opaque(call.function):
            follow_unseen(walk, call)
            return
        product = contraction(call.function, call.args, call.kwargs)
        if product is not None and meet_replaced_parameters(walk, call):
            call = replace(call, known=[self._known(operand) for operand in call.operands])
        is_of_several = len(call.operands) > 2 and is_einsum_of_several(call.function)
        if is_of_several and follow_einsum_of_several(walk, call):
            return
        if call.function is not functional.linear and call.results:  # that is a layer, which is followed already
            follow_channels(walk, product, call.results[0])
        if product is not None and follow_product(walk, product, call):
            return
        for tensor in call.results:
            walk.trail.set(tensor, None)  # what was computed in place is something else now
        if follow_constants(walk, call, is_product=product is not None):
            return
        if loses_layout(call):
            follow_rearranged(walk, call)
        elif call.results:
            _STEPS.get(call.plain_name, keep)(walk, call)
