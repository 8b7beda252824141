"""AttentionMonitor in the runs that people have: several models, layers that are skipped, batches of all lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import TensorBoardLogger
from models import HEADS, LENGTH, VOCABULARY, WIDTH, Block, LanguageModel, Trained, batches, trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_attn import AttentionMonitor, AttentionObserver, AttentionWarning, Snapshot
from lightning_attn.callbacks import loggers
from lightning_attn.tensorboard import heat_map

BLOCKS = ("blocks.0.attention", "blocks.1.attention")


def train(
    model_class: Callable[[], Trained], *callbacks: pl.Callback, data: Any = None, steps: int = 6, **arguments: Any
) -> Trained:
    """Train from a fixed seed."""
    pl.seed_everything(3, verbose=False)
    model = model_class()
    trainer(*callbacks, **arguments).fit(model, batches(steps) if data is None else data)
    return model


def watch(model_class: Callable[[], Trained], data: Any = None, **arguments: Any) -> AttentionMonitor:
    """Watch every step of a run, which has to be the run that nobody watched, and to which nothing is said."""
    plain = train(model_class, data=data)
    plain_random = torch.get_rng_state()
    monitor = AttentionMonitor(every_n_steps=1, print_summary=False, max_sequences=None, **arguments)
    with pytest.MonkeyPatch.context() as context:
        context.setattr("warnings.warn", _refuses_ours)
        watched = train(model_class, monitor, data=data)
    assert watched.losses == plain.losses and watched.losses
    for one, other in zip(watched.gradients, plain.gradients, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    for mine, theirs in zip(watched.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(torch.get_rng_state(), plain_random)
    return monitor


def _refuses_ours(message: Any, category: Any = None, *args: Any, **kwargs: Any) -> None:
    assert category is not AttentionWarning, message


def sites_of(monitor: AttentionMonitor) -> list[tuple[str, ...]]:
    return [snapshot.sites for snapshot in monitor.history]


# Several models


class Adversaries(Trained):
    """A generator and a discriminator, each with an optimiser of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), Block(is_causal=False))
        self.discriminator = nn.Sequential(Block(is_causal=False), nn.Linear(WIDTH, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (tokens,) = batch
        of_generator, of_discriminator = self.optimizers()
        real = functional.one_hot(tokens, WIDTH).float()
        made = self.generator(torch.randn(len(tokens), LENGTH, 4))
        judged = self.discriminator(made.detach()).mean() - self.discriminator(real).mean()
        of_discriminator.zero_grad()
        self.manual_backward(judged)
        of_discriminator.step()
        deceived = -self.discriminator(made).mean()
        of_generator.zero_grad()
        self.manual_backward(deceived)
        of_generator.step()
        self.losses += [judged.item(), deceived.item()]

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (self.generator, self.discriminator)]


def test_a_generator_and_a_discriminator_with_manual_optimisation() -> None:
    monitor = watch(Adversaries)
    assert sites_of(monitor)
    assert set(sites_of(monitor)) == {("generator.1.attention", "discriminator.0.attention")}
    one_of_them = watch(Adversaries, sites="discriminator.*")
    assert set(sites_of(one_of_them)) == {("discriminator.0.attention",)}
    for both, one in zip(monitor.history, one_of_them.history, strict=True):
        for statistic in one.statistics:
            assert one["discriminator.0.attention", statistic] == both["discriminator.0.attention", statistic]


class Distilled(LanguageModel):
    """Learns from a model that is not trained, and is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = LanguageModel(blocks=1).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        with torch.inference_mode():
            wanted = self.teacher(tokens).softmax(-1)
        return super().loss(batch) + functional.cross_entropy(self(tokens).flatten(0, 1), wanted.flatten(0, 1).clone())


def test_a_teacher_in_inference_mode_is_seen_or_left_out_as_asked() -> None:
    assert set(sites_of(watch(Distilled))) == {("teacher.blocks.0.attention", *BLOCKS)}
    assert set(sites_of(watch(Distilled, sites="blocks.*"))) == {BLOCKS}


# Layers that are skipped


class LayerDrop(LanguageModel):
    """The middle block of three is left out at every other step, the first time at the first."""

    skipped_at = 0

    def __init__(self) -> None:
        super().__init__(blocks=3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number != 1 or self.global_step % 2 != self.skipped_at:
                hidden = block(hidden)
        return self.head(hidden)


def test_a_layer_that_is_skipped_is_absent_then_and_in_its_place_otherwise(tmp_path: Path) -> None:
    without, all_of_them = (
        tuple(f"blocks.{number}.attention" for number in numbers) for numbers in ((0, 2), (0, 1, 2))
    )
    monitor = watch(LayerDrop)
    assert sites_of(monitor) == [without, all_of_them] * 3
    assert monitor.history.series("blocks.1.attention", 2, "entropy")[0] == [1, 3, 5]
    assert monitor.history.series("blocks.2.attention", 2, "entropy")[0] == [0, 1, 2, 3, 4, 5]

    drawn: list[Snapshot] = []

    def draw(snapshot: Snapshot, *arguments: Any) -> Any:
        drawn.append(snapshot)
        return heat_map(snapshot, *arguments)

    again = AttentionMonitor(
        every_n_steps=1, heat_map_every_n_steps=1, statistics="entropy", max_sequences=None, print_summary=False
    )
    with patch.object(loggers, "heat_map", draw):
        train(LayerDrop, again, logger=TensorBoardLogger(tmp_path, name="", version=""))
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    events.Reload()
    for number, steps in ((0, range(6)), (1, (1, 3, 5)), (2, range(6))):
        scalars = events.Scalars(f"attention/entropy/blocks.{number}.attention")
        assert [scalar.step for scalar in scalars] == list(steps)
        assert [scalar.value for scalar in scalars] == pytest.approx(
            [again.history[step].over_heads(f"blocks.{number}.attention", "entropy") for step in steps]
        )
    pictures = events.Images("attention_heads/entropy")
    assert [picture.step for picture in pictures] == list(range(6))
    assert [snapshot.sites for snapshot in drawn] == [without, all_of_them] * 3
    assert len({picture.height for picture in pictures[::2]} | {picture.height for picture in pictures[1::2]}) == 2


class SkipsLater(LayerDrop):
    """The middle block runs at the first step."""

    skipped_at = 1


def test_of_a_layer_that_was_seen_nothing_is_said_when_it_is_skipped() -> None:
    monitor = watch(SkipsLater, sites=["blocks.1.*", "blocks.2.*"])
    both = ("blocks.1.attention", "blocks.2.attention")
    assert sites_of(monitor) == [both, both[1:]] * 3
    only = watch(SkipsLater, sites="blocks.1.*")
    assert only.history.steps == [0, 2, 4]


class SkipsAll(LanguageModel):
    """A step in which no block runs."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks if self.global_step != 2 else ():
            hidden = block(hidden)
        return self.head(hidden)


def test_a_step_without_any_attention_has_no_snapshot() -> None:
    monitor = watch(SkipsAll)
    assert monitor.history.steps == [0, 1, 3, 4, 5]


# Batches


def of_all_lengths() -> DataLoader[Any]:
    """Another length at each step, and a smaller batch at the end."""
    tokens = torch.randint(VOCABULARY, (4 * 5 + 2, LENGTH), generator=torch.Generator().manual_seed(0))
    lengths = iter([16, 5, 9, 2, 12, 7] * 10)
    return DataLoader(list(tokens), batch_size=4, collate_fn=lambda rows: [torch.stack(rows)[:, : next(lengths)]])


class Expects(pl.Callback):
    """What an observer sees of a copy of the model on the same batch."""

    def __init__(self) -> None:
        self.expected: list[dict[str, Any]] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        model = copy.deepcopy(pl_module)
        observer = AttentionObserver(model)
        with observer, torch.no_grad():
            model.loss(batch)
        self.expected.append(observer.snapshot().to_dict())


def test_batches_of_all_lengths_and_a_smaller_one_at_the_end() -> None:
    loader = of_all_lengths()
    assert [tuple(batch[0].shape) for batch in loader] == [(4, 16), (4, 5), (4, 9), (4, 2), (4, 12), (2, 7)]
    watch(LanguageModel, data=of_all_lengths())
    monitor, expects = AttentionMonitor(every_n_steps=1, print_summary=False, max_sequences=None), Expects()
    train(lambda: LanguageModel().eval(), monitor, expects, data=of_all_lengths())
    assert [snapshot.to_dict() for snapshot in monitor.history] == expects.expected
    assert len(expects.expected) == 6


# Models that change


class Pruned(Trained):
    """Loses heads when half of its steps are over; what is left of them is as wide as before."""

    def __init__(self, within_a_step: bool = False) -> None:
        super().__init__()
        self.within_a_step = within_a_step
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def attend(self, hidden: Tensor, heads: int) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)[:, :, :heads]
        mixed = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return functional.pad(mixed, (0, WIDTH - mixed.shape[-1]))

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = self.embedding(batch[0])
        if self.within_a_step:
            hidden = hidden + self.attend(hidden, HEADS)
        return self.attend(hidden, HEADS if self.global_step < 3 and not self.within_a_step else 2).square().mean()


