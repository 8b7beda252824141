"""Running beside a model without leaving a trace in it.

A capture runs in the middle of somebody's forward pass: inside their autocast region, their ``torch.device`` context,
their selective checkpointing, their graph. What the capture computes there must be seen by none of them. The names of
torch that are not public are used here and nowhere else, but for those under which a module keeps what it holds
(`module_tree.py`).
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import getclosurevars
from types import FunctionType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from lightning_attn.capture.wrappers import ROOT, canonical_names

#: The newer switch for the precision of products.
_NEWER = "fp32_precision"
#: What `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` take in evaluation; ``None`` where torch has no such.
FUSED_ATTENTION: Callable[..., object] | None = getattr(torch, "_native_multi_head_attention", None)
FUSED_LAYER: Callable[..., object] | None = getattr(torch, "_transformer_encoder_layer_fwd", None)
#: What has no torch function of its own.
_PLAIN = (Tensor, nn.Parameter, type(None))
#: What a compiled module has to say when any global hook is set.
_HOOK_COMPLAINT = re.compile(r"Using `torch\.compile\(module\)` when there are global hooks")


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Compute in full precision, outside every graph, mode and autocast region of the surrounding program.

    Nothing computed inside is differentiated, cast, counted, cached by selective checkpointing or redirected to another
    device; and no setting of the surrounding program is different afterwards.

    Args:
        device: where the computation runs.
    """
    with ExitStack() as stack:
        stack.enter_context(_without_modes())
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


def device_of(arguments: Iterable[object]) -> torch.device:
    """The device of the first tensor among some arguments, asked for without a mode hearing it."""
    with without_function_modes():
        return next(argument.device for argument in arguments if isinstance(argument, Tensor))


@contextmanager
def unheard() -> Iterator[None]:
    """Look at tensors of the surrounding program, and make views of them, without its modes or its graph noticing."""
    with _without_modes(), torch.no_grad():
        yield


@contextmanager
def _without_modes() -> Iterator[None]:
    """Disable the function and dispatch modes of the surrounding program.

    Under selective activation checkpointing a product computed by an observer would otherwise be stored in the place of
    one of the model's own, and the gradient would be wrong without any error. torch has no public switch for this;
    where the private one is missing, modes stay on, and the other guards still hold.
    """
    with without_function_modes(), _without_dispatch_modes():
        yield


def without_function_modes() -> AbstractContextManager[object]:
    """Let no function mode of the surrounding program hear what is done with its tensors."""
    disable = getattr(torch._C, "DisableTorchFunction", nullcontext)
    return cast(AbstractContextManager[object], disable())


def function_modes_hear() -> bool:
    """Whether a function mode of the surrounding program hears what is done with tensors at this point."""
    is_heard = getattr(torch._C, "_is_torch_function_mode_enabled", None)
    return is_heard is None or bool(is_heard())


def call_of_scripts() -> list[type]:
    """The classes of what `torch.jit` compiled whose ``__call__`` no function mode hears."""
    kinds = (getattr(torch._C, name, None) for name in ("ScriptFunction", "ScriptMethod"))
    return [kind for kind in kinds if kind is not None and "__call__" in kind.__dict__]


def apply_of_functions() -> list[type]:
    """The class from which every `torch.autograd.Function` inherits the ``apply`` that no function mode hears."""
    base: type | None = getattr(torch.autograd.function, "_SingleLevelFunction", None)
    return [] if base is None or "apply" in base.__dict__ or not hasattr(base, "apply") else [base]


def _without_dispatch_modes() -> AbstractContextManager[object]:
    try:
        from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
    except ImportError:
        return nullcontext()
    if not _get_current_dispatch_mode_stack():  # to disable none takes a tenth of a millisecond
        return nullcontext()
    return cast(AbstractContextManager[object], _disable_current_modes())


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


@contextmanager
def after_every_module(hook: Callable[..., None]) -> Iterator[None]:
    """Call a hook after the ``forward`` of every module while the block runs: one hook for the process, on no module.

    Args:
        hook: called with the module, its positional and its keyword arguments, and what it returned.
    """
    handle = register_module_forward_hook(hook, with_kwargs=True)
    try:
        with _without_complaint_of_compiled_modules():
            yield
    finally:
        handle.remove()
        # torch forgets to remove that this hook wanted keyword arguments, and the marks of all captures would pile up.
        getattr(torch.nn.modules.module, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)


@contextmanager
def _without_complaint_of_compiled_modules() -> Iterator[None]:
    """Keep modules that `torch.compile` made from warning of a hook that its owner never set.

    The filter is put into the list by hand, since `warnings.filterwarnings` has every warning of the program shown once
    more, again after each capture.
    """
    silence = ("ignore", _HOOK_COMPLAINT, UserWarning, None, 0)
    warnings.filters.insert(0, silence)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if silence in warnings.filters:
            warnings.filters.remove(silence)  # type: ignore[attr-defined]


@contextmanager
def unnoticed_by_fast_paths(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Let modules of `torch.nn` take the fused functions that they take in evaluation, as if no mode of ours were on.

    They ask whether any mode is, and go the plain way then: which rounds otherwise, leaves no zeros in the place of
    padding, and fails for nested tensors. Modes of others are theirs: beside one, the answer stays what it is.

    Args:
        kind: what modes of ours are.
    """
    ask = torch.overrides.has_torch_function

    def ask_as_if_unwatched(arguments: Iterable[object]) -> bool:
        answer: bool = ask(arguments)
        if answer and sys._getframe(1).f_globals.get("__name__", "").startswith("torch.nn.modules."):
            is_ours = all(isinstance(mode, kind) for mode in _function_modes())
            return not (is_ours and all(type(argument) in _PLAIN for argument in arguments))
        return answer

    torch.overrides.has_torch_function = ask_as_if_unwatched  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.overrides.has_torch_function = ask


def _function_modes() -> list[object]:
    depth, at = (getattr(torch._C, name, None) for name in ("_len_torch_function_stack", "_get_function_stack_at"))
    return [None] if depth is None or at is None else [at(place) for place in range(depth())]


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
