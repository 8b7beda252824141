"""What people and programs get to hear of temperatures."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from listening import hearing
from models import HEADS, WIDTH
from temperature_runs import FILE, Decoder, Fused, HandWritten, Hot, Separate, adaptive, awake, lines, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AdaptiveTemperature
from lightning_attn.callbacks import temperature_log
from lightning_attn.temperature import (
    ConstantTemperature,
    CosineTemperature,
    HoldEntropy,
    HoldLogitScale,
    TemperatureControl,
    TemperatureSchedule,
)

SITES = ("blocks.0", "blocks.1")


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages that are no warnings."""
    messages: list[str] = []
    monkeypatch.setattr(temperature_log, "rank_zero_info", lambda text, **_: messages.append(text))
    return messages


# The file.


def assert_joined(told: list[dict[str, Any]], temperatures: dict[str, list[float]]) -> None:
    """Every line begins where the one before has ended, and the last is the end."""
    for site, values in temperatures.items():
        of_site = [line for line in told if line["site"] == site]
        assert of_site[0]["before"] == [1.0] * HEADS
        for earlier, later in itertools.pairwise(of_site):
            assert later["before"] == earlier["after"] and later["step"] > earlier["step"]
        assert of_site[-1]["after"] == values


def test_a_closed_loop_writes_every_move_once() -> None:
    callback = adaptive(awake(1.0))
    run(Hot(), callback, steps=9)
    told = lines(Path(FILE))
    assert_joined(told, callback.temperatures)
    assert [line["step"] for line in told if line["site"] == SITES[0]] == [1, 3, 5, 7, 9]
    for line in told:
        assert set(line) == {"step", "site", "before", "after", "scale", "limited"} and line["limited"] == []
        for before, after, scale in zip(line["before"], line["after"], line["scale"], strict=True):
            wanted = before * (max(scale, 1.0) / before) ** 0.8  # as its documentation has it
            assert after == pytest.approx(min(max(wanted, before / 4), before * 4), rel=1e-6)


def test_a_course_is_written_at_the_cadence_from_one_line_to_the_next() -> None:
    callback = adaptive(CosineTemperature(4.0, 1.0, 7), every_n_steps=3)
    run(Hot(), callback, steps=11)
    told = lines(Path(FILE))
    assert_joined(told, callback.temperatures)
    assert [line["step"] for line in told if line["site"] == SITES[0]] == [3, 6, 7]


@pytest.mark.parametrize("temperature", [4.0, 3.0, 0.7, 1.1, 7.3])
def test_a_constant_is_one_line(temperature: float) -> None:
    run(Hot(), adaptive(temperature), steps=9)
    assert [(line["step"], line["site"]) for line in lines(Path(FILE))] == [(0, site) for site in SITES]
    assert lines(Path(FILE))[0]["after"] == pytest.approx([temperature] * HEADS)


def test_runs_are_told_apart_and_no_file_is_none(tmp_path: Path) -> None:
    for _ in range(2):
        run(Hot(), adaptive(2.0))
    read = [json.loads(line) for line in Path(FILE).read_text().splitlines()]
    assert len({line["run"] for line in read}) == 2 and len(read) == 4
    Path(FILE).unlink()
    run(Hot(), adaptive(2.0, file=None))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with hearing() as warned:
        run(model := Hot(), adaptive(awake(1.0)))
    assert len(warned) == 1 and "not written" in warned[0] and len(model.losses) == 6


# Messages.


def test_it_is_said_once_of_each_site_that_it_moves(said: list[str]) -> None:
    run(Hot(), adaptive(awake(1.0)), steps=9)
    assert len(said) == 2
    assert said[0].startswith("AdaptiveTemperature: at step 1 temperatures of blocks.0 begin to move: head 0 ")
    assert "without it" in said[0]
    said.clear()
    run(Hot(), adaptive(2.0, start=3), steps=6)
    assert said == [
        "AdaptiveTemperature: switched on at step 3; ConstantTemperature(temperature=2.0).",
        "AdaptiveTemperature: from step 3 on blocks.0, blocks.1 have temperature 2.",
    ]
    said.clear()
    run(Hot(), adaptive({"blocks.0": 2.0, "*": 3.0}), steps=2)
    assert said == [
        "AdaptiveTemperature: from step 0 on blocks.0 has temperature 2.",
        "AdaptiveTemperature: from step 0 on blocks.1 has temperature 3.",
    ]
    said.clear()
    run(Hot(), adaptive(lambda step: 2.0 if step == 1 else 1.0), steps=6)  # between two lines it was there and back
    assert said == []
    run(Decoder(), adaptive())
    assert said == []


