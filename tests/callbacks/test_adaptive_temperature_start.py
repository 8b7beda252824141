"""When temperatures are switched on, and what is measured until then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from distributed_training import strategy
from early_warning_runs import SignsAt
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from listening import hearing
from models import batches, trainer
from rank_pool import RankPool
from temperature_runs import FILE, Hot, adaptive, awake, lines, run
from torch import distributed as dist

from lightning_attn import AttentionEarlyWarning
from lightning_attn.callbacks.session import CaptureSession


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def warns(steps: list[int], severity: Any = "warning", name: str = "scripted") -> AttentionEarlyWarning:
    return AttentionEarlyWarning(SignsAt(steps, name, severity), "all", every_n_steps=1, print_summary=False, file=None)


def test_at_a_step_and_nothing_is_measured_before_but_for_the_search() -> None:
    callback = adaptive(awake(1.0), start=5, every_n_steps=1)
    running = run(Hot(), callback, steps=9)
    assert callback.started_at == 5
    assert CaptureSession.of(running).watched_steps == 1 + 4
    assert {line["step"] for line in lines(Path(FILE))} == {6, 7, 8, 9}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("start", "severity", "name", "expected"),
    [
        ("warning", "warning", "scripted", 4),
        ("warning", "critical", "scripted", 4),
        ("critical", "warning", "scripted", None),
        ("info", "info", "scripted", 4),
        ("scripted", "info", "scripted", 4),
        (["critical", "mine"], "info", "mine", 4),
        (["other", "mine"], "info", "mine", 4),
        ("other", "critical", "scripted", None),
    ],
)
def test_with_a_warning_of_that_kind_in_either_order(
    start: Any, severity: Any, name: str, expected: int | None, order: int
) -> None:
    callback = adaptive(awake(1.0), start=start)
    with hearing():
        run(Hot(), *[callback, warns([3, 5], severity, name), warns([], name="other")][::order], steps=8)
    assert callback.started_at == expected
    hot = {value > 1 for values in callback.temperatures.values() for value in values}
    assert hot == ({True} if expected else {False})


def test_schedules_count_from_there_on() -> None:
    callback = adaptive(lambda step: 10.0 + step, start="warning", every_n_steps=1)
    with hearing():
        run(Hot(), callback, warns([2]), steps=6)
    told = [(line["step"], line["after"][0]) for line in lines(Path(FILE)) if line["site"] == "blocks.0"]
    assert [step for step, _ in told] == [3, 4, 5] and [value for _, value in told] == pytest.approx([10, 11, 12])


def test_it_begins_with_a_step_also_where_a_warning_comes_in_the_midst_of_one() -> None:
    seen: list[tuple[int, float]] = []

    class Sees(pl.Callback):
        def on_before_zero_grad(self, *_: Any) -> None: ...

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            seen.append((trainer.global_step, max(callback.temperatures.get("blocks.0", [1.0]))))

    callback = adaptive(lambda step: 5.0, start="warning")
    with hearing():
        run(Hot(), warns([1]), callback, Sees(), steps=9, accumulate_grad_batches=3)
    assert [value for _, value in seen] == pytest.approx([1, 1, 1, 1, 1, 1, 5, 5, 5])


def test_nobody_warns() -> None:
    with pytest.raises(MisconfigurationException, match=r"`start`.*AttentionEarlyWarning"):
        run(Hot(), adaptive(start="warning"))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("start", "nearest"),
    [("critcal", "'critical'"), ("Warning", "'warning'"), (["warning", "scriptd"], "'scripted'"), ("logit_growth", "")],
)
def test_what_never_comes_is_refused_before_the_first_step(start: Any, nearest: str, order: int) -> None:
    """Also the name of a rule that is not held against the run."""
    model = Hot()
    with pytest.raises(MisconfigurationException, match="`start` must be") as refused:
        run(model, *[adaptive(start=start), warns([3])][::order])
    message = str(refused.value)
    assert "'scripted'" in message and repr(start if isinstance(start, str) else start[-1]) in message
    assert message.endswith(f"; did you mean {nearest}?" if nearest else ".") and not model.losses


@pytest.mark.parametrize("start", [-1, True, "", [], [3], 1.5, None])
def test_what_is_no_start(start: Any) -> None:
    with pytest.raises(MisconfigurationException, match="`start`"):
        adaptive(start=start)


@pytest.mark.parametrize("order", [1, -1])
def test_both_go_on_from_a_checkpoint(order: int, tmp_path: Path) -> None:
    """Saved while it waits, in the very step of the warning, and when it has begun."""

    def both() -> list[Any]:
        return [adaptive(awake(1.0), start="warning", every_n_steps=2), warns([3])][::order]

    arguments: dict[str, Any] = {"steps": 8, "enable_checkpointing": True}
    checkpoints = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    model, callbacks = Repeats(), both()
    with hearing():
        run(model, *callbacks, checkpoints, default_root_dir=tmp_path / "whole", **arguments)
    whole = callbacks[::order][0]
    assert whole.started_at == 4
    for step in (2, 3, 4, 5, 6):
        path = next((tmp_path / "saved").glob(f"*step={step}.ckpt"))
        again, callbacks = Repeats(), both()
        with hearing():
            run(again, *callbacks, path=path, default_root_dir=tmp_path / str(step), **arguments)
        assert callbacks[::order][0].started_at == 4
        assert again.losses == model.losses[step:]
        assert all(map(torch.equal, again.parameters(), model.parameters()))


class Repeats(Hot):
    def loss(self, _: Any) -> Any:
        made = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(self.trainer.global_step))
        return super().loss([made])


def on_ranks(folder: Path, order: int) -> tuple[Any, ...]:
    callback = adaptive(awake(1.0), start="warning", file=None)
    model = Hot()
    running = trainer(
        *[callback, warns([2])][::order], strategy=strategy(), devices=2, default_root_dir=folder, max_epochs=1
    )
    with hearing():
        running.fit(model, batches(12))
    return callback.started_at, callback.temperatures, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("order", [1, -1])
def test_on_two_ranks(ranks: RankPool, tmp_path: Path, order: int) -> None:
    first, second = ranks(on_ranks, tmp_path, order)
    assert dist is not None and first == second and first[0] == 3
    assert max(value for values in first[1].values() for value in values) > 1.5
