"""Running beside a model without leaving a trace in it.

A capture runs in the middle of somebody's forward pass: inside their autocast region, their ``torch.device`` context,
their selective checkpointing, their graph. What the capture computes there must be seen by none of them. The names of
torch that are not public are used in this package and nowhere else, but for those under which a module keeps what it
holds (`module_tree.py`).

- `regions`: computing and looking at tensors, unseen by modes, graph and autocast, in full precision;
- `modes`: function and dispatch modes, those of others and our own;
- `hooks`: the one hook of the process;
- `compilation`: what `torch.compile` makes of modules;
- `tracing`: whether a graph is made of what runs;
- `internals`: what torch tells under no public name.
"""

from lightning_attn.capture.isolation.compilation import compiled_modules, compiling_nothing, eager
from lightning_attn.capture.isolation.hooks import after_every_module
from lightning_attn.capture.isolation.internals import (
    FUSED_ATTENTION,
    FUSED_LAYER,
    apply_of_functions,
    call_of_scripts,
    in_backward,
    in_function_transform,
    viewed,
    written_to,
)
from lightning_attn.capture.isolation.modes import (
    SeeingMode,
    function_modes_hear,
    unnoticed_by_fast_paths,
    without_function_modes,
)
from lightning_attn.capture.isolation.regions import device_of, isolated, unheard
from lightning_attn.capture.isolation.tracing import is_written_down

__all__ = [
    "FUSED_ATTENTION",
    "FUSED_LAYER",
    "SeeingMode",
    "after_every_module",
    "apply_of_functions",
    "call_of_scripts",
    "compiled_modules",
    "compiling_nothing",
    "device_of",
    "eager",
    "function_modes_hear",
    "in_backward",
    "in_function_transform",
    "is_written_down",
    "isolated",
    "unheard",
    "unnoticed_by_fast_paths",
    "viewed",
    "without_function_modes",
    "written_to",
]
