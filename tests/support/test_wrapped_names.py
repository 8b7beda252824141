"""Sites have the names of the bare model, whatever it is wrapped in to be trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from lightning_attn import AttentionObserver, AttentionWarning, Snapshot, record
from lightning_attn.capture.wrappers import canonical_names

WIDTH, HEADS = 16, 2
TOKENS = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))
Wrap = Callable[[nn.Module], nn.Module]


class Fused(nn.Module):
    """Calls the fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(4 * tokens).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(*self.heads(tokens)).transpose(1, 2).flatten(2)


class WrittenOut(Fused):
    """Writes the same out, and has a router, which is no attention whatever becomes of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.heads(tokens)
        weights = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        return mixed + self.gate(mixed).softmax(-1) @ self.experts.weight


class Held(nn.Module):
    """A model's own part that holds another under a name that wrappers use as well."""

    def __init__(self, name: str, held: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, held)

    def forward(self, tokens: Tensor) -> Tensor:
        return getattr(self, self.name)(tokens)


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = attention

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.attention(self.norm(tokens))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(Fused()), Block(WrittenOut())])
        self.module = Held("model", Block(Held("base_model", Fused())))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.module(tokens))


SITES = ("blocks.0.attention", "blocks.1.attention", "module.model.attention.base_model")


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """A process group of this process alone."""
    rendezvous = f"file://{folder / 'rendezvous'}"
    distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        yield
    finally:
        distributed.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def each_block(wrap: Wrap) -> Wrap:
    def wrapped(model: nn.Module) -> nn.Module:
        for number, block in enumerate(model.blocks):  # type: ignore[arg-type]
            model.blocks[number] = wrap(block)  # type: ignore[index,operator]
        return model

    return wrapped


