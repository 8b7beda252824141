"""From the weights to the product with the values, as one product or as a sum of what each weight has multiplied."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightning_attn.capture.axes import KEY, QUERY, SHARED, Contraction
from lightning_attn.capture.refusals import SUMS_OVER_MORE_THAN_KEYS
from lightning_attn.capture.softmax.factors import Factor, followed_as_factor
from lightning_attn.capture.softmax.found import tell
from lightning_attn.capture.softmax.layout import keep
from lightning_attn.capture.softmax.normalisation import divide_by_row_sum, sum_exponentials
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.trail import Constant, Exponentials, Logits, WeightedValues, Weights
from lightning_attn.capture.softmax.walk import Step, Walk


def multiply(walk: Walk, product: Contraction, left: Factor, right: Factor) -> bool:
    """A product of weights with what may be their values; whether it needs no other look."""
    of_weights, of_values = (left, right) if isinstance(left.followed, Weights) else (right, left)
    weights, values = of_weights.followed, of_values.followed
    assert isinstance(weights, Weights)
    keys = [label for label, axis in zip(of_weights.labels, weights.axes, strict=True) if axis == KEY]
    # Learned queries compare themselves with each other before they have read any data, as in DETR.
    has_data = any(len(softmax.history.without_data) < 2 for softmax in weights.softmaxes)
    if isinstance(values, Constant) and (has_data or not values.is_computed):
        return not product.summed.isdisjoint(keys)  # a distribution over numbers; otherwise heads are mixed
    queries = {label for label, axis in zip(of_weights.labels, weights.axes, strict=True) if axis == QUERY}
    is_product = isinstance(values, Logits) and queries.isdisjoint(of_values.labels)
    if not (values is None or isinstance(values, Constant) or is_product):
        return True  # the logarithms of a loss, other weights
    if not product.summed.isdisjoint(keys):
        if product.summed.intersection(of_weights.labels) != set(keys):
            for softmax in weights.softmaxes:
                softmax.refuse(SUMS_OVER_MORE_THAN_KEYS)
        has_values_of_queries = bool(queries.intersection(of_values.labels))
        shared = [label for label, axis in zip(of_weights.labels, weights.axes, strict=True) if axis == SHARED]
        value = None if has_values_of_queries else _value(of_values, shared, keys)
        tell(walk, *_with_one_key_axis(weights, of_weights.tensor), value)
    return True


def _with_one_key_axis(weights: Weights, tensor: Tensor) -> tuple[Weights, Tensor]:
    """Weights whose keys are in one axis, also where they were divided into several, as into rows and columns."""
    if weights.axes.count(KEY) == 1:
        return weights, tensor
    others = [i for i, axis in enumerate(weights.axes) if axis != KEY]
    keys = [i for i, axis in enumerate(weights.axes) if axis == KEY]
    axes = (*(weights.axes[i] for i in others), KEY)
    return replace(weights, axes=axes), tensor.detach().permute(*others, *keys).flatten(len(others))


def _value(factor: Factor, shared: list[str], keys: list[str]) -> Tensor:
    """The values of a product as (shared axes, M, E).

    Args:
        factor: the operand that holds them.
        shared: the labels of the axes that queries and keys share.
        keys: the labels of the axes of the keys, in their order.
    """
    there = [factor.labels.index(label) for label in shared if label in factor.labels]
    at_keys = [factor.labels.index(key) for key in keys if key in factor.labels]
    rest = [axis for axis in range(factor.tensor.dim()) if axis not in (*there, *at_keys)]
    value = factor.tensor.detach().permute(*there, *at_keys, *rest)
    value = value.flatten(len(there), len(there) + len(at_keys) - 1).flatten(len(there) + 1)
    value = value if rest else value[..., None]
    for place, label in enumerate(shared):
        value = value if label in factor.labels else value.unsqueeze(place)
    return value


def _mul(walk: Walk, call: Operation) -> None:
    found = call.first(Weights)
    factors = [o for o in call.operands if isinstance(followed_as_factor(walk, o), (Logits, type(None)))]
    if call.first(Exponentials):
        divide_by_row_sum(walk, call)
    elif found and factors and call.results[0].numel() > found[0].numel():
        _weigh(walk, found[0], found[1], factors[0], call.results[0])
    else:
        keep(walk, call)


def _weigh(walk: Walk, tensor: Tensor, weights: Weights, factor: Tensor, result: Tensor) -> None:
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
    walk.trail.set(
        result,
        WeightedValues(of_weights, tensor.detach().permute(*kept, *widths).flatten(len(kept) - 1), at_key, value),
    )


def _sum(walk: Walk, call: Operation) -> None:
    tensor, followed, axis = call.operands[0], call.known[0], call.axis()
    if axis is None:
        return
    if isinstance(followed, WeightedValues) and axis % tensor.dim() == followed.key_axis:
        tell(walk, followed.weights, followed.tensor, followed.value)
    else:
        sum_exponentials(walk, call)


#: By the plain names of the operations.
STEPS: dict[str, Step] = {"mul": _mul, "sum": _sum}
