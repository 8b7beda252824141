"""Why the queries of a site are left alone, with a way out."""

from __future__ import annotations

from torch import nn

from lightning_attn.capture.module_tree import modules_of
from lightning_attn.temperature.projection import QueryProjection

#: Where no guess could be proven.
NOT_FOUND = (
    "no module of it was proven to make its queries. They are normalised by no module after their projection, "
    "projected outside of it or head by head, or made of a bare parameter; make them by one `nn.Linear` in the module "
    "that computes attention, or by one norm behind it"
)


def refusal(projection: QueryProjection, model: nn.Module) -> str | None:
    """Why a projection is not to be scaled; ``None`` if it may be."""
    if _is_adapted(projection.module, model):
        return (
            "its query projection has an adapter (LoRA), and a checkpoint of the adapter alone would lack its "
            "temperature; leave the query projection out of `target_modules`, or merge the adapter first"
        )
    if _is_peft(model) and not all(projection.tensor(part).requires_grad for part in projection.parameters):
        return (
            "its query projection is frozen in a model with adapters, so that a checkpoint of the adapters alone would "
            "lack its temperature; train the query projection too (`modules_to_save`), or choose `sites` without it"
        )
    for part in projection.parameters:
        parameter = projection.tensor(part)
        if not parameter.is_floating_point():
            return "the weights of its query projection are quantised"
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_param_infos"):
            return "its weights are sharded in a way (FSDP1, DeepSpeed ZeRO-3) in which they cannot be changed by rows"
        owners = {
            id(module) for module in modules_of(model) if any(p is parameter for p in module._parameters.values())
        }
        if len(owners) > 1:
            return f"the {part.name} of its query projection is also that of another module"
    return None


def _is_peft(model: nn.Module) -> bool:
    return any(type(module).__module__.startswith("peft.") for module in modules_of(model))


def _is_adapted(module: nn.Module, model: nn.Module) -> bool:
    """Whether a module is a part of what `peft` has put in the place of a layer."""
    return any(
        any(f"{kind.__module__}.{kind.__name__}" == _ADAPTED for kind in type(above).__mro__)
        and any(part is module for part in modules_of(above))
        for above in modules_of(model)
    )


_ADAPTED = "peft.tuners.tuners_utils.BaseTunerLayer"
