"""Several ranks come to the same warnings, do the same about them, and one of them tells."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from collectives import collectives
from distributed_training import sharded_strategy, strategy
from early_warning_runs import SignsAt, lines, without_origin
from lightning.pytorch.loggers import TensorBoardLogger
from listening import hearing
from models import trainer
from rank_pool import RankPool
from shared_batches import EVEN, UNEVEN, SharesBatches
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from lightning_attn import AttentionEarlyWarning, AttentionMonitor, EarlyWarningError
from lightning_attn.warning import LimitRule, Rule

FILE = "attention_warnings.jsonl"
#: At the first batch of a run sites become known; see `test_monitor_on_ranks`.
FIRST, STEADY = ["MAX", "gather", "MAX", "SUM"], ["MAX", "SUM"]


def rules() -> list[Rule]:
    return [SignsAt([2], "scripted", heads=2), LimitRule("spread", "logit_std", above=0.05, patience=2)]


def warned(sizes: tuple[int, ...], folder: Path, action: Any = "warn", **arguments: Any) -> dict[str, Any]:
    """What comes of a run of six batches, of which each rank gets a part; every rank has a directory of its own."""
    mine = folder / (str(dist.get_rank()) if dist.is_initialized() else "alone")
    early_warning = AttentionEarlyWarning(
        rules(), "all", action, every_n_steps=1, max_sequences=None, **{"print_summary": True, **arguments}
    )
    model = SharesBatches(sizes, batches=6)
    ranks: dict[str, Any] = {"strategy": strategy(), "devices": dist.get_world_size()} if dist.is_initialized() else {}
    running = trainer(early_warning, use_distributed_sampler=False, default_root_dir=mine, **ranks)
    raised: list[Any] = []
    with redirect_stdout(io.StringIO()) as out, hearing() as said, collectives() as called:
        try:
            running.fit(model)
        except EarlyWarningError as error:
            raised = error.warnings
    return {
        "warnings": [warning.to_dict() for warning in early_warning.warnings],
        "stopped_for": early_warning.stopped_for and early_warning.stopped_for.rule,
        "raised": [warning.to_dict() for warning in raised],
        "steps": running.global_step,
        "said": said,
        "printed": out.getvalue(),
        "files": sorted(path.name for path in mine.rglob("*") if path.is_file()) if mine.exists() else [],
        "called": called,
    }


# What is found, and who tells it.


@pytest.mark.parametrize("sizes", [EVEN[2], UNEVEN[2]], ids=str)
def test_ranks_find_what_one_process_finds_and_the_first_one_tells(
    sizes: tuple[int, ...], ranks: RankPool, tmp_path: Path
) -> None:
    first, second = ranks(warned, sizes, tmp_path)
    alone = warned((sum(sizes),), tmp_path)
    assert alone["called"] == []
    assert first["warnings"] == second["warnings"]
    assert len(first["warnings"]) > 2
    for found, expected in zip(first["warnings"], alone["warnings"], strict=True):
        numbers = {"value", "slope"}
        assert {k: v for k, v in found.items() if k not in numbers} == {
            k: v for k, v in expected.items() if k not in numbers
        }
        assert found["value"] == pytest.approx(expected["value"], rel=1e-9)
        assert found["slope"] == pytest.approx(expected["slope"], rel=1e-6, abs=1e-9)
    assert len(first["said"]) == 2 and "Early warnings:" in first["printed"] and first["files"] == [FILE]
    assert (second["said"], second["printed"], second["files"]) == ([], "", [])


def to_tensorboard(folder: Path) -> list[str]:
    mine = folder / str(dist.get_rank())
    early_warning = AttentionEarlyWarning(rules(), "all", every_n_steps=1, print_summary=False)
    model = SharesBatches(EVEN[2], batches=6)
    running = trainer(
        early_warning,
        strategy=strategy(),
        devices=2,
        logger=TensorBoardLogger(mine, name="", version=""),
        default_root_dir=mine,
    )
    with hearing():
        running.fit(model)
    return sorted(path.name.split(".")[0] for path in mine.rglob("*") if path.is_file())


def test_only_the_first_rank_writes_to_loggers(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(to_tensorboard, tmp_path)
    assert "events" in first and "attention_warnings" in first and second == []


# What is done.


@pytest.mark.parametrize("sizes", [EVEN[2], UNEVEN[2]], ids=str)
def test_ranks_stop_together(sizes: tuple[int, ...], ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks(warned, sizes, tmp_path, {"scripted": "stop"}):
        assert (found["steps"], found["stopped_for"]) == (3, "scripted")


def test_all_ranks_raise_and_the_file_is_written_before(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(warned, EVEN[2], tmp_path, {"scripted": "raise"})
    assert first["raised"] == second["raised"]
    assert [(warning["step"], warning["rule"]) for warning in first["raised"]] == [(2, "scripted")] * 2
    assert [line["rule"] for line in lines(tmp_path / "0" / FILE)].count("scripted") == 2


def test_a_checkpoint_is_saved_once_and_ranks_go_on_from_it(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(warned, EVEN[2], tmp_path, {"scripted": "checkpoint"})
    assert first["files"] == [FILE, "early-warning-step=2.ckpt"] and second["files"] == []
    path = tmp_path / "0" / "checkpoints" / first["files"][1]
    before = [without_origin(line) for line in lines(tmp_path / "0" / FILE)]
    for found in ranks(gone_on, path, tmp_path / "0"):
        assert found == first["warnings"]
    assert [without_origin(line) for line in lines(tmp_path / "0" / FILE)] == before


def gone_on(path: Path, folder: Path) -> list[dict[str, Any]]:
    early_warning = AttentionEarlyWarning(
        rules(), "all", {"scripted": "checkpoint"}, every_n_steps=1, max_sequences=None, print_summary=False
    )
    running = trainer(
        early_warning, strategy=strategy(), devices=2, use_distributed_sampler=False, default_root_dir=folder
    )
    with hearing():
        running.fit(SharesBatches(EVEN[2], batches=6), ckpt_path=path)
    return [warning.to_dict() for warning in early_warning.warnings]


class Shards(SharesBatches):
    """Shards its blocks."""

    def configure_model(self) -> None:
        for module in [*self.transformer.blocks, self.transformer]:
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


def sharded(folder: Path, path: Path | None) -> list[dict[str, Any]]:
    mine = folder / str(dist.get_rank())
    early_warning = AttentionEarlyWarning(
        rules(), "all", {"scripted": "checkpoint"}, every_n_steps=1, max_sequences=None, print_summary=False
    )
    running = trainer(
        early_warning, strategy=sharded_strategy(), devices=2, use_distributed_sampler=False, default_root_dir=mine
    )
    with hearing():
        running.fit(Shards(EVEN[2], batches=6), ckpt_path=path)
    return [warning.to_dict() for warning in early_warning.warnings]


def test_sharded_models_are_saved_together_too(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(sharded, tmp_path, None)
    assert first == second and {warning["rule"] for warning in first} == {"scripted", "spread"}
    path = tmp_path / "0" / "checkpoints" / "early-warning-step=2.ckpt"
    assert ranks(sharded, tmp_path, path) == [first, first]
    assert [without_origin(line) for line in lines(tmp_path / "0" / FILE)] == first


# What it costs.


class Marks(pl.Callback):
    """Writes down where each batch begins."""

    def __init__(self, called: list[str]) -> None:
        self.called = called

    def on_train_batch_start(self, *_: Any) -> None:
        self.called.append("batch")


def collectives_of_batches(watching: str, folder: Path) -> tuple[list[list[str]], int]:
    """The collectives of each batch, and how many there were before the first."""
    early_warning = AttentionEarlyWarning(SignsAt([4]), every_n_steps=2, print_summary=False)
    monitor = AttentionMonitor(2, print_summary=False)
    callbacks = {"nothing": [], "early warning": [early_warning], "both": [monitor, early_warning]}[watching]
    model = SharesBatches(EVEN[2], batches=7)
    with collectives() as called, hearing():
        trainer(
            Marks(called),
            *callbacks,
            strategy=strategy(),
            devices=2,
            use_distributed_sampler=False,
            default_root_dir=folder,
        ).fit(model)
    before, *of_batches = " ".join(called).split("batch")
    return [of_batch.split() for of_batch in of_batches], len(before.split())


@pytest.mark.parametrize("watching", ["early warning", "both"])
def test_a_capture_costs_two_collectives_and_nothing_else_does(watching: str, ranks: RankPool, tmp_path: Path) -> None:
    """Warning costs none; a run begins with one, which tells all ranks where its files go."""
    bare = ranks(collectives_of_batches, "nothing", tmp_path)
    watched = ranks(collectives_of_batches, watching, tmp_path)
    expected = [FIRST, [], STEADY, [], STEADY, [], STEADY]
    for (without, before), (found, begin) in zip(bare, watched, strict=True):
        assert found == [[*more, *others] for others, more in zip(without, expected, strict=True)]
        assert begin == before + 1


def own_directories(folder: Path) -> str:
    """Ranks whose loggers disagree on where they write."""
    mine = folder / str(dist.get_rank())
    early_warning = AttentionEarlyWarning(SignsAt([1]), "all", ["checkpoint"], every_n_steps=1, print_summary=False)
    running = trainer(early_warning, strategy=strategy(), devices=2, default_root_dir=mine)
    with hearing():
        running.fit(SharesBatches(EVEN[2]))
    return early_warning._folder


def test_ranks_agree_on_where_files_go(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(own_directories, tmp_path) == [str(tmp_path / "0")] * 2
