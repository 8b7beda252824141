"""Why the queries of a site are left alone, with a way out."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_attn.capture.module_tree import modules_of
from lightning_attn.capture.spread import is_spread
from lightning_attn.temperature.projection import QueryProjection

#: Where no guess could be proven.
NOT_FOUND = (
    "no module of it was proven to make its queries. They are normalised by no module after their projection, "
    "projected outside of it or head by head, or made of a bare parameter; make them by one `nn.Linear` in the module "
    "that computes attention, or by one norm behind it"
)
READ_ELSEWHERE = (
    "its queries are read by something else than its attention too: they are added to what leaves it, or gate that, "
    "which would be divided with them; make what else is needed by an `nn.Linear` of its own, or choose `sites` "
    "without it"
)
SHARDED = (
    "its weights are sharded in a way (FSDP1, DeepSpeed ZeRO-3) in which rows of them cannot be changed; shard them "
    "with `ModelParallelStrategy` (FSDP2)"
)
QUANTISED = (
    "the weights of its query projection are quantised, so that nothing can be written into them; leave the "
    "query projection as it is (`modules_to_not_convert`), or choose `sites` without it"
)
_QUANTISING = ("torch.ao.nn", "torch.nn.quantized")


#: Where a layer makes the queries by more than its weight and bias.
NOT_WRITABLE = (
    "the layer that makes its queries does more than multiply by its weight and add its bias (an adapter, a mask), so "
    "that no factor can be written into these; make them by one `nn.Linear`"
)


def refusal(projection: QueryProjection, model: nn.Module) -> str | None:
    """Why a projection is not to be scaled; ``None`` if it may be."""
    if any(
        type(above).__name__ == "FullyShardedDataParallel" and _holds(above, projection.module)
        for above in modules_of(model)
    ):
        return SHARDED
    if is_adapted(projection.module, model):
        return (
            "its query projection has an adapter (LoRA), and a checkpoint of the adapter alone would lack what "
            "is written into it; leave the query projection out of `target_modules`, or merge the adapter first"
        )
    if _is_peft(model) and not all(projection.tensor(part).requires_grad for part in projection.parameters):
        return (
            "its query projection is frozen in a model with adapters, so that a checkpoint of the adapters alone would "
            "lack what is written into it; train the query projection too (`modules_to_save`), or choose `sites` "
            "without it"
        )
    for part in projection.parameters:
        parameter = projection.tensor(part)
        if hasattr(parameter, "ds_id"):
            return SHARDED
        if _is_quantised(parameter):
            return QUANTISED
        owners = {
            id(module) for module in modules_of(model) if any(p is parameter for p in module._parameters.values())
        }
        if len(owners) > 1:
            return (
                f"the {part.name} of its query projection is also that of another module, which would be multiplied "
                "with it in a checkpoint; give each a weight of its own, or choose `sites` without it"
            )
    return None


def refusal_of_site(site: nn.Module) -> str:
    """Why no module of a site was found that makes its queries."""
    for module in modules_of(site):
        if any(kind.__module__.startswith(_QUANTISING) for kind in type(module).__mro__) or any(
            parameter is not None and parameter.dim() == 2 and _is_quantised(parameter)
            for parameter in module._parameters.values()
        ):
            return QUANTISED
    return NOT_FOUND


def _is_quantised(parameter: Tensor) -> bool:
    """Whether a parameter holds no plain floating-point numbers."""
    kind = type(parameter.data)
    return not parameter.is_floating_point() or not (kind is Tensor or is_spread(parameter))


def _holds(above: nn.Module, module: nn.Module) -> bool:
    return any(part is module for part in modules_of(above))


def _is_peft(model: nn.Module) -> bool:
    return any(type(module).__module__.startswith("peft.") for module in modules_of(model))


def is_adapted(module: nn.Module, model: nn.Module) -> bool:
    """Whether a module is a part of what `peft` has put in the place of a layer."""
    return any(
        any(f"{kind.__module__}.{kind.__name__}" == _ADAPTED for kind in type(above).__mro__) and _holds(above, module)
        for above in modules_of(model)
    )


_ADAPTED = "peft.tuners.tuners_utils.BaseTunerLayer"
