"""When AttentionMonitor captures, and what it gives to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from models import HEADS, LanguageModel, Trained, VisionTransformer, batches, fit, trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lightning_attn import AttentionMonitor, AttentionWarning, Snapshot
from lightning_attn.callbacks import session
from lightning_attn.statistics import known_statistics
from lightning_attn.tensorboard import statistics_table

SITES = ("blocks.0.attention", "blocks.1.attention")


def mock_logger() -> Mock:
    logger = Mock(spec=pl.loggers.Logger)
    logger.group_separator = "/"
    return logger


def logged(logger: Mock) -> list[tuple[dict[str, float], int]]:
    """Everything that was logged, by us or by Lightning itself: metrics and step."""
    calls = logger.log_metrics.call_args_list
    return [(call.args[0] if call.args else call.kwargs["metrics"], call.kwargs["step"]) for call in calls]


def logged_steps(logger: Mock, tag: str = "attention") -> list[int]:
    """The steps at which something with such a tag was logged, each by one call."""
    return [step for metrics, step in logged(logger) if any(tag in key for key in metrics)]


# What is logged


def test_the_complete_scalars_of_a_snapshot() -> None:
    logger, monitor = (
        mock_logger(),
        AttentionMonitor(every_n_steps=4, statistics=["entropy", "max_logit", "self_weight"]),
    )
    fit(LanguageModel(), monitor, logger=logger)
    assert logged_steps(logger) == [0, 4]
    assert monitor.snapshot is not None
    heads = torch.tensor([monitor.snapshot[site, "entropy"] for site in SITES])
    logits = torch.tensor([monitor.snapshot[site, "max_logit"] for site in SITES])
    weights = torch.tensor([monitor.snapshot[site, "self_weight"] for site in SITES])
    expected = {
        "attention/entropy/min": heads.min(),
        "attention/entropy/mean": heads.mean(),
        "attention/entropy/max": heads.max(),
        "attention/entropy/blocks.0.attention": heads[0].mean(),
        "attention/entropy/blocks.1.attention": heads[1].mean(),
        "attention/max_logit/min": logits.min(),
        "attention/max_logit/mean": logits.mean(),
        "attention/max_logit/max": logits.max(),
        "attention/max_logit/blocks.0.attention": logits[0].max(),
        "attention/max_logit/blocks.1.attention": logits[1].max(),
        "attention/self_weight/min": weights.min(),
        "attention/self_weight/mean": weights.mean(),
        "attention/self_weight/max": weights.max(),
    }
    (metrics,) = [metrics for metrics, step in logged(logger) if step == 4]
    assert metrics == pytest.approx({tag: float(value) for tag, value in expected.items()}, rel=1e-6)


def test_the_complete_scalars_of_statistics_of_sites() -> None:
    """Summaries are over sites; the similarity of tokens has a scalar for each of them."""
    logger = mock_logger()
    monitor = AttentionMonitor(
        statistics=["token_similarity", "massive_activation"], callback_metrics="token_similarity/max"
    )
    running = fit(LanguageModel(), monitor, logger=logger, steps=1)
    assert monitor.snapshot is not None
    similarity, ratio = (
        [monitor.snapshot[site, name] for site in SITES] for name in ("token_similarity", "massive_activation")
    )
    assert all(len(of_site) == 1 for of_site in similarity + ratio)
    (first,), (second,) = similarity
    (one,), (other,) = ratio
    assert None not in (first, second, one, other)
    ((metrics, _),) = [
        (metrics, step) for metrics, step in logged(logger) if any("attention" in key for key in metrics)
    ]
    assert metrics == pytest.approx(
        {
            "attention/token_similarity/min": min(first, second),
            "attention/token_similarity/mean": (first + second) / 2,
            "attention/token_similarity/max": max(first, second),
            "attention/token_similarity/blocks.0.attention": first,
            "attention/token_similarity/blocks.1.attention": second,
            "attention/massive_activation/min": min(one, other),
            "attention/massive_activation/mean": (one + other) / 2,
            "attention/massive_activation/max": max(one, other),
        }
    )
    assert running.callback_metrics["attention/token_similarity/max"] == pytest.approx(max(first, second))


def test_every_statistic_by_default_and_every_logger() -> None:
    loggers = [mock_logger(), mock_logger()]
    loggers[1].group_separator = "_"
    fit(LanguageModel(), AttentionMonitor(), logger=loggers, steps=1)
    tags = set(logged(loggers[0])[0][0])
    by_default = {name for name, statistic in known_statistics().items() if statistic.by_default}
    faults = {name for name, statistic in known_statistics().items() if statistic.is_fault}
    assert {tag.split("/")[1] for tag in tags} == by_default - faults
    assert set(logged(loggers[1])[0][0]) == {tag.replace("/", "_") for tag in tags}


def test_every_statistic_there_is() -> None:
    """Those that the attention of this model has: it is causal, and its sequences are short."""
    logger = mock_logger()
    fit(LanguageModel(), AttentionMonitor(statistics="all", strict=True), logger=logger, steps=2)
    absent = {"sinkhorn_distance", "state_stable_rank", "state_effective_rank", "state_participation_ratio"}
    faults = {name for name, statistic in known_statistics().items() if statistic.is_fault}
    found = {tag.split("/")[1] for tag in logged(logger)[0][0]}
    assert set(known_statistics()) - faults - absent <= found | {"sink_rate", "any_sink_rate", "sink_position"}


def test_scalars_and_heat_maps_in_tensorboard(tmp_path: Path) -> None:
    import matplotlib.pyplot

    logger = TensorBoardLogger(tmp_path, name="", version="")
    monitor = AttentionMonitor(every_n_steps=2, heat_map_every_n_steps=4, statistics=["entropy", "stable_rank"])
    fit(LanguageModel(), monitor, logger=logger, steps=7)
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("attention/entropy/min")] == [0, 2, 4, 6]
    assert events.Tags()["images"] == ["attention_heads/entropy", "attention_heads/stable_rank"]
    pictures = events.Images("attention_heads/entropy")
    assert [picture.step for picture in pictures] == [0, 4]
    assert all(picture.width > 200 and picture.height > 100 for picture in pictures)
    assert not matplotlib.pyplot.get_fignums()
    (key,) = events.Tensors("attention_statistics/text_summary")  # once, with the first scalars
    text = key.tensor_proto.string_val[0].decode()
    assert (key.step, text) == (0, statistics_table(["entropy", "stable_rank"]))
    assert known_statistics()["entropy"].reading in text


def test_many_sites_give_way_to_heat_maps() -> None:
    logger = mock_logger()
    with pytest.warns(AttentionWarning, match="logs summaries over all heads, and the sites are in the heat maps"):
        fit(LanguageModel(blocks=60), AttentionMonitor(), logger=logger, steps=1)
    tags = logged(logger)[0][0]
    assert len(tags) <= 250
    assert not any("blocks" in tag for tag in tags)


def test_a_csv_logger(tmp_path: Path) -> None:
    fit(LanguageModel(), AttentionMonitor(every_n_steps=2), logger=CSVLogger(tmp_path, name="", version=""))
    assert "attention/entropy/blocks.1.attention" in (tmp_path / "metrics.csv").read_text().splitlines()[0]


# When it captures


@pytest.mark.parametrize(
    ("every_n_steps", "steps"),
    [(1, [0, 1, 2, 3, 4, 5]), (4, [0, 4]), (100, [0]), ({0: 1, 3: 2}, [0, 1, 2, 3, 5]), ({0: 5, 1: 2}, [0, 1, 3, 5])],
)
def test_cadence(every_n_steps: int | dict[int, int], steps: list[int]) -> None:
    monitor = AttentionMonitor(every_n_steps)
    fit(LanguageModel(), monitor)
    assert monitor.history.steps == steps


def test_one_capture_for_each_window_of_accumulation() -> None:
    logger, monitor = mock_logger(), AttentionMonitor(every_n_steps=2)
    running = fit(LanguageModel(), monitor, logger=logger, steps=12, accumulate_grad_batches=3, log_every_n_steps=1)
    assert running.global_step == 4
    assert logged_steps(logger) == monitor.history.steps == [0, 2]


class Adversarial(Trained):
    """Two optimisers by hand, of which the second steps every second batch."""

    def __init__(self, batches_per_step: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.batches_per_step = batches_per_step
        self.generator, self.critic = LanguageModel(), LanguageModel()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, model in ((first, self.generator), (second, self.critic)):
            if batch_idx % self.batches_per_step == 0:
                optimizer.zero_grad()
            loss = model.loss(batch)
            self.manual_backward(loss)
            if (batch_idx + 1) % self.batches_per_step == 0:
                optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters(), lr=0.1) for model in (self.generator, self.critic)]


def test_two_optimisers_by_hand_are_one_step() -> None:
    logger, monitor = mock_logger(), AttentionMonitor(every_n_steps=2)
    running = fit(Adversarial(), monitor, logger=logger, log_every_n_steps=1)
    assert running.global_step == 12
    assert monitor.history.steps == [0, 2, 4]
    assert set(monitor.history[0].sites) == {f"{part}.{site}" for part in ("generator", "critic") for site in SITES}
    # The curves lie on Lightning's own steps.
    assert set(logged_steps(logger)) <= set(logged_steps(logger, "loss"))


def test_accumulation_by_hand_counts_optimiser_steps() -> None:
    monitor = AttentionMonitor(every_n_steps=1)
    fit(Adversarial(batches_per_step=3), monitor, steps=9)
    assert len(monitor.history) == 3


class QuasiNewton(LanguageModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=4)


def test_a_closure_that_runs_often_is_seen_once() -> None:
    monitor = AttentionMonitor(every_n_steps=1, statistics="hidden_row_share")
    model = QuasiNewton()
    fit(model, monitor, steps=2)
    assert len(model.losses) > 4
    assert monitor.history.steps == [0, 1]


def test_sanity_check_is_not_watched() -> None:
    monitor = AttentionMonitor(stage="validate")
    running = trainer(monitor, num_sanity_val_steps=2, limit_train_batches=0)
    running.fit(LanguageModel(), batches(2), batches(2))
    assert not monitor.history


def test_validation_watches_the_first_batch_of_every_run() -> None:
    logger, monitor = mock_logger(), AttentionMonitor(stage="validate")

    class Frozen(LanguageModel):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    fit(Frozen(), monitor, logger=logger, steps=6, validation=3, val_check_interval=2)
    assert monitor.history.steps == [1, 3, 5]
    first, *others = monitor.history
    assert all(first.to_dict() == other.to_dict() for other in others)  # the same batch, the same weights
    assert logged_steps(logger, "attention_validate/entropy/min") == [1, 3, 5]


def test_validation_alone() -> None:
    monitor = AttentionMonitor(stage="validate")
    trainer(monitor).validate(LanguageModel(), batches(2), verbose=False)
    assert len(monitor.history) == 1


@pytest.mark.parametrize("arguments", [{"fast_dev_run": 3}, {"precision": "bf16-mixed"}, {"logger": True}])
def test_other_ways_of_training(arguments: dict[str, Any], tmp_path: Path) -> None:
    monitor = AttentionMonitor(every_n_steps=2)
    fit(LanguageModel(), monitor, steps=3, default_root_dir=tmp_path, **arguments)
    assert monitor.history.steps == [0, 2]


def test_the_other_lightning_package() -> None:
    import pytorch_lightning

    class Model(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.layer(nn.functional.one_hot(batch[0] % 8, 8).float()).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monitor = AttentionMonitor(every_n_steps=2, print_summary=False)
    running = pytorch_lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[monitor],
    )  # fmt: skip
    running.fit(Model(), batches(3))
    assert monitor.history.steps == [0, 2]


# State


def test_a_resumed_run_captures_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = AttentionMonitor(every_n_steps=4)
    fit(LanguageModel(), whole, steps=5, max_epochs=3)

    before = AttentionMonitor(every_n_steps=4)
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=7, save_top_k=-1)
    fit(LanguageModel(), before, checkpoints, steps=5, max_epochs=2, enable_checkpointing=True)
    (path,) = tmp_path.glob("*step=7.ckpt")
    after = AttentionMonitor(every_n_steps=4)
    trainer(after, max_epochs=3).fit(LanguageModel(), batches(5), ckpt_path=path)
    assert whole.history.steps == [0, 4, 8, 12]
    assert after.history.steps == [8, 12]


def test_a_run_goes_on_from_a_checkpoint_that_knows_less(tmp_path: Path) -> None:
    """Of the first version, which did not keep Lightning's count beside its own."""
    running = fit(LanguageModel(), AttentionMonitor(every_n_steps=4), steps=6)
    running.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    (state,) = checkpoint["callbacks"].values()
    del state["global_step"]
    torch.save(checkpoint, tmp_path / "last.ckpt")
    after = AttentionMonitor(every_n_steps=4)
    trainer(after, max_epochs=3).fit(LanguageModel(), batches(6), ckpt_path=tmp_path / "last.ckpt")
    assert after.history.steps == [8, 12, 16]


