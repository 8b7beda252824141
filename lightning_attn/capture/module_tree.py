"""Walking over a model without asking it to.

What belongs to a model is read from where `torch.nn.Module` keeps it. `named_modules`, `parameters` and `buffers` are
methods that a model may override, and some that do change it: peft's layer around `torch.nn.MultiheadAttention` makes
new parameters of its weights whenever its modules are listed, also where that happens within its forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def children_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a module holds itself, by their names in it."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """A model and every module below it, each once, in the order of `named_modules`."""
    seen: set[nn.Module] = set()
    ahead = [model]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            yield module
            ahead += reversed([child for _, child in children_of(module)])


def parameters_of(model: nn.Module) -> Iterator[Tensor]:
    """The parameters of a model. Under `torch.func.functional_call` they are what stands in their place."""
    return (tensor for module in modules_of(model) for tensor in module._parameters.values() if tensor is not None)


def buffers_of(model: nn.Module) -> Iterator[Tensor]:
    """The buffers of a model."""
    return (tensor for module in modules_of(model) for tensor in module._buffers.values() if tensor is not None)
