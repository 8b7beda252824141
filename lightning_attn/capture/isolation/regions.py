"""Computing and looking at tensors in the middle of a program that must not notice it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from lightning_attn.capture.isolation.modes import without_function_modes, without_modes

#: The newer switch for the precision of products.
_NEWER = "fp32_precision"


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Compute in full precision, outside every graph, mode and autocast region of the surrounding program.

    Nothing computed inside is differentiated, cast, counted, cached by selective checkpointing or redirected to another
    device; and no setting of the surrounding program is different afterwards.

    Args:
        device: where the computation runs.
    """
    with ExitStack() as stack:
        stack.enter_context(without_modes())
        # Tensors made under inference mode could not be added to later, outside it.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device.type):
            # Leaving the outermost region clears the cache of cast weights, so this one must not be it.
            torch.autocast_increment_nesting()
            stack.callback(torch.autocast_decrement_nesting)
            stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(_full_precision_products())
        stack.enter_context(_single_precision_by_default())
        yield


@contextmanager
def unheard() -> Iterator[None]:
    """Look at tensors of the surrounding program, and make views of them, without its modes or its graph noticing."""
    with without_modes(), torch.no_grad():
        yield


def device_of(arguments: Iterable[object]) -> torch.device:
    """The device of the first tensor among some arguments, asked for without a mode hearing it."""
    with without_function_modes():
        return next(argument.device for argument in arguments if isinstance(argument, Tensor))


@contextmanager
def _single_precision_by_default() -> Iterator[None]:
    """Make new tensors in float32; training in a "true" half or double precision makes them in that."""
    default = torch.get_default_dtype()
    if default == torch.float32:
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def _full_precision_products() -> Iterator[None]:
    """Keep float32 products in float32: users lower them to TF32 or bfloat16 with one global switch.

    torch has an older switch for all backends and a newer one for each. The older sets the newer ones as well, and
    refuses to answer where they disagree.
    """
    backends = [
        package.matmul
        for package in (torch.backends.cuda, torch.backends.mkldnn)
        if hasattr(package, "matmul") and hasattr(package.matmul, _NEWER)
    ]
    of_backends = [getattr(backend, _NEWER) for backend in backends]
    try:
        precision: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:
        precision = None
    try:
        if precision is not None:
            torch.set_float32_matmul_precision("highest")
        else:
            for backend in backends:
                setattr(backend, _NEWER, "ieee")
        yield
    finally:
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        for backend, value in zip(backends, of_backends, strict=True):
            if getattr(backend, _NEWER) != value:
                setattr(backend, _NEWER, value)