def test_a_resumed_run_knows_its_callback_metrics_before_the_next_capture(tmp_path: Path) -> None:
    def callbacks() -> list[pl.Callback]:
        monitor = AttentionMonitor(every_n_steps=50, callback_metrics="entropy/min")
        return [monitor, EarlyStopping("attention/entropy/min", patience=9, check_on_train_epoch_end=True)]

    before = fit(LanguageModel(), *callbacks(), steps=4)
    before.save_checkpoint(tmp_path / "last.ckpt")
    after = trainer(*callbacks(), max_epochs=3)
    after.fit(LanguageModel(), batches(4), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert after.current_epoch == 3
    assert after.callback_metrics["attention/entropy/min"] == before.callback_metrics["attention/entropy/min"]


class SkipsBatches(LanguageModel):
    """Returns before it has computed anything in two batches of three."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return super().training_step(batch, batch_idx) if batch_idx % 3 == 2 else None


def test_a_batch_without_attention_is_made_up_for_by_the_next() -> None:
    monitor = AttentionMonitor(every_n_steps=1)
    fit(SkipsBatches(), monitor, steps=9)
    assert len(monitor.history) == 3


def test_a_model_without_attention_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(session.CaptureSession, "_watch", lambda *_: tried.append(True))
    monkeypatch.setattr(
        session.AttentionObserver, "snapshot", lambda self, step: Snapshot(step, {}, (), torch.empty(0, 0))
    )
    fit(NoAttention(), AttentionMonitor(every_n_steps=100), steps=30)
    assert len(tried) == 10


def test_callback_metrics_that_no_head_defines_are_told() -> None:
    """Of one sequence it cannot be told what sequences have in common."""
    with pytest.warns(AttentionWarning, match="'positional_share/min' of `callback_metrics` has no value"):
        fit(LanguageModel(), AttentionMonitor(callback_metrics=["positional_share/min"], max_sequences=1), steps=1)


def test_monitors_that_differ_in_anything_can_share_a_trainer() -> None:
    monitors = [AttentionMonitor(max_sequences=1), AttentionMonitor(max_sequences=2), AttentionMonitor(prefix="other")]
    fit(LanguageModel(), *monitors, steps=1)
    assert all(monitor.history for monitor in monitors)


def test_two_monitors_share_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = []

    class Counted(session.AttentionObserver):
        def snapshot(self, step: int = 0) -> Snapshot:
            snapshots.append(step)
            return super().snapshot(step)

    monkeypatch.setattr(session, "AttentionObserver", Counted)
    often = AttentionMonitor(every_n_steps=2, sites="blocks.0.*", statistics=["entropy"], print_summary=False)
    rarely = AttentionMonitor(every_n_steps=3, statistics=["max_logit", "stable_rank"], max_sequences=2)
    fit(LanguageModel(), often, rarely, steps=7)
    assert snapshots == [0, 2, 3, 4, 6]
    assert often.history.steps == [0, 2, 4, 6]
    assert rarely.history.steps == [0, 3, 6]
    assert often.history[0].sites == SITES[:1]
    assert often.history[0].statistics == ("entropy",)
    assert rarely.history[0].sites == SITES
    assert rarely.history[0].statistics == ("max_logit", "stable_rank")


def test_each_step_is_measured_anew() -> None:
    """Sums of one capture do not leak into the next."""
    once, often = AttentionMonitor(every_n_steps={0: 100}), AttentionMonitor(every_n_steps={0: 1})
    fit(LanguageModel(), often, steps=3)
    torch.manual_seed(0)
    fit(LanguageModel(), once, steps=1)
    assert once.history[0] == often.history[0]
    assert often.history[1] != often.history[0]


# Other callbacks


def test_checkpoints_and_early_stopping_monitor_attention(tmp_path: Path) -> None:
    monitor = AttentionMonitor(every_n_steps=2, callback_metrics=["entropy/min", "max_logit/max"])
    checkpoints = ModelCheckpoint(tmp_path, monitor="attention/entropy/min", mode="max", every_n_train_steps=2)
    stop = EarlyStopping("attention/max_logit/max", mode="max", stopping_threshold=-1e9, check_on_train_epoch_end=True)
    running = fit(LanguageModel(), monitor, checkpoints, stop, steps=6, max_epochs=3, enable_checkpointing=True)
    assert running.current_epoch == 1
    assert monitor.snapshot is not None
    summary = monitor.snapshot.summary("entropy")
    assert summary is not None
    assert running.callback_metrics["attention/entropy/min"] == pytest.approx(summary.min)
    minima = [snapshot.summary("entropy").min for snapshot in monitor.history]
    assert float(checkpoints.best_model_score) == pytest.approx(max(minima))


def test_validation_metrics_reach_checkpoints(tmp_path: Path) -> None:
    monitor = AttentionMonitor(stage="validate", callback_metrics=["entropy/mean"])
    checkpoints = ModelCheckpoint(tmp_path, monitor="attention_validate/entropy/mean")
    fit(VisionTransformer(), monitor, checkpoints, steps=2, validation=2, enable_checkpointing=True)
    assert checkpoints.best_model_score is not None


# What it prints


def test_the_table_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    fit(LanguageModel(), AttentionMonitor(every_n_steps=2))
    printed = capsys.readouterr().out
    assert "Attention at step 4: 2 sites, 8 heads" in printed
    assert "blocks.1.attention #" in printed
    fit(LanguageModel(), AttentionMonitor(print_summary=False))
    assert "Attention at step" not in capsys.readouterr().out


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "`every_n_steps` must be a positive integer, .* got 0"),
        ({"every_n_steps": 2.5}, "`every_n_steps` .* got 2.5"),
        ({"every_n_steps": {10: 5}}, r"`every_n_steps` .* \(one of them 0\) .* got {10: 5}"),
        ({"every_n_steps": {0: 5, 10: 0}}, "`every_n_steps`"),
        ({"every_n_steps": True}, "`every_n_steps`"),
        ({"statistics": ["entropie"]}, "`statistics` holds 'entropie', .* Did you mean 'entropy'?"),
        ({"statistics": []}, "`statistics` must name at least one"),
        ({"sites": []}, "`sites` must be a glob pattern"),
        ({"sites": [3]}, "`sites` must be a glob pattern"),
        ({"max_sequences": 0}, "`max_sequences` must be a positive integer, .* got 0"),
        ({"spectral_sequences": -1}, "`spectral_sequences` must be a positive integer, .* got -1"),
        ({"stage": "test"}, "`stage` must be 'train' or 'validate', got 'test'"),
        ({"heat_map_every_n_steps": 0}, "`heat_map_every_n_steps` must be"),
        ({"heat_map_every_n_steps": 0}, "or None for no heat maps, got 0"),
        ({"history_size": 0}, "`history_size` must be"),
        ({"callback_metrics": ["entropy/median"]}, "`callback_metrics` holds 'entropy/median'; allowed is"),
        (
            {"callback_metrics": ["max_logit/max"], "statistics": ["entropy"]},
            "`callback_metrics` holds 'max_logit/max'",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        AttentionMonitor(**arguments)


def test_a_pattern_that_matches_no_module() -> None:
    with pytest.raises(MisconfigurationException, match=r"'block\.\*', which matches none .* Did you mean 'blocks"):
        fit(LanguageModel(), AttentionMonitor(sites=["block.*"]))


def test_a_pattern_that_matches_modules_without_attention() -> None:
    with pytest.warns(AttentionWarning, match=r"No attention was seen at the sites 'head'; it was at \['blocks.0"):
        fit(LanguageModel(), AttentionMonitor(sites=["blocks.0.*", "head"]))


class NoAttention(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[0].float()).square().mean()


def test_a_model_without_attention_is_told_once() -> None:
    with pytest.warns(AttentionWarning) as said:
        fit(NoAttention(), AttentionMonitor(every_n_steps=1))
    (message,) = [str(warning.message) for warning in said if warning.category is AttentionWarning]
    assert message.startswith("No attention was seen at the sites ['*'] of NoAttention")


class Overflows(LanguageModel):
    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 2:
            with torch.no_grad():
                self.blocks[1].attention.qkv.weight.mul_(1e30)


def test_logits_that_overflow_are_counted_and_reported() -> None:
    logger, monitor = mock_logger(), AttentionMonitor(every_n_steps=2)
    with pytest.warns(
        AttentionWarning, match="At step 2 attention logits at 'blocks.1.attention' are infinite or NaN"
    ) as said:
        fit(Overflows(), monitor, logger=logger, steps=3)
    assert sum("infinite or NaN" in str(warning.message) for warning in said) == 1
    assert monitor.snapshot is not None
    assert monitor.snapshot["blocks.0.attention", "non_finite_share"] == [0.0] * HEADS
    assert monitor.snapshot.over_heads("blocks.1.attention", "non_finite_share") > 0
    assert logged_steps(logger, "attention/non_finite_share/max") == [2]
    assert not logged_steps(logger, "attention/hidden_row_share/max")
