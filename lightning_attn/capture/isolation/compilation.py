"""What `torch.compile` makes of modules: told, and left aside for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from inspect import getclosurevars
from types import FunctionType
from typing import cast

import torch
from torch import nn

from lightning_attn.capture.wrappers import ROOT, canonical_names


def eager() -> AbstractContextManager[object]:
    """Run compiled modules eagerly inside the block; their compiled code is used again after it, as it was.

    A compiled module calls its attention from a graph, where nothing can be seen; and one that is compiled while
    something watches would have the watching compiled into it.
    """
    return _stance("force_eager")


def compiling_nothing() -> AbstractContextManager[object]:
    """Compile nothing inside the block: what was compiled is used where it fits, and the rest runs eagerly."""
    return _stance("eager_on_recompile")


def _stance(name: str) -> AbstractContextManager[object]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing the compiler takes seconds
        return nullcontext()
    return cast(AbstractContextManager[object], torch.compiler.set_stance(name))


def compiled_modules(model: nn.Module) -> list[str]:
    """The modules of a model that `torch.compile` was applied to: as a whole, to their call, or to a function they use.

    Nothing public tells them. What carries none of the marks that are looked for here is taken for not compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return []
    named = canonical_names(model).items()
    compiled = (name for module, name in named if _is_compiled(module))
    return list(dict.fromkeys("the model" if name == ROOT else name for name in compiled))


def _is_compiled(module: nn.Module) -> bool:
    return (
        any(kind.__name__ == "OptimizedModule" for kind in type(module).__mro__)
        or getattr(module, "_compiled_call_impl", None) is not None
        or any(hasattr(function, "_torchdynamo_orig_callable") for function in _functions_of(module))
    )


def _functions_of(module: nn.Module) -> Iterator[object]:
    """What the module's ``forward`` may call that is no module: its attributes, and what its code names."""
    forward = getattr(type(module), "forward", None)
    yield forward
    yield from (attribute for attribute in vars(module).values() if callable(attribute))
    if isinstance(forward, FunctionType):
        variables = getclosurevars(forward)
        yield from variables.nonlocals.values()
        yield from variables.globals.values()