def each_attention(wrap: Wrap) -> Wrap:
    def wrapped(model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            block.attention = wrap(block.attention)
        return model

    return wrapped


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fully_sharded(use_orig_params: bool) -> Wrap:
    def wrapped(model: nn.Module) -> nn.Module:
        device = torch.device("cpu")
        each_block(lambda block: FullyShardedDataParallel(block, device_id=device, use_orig_params=use_orig_params))(
            model
        )
        return FullyShardedDataParallel(model, device_id=device, use_orig_params=use_orig_params)

    return wrapped


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def in_fabric(model: nn.Module) -> nn.Module:
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup(model)


#: What needs no process group.
ALONE: dict[str, Wrap] = {
    "torch.compile": compiled,
    "module.compile": compiled_in_place,
    "compiled blocks": each_block(compiled),
    "blocks compiled in place": each_block(compiled_in_place),
    "DataParallel": DataParallel,
    "checkpoint_wrapper": checkpoint_wrapper,
    "checkpoint_wrapper of blocks": checkpointed,
    "offload_wrapper of attention": each_attention(offload_wrapper),
    "AveragedModel": AveragedModel,
    "Fabric": in_fabric,
    "Fabric of a compiled model": lambda model: in_fabric(compiled(model)),
    "AveragedModel of compiled and checkpointed blocks": lambda model: AveragedModel(
        each_block(lambda block: compiled(checkpoint_wrapper(block)))(model)
    ),
}
#: What needs one.
TOGETHER: dict[str, Wrap] = {
    "DistributedDataParallel": DistributedDataParallel,
    "fully_shard": sharded,
    "FullyShardedDataParallel": fully_sharded(use_orig_params=True),
    "FullyShardedDataParallel of flat parameters": fully_sharded(use_orig_params=False),
    "torch.compile of DistributedDataParallel of checkpoint_wrapper": lambda model: compiled(
        DistributedDataParallel(checkpointed(model))
    ),
    "fully_shard of compiled and checkpointed blocks": lambda model: sharded(
        each_block(lambda block: compiled(checkpoint_wrapper(block)))(model)
    ),
}


def bare_names(model: nn.Module) -> list[str]:
    return [name or "(root)" for name, _ in model.named_modules()]


def watch(model: nn.Module, run: nn.Module, sites: Any = None) -> Snapshot:
    observer = AttentionObserver(model, sites=sites, max_sequences=None, strict=True)
    with observer:
        run(TOKENS)
    return observer.snapshot()


def assert_known_by_its_own_names(wrap: Wrap) -> None:
    bare = Model()
    inner = copy.deepcopy(bare)
    wrapped = wrap(inner)
    expected = watch(bare, bare)
    assert expected.sites == SITES
    assert list(dict.fromkeys(canonical_names(wrapped).values())) == bare_names(bare)
    assert watch(wrapped, wrapped) == expected
    if inner in wrapped.modules():  # an average is one of a copy
        assert watch(inner, wrapped) == expected, "the model is watched while its wrapper runs, as by Lightning"
    assert watch(wrapped, wrapped, "blocks.*.attention").sites == SITES[:2]
    assert watch(wrapped, wrapped, ["module.model.*", "blocks.0.*"]).sites == (SITES[0], SITES[2])
    with pytest.raises(ValueError, match=r"'blocks\.0\.attentoin'.*Did you mean 'blocks\.0\.attention' or"):
        watch(wrapped, wrapped, "blocks.0.attentoin")


def losses(wrap: Wrap, watched: bool) -> list[float]:
    torch.manual_seed(0)
    model = wrap(Model()).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    observer, found = AttentionObserver(model), []
    for _ in range(3):
        with observer if watched else nullcontext():
            loss = model(TOKENS).square().mean()
            loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_trains_the_same(wrap: Wrap) -> None:
    plain = losses(wrap, watched=False)
    assert plain[2] < plain[0]
    assert losses(wrap, watched=True) == plain


@pytest.mark.parametrize("wrapping", ALONE)
def test_under_a_wrapper(wrapping: str) -> None:
    assert_known_by_its_own_names(ALONE[wrapping])
    assert_trains_the_same(ALONE[wrapping])


@pytest.mark.parametrize("wrapping", TOGETHER)
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_under_a_wrapper_for_several_devices(wrapping: str, tmp_path: Path) -> None:
    with one_rank(tmp_path):
        assert_known_by_its_own_names(TOGETHER[wrapping])
        assert_trains_the_same(TOGETHER[wrapping])


def test_parts_that_are_called_as_wrappers_call_theirs_keep_their_names() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("module", "model", "base_model", "base_layer", "original_module", "modules_to_save")
            for name in (*names, "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"):
                self.add_module(name, Held(name, Fused()))

        def forward(self, tokens: Tensor) -> Tensor:
            for part in self.children():
                tokens = tokens + part(tokens)
            return tokens

    model = Names()
    expected = tuple(name for name, part in model.named_modules() if isinstance(part, Fused))
    assert len(expected) == 10
    assert watch(model, model).sites == expected
    wrapped = AveragedModel(model)
    assert watch(wrapped, wrapped).sites == expected


def test_a_class_of_ones_own_that_inherits_from_a_wrapper_is_one() -> None:
    class Averages(AveragedModel):
        pass

    wrapped = Averages(Model())
    assert watch(wrapped, wrapped).sites == SITES


def test_what_a_wrapper_holds_beside_a_model_has_a_name_of_its_own() -> None:
    class WithHead(DataParallel):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.head = Fused()

        def forward(self, tokens: Tensor) -> Tensor:
            self.module(tokens)
            return self.head(tokens)

    model = nn.Sequential()
    model.add_module("head", Fused())
    wrapped = WithHead(model)
    names = canonical_names(wrapped)
    assert names[model.head] == "head"
    assert names[wrapped.head] == "head (Fused)"
    assert watch(wrapped, wrapped).sites == ("head", "head (Fused)")


def test_compiled_parts_that_are_left_out_are_told_by_their_own_names() -> None:
    wrapped = AveragedModel(each_block(compiled)(Model()))
    observer = AttentionObserver(wrapped, compiled="skip")
    with pytest.warns(AttentionWarning, match=r"is compiled \('blocks\.0', 'blocks\.1'\)"), observer:
        pass
    whole = AttentionObserver(AveragedModel(compiled(Model())), compiled="skip")
    with pytest.warns(AttentionWarning, match=r"is compiled \('the model'\)"), whole:
        pass


# Adapters of peft


def encoder() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    model: nn.Module = transformers.BertModel(config, add_pooling_layer=False)
    return model


BERT_SITES = ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self")
IDS = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(0))