def test_heads_that_are_pruned_between_two_captures() -> None:
    monitor = watch(Pruned)
    assert [snapshot.heads["(root)"] for snapshot in monitor.history] == [HEADS] * 3 + [2] * 3
    assert monitor.history.series("(root)", 1, "entropy")[0] == [0, 1, 2, 3, 4, 5]
    assert monitor.history.series("(root)", 3, "entropy")[0] == [0, 1, 2]


def test_a_site_whose_calls_have_other_heads_in_one_step_is_refused_by_name() -> None:
    monitor = AttentionMonitor(every_n_steps=1, print_summary=False)
    with pytest.warns(AttentionWarning, match=r"at '\(root\)' .* ran with 4 heads and again with 2 before") as said:
        train(lambda: Pruned(within_a_step=True), monitor)
    assert sum(issubclass(warning.category, AttentionWarning) for warning in said) == 1
    assert {snapshot.heads["(root)"] for snapshot in monitor.history} == {HEADS}


class Lazy(LanguageModel):
    """Has no modules before training begins, as models that are sharded while they are made."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(Block(is_causal=True) for _ in range(2))


def test_a_model_that_is_made_in_configure_model() -> None:
    assert set(sites_of(watch(Lazy, sites="blocks.*"))) == {BLOCKS}
    with pytest.raises(MisconfigurationException, match=r"'layers\.\*', which matches none"):
        train(Lazy, AttentionMonitor(sites="layers.*"))


class LazyLayers(LanguageModel):
    """The head learns its size from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(VOCABULARY)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self(torch.zeros(1, 2, dtype=torch.long))
        return super().configure_optimizers()


