"""Einsums of more than two tensors: queries and keys, or weights and values, and a layer in the same call."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightning_attn.capture.axes import KEY, LEFT, RIGHT
from lightning_attn.capture.contraction import product_and_layer
from lightning_attn.capture.isolation import in_backward
from lightning_attn.capture.refusals import SEVERAL_FACTORS
from lightning_attn.capture.softmax.factors import factors_of
from lightning_attn.capture.softmax.found import tell
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.products import begin_logits
from lightning_attn.capture.softmax.trail import Constant, Logits, Weights
from lightning_attn.capture.softmax.values import multiply
from lightning_attn.capture.softmax.walk import Walk


def follow_einsum_of_several(walk: Walk, call: Operation) -> bool:
    """Whether an einsum of more than two tensors ends here what was followed, or begins it.

    Weights of the model among them are a layer of the two others, before their product or after it. With more than two
    others, or where keys are weighted, it is refused.
    """
    constants = [o for o, followed in zip(call.operands, call.known, strict=True) if isinstance(followed, Constant)]
    others = [o for o, followed in zip(call.operands, call.known, strict=True) if not isinstance(followed, Constant)]
    with_weights = call.first(Weights)
    if with_weights:
        return _multiply_several(walk, call, constants, *with_weights)
    if len(others) < 2 or any(walk.trail.get(other) is not None for other in others):
        return False
    constants += others[2:]
    product = product_and_layer(call.function, call.args, constants, of_weights_and_values=False)
    if product is None or in_backward():
        return False
    number = call.results[0].dim()
    also_summed = set(product.axes[number:])
    product = replace(product, axes=product.axes[:number])
    is_whole = len(product.axes) == number and also_summed <= product.summed and product.summed
    if not is_whole or not {LEFT, RIGHT} <= set(product.meaning()):
        return False
    begin_logits(walk, product, call, *factors_of(walk, product))
    followed = walk.trail.get(call.results[0])
    if len(others) > 2 and isinstance(followed, Logits):
        walk.trail.set(call.results[0], replace(followed, refusal=SEVERAL_FACTORS))
    return True


def _multiply_several(walk: Walk, call: Operation, constants: list[Tensor], tensor: Tensor, weights: Weights) -> bool:
    """Weights that multiply values and more in one einsum."""
    product = product_and_layer(call.function, call.args, constants, of_weights_and_values=True)
    if product is not None:
        left, right = factors_of(walk, product)
        of_weights = left if left.tensor is tensor else right
        if of_weights.labels[weights.axes.index(KEY)] not in product.axes[call.results[0].dim() :]:
            return multiply(walk, product, left, right)
    for softmax in weights.softmaxes:
        softmax.refuse(SEVERAL_FACTORS)
    tell(walk, weights, tensor, None)
    return True