def with_lora(model: nn.Module, **arguments: Any) -> Any:
    """A model with adapters that have learned something."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["query", "value"], **arguments}))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    return adapted


def watch_encoder(model: nn.Module, sites: Any = None) -> Snapshot:
    observer = AttentionObserver(model, sites=sites, max_sequences=None, strict=True)
    with observer, torch.no_grad():
        model(input_ids=IDS)
    return observer.snapshot()


def test_a_model_with_lora_has_the_names_of_the_bare_one() -> None:
    bare = encoder()
    names = bare_names(bare)
    expected = watch_encoder(bare)
    assert expected.sites == BERT_SITES
    adapted = with_lora(bare)
    found = canonical_names(adapted)
    assert set(names) <= set(found.values())
    added = set(found.values()) - set(names)
    assert added and all(".lora_" in name for name in added)
    with_adapter = watch_encoder(adapted)
    assert with_adapter.sites == BERT_SITES and with_adapter != expected
    assert watch_encoder(adapted, "encoder.layer.1.*").sites == BERT_SITES[1:]
    with adapted.disable_adapter():
        assert watch_encoder(adapted) == expected


def test_a_model_with_lora_in_wrappers(tmp_path: Path) -> None:
    adapted = with_lora(encoder()).eval()
    expected = watch_encoder(adapted)
    with one_rank(tmp_path):
        assert watch_encoder(DistributedDataParallel(adapted)) == expected
        assert watch_encoder(compiled(DistributedDataParallel(adapted))) == expected


def test_merged_and_unloaded_adapters() -> None:
    adapted = with_lora(encoder())
    before = watch_encoder(adapted)
    adapted.merge_adapter()
    merged = watch_encoder(adapted)
    assert merged.sites == BERT_SITES
    torch.testing.assert_close(merged.values, before.values, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert watch_encoder(adapted.merge_and_unload()) == merged


def test_attention_that_is_trained_as_a_whole_and_its_original_are_two_sites() -> None:
    """The copy that is trained has the name of the bare model; the original runs where adapters are switched off."""
    peft = pytest.importorskip("peft")
    bare = encoder()
    expected = watch_encoder(bare)
    adapted = with_lora(bare, target_modules=["dense"], modules_to_save=["self"])
    assert watch_encoder(adapted).sites == BERT_SITES
    originals = tuple(f"{site}.original_module" for site in BERT_SITES)
    with adapted.disable_adapter():
        switched_off = watch_encoder(adapted)
    assert switched_off.sites == originals
    assert torch.equal(switched_off.values.nan_to_num(), expected.values.nan_to_num())
    observer = AttentionObserver(adapted)
    with observer, torch.no_grad():  # as where preferences are trained and the reference is the model without adapters
        adapted(input_ids=IDS)
        with adapted.disable_adapter():
            adapted(input_ids=IDS)
    assert set(observer.snapshot().sites) == {*BERT_SITES, *originals}

    adapted.add_adapter("other", peft.LoraConfig(target_modules=["dense"], modules_to_save=["self"]))
    adapted.set_adapter("other")
    assert watch_encoder(adapted).sites == tuple(f"{site}.modules_to_save.other" for site in BERT_SITES)
    adapted.set_adapter("default")
    assert watch_encoder(adapted).sites == BERT_SITES


class TorchModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]


def test_lora_on_the_attention_of_torch() -> None:
    """Its layer makes new parameters whenever somebody lists its modules or parameters, which a capture never does."""
    adapted = with_lora(TorchModel(), target_modules=["attention"])
    attention = adapted.base_model.model.attention
    weight = dict(attention.base_layer._parameters)["in_proj_weight"]
    with pytest.warns(AttentionWarning, match="No attention was seen"), record(adapted):
        pass
    assert attention.base_layer._parameters["in_proj_weight"] is weight

    with record(adapted) as recording:
        adapted(TOKENS).sum().backward()
    (call,) = recording.calls
    assert call.site == "attention"
    merged = weight + attention.get_delta_weight("default")
    query, key, _ = functional.linear(TOKENS, merged, attention.in_proj_bias).double().chunk(3, -1)
    products = torch.einsum("bnhd,bmhd->bhnm", query.unflatten(-1, (HEADS, -1)), key.unflatten(-1, (HEADS, -1)))
    torch.testing.assert_close(call.logits()[0].double(), products / (WIDTH / HEADS) ** 0.5, rtol=1e-5, atol=1e-5)
    gradients = [parameter.grad for name, parameter in adapted.named_parameters() if "lora_" in name]

    again = with_lora(TorchModel(), target_modules=["attention"])
    again.load_state_dict(adapted.state_dict())
    again(TOKENS).sum().backward()
    expected = [parameter.grad for name, parameter in again.named_parameters() if "lora_" in name]
    assert gradients and any(gradient is not None for gradient in gradients)
    for found, plain in zip(gradients, expected, strict=True):
        assert (found is None) == (plain is None) and (found is None or torch.equal(found, plain))


#: Ways to adapt weights, many of which compute the weights of a layer anew in each forward pass.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {}),
    "DoRA": ("LoraConfig", {"use_dora": True}),
    "AdaLoRA": ("AdaLoraConfig", {"total_step": 10}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "VeRA": ("VeraConfig", {}),
    "LoHa": ("LoHaConfig", {}),
    "LoKr": ("LoKrConfig", {}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 4}),
    "HRA": ("HRAConfig", {"r": 2}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 4}),
    "VB-LoRA": ("VBLoRAConfig", {"num_vectors": 8, "vector_length": 4, "topk": 2}),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_of_other_kinds(adapter: str) -> None:
    """Weights of a layer are none of the activations, whatever they were computed of."""
    peft = pytest.importorskip("peft")
    kind, arguments = ADAPTERS[adapter]
    if not hasattr(peft, kind):
        pytest.skip(f"this version of peft has no {kind}")
    adapted = peft.get_peft_model(encoder(), getattr(peft, kind)(target_modules=["query", "value"], **arguments))
    with record(adapted) as recording:
        output = adapted(input_ids=IDS).last_hidden_state
    output.sum().backward()
    assert tuple(call.site for call in recording.calls) == BERT_SITES
    assert all(call.value is not None for call in recording.calls)