@pytest.mark.filterwarnings("ignore:.*A layer with UninitializedParameter", "ignore:Lazy modules are a new feature")
def test_lazy_layers() -> None:
    assert set(sites_of(watch(LazyLayers))) == {BLOCKS}


# Adapters


def a_llama(way: str) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation=way, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class AdaptedDecoder(Trained):
    def __init__(self) -> None:
        super().__init__()
        peft = pytest.importorskip("peft")
        self.model = peft.get_peft_model(a_llama("eager"), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


class AdaptedEncoder(Trained):
    """Adapters around `nn.MultiheadAttention` make its parameters anew at every call."""

    def __init__(self) -> None:
        super().__init__()
        peft = pytest.importorskip("peft")
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True)
        encoder = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.TransformerEncoder(layer, 2))
        self.model = peft.get_peft_model(encoder, peft.LoraConfig(target_modules=["self_attn"]))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(batch[0]).square().mean()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(
    ("model_class", "sites"),
    [(AdaptedDecoder, "model.model.layers.{}.self_attn"), (AdaptedEncoder, "model.1.layers.{}.self_attn")],
)
def test_adapters_are_trained_as_if_nobody_watched(model_class: type[Trained], sites: str) -> None:
    monitor = watch(model_class, sites=sites.format("*"))
    assert set(sites_of(monitor)) == {(sites.format(0), sites.format(1))}
    site = sites.format(1)
    first, *_, last = (snapshot[site, "max_logit"] for snapshot in monitor.history)
    assert first != last, "adapters change what is attended to"


# Text that is generated while a model is validated


class Generates(Trained):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.model = a_llama(way)
        self.generated: list[Tensor] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        mask = torch.ones_like(batch[0])
        text = self.model.generate(batch[0], attention_mask=mask, do_sample=True, max_new_tokens=4, use_cache=True)
        self.generated.append(text)


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_text_that_is_generated_in_validation(way: str) -> None:
    def run(*callbacks: pl.Callback) -> Generates:
        pl.seed_everything(3, verbose=False)
        model = Generates(way)
        trainer(*callbacks, val_check_interval=2).fit(model, batches(4), batches(2))
        return model

    plain = run()
    training = AttentionMonitor(every_n_steps=1, print_summary=False)
    validation = AttentionMonitor(stage="validate", print_summary=False)
    watched = run(training, validation)
    assert watched.losses == plain.losses
    for one, other in zip(watched.generated, plain.generated, strict=True):
        assert torch.equal(one, other)
    sites = ("model.model.layers.0.self_attn", "model.model.layers.1.self_attn")
    assert set(sites_of(training)) == set(sites_of(validation)) == {sites}
    assert len(training.history) == 4 and len(validation.history) == 2
    assert all(set(snapshot.heads.values()) == {4} for snapshot in validation.history)
