"""What functions of dense tensors share: which tensors they take, and which rows and keys of these count.

Shape suffixes: N queries, M keys; "…" stands for sequences, heads, or anything else.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Literal

import torch
from torch import Tensor

#: So much of what is no tensor is written into a message.
_LONGEST: Final = 80


def checked(name: str, tensor: Tensor, shape: str = "(…, N, M)", *, may_be_empty: bool = True) -> Tensor:
    """A floating-point tensor in the precision that it is computed with.

    Args:
        name: of the argument, for the message.
        tensor: its value.
        shape: such as ``"(…, N, N)"``: a letter is the same size wherever it stands, and an ellipsis in front of the
            letters any dimensions. Several are joined by ``" or "``.
        may_be_empty: whether the sizes of the last two dimensions may be zero.

    Returns:
        float64 as it is, and other types as float32.

    Raises:
        ValueError: if it is no floating-point tensor of that shape.
    """
    check_floating(name, tensor, shape)
    if not may_be_empty and 0 in tensor.shape[-2:]:
        raise ValueError(f"`{name}` must have a row and a column at least, got {described(tensor)}.")
    return tensor.to(working_type(tensor))


def check_floating(name: str, tensor: object, shape: str) -> None:
    """Refuse what is no floating-point tensor of a shape, which is written as for `checked`.

    Raises:
        ValueError: if it is none.
    """
    if (
        not isinstance(tensor, Tensor)
        or not tensor.is_floating_point()
        or not is_dense(tensor)
        or not _has_shape(tensor, shape)
    ):
        raise ValueError(f"`{name}` must be floating-point, of shape {shape}, got {described(tensor)}.")


def refuse_negative(name: str, weights: Tensor) -> None:
    """Refuse weights that can be none, as logits are that somebody forgot to normalise.

    Raises:
        ValueError: if any is below zero.
    """
    if bool((weights < 0).any()):
        raise ValueError(
            f"`{name}` must not be negative, got {weights[weights < 0].min().item():.4g}: are these logits?"
        )


def working_type(tensor: Tensor) -> torch.dtype:
    """The precision that a floating-point tensor is computed with."""
    return torch.promote_types(tensor.dtype, torch.float32)


def broadcast(
    name: str, tensor: Tensor, shape: Sequence[int], kind: Literal["boolean", "floating-point"] = "boolean"
) -> Tensor:
    """A mask, or numbers, in the shape that they broadcast to.

    Raises:
        ValueError: if they are of another kind, or do not broadcast to it.
    """
    if isinstance(tensor, Tensor):
        is_of_kind = tensor.dtype == torch.bool if kind == "boolean" else tensor.is_floating_point()
        with suppress(RuntimeError):
            expanded = tensor.expand(tuple(shape))
            if is_of_kind:
                return expanded
    raise ValueError(f"`{name}` must be {kind} and broadcast to {tuple(shape)}, got {described(tensor)}.")


def visible_keys(weights: Tensor, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
    """Where a key may be seen.

    Args:
        weights: (…, N, M), of which only shape and device matter.
        mask: boolean, true where a key may be seen; broadcasts to the weights. ``None`` for every key.
        is_causal: whether, besides, query ``i`` sees the keys ``j <= i`` alone.

    Returns:
        (…, N, M), boolean; elements may share memory.

    Raises:
        ValueError: if the mask is not boolean or does not broadcast.
    """
    if mask is None:
        visible = torch.ones((), dtype=torch.bool, device=weights.device).expand(weights.shape)
    else:
        visible = broadcast("mask", mask, weights.shape).to(weights.device)
    return visible.tril() if is_causal else visible


def present_rows(weights: Tensor, visible: Tensor, *, is_self_attention: bool) -> Tensor:
    """The rows that have a distribution, (…, N): a visible key, finite weights on those, no padding.

    In self-attention a token that nobody may see as a key is padding.
    """
    is_finite = (weights.isfinite() | ~visible).all(-1)
    present = visible.any(-1) & is_finite
    return present & visible.any(-2) if is_self_attention else present


def check_visibility(name: str, visible: Tensor | tuple[int, int]) -> None:
    """Refuse what is neither a mask of its own, (…, N, M), nor the numbers N and M.

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(visible, Tensor):
        is_one = visible.dtype == torch.bool and visible.dim() >= 2
    else:
        sizes = visible if isinstance(visible, tuple) else ()
        is_one = len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes)
    if not is_one:
        raise ValueError(
            f"`{name}` must be a boolean tensor of shape (…, N, M), or a tuple of the numbers of queries and keys, "
            f"got {described(visible)}."
        )


def described(value: object) -> str:
    """What was given, in a few words for a message: a list or an array may have thousands of numbers."""
    if isinstance(value, Tensor):
        layout = "" if is_dense(value) else " nested" if value.is_nested else f" {value.layout}"
        shape = "" if value.is_nested else f" of shape {tuple(value.shape)}"
        return f"{value.dtype}{layout}{shape}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} of {value.dtype} of shape {value.shape}"
    words = reprlib.repr(value)
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has all its elements side by side: it is neither sparse nor nested."""
    return tensor.layout == torch.strided and not tensor.is_nested


def _has_shape(tensor: Tensor, shape: str) -> bool:
    return any(_has_one_shape(tuple(tensor.shape), one.strip("()").split(", ")) for one in shape.split(" or "))


def _has_one_shape(sizes: tuple[int, ...], letters: list[str]) -> bool:
    if letters[0] == "…":
        letters = letters[1:]
        sizes = sizes[-len(letters) :]
    size_of = dict(zip(letters, sizes, strict=False))
    return len(sizes) == len(letters) and sizes == tuple(size_of[letter] for letter in letters)
