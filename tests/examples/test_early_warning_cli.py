"""AttentionEarlyWarning in LightningCLI: rules, actions and the rest go through YAML and the command line."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning_cli import main
from listening import hearing

from lightning_attn import AttentionEarlyWarning
from lightning_attn.warning import LimitRule, LogitGrowth, LogitSpread

CONFIG = str(Path(__file__).parents[2] / "examples" / "config.yaml")
QUICK = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--model.layers=1"]
PACKAGE = "lightning_attn.warning."

#: Rules as YAML names them, with all their arguments.
RULES: list[dict[str, Any]] = [
    {
        "class_path": f"{PACKAGE}LogitSpread",
        "init_args": {"limits": [40.0, 80.0], "severity": ["info", "critical"], "patience": 4, "warmup_steps": 2},
    },
    {
        "class_path": f"{PACKAGE}LogitGrowth",
        "init_args": {"limit": 30.0, "beyond": 12.0, "horizon": 20, "window": 6, "patience": 3, "warmup_steps": 1},
    },
]

#: Every argument of AttentionEarlyWarning, with no value at its default.
ARGUMENTS: dict[str, Any] = {
    "rules": RULES,
    "without": ["sink_takeover", "positional_transition"],
    "action": {"critical": ["checkpoint", "stop"], "logit_growth": "warn"},
    "every_n_steps": {0: 1, 2: 50},
    "sites": ["blocks.*"],
    "max_sequences": None,
    "quiet_steps": 7,
    "file": "elsewhere.jsonl",
    "print_summary": False,
    "strict": True,
    "compiled": "skip",
    "max_overhead": 0.25,
}


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning_cli.py"])  # LightningCLI warns of pytest's arguments


def with_early_warning(path: Path, **init_args: object) -> str:
    """The example's file with another callback."""
    config = yaml.safe_load(Path(CONFIG).read_text())
    config["trainer"]["callbacks"] = [{"class_path": "lightning_attn.AttentionEarlyWarning", "init_args": init_args}]
    config["trainer"]["logger"] = False
    path.write_text(yaml.safe_dump(config))
    return str(path)


def printed_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["fit", *arguments, "--print_config"])
    assert end.value.code == 0
    return capsys.readouterr().out


def printed_arguments(config: str) -> dict[str, Any]:
    (callback,) = yaml.safe_load(config)["trainer"]["callbacks"]
    assert callback["class_path"] == "lightning_attn.AttentionEarlyWarning"
    return dict(callback["init_args"])


def early_warning_of(cli: LightningCLI) -> AttentionEarlyWarning:
    (found,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, AttentionEarlyWarning)]
    return found


@pytest.mark.parametrize(
    "given",
    [{}, ARGUMENTS, ARGUMENTS | {"rules": RULES[0], "without": "all", "action": ["warn", "stop"], "sites": "*"}],
    ids=["defaults", "all", "others"],
)
def test_every_argument_survives_printing_and_reading(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = inspect.signature(AttentionEarlyWarning).parameters.values()
    assert ARGUMENTS.keys() == {parameter.name for parameter in parameters}
    expected = {parameter.name: parameter.default for parameter in parameters} | given
    once = printed_config(capsys, "--config", with_early_warning(tmp_path / "given.yaml", **given))
    assert printed_arguments(once) == json.loads(json.dumps(expected))
    (tmp_path / "printed.yaml").write_text(once)
    assert printed_config(capsys, "--config", str(tmp_path / "printed.yaml")) == once


def test_a_printed_configuration_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit = {
        "class_path": f"{PACKAGE}LimitRule",
        "init_args": {"name": "wide", "statistic": "logit_std", "above": 1e-6, "severity": "critical", "patience": 1},
    }
    given = ARGUMENTS | {"rules": [*RULES, limit], "max_overhead": None, "action": {"wide": "stop"}}
    config = printed_config(capsys, "--config", with_early_warning(tmp_path / "given.yaml", **given))
    (tmp_path / "printed.yaml").write_text(config)
    with hearing() as said:
        cli = main(["fit", "--config", str(tmp_path / "printed.yaml"), "--trainer.max_steps=4", *QUICK])
    early_warning = early_warning_of(cli)
    rules = {rule.name: rule for rule in early_warning.rules}
    assert isinstance(rules["logit_spread"], LogitSpread) and rules["logit_spread"].limits == (40.0, 80.0)
    assert isinstance(rules["logit_growth"], LogitGrowth) and rules["logit_growth"].limit == 30.0
    assert isinstance(rules["wide"], LimitRule)
    assert not {"sink_takeover", "positional_transition"} & rules.keys()
    assert cli.trainer.global_step == 1
    assert early_warning.stopped_for is not None and early_warning.stopped_for.rule == "wide"
    assert len(said) == 1 and (tmp_path / "elsewhere.jsonl").exists()
    assert "Early warnings" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("action=stop", "stop"),
        ("action=[checkpoint, stop]", ["checkpoint", "stop"]),
        ("action={critical: [checkpoint, stop]}", {"critical": ["checkpoint", "stop"]}),
        ("without=sink_takeover", "sink_takeover"),
        ("without=[sink_takeover, saturation]", ["sink_takeover", "saturation"]),
        ("every_n_steps=5", 5),
        ("file=null", None),
        ("quiet_steps=50", 50),
    ],
)
def test_arguments_on_the_command_line(argument: str, expected: object, capsys: pytest.CaptureFixture[str]) -> None:
    config = printed_config(
        capsys,
        "--model.learning_rate=0.001",
        "--trainer.callbacks+=lightning_attn.AttentionEarlyWarning",
        f"--trainer.callbacks.{argument}",
    )
    assert printed_arguments(config)[argument.split("=")[0]] == expected


@pytest.mark.parametrize(
    "action",
    ["builtins.print", ["stop", "builtins.print"], {"critical": ["builtins.print"], "saturation": "builtins.id"}],
)
def test_a_function_as_an_action(action: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = with_early_warning(tmp_path / "given.yaml", action=action)
    once = printed_config(capsys, "--config", config)
    assert printed_arguments(once)["action"] == action
    cli = main(["fit", "--config", config, "--trainer.max_steps=1", *QUICK])
    assert early_warning_of(cli).rules


def test_help_says_what_arguments_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--trainer.callbacks.help=lightning_attn.AttentionEarlyWarning"])
    printed = capsys.readouterr().out
    for name in ARGUMENTS:
        assert f".{name} " in printed
    assert "names of built-in rules that are left out" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("init_args", "words"),
    [
        ({"action": "halt"}, "action"),
        ({"without": ["sinks"]}, "without"),
        ({"rules": [{"class_path": "int"}]}, "rules"),
    ],
)
def test_an_argument_that_is_not_allowed_ends_with_its_name(
    init_args: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        (SystemExit, ValueError)
    ) as end:  # as jsonargparse finds it while reading, or while it makes one
        main(["fit", "--config", with_early_warning(tmp_path / "given.yaml", **init_args), *QUICK])
    assert words in capsys.readouterr().err + str(end.value)