def test_what_wakes_a_loop_is_said(said: list[str]) -> None:
    run(Hot(scale=12.0), callback := adaptive(HoldLogitScale(3.0, 4.0), every_n_steps=1), steps=12)
    woken = [text for text in said if "wakes it" in text]
    assert re.search(r"head \d of blocks.\d wakes it at step \d+ \(raw scale [\d.]+ after [\d.]+ at the meas", woken[0])
    assert len(woken) == 1 and max(map(max, callback.temperatures.values())) > 1
    said.clear()
    run(Hot(), adaptive(HoldLogitScale(3.0, 1000.0), every_n_steps=1), steps=6)
    assert said == []


def test_a_limit_is_said_once_of_each_head() -> None:
    with hearing() as warned:
        run(Hot(), callback := adaptive(awake(0.1), max_temperature=3.0, every_n_steps=1), steps=9)
    assert all(values == pytest.approx([3.0] * HEADS) for values in callback.temperatures.values())
    assert len(warned) == 2
    assert "at step 1 the temperature of head 0, 1, 2, 3 of blocks.0 has come to its limit of 3" in warned[0]
    assert "learning rate" in warned[0]
    told = lines(Path(FILE))
    assert len(told) == 2 and all(line["limited"] == [0, 1, 2, 3] for line in told)


def test_a_lower_limit_and_that_of_a_course_blame_no_weights() -> None:
    for control, messages in ((awake(100.0, lower=50.0), 2), (ConstantTemperature(0.2), 1)):
        with hearing() as warned:
            run(Hot(scale=1.0), adaptive(control, min_temperature=0.5), steps=9)
        assert len(warned) == messages and all("limit of 0.5 and goes no farther." in text for text in warned)
        assert not any("learning rate" in text for text in warned)


