"""Finding the attention that a model writes out with a softmax, by following tensors.

Attention is a softmax whose input descends from a product of two activations, and whose result multiplies a third. So
every tensor that descends from such a product is followed, through whatever operations keep its layout (scale, bias,
mask, cast, slice), to a softmax; and the softmax's result through dropout, cast and slice to the product with the
values. No name of a module or of a model is needed, and what only looks like attention stays out: a router, a codebook
and a distributional head compare activations with weights; a contrastive loss never multiplies values.

Tensors are followed by weak references. From its softmax to its product with the values an attention's logits and masks
are held, and no longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn.capture.axes import (
    HEADS_AS_QUERIES,
    KEY,
    KEYS_OF_WINDOWS,
    LEFT,
    QUERY,
    RIGHT,
    SHARED,
    TOKENS_AS_HEADS,
    Axes,
    Contraction,
    axes_after,
    contraction,
    is_contraction,
    is_view,
)
from lightning_attn.capture.call import HIDING_PENALTY
from lightning_attn.capture.channels import REFUSAL as OVER_CHANNELS
from lightning_attn.capture.channels import ChannelTrail
from lightning_attn.capture.isolation import in_backward, isolated, unheard, viewed, written_to
from lightning_attn.capture.module_tree import buffers_of, parameters_of
from lightning_attn.capture.open_trails import OpenTrails, place_of
from lightning_attn.capture.operation import Operation, is_opaque, name_of, tensors_among
from lightning_attn.capture.sites import SiteNames
from lightning_attn.capture.trail import (
    COMPUTED_CONSTANT,
    CONSTANT,
    Constant,
    Exponentials,
    Followed,
    Logits,
    LogWeights,
    Mask,
    Ragged,
    Rearranged,
    RowLogSum,
    RowMaximum,
    RowSum,
    Softmax,
    Trail,
    WeightedValues,
    Weights,
)
from lightning_attn.capture.written import WrittenAttention

#: How far from the softmax of their logits weights may be that no softmax function computed.
_TOLERANCE = 1e-2
#: How alike two products are of which one is of low precision.
_SIMILARITY_OF_PRODUCTS = 0.99
#: So many rows are looked at to tell whether they are.
_CHECKED_ROWS = 8

#: Data that are drawn, of nothing.
_DRAWS = {"rand", "randn", "randint", "normal", "bernoulli"}
#: These compute something of two weights of the model, as products do.
_COMPUTES = ("conv", "bilinear")
#: Of their operand these take nothing but the shape.
_TAKE_THE_SHAPE = {
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor),
}
#: The functions that compute a softmax.
_SOFTMAXES = {functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
#: The method that sees a function of another name.
_SYNONYMS = {
    "radd": "add",
    "iadd": "add",
    "isub": "sub",
    "subtract": "sub",
    "rmul": "mul",
    "imul": "mul",
    "multiply": "mul",
    "truediv": "div",
    "itruediv": "div",
    "true_divide": "div",
    "divide": "div",
    "concat": "cat",
    "concatenate": "cat",
    "amax": "max",
    "special_logsumexp": "logsumexp",
    "special_softmax": "softmax",
    "special_log_softmax": "log_softmax",
}
_CASTS = (
    "to",
    "type",
    "type_as",
    "float",
    "half",
    "bfloat16",
    "double",
    "contiguous",
    "clone",
    "detach",
    "cuda",
    "cpu",
)
#: Why weights that were rearranged are not read.
_REARRANGED = (
    "its logits or weights are rearranged on their way to the values, as where windows overlap or blocks are put "
    "together, so that which keys they belong to cannot be told"
)
_SEVERAL_AXES = "several of its axes may be the one of the queries, and the others those of heads"
_KEYS_OF_QUERIES = "each of its queries has keys of its own, and which axes are heads and queries cannot be told"
#: What is refused for this may be a part of an attention, of which then no part is taken.
_OF_PIECES = (KEYS_OF_WINDOWS, _SEVERAL_AXES, _KEYS_OF_QUERIES)
#: Operations that change no difference between two logits of a row, hidden keys aside.
_KEEPS_DIFFERENCES = (*_CASTS, "masked_fill", "where", "add", "radd", "iadd", "sub", "isub", "cat", "reshape")
#: Operations that change no weight.
_KEEPS_WEIGHTS = (*_CASTS, "nan_to_num", "reshape", "cat", "stack")


class SoftmaxFollower:
    """Follows the tensors of a forward pass, and tells of every attention that is written out with a softmax.

    Args:
        model: the model; its weights and buffers are no activations.
        names: tells which modules are computing, and what they were given.
        found: called with each attention, when its weights have multiplied its values.
        channels: follows the channels of tensors, from the layers that made them.
    """

    def __init__(
        self,
        model: nn.Module,
        names: SiteNames,
        found: Callable[[WrittenAttention], None],
        channels: ChannelTrail,
    ) -> None:
        self._model = model
        self._modules = names.computing
        self._given = names.given
        self._found = found
        self._trail = Trail(constants=(*parameters_of(model), *buffers_of(model)))
        self._open = OpenTrails()
        self._channels = channels

    def see(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Look at one call of a torch function and its result."""
        # Most calls have nothing to do with attention: these first lines decide what watching costs.
        operands = tensors_among(args, kwargs)
        known = [self._trail.get(operand) for operand in operands]
        self._channels.follow(function, operands, result)
        if known.count(None) + known.count(CONSTANT) == len(known):
            if is_contraction(function):
                factors = known[:2] if function is functional.linear else known[-2:]
                if CONSTANT in factors and None in factors:
                    if function is not functional.linear and isinstance(result, Tensor):
                        with unheard():
                            self._follow_channels(contraction(function, args, kwargs), result)
                    return
            elif None in known:
                written = result is operands[0] or function is Tensor.__setitem__
                # As keys into a cache. A parameter stays one: an optimiser that steps writes into every one of them.
                if written and known[0] is CONSTANT and type(operands[0]) is not nn.Parameter:
                    with unheard():
                        self._trail.write_data(operands[0])
                elif function in _TAKE_THE_SHAPE and isinstance(result, Tensor):
                    self._trail.set(result, CONSTANT)
                elif function in _SOFTMAXES and self._open.has_logits:
                    with unheard():
                        self._see_softmax_of_unknown(
                            Operation("softmax", function, args, kwargs, operands, known, result)
                        )
                elif len(known) > 1 and is_opaque(function):
                    with unheard():
                        self._see_opaque_product(
                            Operation(name_of(function), function, args, kwargs, operands, known, result)
                        )
                return
        with unheard():
            self._look(Operation(name_of(function), function, args, kwargs, operands, known, result))

    def see_opaque(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Look at one call of a function into which nothing can see, or not into all of it, and at its result."""
        operands = tensors_among(args, kwargs)
        known = [self._trail.get(operand) for operand in operands]
        if known.count(None) < len(known) or known.count(None) > 1:
            with unheard():
                self._look_at_opaque(Operation(name, _nothing_is_known, args, kwargs, operands, known, result))

    def _look(self, call: Operation) -> None:
        """Look closely at a call of which some operand is known, or that may be a product of two activations."""
        if any(operand.is_nested for operand in call.operands) or call.first(Ragged):
            self._see_ragged(call)
            return
        if is_opaque(call.function):
            self._look_at_opaque(call)
            return
        product = contraction(call.function, call.args, call.kwargs)
        if product is not None and self._meet_replaced_parameters(call):
            call = replace(call, known=[self._trail.get(operand) for operand in call.operands])
        if call.function is not functional.linear and call.results:  # that is a layer, which is followed already
            self._follow_channels(product, call.results[0])
        if product is not None and self._see_product(product, call):
            return
        for tensor in call.results:
            self._trail.set(tensor, None)  # what was computed in place is something else now
        if call.function in _TAKE_THE_SHAPE:
            for tensor in call.results:
                self._trail.set(tensor, CONSTANT)
            return
        if call.name.endswith("_like"):  # data that are drawn
            return
        if all(isinstance(followed, Constant) for followed in call.known):
            if call.name in _DRAWS:
                return  # data that are drawn
            is_computed = product is not None or COMPUTED_CONSTANT in call.known or call.name.startswith(_COMPUTES)
            for tensor in call.results:
                self._trail.set(tensor, COMPUTED_CONSTANT if is_computed else CONSTANT)
        elif _is_rearranged(call) or _puts_pieces_together(call):
            self._see_rearranged(call)
        elif call.results:
            getattr(self, f"_see_{_SYNONYMS.get(call.name, call.name)}", self._keep)(call)

    def _meet_replaced_parameters(self, call: Operation) -> bool:
        """Meet what stands in the place of parameters, as under `functional_call`, if an operand is of that kind."""
        may_be = [o for o, k in zip(call.operands, call.known, strict=True) if k is None or isinstance(k, Logits)]
        if call.function is functional.linear:
            may_be = [operand for operand in may_be if operand is call.argument(1, "weight")]
        if not may_be:
            return False
        of_module = next(filter(None, (list(parameters_of(module)) for module in self._modules())), [])
        met = [operand for operand in may_be if any(is_view(operand, parameter) for parameter in of_module)]
        if met:
            for tensor in (*parameters_of(self._model), *met):
                if not isinstance(self._trail.get(tensor), Constant):
                    self._trail.set(tensor, CONSTANT)
        return bool(met)

    def _look_at_opaque(self, call: Operation) -> None:
        """What went in comes out in some way, where it has the shape; what that did to it, numbers have to tell."""
        if any(tensor.is_nested for tensor in (*call.operands, *call.results)):
            return
        if all(isinstance(followed, Constant) for followed in call.known):
            for tensor in call.results:
                if self._trail.get(tensor) is None:
                    self._trail.set(tensor, COMPUTED_CONSTANT if len(call.known) > 1 else CONSTANT)
            return
        logits, weights = call.first(Logits), call.first(Weights)
        if not logits and not weights:
            self._keep(call)
            self._see_opaque_product(call)
            return
        if self._see_values_go_in(call, logits, weights):
            return
        # What was seen inside is known already. Memory that was only made there is known too, for a constant.
        unknown = [r for r in call.results if isinstance(self._trail.get(r), (Constant, type(None)))]
        for tensor in unknown:
            self._trail.set(tensor, None)
        if len(unknown) == len(call.results):
            self._keep(call)
        kept = [self._trail.get(result) for result in call.results]
        for result, followed in zip(call.results, kept, strict=True):
            if isinstance(followed, Logits):
                self._trail.set(result, replace(followed, has_unseen_mask=True, opaque=call.name))

    def _see_opaque_product(self, call: Operation) -> None:
        """Begin to follow what turns out to be a product of two activations, as of a kernel of low precision."""
        factors = [o for o, k in zip(call.operands, call.known, strict=True) if k is None and o.is_floating_point()]
        if len(factors) != 2 or len(call.results) != 1 or self._trail.get(call.results[0]) is not None or in_backward():
            return
        result, (left, right) = call.results[0], factors
        axes = (SHARED,) * (result.dim() - 2) + (LEFT, RIGHT)
        if any(_is_product(result, left, other) for other in (right, right.mT if right.dim() > 1 else right)):
            place = place_of(self._modules(), result.shape)
            self._open.begin_logits(place, axes)
            self._trail.set(result, Logits(axes, has_unseen_mask=True, place=place, opaque=call.name))

    def _see_values_go_in(
        self, call: Operation, logits: tuple[Tensor, Logits] | None, weights: tuple[Tensor, Weights] | None
    ) -> bool:
        """Tell of weights, or logits, that a function has multiplied with values that it was also given, if it has."""
        for value, followed in zip(call.operands, call.known, strict=True):
            if followed is not None or value.dim() < 2 or not value.is_floating_point():
                continue
            entered = [known[0].shape for known in (logits, weights) if known]
            outputs = [result.shape for result in call.results if result.dim() > 1 and self._trail.get(result) is None]
            if any(shape in entered for shape in outputs) or not any(shape[-1] == value.shape[-1] for shape in outputs):
                continue
            if weights and value.shape[-2] == weights[0].shape[weights[1].axes.index(KEY)]:
                for softmax in weights[1].softmaxes:
                    softmax.refusal = f"its weights and values enter {call.name!r}, into which nothing can see"
                self._find(weights[1], weights[0], None)
                return True
            if logits and value.shape[-2] == logits[0].shape[-1]:
                self._refuse(
                    logits[0],
                    logits[1],
                    logits[0].dim() - 1,
                    f"its logits and values enter {call.name!r}, into which nothing can see",
                )
                return True
        return False

    def _refuse(self, logits: Tensor, history: Logits, axis: int, refusal: str) -> None:
        """Tell of an attention whose softmax over an axis cannot be seen."""
        softmax = self._softmax(logits, history, axis)
        if softmax is not None:
            softmax.refusal = refusal
            self._find(Weights((softmax,), softmax.axes), logits, None)

    def _follow_channels(self, product: Contraction | None, result: Tensor) -> None:
        """Follow the channels of a product's operands; one with a weight is a layer that is written out."""
        if product is None or result.is_nested:
            return
        operands = (product.left, product.right)
        constant = next((operand for operand in operands if isinstance(self._trail.get(operand), Constant)), None)
        self._channels.follow_product(product, result, constant)

    def _see_ragged(self, call: Operation) -> None:
        """Follow nested tensors only to say of which module the attention cannot be read."""
        found = call.first(Ragged)
        ragged = None if found is None else found[1]
        name = _SYNONYMS.get(call.name, call.name)
        if is_contraction(call.function):
            if ragged is not None and ragged.modules is not None:
                both = tuple(module for module in ragged.modules if module in self._modules())
                self._found(WrittenAttention.of_nested_tensors(call.operands[0].device, both))
                return
            is_product_of_data = not any(isinstance(followed, Constant) for followed in call.known)
            ragged = Ragged() if ragged is None and is_product_of_data and not in_backward() else None
        elif ragged is not None and name == "softmax":
            ragged = Ragged(self._modules())
        for tensor in call.results:
            self._trail.set(tensor, ragged)

    # Products: of queries and keys, and of weights and values.

    def _see_product(self, product: Contraction, call: Operation) -> bool:
        """Whether the product ends here what was followed, or begins it."""
        left, right = self._factor(product.left), self._factor(product.right)
        if isinstance(left, Rearranged) or isinstance(right, Rearranged):
            self._refuse_rearranged(left, right)
            return True
        if call.function is functional.linear and (right is None or isinstance(right, (Constant, Logits))):
            right = CONSTANT  # the weights of a layer, whatever they were computed of
            self._trail.set(product.right, right)
        if isinstance(left, Weights) or isinstance(right, Weights):
            return self._multiply(product, left, right)
        if isinstance(left, Exponentials) or isinstance(right, Exponentials):
            self._refuse_exponentials(product, left, right)
            return True
        are_constants = isinstance(left, Constant) and isinstance(right, Constant)
        if are_constants and not (
            _may_be_learned_queries(left, product.left) and _may_be_learned_queries(right, product.right)
        ):
            return False
        if left is CONSTANT or right is CONSTANT:
            logits, labels = (left, product.left_axes) if isinstance(left, Logits) else (right, product.right_axes)
            # Weights of the model may mix heads. A layer on tokens or channels makes something else of them.
            return not isinstance(logits, Logits) or any(
                label in product.summed and axis != SHARED for label, axis in zip(labels, logits.axes, strict=True)
            )
        self._refuse_what_multiplies_values(product, left, right)
        axes = product.meaning()
        if (LEFT in axes or RIGHT in axes) and not in_backward():
            result = call.results[0]
            place = place_of(self._modules(), result.shape)
            self._open.begin_logits(place, axes)
            # With a factor of 0, what is added may be memory that nobody has written.
            factor = call.kwargs.get("beta", 1) if call.name in ("addmm", "baddbmm") else 0
            masks = (Mask(_times(call.operands[0], factor), result.shape),) if factor else ()
            without_data = frozenset(
                side for side, operand in ((LEFT, left), (RIGHT, right)) if isinstance(operand, Constant)
            )
            logits = Logits(
                axes,
                masks=masks,
                without_data=without_data,
                doubts=product.doubts(),
                refusal=OVER_CHANNELS if self._channels.sums_over_tokens(product) else None,
                place=place,
            )
            self._trail.set(result, logits)
        return True

    def _refuse_what_multiplies_values(
        self, product: Contraction, left: Followed | None, right: Followed | None
    ) -> None:
        """Tell of values that are multiplied with what was made of logits, or of weights, where it was not seen."""
        if right is None:
            self._refuse_weights(product.left, left, product.left_axes, product.summed)
        if left is None:
            self._refuse_weights(product.right, right, product.right_axes, product.summed)

    def _refuse_weights(self, tensor: Tensor, followed: Followed | None, labels: Axes, summed: set[str]) -> None:
        if isinstance(followed, Logits) and followed.opaque and _may_be_weights(tensor):
            refusal = f"its weights come out of {followed.opaque!r}, into which nothing can see, perhaps as a softmax"
            for axis, label in enumerate(labels):
                if label in summed and followed.axes[axis] != SHARED:
                    self._refuse(tensor, followed, axis, refusal)
        elif followed is None and self._open.has_weights:
            modules = self._modules()
            place = place_of(modules, tensor.shape)
            axes = self._open.weights(place)
            if axes is not None and labels[axes.index(KEY)] in summed:
                softmax = Softmax(
                    tensor.detach(),
                    axes,
                    Logits(axes, place=place),
                    modules,
                    written_to(tensor),
                    refusal="its weights cannot be followed from their softmax to their product with the values",
                )
                self._find(Weights((softmax,), axes), tensor, None)

    def _factor(self, tensor: Tensor) -> Followed | None:
        """What is known of an operand of a product; what was once a product, and is no logits any more, is data."""
        followed = self._trail.get(tensor)
        return None if isinstance(followed, Rearranged) and not followed.softmaxes else followed

    def _refuse_exponentials(self, product: Contraction, left: Followed | None, right: Followed | None) -> None:
        """Exponentials that multiply values before they are divided by their sum."""
        exponentials, labels, factor = (
            (left, product.left_axes, right) if isinstance(left, Exponentials) else (right, product.right_axes, left)
        )
        assert isinstance(exponentials, Exponentials)
        for axis, label in enumerate(labels):
            if label in product.summed and factor is None:
                self._refuse(
                    exponentials.logits,
                    exponentials.history,
                    axis,
                    "its exponentials multiply the values before they are divided by their sum",
                )

    def _refuse_rearranged(self, left: Followed | None, right: Followed | None) -> None:
        """Weights that multiply values in a layout that could not be followed."""
        weights, value = (left, right) if isinstance(left, Rearranged) else (right, left)
        if not isinstance(weights, Rearranged) or value is not None or in_backward():
            return
        modules = self._modules()
        for softmax in weights.softmaxes:
            if not softmax.is_done:
                softmax.is_done = softmax.is_piece = True
                softmax.refusal = _REARRANGED
                both = tuple(module for module in softmax.modules if module in modules)
                self._found(WrittenAttention(softmax, both, None, False, slice(0, 0)))
                softmax.logits = softmax.logits.new_empty(0)

    def _multiply(self, product: Contraction, left: Followed | None, right: Followed | None) -> bool:
        if isinstance(left, Weights) and isinstance(right, Weights):
            return True
        if isinstance(left, Weights):
            weights, tensor, labels = left, product.left, product.left_axes
            value, value_labels, factor = product.right, product.right_axes, right
        else:
            assert isinstance(right, Weights)
            weights, tensor, labels = right, product.right, product.right_axes
            value, value_labels, factor = product.left, product.left_axes, left
        key = labels[weights.axes.index(KEY)]
        # Learned queries compare themselves with each other before they have read any data, as in DETR.
        has_data = any(len(softmax.history.without_data) < 2 for softmax in weights.softmaxes)
        if isinstance(factor, Constant) and (has_data or not factor.is_computed):
            return key in product.summed  # a distribution over numbers; otherwise heads are mixed
        queries = {label for label, axis in zip(labels, weights.axes, strict=True) if axis == QUERY}
        is_product = isinstance(factor, Logits) and queries.isdisjoint(value_labels)
        if not (factor is None or isinstance(factor, Constant) or is_product):
            return True  # the logarithms of a loss, other weights
        if key in product.summed:
            if product.summed.intersection(labels) != {key}:
                for softmax in weights.softmaxes:
                    softmax.refusal = "its values are summed over more than the keys of its softmax"
            shared = [label for label, axis in zip(labels, weights.axes, strict=True) if axis == SHARED]
            there = [value_labels.index(label) for label in shared if label in value_labels]
            at_key = value_labels.index(key)
            rest = [axis for axis in range(value.dim()) if axis not in (*there, at_key)]
            value = value.detach().permute(*there, at_key, *rest).flatten(len(there) + 1)
            value = value if rest else value[..., None]
            for place, label in enumerate(shared):
                value = value if label in value_labels else value.unsqueeze(place)
            self._find(weights, tensor, None if queries.intersection(value_labels) else value)
        return True

    def _find(self, weights: Weights, tensor: Tensor, value: Tensor | None) -> None:
        """Tell of the attention whose weights, in a tensor, multiplied a value of shape (shared axes, M, E)."""
        if any(softmax.changed_by for softmax in weights.softmaxes):
            weights = _without_detours(weights, tensor)
        sizes = [size for size, axis in zip(tensor.shape, weights.axes, strict=True) if axis == SHARED]
        is_grouped = value is not None and len(sizes) > 2 and value.shape[-3] == 1 != sizes[-1]
        columns = slice(weights.first_column, weights.first_column + tensor.shape[weights.axes.index(KEY)])
        rows = tensor.numel() // max(1, tensor.shape[weights.axes.index(KEY)])
        modules = self._modules()
        for softmax in weights.softmaxes:
            if softmax.is_done:
                continue
            softmax.is_done = True
            self._open.end_weights(place_of(softmax.modules, softmax.logits.shape))
            own = [size for size, axis in zip(softmax.logits.shape, softmax.axes, strict=True) if axis == SHARED]
            is_whole = rows == softmax.logits.numel() // max(1, softmax.logits.shape[softmax.axes.index(KEY)])
            both = tuple(module for module in softmax.modules if module in modules)
            self._found(
                WrittenAttention(
                    softmax,
                    both,
                    _with_leading(value, sizes, own) if is_whole else None,
                    is_grouped and len(own) > 2,
                    columns,
                )
            )
            softmax.logits = softmax.logits.new_empty(0)  # others may still hold the weights, and by them this object
            softmax.history = replace(softmax.history, masks=(), shift=None)

    # From the product to the softmax.

    def _see_add(self, call: Operation) -> None:
        if call.first(Weights):
            self._keep(call)
            return
        logits, history = call.logits()
        others = [o for o in call.operands if o is not logits]
        if not history or not others:
            self._keep(call)
            return
        other = self._trail.get(others[0])
        if isinstance(other, Logits):
            self._keep_logits(call, logits, replace(history, masks=history.masks + other.masks))
        else:
            self._keep_logits(call, logits, history, mask=_times(others[0], call.kwargs.get("alpha", 1)))

    def _see_sub(self, call: Operation) -> None:
        logits, history = call.logits()
        if history is None or call.first(Weights) or len(call.operands) < 2 or call.operands[0] is not logits:
            self._keep(call)
            return
        other, followed = call.operands[1], call.known[1]
        if isinstance(followed, RowLogSum):
            self._trail.set(call.results[0], _log_weights(self._softmax(logits, history, followed.axis)))
        elif isinstance(followed, RowMaximum):
            shift = other.detach()[(None,) * (logits.dim() - other.dim())]
            shift = shift if history.shift is None else history.shift + shift
            self._keep_logits(call, logits, replace(history, shift=shift))
        else:
            self._keep_logits(call, logits, history, mask=_times(other, -call.kwargs.get("alpha", 1)))

    def _see_masked_fill(self, call: Operation) -> None:
        logits, history = call.logits()
        if history is None or call.operands[0] is not logits:
            self._keep(call)
            return
        value = call.argument(2, "value")
        self._keep_logits(call, logits, history, mask=call.argument(1, "mask") if _hides(value) else None)

    def _see_where(self, call: Operation) -> None:
        logits, history = call.logits()
        first = call.argument(0, "condition")
        is_method = isinstance(first, Tensor) and first.dtype != torch.bool
        names = ("input", "condition", "other") if is_method else ("condition", "input", "other")
        given = {name: call.argument(place, name) for place, name in enumerate(names)}
        condition = given["condition"]
        if history is None or not isinstance(condition, Tensor) or condition.dtype != torch.bool:
            self._keep(call)
            return
        keeps = given["input"] is logits
        replacement = given["other"] if keeps else given["input"]
        if isinstance(replacement, Tensor) and replacement.numel() > 1:
            history = replace(history, has_unseen_mask=True)
        hidden = ~condition if keeps else condition
        self._keep_logits(call, logits, history, mask=hidden if _hides(replacement) else None)

    def _see_setitem(self, call: Operation) -> None:
        for tensor, followed in zip(call.operands[:1], call.known[:1], strict=True):
            if isinstance(followed, Logits):
                self._trail.set(tensor, replace(followed, has_unseen_mask=True))
                self._see_written_view(tensor)
            elif isinstance(followed, Weights):
                self._trail.set(tensor, _changed(followed, "an assignment"))

    def _see_cat(self, call: Operation) -> None:
        """Something may be put beside the logits, as learned sinks are."""
        logits, history = call.logits()
        if history is None:
            self._keep(call)
            return
        axis = call.argument(1, "dim", 0) % logits.dim()
        parts = [followed for followed in call.known if isinstance(followed, Logits)]
        if len(parts) > 1 or history.axes[axis] == SHARED:
            # Learned keys beside keys of data, as of tokens that are the same in all sequences, make no codebook.
            without_data = frozenset.intersection(*(part.without_data for part in parts))
            history = replace(history, masks=(), has_unseen_mask=True, without_data=without_data)
        self._trail.set(call.results[0], history)

    def _see_stack(self, call: Operation) -> None:
        """A new axis at a place that is known, as where heads are computed one by one."""
        _, followed = call.first(Weights) or call.logits()
        if followed is None:
            self._keep(call)
            return
        result, axis = call.results[0], call.argument(1, "dim", 0)
        axis %= result.dim()
        axes = (*followed.axes[:axis], SHARED, *followed.axes[axis:])
        if isinstance(followed, Weights):
            each = [known.softmaxes for known in call.known if isinstance(known, Weights)]
            self._trail.set(result, replace(followed, softmaxes=tuple(dict.fromkeys(sum(each, ()))), axes=axes))
        else:
            refusal = "its logits are put together from several of which a row maximum was subtracted"
            self._trail.set(
                result,
                replace(
                    followed,
                    axes=axes,
                    masks=(),
                    has_unseen_mask=True,
                    shift=None,
                    refusal=followed.refusal if followed.shift is None else refusal,
                ),
            )

    def _see_max(self, call: Operation) -> None:
        if len(call.operands) > 1:  # the larger of two: as masked logits are kept finite
            self._keep(call)
        elif call.first(Logits):
            self._trail.set(call.results[0], RowMaximum())

    def _see_logsumexp(self, call: Operation) -> None:
        logits, history = call.logits()
        axis = call.axis()
        if history is not None and axis is not None:
            self._trail.set(call.results[0], RowLogSum(axis % logits.dim()))

    def _see_exp(self, call: Operation) -> None:
        tensor, followed = call.operands[0], call.known[0]
        if isinstance(followed, Logits):
            # In place, what entered is gone; nothing can be told of it then.
            if call.results[0] is not tensor:
                self._trail.set(call.results[0], Exponentials(tensor.detach(), followed))
        elif isinstance(followed, LogWeights):
            self._begin_weights(followed.softmax, call.results[0])

    def _see_sum(self, call: Operation) -> None:
        tensor, followed, axis = call.operands[0], call.known[0], call.axis()
        if axis is None:
            return
        axis %= tensor.dim()
        if isinstance(followed, Exponentials):
            self._trail.set(call.results[0], RowSum(axis))
        elif isinstance(followed, WeightedValues) and axis == followed.key_axis:
            self._find(followed.weights, followed.tensor, followed.value)

    def _see_div(self, call: Operation) -> None:
        exponentials = call.first(Exponentials)
        total = call.first(RowSum)
        if exponentials and total:
            followed = exponentials[1]
            self._begin_weights(self._softmax(followed.logits, followed.history, total[1].axis), call.results[0])
        else:
            self._keep(call)

    def _see_softmax(self, call: Operation) -> None:
        softmax = self._softmax_of(call)
        if softmax is not None:
            if is_view(call.results[0], softmax.logits):
                softmax.refusal = "its logits are overwritten by their softmax"
            self._trail.set(call.results[0], Weights((softmax,), softmax.axes))

    def _see_softmax_of_unknown(self, call: Operation) -> None:
        """Logits that went through something unseen on their way to the softmax, if they have the shape of some."""
        tensor, axis = call.operands[0], call.axis()
        place = place_of(self._modules(), tensor.shape)
        axes = self._open.logits(place)
        if axes is None or axis is None:
            return
        refusal = "its logits cannot be followed from the product of queries and keys to their softmax"
        softmax = self._softmax(tensor, Logits(axes, refusal=refusal, place=place), axis % tensor.dim())
        if softmax is not None:
            self._trail.set(call.results[0], Weights((softmax,), softmax.axes))

    def _see_gumbel_softmax(self, call: Operation) -> None:
        """Weights that are drawn."""
        logits, history = call.logits()
        axis = call.argument(4, "dim", -1)
        softmax = None if history is None else self._softmax(logits, history, axis % logits.dim())
        if softmax is not None:
            softmax.refusal = "its weights are drawn at random (gumbel_softmax)"
            self._trail.set(call.results[0], Weights((softmax,), softmax.axes))

    def _see_log_softmax(self, call: Operation) -> None:
        self._trail.set(call.results[0], _log_weights(self._softmax_of(call)))

    def _softmax_of(self, call: Operation) -> Softmax | None:
        logits, history = call.logits()
        axis = call.axis()
        return None if history is None or axis is None else self._softmax(logits, history, axis % logits.dim())

    def _softmax(self, logits: Tensor, history: Logits, axis: int) -> Softmax | None:
        """The softmax of logits along an axis; ``None`` where that axis is not one of the two that are compared."""
        if history.place is not None:
            self._open.end_logits(history.place)
        side = history.axes[axis]
        if side == SHARED:
            return None
        if side in history.without_data and len(history.without_data) == 1:
            return None  # a codebook, a router: keys that are the same for all data
        # Where keys are the same for several heads, their axis is the queries' alone, beside the one of the tokens; and
        # where queries are the same for all sequences, as learned ones, that axis is the keys' alone.
        beside_keys = [i for i, meaning in enumerate(history.axes) if meaning not in (SHARED, side)]
        alike = [i for i in beside_keys if logits.shape[i] == logits.shape[axis]]
        queries = alike[0] if len(alike) == 1 else beside_keys[-1] if beside_keys else None
        refusal = history.refusal
        if not alike and len(beside_keys) > 1:
            given = {size for shape in self._given() for size in shape[:2]}
            tokens = [i for i in beside_keys if logits.shape[i] in given]
            if len(tokens) == 1:
                queries = tokens[0]
            else:
                refusal = _SEVERAL_AXES
        axes = tuple(KEY if i == axis else QUERY if i == queries else SHARED for i in range(logits.dim()))
        heads = self._heads(logits, axes)
        has_windows = heads is not None and axes.count(SHARED) - len(heads) > 1
        is_square = queries is not None and logits.shape[queries] == logits.shape[axis]
        applies = {
            HEADS_AS_QUERIES: {LEFT, RIGHT} - {side},
            TOKENS_AS_HEADS: {LEFT, RIGHT} if heads is None else set(),
            KEYS_OF_WINDOWS: {side} if has_windows and not is_square else set(),
        }
        doubts = [doubt for of, doubt in history.doubts.items() if of in applies[doubt]]
        if len(beside_keys) == 1 and doubts:
            refusal = doubts[0]
        if not beside_keys and logits.dim() > 2:
            refusal = _KEYS_OF_QUERIES
        if len(alike) > 1:
            refusal = "it has as many heads as tokens, and which axis holds the queries cannot be told"
        if history.shift is not None and history.shift.shape[axis] != 1:
            refusal = "what was subtracted from its logits is not one number for each row"
        modules = self._modules()
        self._open.begin_weights(place_of(modules, logits.shape), axes)
        refusal = OVER_CHANNELS if history.refusal == OVER_CHANNELS else refusal
        return Softmax(
            logits.detach(),
            axes,
            history,
            modules,
            written_to(logits),
            heads=heads,
            refusal=refusal,
            is_piece=refusal in _OF_PIECES,
        )

    def _heads(self, logits: Tensor, axes: Axes) -> tuple[int, ...] | None:
        """Which of the shared axes of some logits are heads."""
        shared = [i for i, axis in enumerate(axes) if axis == SHARED]
        heads = self._channels.heads_among([logits], [i - logits.dim() for i in shared])
        return None if heads is None else tuple(shared.index(axis + logits.dim()) for axis in heads)

    def _begin_weights(self, softmax: Softmax | None, weights: Tensor) -> None:
        """Go on with weights that no softmax function computed, if they are the softmax that they should be."""
        if softmax is None:
            return
        if not _are_softmax_of(softmax.logits, weights, softmax.axes.index(KEY)):
            softmax.refusal = (
                "its weights are exponentials over something else than their sum (with a one added to the sum, it is a "
                "sink: `sink_logits=torch.zeros(heads)`)"
            )
        self._trail.set(weights, Weights((softmax,), softmax.axes))

    # From the softmax to the values.

    def _see_mul(self, call: Operation) -> None:
        found = call.first(Weights)
        factors = [o for o in call.operands if self._factor(o) is None or isinstance(self._factor(o), Logits)]
        if call.first(Exponentials):
            self._see_div(call)
        elif found and factors and call.results[0].numel() > found[0].numel():
            self._weigh(found[0], found[1], factors[0], call.results[0])
        else:
            self._keep(call)

    def _weigh(self, tensor: Tensor, weights: Weights, factor: Tensor, result: Tensor) -> None:
        """Every value times its weight: an axis of the values is new, the key axis is summed over later."""
        added = result.dim() - tensor.dim()
        axes = (SHARED,) * added + weights.axes
        tensor, factor = tensor[(None,) * added], factor[(None,) * (result.dim() - factor.dim())].detach()
        # The axis that the weights were given for the width of the values.
        widths = [i for i, size in enumerate(tensor.shape) if axes[i] == SHARED and size == 1 < result.shape[i]]
        at_key = axes.index(KEY)
        queries = [i for i, axis in enumerate(axes) if axis == QUERY]
        shared = [i for i, axis in enumerate(axes) if axis == SHARED and i not in widths]
        if not widths:
            return
        value: Tensor | None = None
        if all(factor.shape[i] == 1 for i in queries) and factor.shape[at_key] == result.shape[at_key]:
            value = factor.permute(*shared, *queries, at_key, *widths)
            value = value.flatten(len(shared), len(shared) + len(queries)).flatten(len(shared) + 1)
        kept = [i for i in range(result.dim()) if i not in widths]
        of_weights = replace(weights, axes=tuple(axes[i] for i in kept))
        self._trail.set(
            result,
            WeightedValues(of_weights, tensor.detach().permute(*kept, *widths).flatten(len(kept) - 1), at_key, value),
        )

    def _keep(self, call: Operation) -> None:
        """Go on following what has the layout of what it was made of."""
        weights = [(o, k) for o, k in zip(call.operands, call.known, strict=True) if isinstance(k, Weights)]
        logits, history = call.logits()
        if weights:
            self._keep_weights(call, weights)
        elif history is not None:
            self._keep_logits(call, logits, history)
        else:
            for operand, followed in zip(call.operands, call.known, strict=True):
                if isinstance(followed, (RowMaximum, RowLogSum, RowSum, LogWeights, Exponentials)):
                    for result in call.results:
                        if result.numel() == operand.numel():
                            self._trail.set(result, followed)

    def _see_rearranged(self, call: Operation) -> None:
        """Go on following what has lost its layout, only to say what becomes of it."""
        softmaxes: tuple[Softmax, ...] = ()
        size = 0
        for operand, followed in zip(call.operands, call.known, strict=True):
            if isinstance(followed, (Rearranged, Weights)):
                softmaxes += followed.softmaxes
            if isinstance(followed, (Rearranged, Weights, Logits)):
                size = max(size, operand.numel())
        if _SYNONYMS.get(call.name, call.name) == "softmax" and not softmaxes:
            nothing = call.operands[0].new_empty(0)
            softmaxes = (Softmax(nothing, (QUERY, KEY), Logits((LEFT, RIGHT)), self._modules(), version=0),)
        kept = Rearranged(tuple(dict.fromkeys(softmaxes)))
        for result in call.results:
            # What is smaller by far is a sum or a maximum, unless it is a part.
            is_part = any(is_view(result, operand) for operand in call.operands)
            if result.is_floating_point() and (is_part or 2 * result.numel() >= size):
                self._trail.set(result, kept)
                whole = viewed(result) if result is call.operands[0] else None
                if whole is not None:
                    self._trail.set(whole, kept)

    def _keep_logits(self, call: Operation, logits: Tensor, history: Logits, mask: Tensor | None = None) -> None:
        for result in call.results:
            if not result.is_floating_point():
                continue
            axes = axes_after(result, logits, history.axes)
            if axes is None:
                self._see_rearranged(call)
                return
            kept = history
            if axes != history.axes:
                kept = replace(
                    history, axes=axes, masks=(), has_unseen_mask=history.has_unseen_mask or bool(history.masks)
                )
            if history.shift is not None and (
                axes != history.axes or not (is_view(result, logits) or call.name in _KEEPS_DIFFERENCES)
            ):
                kept = replace(
                    kept, refusal=f"after the subtraction of its row maximum {call.name!r} changes its logits"
                )
            if mask is not None and mask.dim() > 0:
                kept = replace(kept, masks=(*kept.masks, Mask(mask.detach(), result.shape)))
            self._trail.set(result, kept)
            if result is logits:
                self._see_written_view(result)

    def _see_written_view(self, tensor: Tensor) -> None:
        """What was written into a view of logits may have been a mask for all of them."""
        whole = viewed(tensor)
        history = self._trail.get(whole)
        if whole is not None and isinstance(history, Logits):
            self._trail.set(whole, replace(history, has_unseen_mask=True))

    def _keep_weights(self, call: Operation, weights: list[tuple[Tensor, Weights]]) -> None:
        tensor, followed = weights[0]
        softmaxes = tuple(dict.fromkeys(softmax for _, other in weights for softmax in other.softmaxes))
        for result in call.results:
            if not result.is_floating_point():
                continue
            axes = axes_after(result, tensor, followed.axes)
            if axes is None:
                self._see_rearranged(call)
                return
            kept = replace(followed, softmaxes=softmaxes, axes=axes)
            if is_view(result, tensor) and result is not tensor:
                kept = replace(kept, first_column=followed.first_column + _skipped_columns(result, tensor, followed))
            elif not all(softmax.changed_by for softmax in softmaxes) and not (
                call.name.endswith("dropout") or call.name in _KEEPS_WEIGHTS or _is_part(result, tensor)
            ):
                kept = _changed(kept, call.name)
            self._trail.set(result, kept)


def _nothing_is_known(*_: Any) -> None:
    """Stands for a function that torch does not tell."""


def _is_product(result: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether numbers are those of a product times a factor, nearly: quantised ones are some per cent off."""
    if min(left.dim(), right.dim(), result.dim()) < 2 or left.shape[:-2] != right.shape[:-2]:
        return False
    if result.shape != (*left.shape[:-1], right.shape[-1]) or left.shape[-1] != right.shape[-2] or 0 in result.shape:
        return False
    with isolated(result.device):
        last = (-1,) * (result.dim() - 2)
        left_RD, right_DM, found_RM = left[last][-_CHECKED_ROWS:], right[last], result[last][-_CHECKED_ROWS:]
        expected, found = (left_RD.float() @ right_DM.float()).flatten(), found_RM.float().flatten()
        return bool(functional.cosine_similarity(expected, found, dim=0) > _SIMILARITY_OF_PRODUCTS)


def _may_be_weights(tensor: Tensor) -> bool:
    """Whether no number in a tensor is negative."""
    with isolated(tensor.device):
        return not bool((tensor.detach() < 0).any())


def _is_rearranged(call: Operation) -> bool:
    """Whether the layout of what comes out cannot be followed. Beside logits that it can, it is that of a bias."""
    has_layout = any(isinstance(followed, (Logits, Weights)) for followed in call.known)
    return call.first(Rearranged) is not None and (not has_layout or call.name == "cat")


def _may_be_learned_queries(followed: Followed | None, tensor: Tensor) -> bool:
    """Whether a constant may be learned queries of several heads, or their keys. Matrices are weights of a layer."""
    return followed == COMPUTED_CONSTANT and tensor.dim() > 2


def _puts_pieces_together(call: Operation) -> bool:
    """Whether logits or weights are written into memory that held none."""
    return (
        call.name in ("setitem", "copy")
        and not isinstance(call.known[0], (Logits, Weights))
        and any(isinstance(followed, (Logits, Weights)) for followed in call.known[1:])
    )


def _hides(value: Any) -> bool:
    """Whether a key is hidden by having its logit replaced by this."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and float(value.detach()) <= HIDING_PENALTY
    return isinstance(value, (int, float)) and value <= HIDING_PENALTY


def _times(mask: Tensor, factor: float) -> Tensor:
    """What was added to logits: a tensor times a number."""
    with isolated(mask.device):
        return mask.detach() if factor == 1 else mask.detach() * factor


def _log_weights(softmax: Softmax | None) -> LogWeights | None:
    return None if softmax is None else LogWeights(softmax)


def _changed(weights: Weights, name: str) -> Weights:
    for softmax in weights.softmaxes:
        softmax.changed_by = softmax.changed_by or name
    return weights


def _are_softmax_of(logits: Tensor, weights: Tensor, axis: int) -> bool:
    """Whether weights are the softmax of logits along an axis; some rows are looked at."""
    with isolated(weights.device):
        given, computed = (
            tensor.detach().movedim(axis, -1).flatten(0, -2)[-_CHECKED_ROWS:].float() for tensor in (logits, weights)
        )
        expected = given.softmax(-1)
        # Held against the largest weight: a row of many keys has small ones only.
        is_close = (expected - computed).abs() <= _TOLERANCE * expected.amax(-1, keepdim=True)
        return bool((is_close | (expected.isnan() & computed.isnan())).all())


def _without_detours(weights: Weights, tensor: Tensor) -> Weights:
    """Weights that are what one softmax gave after all: what was added was subtracted again, as for its gradient."""
    for softmax in weights.softmaxes:
        is_alike = softmax.axes == weights.axes and softmax.logits.shape == tensor.shape
        if is_alike and _are_softmax_of(softmax.logits, tensor, softmax.axes.index(KEY)):
            for other in weights.softmaxes:
                other.is_done = True
            softmax.is_done, softmax.changed_by = False, None
            return replace(weights, softmaxes=(softmax,))
    return weights


def _is_part(result: Tensor, tensor: Tensor) -> bool:
    """Whether an operation has set weights to zero and left the others, or raised them all alike as dropout does."""
    if result is tensor or result.shape != tensor.shape:
        return False
    with isolated(tensor.device):
        result, tensor = (t.detach().flatten(0, -2)[-_CHECKED_ROWS:].float() for t in (result, tensor))
        kept = result != 0
        factor = result[kept].nansum() / tensor[kept].nansum()
        is_alike = torch.isclose(result, factor * tensor, rtol=_TOLERANCE, atol=0, equal_nan=True)
        return not bool(factor < 1 - _TOLERANCE) and bool(is_alike[kept].all())


def _skipped_columns(result: Tensor, tensor: Tensor, weights: Weights) -> int:
    """How many columns were cut off in front in a view."""
    axis = weights.axes.index(KEY)
    stride = tensor.stride(axis)
    if KEY not in weights.axes or result.numel() == tensor.numel() or stride == 0:
        return 0
    return (result.storage_offset() - tensor.storage_offset()) % max(1, stride * tensor.shape[axis]) // stride


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
