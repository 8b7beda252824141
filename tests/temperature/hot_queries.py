"""A temperature for models that nobody here has written: where a site compares queries with keys, queries are divided.

It knows nothing of projections and layouts, and goes where the temperatures of the package do not: into the functions
with which attention is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

#: Functions that compare queries with keys, and where the queries stand among their arguments.
_PRODUCTS: dict[Any, tuple[int | str, ...]] = {
    functional.scaled_dot_product_attention: (0, "query"),
    torch.matmul: (0,),
    Tensor.matmul: (0,),
    Tensor.__matmul__: (0,),
    torch.bmm: (0,),
    Tensor.baddbmm: (1, "batch1"),
    torch.baddbmm: (1,),
    torch.einsum: (1,),
    torch.functional.einsum: (1,),
}
_BATCHED = (torch.bmm, torch.baddbmm, Tensor.baddbmm)


class HotQueries(TorchFunctionMode):
    """Divides queries (B, H, N, D), or (B * H, N, D), in the first product of activations that a site makes.

    Args:
        temperature: of its heads.
        products: how many of its first products belong to its logits.
    """

    def __init__(self, temperature: list[float], products: int = 1) -> None:
        super().__init__()
        self._temperature_H11 = torch.tensor(temperature, dtype=torch.float64)[:, None, None]
        self._left = products

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, args = dict(kwargs or {}), list(args)
        if self._left and function in _PRODUCTS:
            place = next(p for p in _PRODUCTS[function] if p in kwargs or (isinstance(p, int) and p < len(args)))
            given: Any = kwargs if place in kwargs else args
            if isinstance(given[place], Tensor) and given[place].dim() + (function in _BATCHED) >= 4:
                given[place] = self._divided(given[place])
                self._left -= 1
        return function(*args, **kwargs)

    def _divided(self, tensor: Tensor) -> Tensor:
        heads = len(self._temperature_H11)
        temperature = self._temperature_H11.to(tensor.dtype)
        if tensor.dim() == 3:
            return (tensor.unflatten(0, (-1, heads)) / temperature).flatten(0, 1)
        return tensor / temperature


@contextmanager
def hot_queries(model: nn.Module, temperature: dict[str, list[float]], products: int = 1) -> Iterator[None]:
    """Have the sites of a model compute with temperatures while the block runs."""
    modes: dict[nn.Module, HotQueries] = {}

    def enter(site: str, heads: list[float]) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            modes[module] = HotQueries(heads, products)
            modes[module].__enter__()

        return model.get_submodule(site).register_forward_pre_hook(hook)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        modes.pop(module).__exit__(None, None, None)

    with ExitStack() as stack:
        for site, heads in temperature.items():
            stack.callback(enter(site, heads).remove)
            stack.callback(model.get_submodule(site).register_forward_hook(leave).remove)
        yield