class OneColdHead(Hot):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.blocks[0].q_proj.weight[: WIDTH // HEADS] *= 1e-3


def test_heads_at_different_limits_are_told_apart() -> None:
    control = {"blocks.0": awake(4.0, lower=3.9), "*": 1.0}
    with hearing() as warned:
        run(OneColdHead(), adaptive(control, min_temperature=0.99, max_temperature=1.01, every_n_steps=1))
    at = {text.split(" of blocks.0 ")[0].split("temperature of ")[1]: text for text in warned}
    assert set(at) == {"head 0", "head 1, 2, 3"}
    assert "limit of 0.99 and" in at["head 0"] and "limit of 1.01 and" in at["head 1, 2, 3"]


def test_a_loop_that_may_not_move_at_all_says_so() -> None:
    with hearing() as warned:
        run(Hot(), callback := adaptive(awake(1.0), max_temperature=1.0, every_n_steps=1))
    assert len(warned) == 2 and all("has come to its limit of 1 and goes no farther" in text for text in warned)
    assert all(values == [1.0] * HEADS for values in callback.temperatures.values()) and not Path(FILE).exists()


class Unfindable(Separate):
    """Normalised by no module after their projection."""

    def projected(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().projected(normed)
        return 4 * functional.normalize(query, dim=-1), key, value


class UnfindableFirst(Decoder):
    def __init__(self) -> None:
        super().__init__(Separate, scale=30.0)
        self.blocks[0] = Unfindable()


def test_what_cannot_be_found_is_said_once_with_a_reason() -> None:
    with hearing() as warned:
        run(UnfindableFirst(), callback := adaptive(awake(1.0), every_n_steps=1), steps=9)
    (message,) = warned
    assert message.startswith("AdaptiveTemperature: the temperature of blocks.0 stays 1: no module of it was proven")
    assert set(callback.temperatures) == {"blocks.1"}
    with hearing() as warned:
        run(Decoder(Unfindable), adaptive(), steps=9)
    (message,) = warned
    assert "of blocks.0, blocks.1 stays 1" in message


class BeginsWithZeros(Decoder):
    """Its queries are zero until the optimiser has moved them, or for good."""

    def __init__(self, for_good: bool = False) -> None:
        super().__init__(Separate)
        for block in self.blocks:
            nn.init.zeros_(block.q_proj.weight)
            nn.init.zeros_(block.q_proj.bias)
            block.q_proj.requires_grad_(not for_good)


def test_queries_that_are_zero_at_first_are_found_later() -> None:
    with hearing() as warned:
        run(BeginsWithZeros(), callback := adaptive(0.5, every_n_steps=1))
    assert warned == [] and callback.temperatures["blocks.0"] == pytest.approx([0.5] * HEADS)
    with hearing() as warned:
        run(BeginsWithZeros(for_good=True), callback := adaptive(0.5, every_n_steps=1), steps=14)
    (message,) = warned
    assert "in 10 captures all its queries are zero" in message and callback.temperatures == {}


def test_a_summary_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    run(Hot(), adaptive(awake(1.0), print_summary=True))
    out = capsys.readouterr().out
    assert "temperatures of 8 of 8 heads; they are written into the weights" in out and "blocks.1, head 3" in out
    run(Decoder(), adaptive(print_summary=True))
    assert "all 8 heads were left at temperature 1" in capsys.readouterr().out


# A dry run.


@pytest.mark.parametrize("control", [awake(1.0), CosineTemperature(4.0, 1.5, 5), HoldEntropy(0.9, 0.95)])
def test_a_dry_run_changes_nothing_and_tells_what_it_would(control: Any, said: list[str]) -> None:
    run(plain := Hot())
    run(dry := Hot(), callback := adaptive(control, dry_run=True))
    assert dry.losses == plain.losses
    assert all(map(torch.equal, dry.parameters(), plain.parameters()))
    told = lines(Path(FILE))
    assert {line["site"] for line in told} == set(SITES) and max(told[0]["after"]) > 1.1
    assert max(map(max, callback.temperatures.values())) > 1.1
    assert all(text.startswith("AdaptiveTemperature (dry run): ") for text in said) and said
    if isinstance(control, HoldLogitScale):
        # The scale without temperature is what it would be held by; at the first move both runs are one.
        Path(FILE).unlink()
        run(Hot(), adaptive(control))
        assert lines(Path(FILE))[:2] == told[:2]


# Loggers.


def test_scalars_and_heat_maps(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(tmp_path, name="", version="t"), CSVLogger(tmp_path, name="", version="c")]
    callback = adaptive(awake(1.0), heat_map_every_n_steps=4)
    run(Hot(), callback, logger=loggers, steps=9)
    board = EventAccumulator(str(tmp_path / "t"), size_guidance={"images": 0})
    board.Reload()
    prefix = "attention_temperature"
    names = ("min", "mean", "max", "share_changed", "highest_raw_scale", "site/blocks.0", "site/blocks.1")
    assert {tag for tag in board.Tags()["scalars"] if tag.startswith(prefix)} == {f"{prefix}/{name}" for name in names}
    assert [event.step for event in board.Scalars(f"{prefix}/max")] == [1, 3, 5, 7, 9]
    last = [value for values in callback.temperatures.values() for value in values]
    ends = {name: board.Scalars(f"{prefix}/{name}")[-1].value for name in ("min", "mean", "max", "share_changed")}
    assert ends == {
        "min": pytest.approx(min(last)),
        "mean": pytest.approx(sum(last) / len(last)),
        "max": pytest.approx(max(last)),
        "share_changed": 1.0,
    }
    assert [event.step for event in board.Images(f"{prefix}_heads/temperature")] == [1, 5, 9]
    assert [event.step for event in board.Scalars(f"{prefix}/highest_raw_scale")] == [1, 3, 5, 7, 9]
    assert f"{prefix}/max" in (tmp_path / "c" / "metrics.csv").read_text().splitlines()[0]


@pytest.mark.parametrize(
    "arguments",
    [{"control": HoldLogitScale(3.0, 1e6)}, {"control": awake(1.0), "max_temperature": 1.0}, {"dry_run": True}],
    ids=["asleep", "at its limit", "dry"],
)
def test_the_raw_scale_is_logged_at_every_measurement(arguments: dict[str, Any], tmp_path: Path) -> None:
    run(Hot(), adaptive(**arguments), logger=TensorBoardLogger(tmp_path, name="", version="t"), steps=8)
    board = EventAccumulator(str(tmp_path / "t"))
    board.Reload()
    scales = board.Scalars("attention_temperature/highest_raw_scale")
    assert [event.step for event in scales] == [1, 3, 5, 7] and min(event.value for event in scales) > 5


def test_a_last_heat_map_is_of_the_end(tmp_path: Path) -> None:
    run(Hot(), adaptive(awake(1.0)), logger=TensorBoardLogger(tmp_path, name="", version="t"), steps=6)
    board = EventAccumulator(str(tmp_path / "t"), size_guidance={"images": 0})
    board.Reload()
    assert [event.step for event in board.Images("attention_temperature_heads/temperature")] == [1, 6]


def test_weights_that_are_not_finite_are_told_of_and_nothing_is_left_on_them() -> None:
    class Breaks(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, model: Any) -> None:
            with torch.no_grad():
                model.blocks[1].q_proj.weight[3, 4] = math.nan

    with hearing() as warned:
        run(model := Hot(), adaptive(3.0), Breaks())
    (message,) = warned
    assert "query projections of blocks.1 have weights that are not finite" in message
    assert not any(module._forward_hooks for module in model.modules())


def test_of_healthy_runs_too(tmp_path: Path) -> None:
    run(Decoder(), adaptive(), logger=CSVLogger(tmp_path, name="", version="c"))
    assert "attention_temperature/max" in (tmp_path / "c" / "metrics.csv").read_text()


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"control": 0.0}, "control"),
        ({"control": "hold"}, "control"),
        ({"control": {}}, "control"),
        ({"control": HoldLogitScale}, "control"),
        ({"control": CosineTemperature}, "control"),
        ({"dry_run": "no"}, "dry_run"),
        ({"control": {"": 2.0}}, "sites"),
        ({"start": -1}, "start"),
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"sites": []}, "sites"),
        ({"min_temperature": 0.0}, "min_temperature"),
        ({"min_temperature": 2.0}, "min_temperature"),
        ({"max_temperature": 0.5}, "max_temperature"),
        ({"max_temperature": float("inf")}, "max_temperature"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"heat_map_every_n_steps": 0}, "heat_map_every_n_steps"),
        ({"file": ""}, "file"),
        ({"compiled": "other"}, "compiled"),
        ({"max_overhead": -0.1}, "max_overhead"),
    ],
)
def test_arguments_are_refused_by_name(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"`{name}`"):
        AdaptiveTemperature(**arguments)


