"""The names of a model's modules without what wrappers put into them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_attn.capture.module_tree import children_of

#: Name of the model itself, which `named_modules` calls by the empty string.
ROOT = "(root)"

#: The classes whose modules run another one in their place, and under which name they hold it. They are known by their
#: qualified names, since most are of packages that need not be there. The name of the step alone tells nothing: many
#: models have a part that they call `module` or `model`.
_WRAPPED_AS = {
    # Compiling.
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    # Training on several devices.
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "megatron.core.distributed.data_parallel_base._BaseDataParallel": "module",
    "megatron.core.transformer.module.Float16Module": "module",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
    # Activation checkpointing and offloading.
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    # Averages of weights, and gradients by example.
    "torch.optim.swa_utils.AveragedModel": "module",
    "opacus.grad_sample.gsm_base.AbstractGradSampleModule": "_module",
    # Adapters: around the model, around what is adapted in it, and around each layer.
    "peft.peft_model.PeftModel": "base_model",
    "peft.mixed_model.PeftMixedModel": "base_model",
    "peft.tuners.tuners_utils.BaseTuner": "model",
    "peft.tuners.tuners_utils.BaseTunerLayer": "base_layer",
    "peft.tuners.adaption_prompt.model.AdaptionPromptModel": "model",
    "peft.tuners.adaption_prompt.layer._BaseAdaptedAttention": "model",
    "peft.utils.other.AuxiliaryTrainingWrapper": "original_module",
}

#: peft's wrapper of a module that is trained as a whole: it holds the original and a copy of it for each adapter.
_TRAINED_COPIES = "peft.utils.other.ModulesToSaveWrapper"
_KNOWN = {*_WRAPPED_AS, _TRAINED_COPIES}


def canonical_names(model: nn.Module) -> dict[nn.Module, str]:
    """The name of every module in the model as its owner wrote it; the model itself is ``(root)``.

    It is the name that `named_modules` of the bare model gives it. A wrapper and what it wraps share one name. No other
    two modules do: where what a wrapper holds beside the wrapped module has the name of a module in that, it gets its
    name in `named_modules` of the model as it is, with its class where that name is taken as well.

    Example:
        >>> from torch.optim.swa_utils import AveragedModel
        >>> model = AveragedModel(nn.Sequential(nn.Linear(2, 2)))
        >>> [name for name, _ in model.named_modules()]
        ['', 'module', 'module.0']
        >>> list(canonical_names(model).values())
        ['(root)', '(root)', '0']
    """
    names: dict[nn.Module, str] = {model: ROOT}
    taken = {ROOT}
    known: dict[type, set[str]] = {}  # the qualified names of classes met on the way, of which there are few

    def classes_of(module: nn.Module) -> set[str]:
        kind = type(module)
        if kind not in known:
            known[kind] = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__} & _KNOWN
        return known[kind]

    def name_below(parent: nn.Module, path: str) -> None:
        for step, child, is_wrapped in _steps(parent, classes_of(parent)):
            if child in names:  # a module under several names has the first
                continue
            child_path = f"{path}.{step}" if path else step
            if is_wrapped:
                names[child] = names[parent]
            else:
                name = step if names[parent] == ROOT else f"{names[parent]}.{step}"
                ways_out = (name, child_path, f"{child_path} ({type(child).__name__})")
                names[child] = next((way for way in ways_out if way not in taken), name)
                taken.add(names[child])
            name_below(child, child_path)

    name_below(model, "")
    return names


def _steps(parent: nn.Module, classes: set[str]) -> Iterator[tuple[str, nn.Module, bool]]:
    """From a module of some classes to those that it holds: their names in it, and whether it runs in their place."""
    copies = parent._modules.get("modules_to_save") if _TRAINED_COPIES in classes else None
    if copies is not None and copies._modules:
        # The first adapter's copy is the one that is trained; the original stays, for when adapters are switched off.
        for number, (adapter, copy) in enumerate(children_of(copies)):
            yield f"modules_to_save.{adapter}", copy, number == 0
        classes = set()
    wrapped = {_WRAPPED_AS[kind] for kind in classes & _WRAPPED_AS.keys()}
    for step, child in children_of(parent):
        yield step, child, step in wrapped
