"""Ranks that do not do the same: what they see is the same all the same, or all of them end soon."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from collectives import collectives, counted_captures
from distributed_training import strategy
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache
from listening import hearing
from models import LanguageModel, batches, trainer
from rank_pool import Raised, RankPool
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_attn import AttentionMonitor
from lightning_attn.callbacks.summaries import summary_value
from lightning_attn.statistics import known_statistics

FIRST, STEADY = ["MAX", "gather", "MAX", "SUM"], ["MAX", "SUM"]
#: News for which the layout has room already.
SAID = ["MAX", "gather", "SUM"]


class Batches(IterableDataset[Tensor]):
    """So many batches, which nobody knows before; each rank has its own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        tokens = torch.randint(32, (8, 4, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
        yield from tokens[: self.count]


def loader(count: int) -> DataLoader[Any]:
    return DataLoader(Batches(count), batch_size=None)


class Trained(LanguageModel):
    """Validates without its ranks asking each other; batches are plain tensors."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss([batch] if isinstance(batch, Tensor) else batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.loss(batch)


def watched(
    model: pl.LightningModule,
    *monitors: AttentionMonitor,
    callbacks: tuple[pl.Callback, ...] = (),
    train: Any = None,
    validate: Any = None,
    path: str | None = None,
    save: str | None = None,
    parallel: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Train on all ranks: what their monitors saw, what was said, and the collectives."""
    running = trainer(
        *monitors, *callbacks, strategy=strategy(**(parallel or {})), devices=dist.get_world_size(),
        use_distributed_sampler=False, num_sanity_val_steps=arguments.pop("num_sanity_val_steps", 0), **arguments,
    )  # fmt: skip
    printed = io.StringIO()
    with hearing() as said, counted_captures() as captures, contextlib.redirect_stdout(printed):
        running.fit(model, loader(6) if train is None else train, validate, ckpt_path=path)
    if save is not None:
        running.save_checkpoint(save)
    return {
        "histories": [[snapshot.to_dict() for snapshot in monitor.history] for monitor in monitors],
        "steps": [monitor.history.steps for monitor in monitors],
        "metrics": {name: value.item() for name, value in running.callback_metrics.items() if "attention" in name},
        "collectives": captures,
        "said": said,
        "printed": printed.getvalue(),
    }


def monitor(every_n_steps: int = 2, **arguments: Any) -> AttentionMonitor:
    return AttentionMonitor(every_n_steps, **{"statistics": ["entropy", "max_logit"], **arguments})


def agree(results: list[dict[str, Any]], but: tuple[str, ...] = ("said", "printed")) -> dict[str, Any]:
    """What all ranks have alike."""
    first, *others = ({name: found for name, found in result.items() if name not in but} for result in results)
    for other in others:
        assert repr(other) == repr(first)
    return first


# Nothing, or something else, on one rank.


class SkipsAttention(Trained):
    """Its attention does not run on the last rank at times: in its first steps, or always."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self.until = until

    def forward(self, tokens: Tensor) -> Tensor:
        if dist.get_rank() == dist.get_world_size() - 1 and self.global_step < self.until:
            return self.head(self.embedding(tokens))
        return super().forward(tokens)


def a_rank_without_attention(until: int) -> dict[str, Any]:
    return watched(SkipsAttention(until), monitor(), parallel={"find_unused_parameters": True})


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("until", [1, 100])
def test_a_rank_that_records_nothing(until: int, world: int, ranks: RankPool) -> None:
    results = ranks(a_rank_without_attention, until, ranks=world)
    alike = agree(results)
    assert alike["steps"] == [[0, 2, 4]]
    assert alike["collectives"] == [FIRST, STEADY, STEADY]
    assert [result["said"] for result in results] == [[]] * world


class NoAttention(Trained):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def no_attention() -> dict[str, Any]:
    return watched(NoAttention(), monitor(), parallel={"find_unused_parameters": True}, train=loader(8))


def test_that_there_is_no_attention_is_said_by_rank_zero_alone(ranks: RankPool) -> None:
    first, second = ranks(no_attention)
    assert agree([first, second])["histories"] == [[]]
    assert len(first["said"]) == 1 and "No attention was seen" in first["said"][0]
    assert not second["said"]


class Experts(Trained):
    """Each rank chooses a block, in turn."""

    def __init__(self) -> None:
        super().__init__(blocks=4)

    def forward(self, tokens: Tensor) -> Tensor:
        mine = self.blocks[(self.global_step + dist.get_rank()) % 4]
        return self.head(mine(self.embedding(tokens)))


def experts() -> dict[str, Any]:
    return watched(Experts(), monitor(1), parallel={"find_unused_parameters": True})


def test_sites_that_run_on_one_rank_only(ranks: RankPool) -> None:
    results = ranks(experts)
    alike = agree(results)
    ran = [{f"blocks.{(step + rank) % 4}.attention" for rank in (0, 1)} for step in range(6)]
    assert [snapshot.keys() for snapshot in alike["histories"][0]] == ran
    # Two new sites, one new site, one new site; then all are known.
    assert alike["collectives"] == [FIRST, FIRST, FIRST, STEADY, STEADY, STEADY]


def a_fault_on(faulty: list[int]) -> dict[str, Any]:
    statistic, compute = known_statistics()["entropy"], known_statistics()["entropy"].values  # type: ignore[attr-defined]
    seen = []

    def values(self: Any, rows: Any) -> Tensor:
        seen.append(1)
        if dist.get_rank() in faulty and model.global_step >= 2:  # small calls are measured when the batch has ended
            raise ArithmeticError("no such number")
        result: Tensor = compute(self, rows)
        return result

    model = Trained()
    with patch.object(statistic, "values", values):
        result = watched(model, monitor(1))
    assert seen
    return result


@pytest.mark.parametrize("faulty", [[1], [0, 1], [2, 3], [0, 1, 2, 3]])
def test_a_fault_of_a_statistic_gives_its_sites_up_on_all_ranks_and_is_said_by_one(
    faulty: list[int], ranks: RankPool
) -> None:
    world = 4 if 3 in faulty else 2
    results = ranks(a_fault_on, faulty, ranks=world)
    alike = agree(results)
    assert alike["steps"] == [[0]]
    assert alike["collectives"] == [FIRST, SAID, *[STEADY] * (len(alike["collectives"]) - 2)]
    for rank, result in enumerate(results):
        assert len(result["said"]) == (2 if rank == faulty[0] else 0), result["said"]
        assert all("no such number" in message for message in result["said"])


# Validation.


class Holds(pl.Callback):
    """What other callbacks find among the metrics when a validation run ends."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.found.append(trainer.callback_metrics["attention_validate/entropy/min"].item())


def uneven_validation(counts: list[list[int]], sanity: int = 0) -> dict[str, Any]:
    """Some loaders, with other numbers of batches on each rank."""
    validating = monitor(stage="validate", callback_metrics="entropy/min", max_sequences=None)
    holds = Holds()
    callbacks = (holds, EarlyStopping("attention_validate/entropy/min", patience=100, check_finite=True))
    mine = [loader(of_ranks[dist.get_rank()]) for of_ranks in counts]
    torch.manual_seed(1)
    result = watched(
        Trained().eval(),
        validating,
        monitor(3),
        callbacks=callbacks,
        validate=mine,
        val_check_interval=3,
        num_sanity_val_steps=sanity,
    )
    return {**result, "held": holds.found}


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("counts", [[[2, 0]], [[0, 2]], [[1, 4]], [[2, 0], [2, 2]], [[1, 0], [0, 3]]], ids=str)
def test_validation_on_unequal_ranks(counts: list[list[int]], sanity: int, ranks: RankPool) -> None:
    alike = agree(ranks(uneven_validation, counts, sanity))
    assert alike["steps"] == [[2, 5], [0, 3]]  # as Lightning logs the losses of these validation runs
    assert len(alike["held"]) == 2
    assert alike["collectives"] == [FIRST, STEADY, STEADY, STEADY]
    assert alike["metrics"]["attention_validate/entropy/min"] == alike["held"][-1]


def test_only_the_first_batch_of_the_first_loader_counts(ranks: RankPool) -> None:
    """With nothing in it on the second rank, the validation is as that of the first alone."""
    alone, *_ = ranks(uneven_validation, [[1, 0]])
    for counts in ([[3, 0]], [[3, 0], [1, 2]]):
        first, second = ranks(uneven_validation, counts)
        assert first["histories"][0] == second["histories"][0] == alone["histories"][0]


def validation_metrics(stage: str) -> dict[str, Any]:
    """What Lightning has to say of the values that other callbacks may monitor, and what they are."""
    warning_cache.clear()  # of what was said in this process already
    watching = monitor(1, stage=stage, callback_metrics=["entropy/min", "max_logit/max"])
    with collectives() as called:
        result = watched(Trained().eval(), watching, train=loader(2), validate=loader(2), max_epochs=2)
    snapshot = watching.snapshot
    assert snapshot is not None
    values = {name: summary_value(snapshot, name) for name in ("entropy/min", "max_logit/max")}
    advice = [message for message in warning_cache if "sync_dist" in message]
    return {**result, "advice": advice, "values": values, "all collectives": called}


@pytest.mark.parametrize(("stage", "prefix"), [("train", "attention"), ("validate", "attention_validate")])
def test_values_to_be_monitored_are_reduced_already_and_draw_no_advice(
    stage: str, prefix: str, ranks: RankPool
) -> None:
    alike = agree(ranks(validation_metrics, stage))
    assert alike["metrics"] == {f"{prefix}/{name}": pytest.approx(value) for name, value in alike["values"].items()}
    assert alike["advice"] == []
    of_captures = [called for capture in alike["collectives"] for called in capture]
    of_lightning = ("broadcast_object_list", "broadcast", "barrier")
    assert [called for called in alike["all collectives"] if called not in of_lightning] == of_captures


class AllowsNoBatches(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True


def no_validation_on_a_rank() -> dict[str, Any]:
    data = DataLoader(batches(2 * (dist.get_rank() == 0)).dataset, batch_size=4)
    return watched(AllowsNoBatches(), monitor(stage="validate"), validate=data)


def test_validation_that_a_rank_may_leave_out_is_not_watched_and_said(ranks: RankPool) -> None:
    first, second = ranks(no_validation_on_a_rank, seconds=30)
    assert agree([first, second])["histories"] == [[]]
    assert "allow_zero_length_dataloader_with_multiple_devices" in first["said"][0]
    assert not second["said"]


# Cadences.


def several_monitors() -> dict[str, Any]:
    monitors = (
        monitor(2, statistics="entropy"), monitor(3, statistics=["max_weight", "max_logit"]),
        monitor(4, statistics="entropy", sites="blocks.1*", max_overhead=0.5),
    )  # fmt: skip
    return watched(Trained(), *monitors, max_epochs=2)


def test_several_monitors_of_other_cadences_and_statistics(ranks: RankPool) -> None:
    alike = agree(ranks(several_monitors))
    assert alike["steps"][:2] == [[0, 2, 4, 6, 8, 10], [0, 3, 6, 9]]
    assert alike["collectives"] == [FIRST, *[STEADY] * (len(alike["collectives"]) - 1)]


def accumulated() -> dict[str, Any]:
    return watched(Trained(), monitor(1), train=loader(8), accumulate_grad_batches=3)


def test_accumulated_gradients(ranks: RankPool) -> None:
    """Which DDP does not synchronise in every batch."""
    alike = agree(ranks(accumulated))
    assert alike["steps"] == [[0, 1, 2]]
    assert alike["collectives"] == [FIRST, STEADY, STEADY]


class LeavesEpochs(Trained):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def epochs_left_early() -> dict[str, Any]:
    return watched(LeavesEpochs(), monitor(1), max_epochs=2)


def test_epochs_that_all_ranks_leave_early(ranks: RankPool) -> None:
    alike = agree(ranks(epochs_left_early))
    assert alike["steps"] == [[0, 1, 2, 3]]
    assert alike["collectives"] == [FIRST, STEADY, STEADY, STEADY]


def limited(limit: float, counts: list[int]) -> dict[str, Any]:
    data = batches(counts[dist.get_rank()])
    return watched(Trained(), monitor(1), train=data, limit_train_batches=limit, max_epochs=2)


@pytest.mark.parametrize(
    ("limit", "counts", "steps"), [(3, [4, 6], 6), (0.5, [4, 4], 4), (1, [1, 5], 2), (0.5, [4, 5], 4)]
)
def test_limited_numbers_of_batches(limit: float, counts: list[int], steps: int, ranks: RankPool) -> None:
    alike = agree(ranks(limited, limit, counts))
    assert alike["steps"] == [list(range(steps))]
    assert alike["collectives"] == [FIRST, *[STEADY] * (steps - 1)]


# Ends.


class Stops(pl.Callback):
    def __init__(self, on: list[int]) -> None:
        self.on = on

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2 and dist.get_rank() in self.on:
            trainer.should_stop = True


def stopped(on: list[int], watching: bool = True) -> dict[str, Any]:
    return watched(Trained(), *[monitor(1)] * watching, callbacks=(Stops(on),))


def test_ranks_that_stop_together(ranks: RankPool) -> None:
    alike = agree(ranks(stopped, [0, 1]))
    assert alike["steps"] == [[0, 1, 2]]
    assert alike["collectives"] == [FIRST, STEADY, STEADY]


def uneven_training(counts: list[int], watching: bool = True) -> dict[str, Any]:
    return watched(Trained(), *[monitor(1)] * watching, train=loader(counts[dist.get_rank()]))


ONE_GOES_ON = [(stopped, [0]), (stopped, [1]), (uneven_training, [2, 4]), (uneven_training, [4, 2])]


@pytest.mark.parametrize(
    ("function", "argument"), ONE_GOES_ON, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_rank_that_goes_on_without_another_ends_soon_as_it_does_unwatched(
    function: Callable[..., Any], argument: list[int], ranks: RankPool
) -> None:
    """Gradients are joined by all ranks, so that the training itself cannot go on."""
    plain = ranks.try_on(function, argument, False, seconds=20)
    assert any(isinstance(result, Raised) for result in plain)
    ended = ranks.try_on(function, argument, seconds=20)
    assert any(isinstance(result, Raised) for result in ended)


def watched_on(which: list[int]) -> dict[str, Any]:
    """On a process group whose time is short."""
    dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))._set_default_timeout(
        timedelta(seconds=1)
    )
    return watched(Trained(), *[monitor()] * (dist.get_rank() in which))


@pytest.mark.parametrize("which", [[0], [1]])
def test_the_callback_on_some_ranks_only_ends_soon_and_is_named_as_a_reason(which: list[int], ranks: RankPool) -> None:
    results = ranks.try_on(watched_on, which, seconds=20)
    assert all(isinstance(result, Raised) for result in results)
    assert "cannot be joined" in results[which[0]].error
    assert "the callback is on some ranks only" in results[which[0]].error


class Fails(Trained):
    """Raises on some ranks in the middle of a watched step."""

    def __init__(self, on: list[int]) -> None:
        super().__init__()
        self.on = on

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and dist.is_initialized() and dist.get_rank() in self.on:
            raise ArithmeticError("a bad batch")
        return loss


#: What was left on a rank by the run that failed.
_LEFT: dict[str, Any] = {}


def fails(on: list[int]) -> None:
    model, watching = Fails(on), monitor(1)
    try:
        watched(model, watching)
    finally:
        hooks = [left for name, left in vars(torch.nn.modules.module).items() if name.startswith("_global")]
        _LEFT["modes"] = torch._C._len_torch_function_stack()
        _LEFT["hooks"] = [left for left in hooks if isinstance(left, dict) and left]
        _LEFT["of modules"] = [name for name, part in model.blocks.named_modules() if part._forward_hooks]
        _LEFT["steps"] = watching.history.steps


def trains_again() -> dict[str, Any]:
    return {**watched(Trained(), monitor(1)), "left": dict(_LEFT)}


@pytest.mark.parametrize("on", [[0], [1], [0, 1]])
def test_an_exception_in_a_watched_step_ends_all_ranks_and_leaves_nothing(on: list[int], ranks: RankPool) -> None:
    for rank, raised in enumerate(ranks.try_on(fails, on, seconds=20)):
        assert isinstance(raised, Raised)
        assert raised.error.startswith("ArithmeticError" if rank in on else "RuntimeError")
    alike = agree(ranks(trains_again, seconds=20))
    assert alike["left"] == {"modes": 0, "hooks": [], "of modules": [], "steps": [0, 1]}
    assert alike["steps"] == [[0, 1, 2, 3, 4, 5]]


# Checkpoints.


def saved(path: str) -> dict[str, Any]:
    return watched(Trained(), monitor(4), save=path)


def resumed(path: str, save: str | None = None, epochs: int = 2) -> dict[str, Any]:
    return watched(Trained(), monitor(4), path=path, max_epochs=epochs, save=save)


@pytest.mark.parametrize(("before", "between", "after"), [(2, 1, 2), (2, 4, 1), (4, 2, 4), (1, 4, 2)])
def test_the_cadence_goes_on_with_another_number_of_ranks(
    before: int, between: int, after: int, ranks: RankPool, tmp_path: Path
) -> None:
    paths = [str(tmp_path / f"{name}.ckpt") for name in ("before", "between")]
    assert agree(ranks(saved, paths[0], ranks=before))["steps"] == [[0, 4]]
    alike = agree(ranks(resumed, *paths, ranks=between))
    assert alike["steps"] == [[8]]
    alike = agree(ranks(resumed, paths[1], None, 3, ranks=after))
    assert alike["steps"] == [[12, 16]]
    assert alike["collectives"] == ([[], []] if after == 1 else [FIRST, STEADY])


# Who writes.


def logged(folder: str) -> dict[str, Any]:
    mine = Path(folder) / str(dist.get_rank())
    loggers = [CSVLogger(mine / "csv"), TensorBoardLogger(mine / "tensorboard")]
    result = watched(Trained(), monitor(2), logger=loggers, log_every_n_steps=100)
    return {**result, "files": sorted(file.name.split(".")[0] for file in mine.rglob("*") if file.is_file())}


def test_only_rank_zero_writes_and_prints(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(logged, str(tmp_path))
    agree([first, second], but=("said", "printed", "files"))
    assert "events" in first["files"] and "metrics" in first["files"]
    assert second["files"] == []
    assert "entropy" in first["printed"] and not second["printed"]
