"""Reading calls of torch functions as products of two tensors, with a label for each of their axes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_attn.capture.axes import LEFT, RIGHT, Axes, Contraction


def is_contraction(function: Callable[..., Any]) -> bool:
    """Whether a torch function is one that `contraction` may read."""
    return function in _CONTRACTIONS


def contraction(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Contraction | None:
    """Read a call of a torch function as a product of two tensors; ``None`` where it is none or another kind of one."""
    read = _CONTRACTIONS.get(function)
    if read is None:
        return None
    try:
        return read(*args, **kwargs)
    except (TypeError, ValueError):  # a signature that is not used for attention: three operands, `out=`, …
        return None


def is_einsum_of_several(function: Callable[..., Any]) -> bool:
    """Whether a torch function is one that `product_and_layer` may read."""
    return function is torch.einsum


def product_and_layer(
    function: Callable[..., Any], args: tuple[Any, ...], constants: Collection[Tensor], *, of_weights_and_values: bool
) -> Contraction | None:
    """Read an einsum of two tensors and weights of the model as the product of the two alone.

    Weights that multiply both, x W x, make one width of those of the two; those that multiply one are a layer before
    the product or after it. What the einsum has summed with weights alone, as heads in a layer after it, are axes that
    come last, behind those of its result.

    Args:
        function: the torch function.
        args: what it got.
        constants: the weights of the model among that.
        of_weights_and_values: whether it is a product of the weights of an attention with values.
    """
    if function is not torch.einsum or len(args) < 4 or not isinstance(args[0], str) or "..." in args[0]:
        return None
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    pairs = list(zip(inputs.split(","), args[1:], strict=True))
    data = [(letters, tensor) for letters, tensor in pairs if all(tensor is not constant for constant in constants)]
    if not arrow or len(data) != 2:
        return None
    of_weights = {
        letter for letters, tensor in pairs if any(tensor is constant for constant in constants) for letter in letters
    }
    (left_letters, left), (right_letters, right) = data
    own = [
        {x for x in letters if x not in others and x in of_weights and x not in output}
        for letters, others in ((left_letters, right_letters), (right_letters, left_letters))
    ]
    widths = own[0] | own[1] if all(own) and not of_weights_and_values else set()
    new = [x for x in output if x in of_weights and x not in left_letters + right_letters and widths]

    def labels(letters: str) -> Axes:
        return (*new, *("width" if letter in widths else letter for letter in letters))

    def kept(letter: str) -> bool:
        return letter in output or (letter in of_weights and letter not in widths)

    axes = [x for x in output if x in (*left_letters, *right_letters, *new)]
    axes += [x for x in dict.fromkeys(left_letters + right_letters) if x not in axes and kept(x)]
    for _ in new:
        left, right = left[None], right[None]
    return Contraction(left, right, labels(left_letters), labels(right_letters), tuple(axes))


def _matmul(input: Tensor, other: Tensor) -> Contraction:
    shared = max(input.dim(), other.dim()) - 2
    leading = [f"leading {number}" for number in range(shared, 0, -1)]
    left = (*leading[shared - (input.dim() - 2) :], LEFT, "width") if input.dim() > 1 else ("width",)
    right = (*leading[shared - (other.dim() - 2) :], "width", RIGHT) if other.dim() > 1 else ("width",)
    axes = (*leading, *(LEFT,) * (input.dim() > 1), *(RIGHT,) * (other.dim() > 1))
    return Contraction(input, other, left, right, axes)


def _matmul_of_the_right(self: Tensor, other: Tensor) -> Contraction:
    return _matmul(other, self)


def _product_of_batches(input: Tensor, mat2: Tensor) -> Contraction:
    return _matmul(input, mat2)


def _added_product_of_batches(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Contraction:
    return _matmul(batch1, batch2)


def _added_product(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Contraction:
    return _matmul(mat1, mat2)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Contraction:
    leading = tuple(f"{LEFT} {number}" for number in range(input.dim() - 2))
    return Contraction(input, weight, (*leading, LEFT, "width"), (RIGHT, "width"), (*leading, LEFT, RIGHT))


def _einsum(equation: str, *operands: Any) -> Contraction:
    tensors: Sequence[Tensor] = operands[0] if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
    left, right = tensors
    inputs, _, output = equation.replace(" ", "").partition("->")
    left_letters, right_letters = inputs.split(",")
    if "->" not in equation:
        letters = (left_letters + right_letters).replace("...", "")
        output = "..." * ("..." in inputs) + "".join(sorted(x for x in letters if letters.count(x) == 1))
    longest = max(
        left.dim() - len(left_letters.replace("...", "")), right.dim() - len(right_letters.replace("...", ""))
    )

    def labels(letters: str, dimensions: int) -> Axes:
        before, dots, after = letters.partition("...")
        count = dimensions - len(before) - len(after) if dots else 0
        return (*before, *(f"leading {number}" for number in range(count, 0, -1)), *after)

    dimensions = len(output.replace("...", "")) + longest * ("..." in output)
    return Contraction(
        left,
        right,
        labels(left_letters, left.dim()),
        labels(right_letters, right.dim()),
        labels(output, dimensions),
    )


def _tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> Contraction:
    if isinstance(dims, int):
        dims = (list(range(a.dim() - dims, a.dim())), list(range(dims)))
    summed_left, summed_right = (
        [axis % tensor.dim() for axis in axes] for axes, tensor in zip(dims, (a, b), strict=True)
    )
    left = tuple(f"width {summed_left.index(i)}" if i in summed_left else f"{LEFT} {i}" for i in range(a.dim()))
    right = tuple(f"width {summed_right.index(i)}" if i in summed_right else f"{RIGHT} {i}" for i in range(b.dim()))
    return Contraction(a, b, left, right, tuple(label for label in left + right if not label.startswith("width")))


def _distances(x1: Tensor, x2: Tensor, *_: Any, **__: Any) -> Contraction:
    """Distances compare the tokens of two tensors as products do."""
    return _matmul(x1, x2.mT)


_CONTRACTIONS: dict[Callable[..., Any], Callable[..., Contraction]] = {
    torch.matmul: _matmul,
    torch.linalg.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _matmul_of_the_right,
    torch.bmm: _product_of_batches,
    Tensor.bmm: _product_of_batches,
    torch.mm: _product_of_batches,
    Tensor.mm: _product_of_batches,
    torch.baddbmm: _added_product_of_batches,
    Tensor.baddbmm: _added_product_of_batches,
    torch.addmm: _added_product,
    Tensor.addmm: _added_product,
    torch.nn.functional.linear: _linear,
    torch.einsum: _einsum,
    torch.tensordot: _tensordot,
    torch.cdist: _distances,
}
# The same operators, called by their names.
_CONTRACTIONS |= {
    operator: read
    for name, read in {
        "matmul": _matmul,
        "bmm": _product_of_batches,
        "mm": _product_of_batches,
        "baddbmm": _added_product_of_batches,
        "linear": _linear,
        "einsum": _einsum,
    }.items()
    for operator in (getattr(torch.ops.aten, name), getattr(torch.ops.aten, name).default)
}
