"""A watched run is the run that would have been: bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from models import HEADS, WIDTH, Attention, Encoder, LanguageModel, Trained, VisionTransformer, fit
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_attn import AttentionMonitor

STEPS = 50


def run(model_class: type[Trained], *callbacks: pl.Callback, **arguments: object) -> tuple[Trained, Tensor]:
    """Train from a fixed seed; the model and the state of the random numbers after it."""
    pl.seed_everything(7, verbose=False)
    model = model_class()
    fit(model, *callbacks, **{"steps": STEPS, **arguments})
    return model, torch.get_rng_state()


def assert_same_run(model_class: type[Trained], **arguments: object) -> AttentionMonitor:
    """Compare a watched run with one that is not."""
    plain, plain_random = run(model_class, **arguments)
    monitor = AttentionMonitor(every_n_steps=1, print_summary=False, max_sequences=None)
    watched, watched_random = run(model_class, monitor, **arguments)
    assert watched.losses == plain.losses
    assert len(watched.gradients) == len(plain.gradients)
    for watched_step, plain_step in zip(watched.gradients, plain.gradients, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(watched_step, plain_step, strict=True))
    for (name, one), other in zip(watched.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert torch.equal(watched_random, plain_random)
    return monitor


@pytest.mark.parametrize("model_class", [LanguageModel, VisionTransformer, Encoder])
def test_losses_gradients_weights_and_random_numbers_are_bit_identical(model_class: type[Trained]) -> None:
    monitor = assert_same_run(model_class)
    assert len(monitor.history) == STEPS


@pytest.mark.parametrize("model_class", [LanguageModel, Encoder])
def test_under_autocast(model_class: type[Trained]) -> None:
    monitor = assert_same_run(model_class, precision="bf16-mixed", steps=10)
    assert monitor.history


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_in_true_half_and_double_precision(precision: str) -> None:
    """Lightning has tensors made in that precision while the step runs; ours are not."""
    monitor = assert_same_run(LanguageModel, precision=precision, steps=6)
    assert monitor.snapshot is not None and len(monitor.history) == 6
    assert monitor.snapshot.sites == ("blocks.0.attention", "blocks.1.attention")
    assert monitor.snapshot.summary("entropy") is not None


def test_under_accumulation_and_clipping() -> None:
    assert_same_run(LanguageModel, accumulate_grad_batches=3, gradient_clip_val=0.1, steps=20)


class InDeviceContext(LanguageModel):
    """Enters a mode of its own within the step, around the model and around nothing."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        with torch.device("cpu"):
            torch.zeros(1)
            return super().training_step(batch, batch_idx)


class ReturnsNoneAtTimes(LanguageModel):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


@pytest.mark.parametrize("model_class", [InDeviceContext, ReturnsNoneAtTimes])
def test_in_awkward_training_steps(model_class: type[Trained]) -> None:
    assert_same_run(model_class, steps=12)


class WrittenOut(Attention):
    """The same attention in products and a softmax."""

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT * (WIDTH // HEADS) ** -0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = functional.dropout(scores.masked_fill(later, -torch.inf).softmax(-1), 0.1, self.training)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class WrittenOutLanguageModel(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = WrittenOut(is_causal=True)


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default]
CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "none": lambda block, hidden: block(hidden),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, PRODUCTS)
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("model_class", [LanguageModel, WrittenOutLanguageModel])
def test_under_activation_checkpointing(model_class: type[LanguageModel], kind: str) -> None:
    class Checkpointed(model_class):  # type: ignore[misc, valid-type]
        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.embedding(tokens)
            for block in self.blocks:
                hidden = CHECKPOINTS[kind](block, hidden)
            return self.head(hidden)

    monitor = assert_same_run(Checkpointed, steps=12)
    assert len(monitor.history) == 12
    assert monitor.snapshot is not None
    assert monitor.snapshot.sites == ("blocks.0.attention", "blocks.1.attention")


def test_inside_a_device_context_of_the_user() -> None:
    with torch.device("cpu"):
        monitor = assert_same_run(LanguageModel, steps=6)
    assert monitor.history


class Raises(LanguageModel):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            raise RuntimeError("out of luck")
        return loss


def test_after_a_training_step_that_raised() -> None:
    """The next run in the same process is not changed by what the exception interrupted."""
    plain, _ = run(LanguageModel, steps=6)
    with pytest.raises(RuntimeError, match="out of luck"):
        run(Raises, AttentionMonitor(every_n_steps=1), steps=6)
    again, _ = run(LanguageModel, steps=6)
    assert again.losses == plain.losses
