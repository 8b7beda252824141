"""The monitor in LightningCLI: every argument goes through YAML and the command line."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning_cli import main

from lightning_attn import AttentionMonitor

CONFIG = str(Path(__file__).parents[2] / "examples" / "config.yaml")
QUICK = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--model.layers=1"]

#: Every argument of AttentionMonitor, with no value at its default.
ARGUMENTS: dict[str, Any] = {
    "every_n_steps": {0: 1, 2: 50},
    "sites": ["blocks.*", "blocks.0.attention"],
    "statistics": ["entropy", "max_logit"],
    "max_sequences": None,
    "spectral_sequences": None,
    "stage": "validate",
    "heat_map_every_n_steps": None,
    "callback_metrics": ["entropy/min", "max_logit/max"],
    "history_size": 7,
    "print_summary": False,
    "prefix": "heads",
    "strict": True,
    "compiled": "skip",
    "max_overhead": 0.25,
}


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning_cli.py"])  # LightningCLI warns of pytest's arguments


def printed_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["fit", *arguments, "--print_config"])
    assert end.value.code == 0
    return capsys.readouterr().out


def monitor_of(cli: LightningCLI) -> AttentionMonitor:
    (monitor,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, AttentionMonitor)]
    return monitor


def with_monitor(path: Path, **init_args: object) -> str:
    """A copy of the example's file whose monitor has other arguments."""
    config = yaml.safe_load(Path(CONFIG).read_text())
    config["trainer"]["callbacks"][0]["init_args"] = init_args
    config["trainer"]["logger"] = False
    path.write_text(yaml.safe_dump(config))
    return str(path)


def printed(value: object) -> object:
    """The value as jsonargparse prints it: keys become strings, and are read back as numbers."""
    return json.loads(json.dumps(value))


def printed_arguments(config: str) -> dict[str, Any]:
    (callback,) = yaml.safe_load(config)["trainer"]["callbacks"]
    assert callback["class_path"] == "lightning_attn.AttentionMonitor"
    return dict(callback["init_args"])


def test_the_example_runs_and_logs() -> None:
    cli = main(["fit", "--config", CONFIG, "--trainer.max_steps=12", *QUICK])
    assert cli.trainer.global_step == 12
    monitor = monitor_of(cli)
    assert monitor.history.steps == [0, 10]
    assert monitor.snapshot is not None and monitor.snapshot.sites == ("blocks.0.attention",)
    assert list(Path("lightning_logs/character_lm").rglob("events.out.tfevents.*"))


@pytest.mark.parametrize(
    "given", [{}, ARGUMENTS, ARGUMENTS | {"every_n_steps": 3, "sites": "*", "statistics": "entropy"}]
)
def test_every_argument_survives_printing_and_reading(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = inspect.signature(AttentionMonitor).parameters.values()
    expected = {parameter.name: parameter.default for parameter in parameters} | given
    once = printed_config(capsys, "--config", with_monitor(tmp_path / "given.yaml", **given))
    assert printed_arguments(once) == printed(expected)
    (tmp_path / "printed.yaml").write_text(once)
    assert printed_config(capsys, "--config", str(tmp_path / "printed.yaml")) == once


def test_a_printed_configuration_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ARGUMENTS | {"stage": "train", "max_overhead": None}  # a limit would change the steps below
    config = printed_config(capsys, "--config", with_monitor(tmp_path / "given.yaml", **given))
    (tmp_path / "printed.yaml").write_text(config)
    cli = main(["fit", "--config", str(tmp_path / "printed.yaml"), "--trainer.max_steps=4", *QUICK])
    (callback,) = cli.config.fit.trainer.callbacks
    assert vars(callback.init_args) == given
    monitor = monitor_of(cli)
    assert monitor.history.steps == [0, 1, 2]
    assert monitor.snapshot is not None and monitor.snapshot.statistics == ("entropy", "max_logit")
    assert "heads/max_logit/max" in cli.trainer.callback_metrics
    assert "Attention at step" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("every_n_steps=10", 10),
        ("every_n_steps={0: 10, 500: 50}", {0: 10, 500: 50}),
        ('every_n_steps={"0": 10, "500": 50}', {0: 10, 500: 50}),
        ("sites=*", "*"),
        ("sites=blocks.*.attention", "blocks.*.attention"),
        ('sites=["blocks.0.*", "*.attention"]', ["blocks.0.*", "*.attention"]),
        ("statistics=entropy", "entropy"),
        ("statistics=[entropy, max_logit]", ["entropy", "max_logit"]),
        ("statistics+=entropy", ["entropy"]),
        ("max_sequences=null", None),
        ("heat_map_every_n_steps=null", None),
        ("callback_metrics=entropy/min", "entropy/min"),
        ("stage=validate", "validate"),
        ("prefix=heads", "heads"),
    ],
)
def test_arguments_on_the_command_line(argument: str, expected: object, capsys: pytest.CaptureFixture[str]) -> None:
    config = printed_config(
        capsys,
        "--model.learning_rate=0.001",
        "--trainer.callbacks+=lightning_attn.AttentionMonitor",
        f"--trainer.callbacks.{argument}",
    )
    name = argument.split("=")[0].rstrip("+")
    assert printed_arguments(config)[name] == printed(expected)


def test_a_monitor_from_the_command_line_trains() -> None:
    cli = main(
        [
            "fit",
            "--model.learning_rate=0.001",
            "--trainer.max_steps=12",
            "--trainer.logger=false",
            "--trainer.callbacks+=lightning_attn.AttentionMonitor",
            "--trainer.callbacks.every_n_steps=10",
            *QUICK,
        ]
    )
    assert monitor_of(cli).history.steps == [0, 10]


def test_help_says_what_arguments_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--trainer.callbacks.help=lightning_attn.AttentionMonitor"])
    printed = capsys.readouterr().out
    for name in ARGUMENTS:
        assert f".{name} " in printed
    assert "glob patterns over" in printed


def test_an_argument_that_is_not_allowed_ends_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", CONFIG, "--trainer.callbacks.every_n_steps=often"])
    assert end.value.code != 0
    assert "every_n_steps" in capsys.readouterr().err
