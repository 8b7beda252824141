"""What torch tells under no public name; where a version of it does not, the answer is the one that does no harm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: What `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` take in evaluation; ``None`` where torch has no such.
FUSED_ATTENTION: Callable[..., object] | None = getattr(torch, "_native_multi_head_attention", None)
FUSED_LAYER: Callable[..., object] | None = getattr(torch, "_transformer_encoder_layer_fwd", None)


def written_to(tensor: Tensor) -> int:
    """How often a tensor's memory was written to in place; 0 where nobody counts, as under inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def viewed(tensor: Tensor) -> Tensor | None:
    """The tensor that another is a view of, where torch keeps it."""
    return tensor._base


def in_backward() -> bool:
    """Whether a backward pass is running, as when activation checkpointing computes a forward pass again."""
    current_graph_task = getattr(torch._C, "_current_graph_task_id", None)
    return current_graph_task is not None and current_graph_task() != -1


def in_function_transform() -> bool:
    """Whether a ``torch.func`` transform (``vmap``, ``grad``, …) runs, where tensors stand for more than they show."""
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def call_of_scripts() -> list[type]:
    """The classes of what `torch.jit` compiled whose ``__call__`` no function mode hears."""
    kinds = (getattr(torch._C, name, None) for name in ("ScriptFunction", "ScriptMethod"))
    return [kind for kind in kinds if kind is not None and "__call__" in kind.__dict__]


def apply_of_functions() -> list[type]:
    """The class from which every `torch.autograd.Function` inherits the ``apply`` that no function mode hears."""
    base: type | None = getattr(torch.autograd.function, "_SingleLevelFunction", None)
    return [] if base is None or "apply" in base.__dict__ or not hasattr(base, "apply") else [base]