@pytest.mark.parametrize("arguments", [{"sites": "layers.*"}, {"control": {"layers.*": 2.0}}])
def test_patterns_that_no_module_has(arguments: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match=r"'layers\.\*'"):
        run(Hot(), adaptive(**arguments))


class Fails(TemperatureSchedule):
    """Without a hash, as a dataclass has none."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, step: int) -> float:
        return 1.5 if step < 3 else 0.0


class FailingLoop(TemperatureControl):
    statistics = ("logit_std",)

    def __init__(self, given: Any) -> None:
        super().__init__(0.5, 2.0)
        self.given = given

    def error(self, log_temperatures: Tensor, read: Any) -> Tensor:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given

    def __str__(self) -> str:
        return "fails"


@pytest.mark.parametrize(
    ("control", "cause", "last"),
    [
        (lambda step: 3.0 - step, "the temperature at step 3", 1.0),
        (lambda step: 1 / (step - 3) if step == 3 else 1.5, "ZeroDivisionError", 1.5),
        (lambda step: math.nan if step > 2 else 1.5, "got nan", 1.5),
        (lambda step: None, "got None", 1.0),
        (Fails(), "got 0.0", 1.5),
        (FailingLoop(RuntimeError("no idea")), "RuntimeError: no idea", 1.0),
        (FailingLoop(torch.zeros(3)), "RuntimeError", 1.0),
    ],
)
def test_a_control_that_fails_leaves_the_temperature_and_is_told_of_once(control: Any, cause: str, last: float) -> None:
    with hearing() as warned:
        run(model := Hot(), callback := adaptive(control, every_n_steps=1), steps=7)
    (message,) = warned
    assert message.startswith("AdaptiveTemperature: the temperature of blocks.0, blocks.1 stays as it is at step ")
    assert cause in message and len(model.losses) == 7
    assert all(values == pytest.approx([last] * HEADS) for values in callback.temperatures.values())
    with pytest.raises((ValueError, RuntimeError)):
        run(model := Hot(), adaptive(control, strict=True), steps=7)
    assert len(model.losses) < 7
    assert not any(module._forward_hooks or module._state_dict_hooks for module in model.modules())


@pytest.mark.parametrize("number", [torch.tensor(2.0), np.float32(2.0), np.int64(2), 2])
def test_numbers_of_torch_and_numpy_are_temperatures(number: Any) -> None:
    for control in (lambda step: number, number):
        run(Hot(), callback := adaptive(control))
        assert callback.temperatures["blocks.0"] == pytest.approx([2.0] * HEADS)


def test_nothing_is_left_after_that(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    model = Hot()
    with pytest.raises(ValueError, match="step 3"):
        run(model, adaptive(lambda step: 3.0 - step, strict=True))
    assert not any(module._forward_hooks or module._state_dict_hooks for module in model.modules())


def test_fused_and_grouped_heads_have_their_own(said: list[str]) -> None:
    kinds: list[type[HandWritten]] = [Fused, Separate]
    for kind in kinds:
        run(Decoder(kind, scale=50.0), callback := adaptive(awake(1.0), every_n_steps=1), steps=8)
        assert all(len(set(values)) == HEADS for values in callback.temperatures.values())
    assert WIDTH % HEADS == 0 and said
