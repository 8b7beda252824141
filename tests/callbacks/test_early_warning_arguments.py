"""What AttentionEarlyWarning is given: rules of its own and of others, and arguments that it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from early_warning_runs import Repeatable, SignsAt
from lightning.fabric.utilities.exceptions import MisconfigurationException
from listening import hearing
from models import LanguageModel, fit, trainer

from lightning_attn import AttentionEarlyWarning
from lightning_attn.callbacks.warning_actions import WarningActions
from lightning_attn.warning import LimitRule, LogitSpread, Record, Rule, Sign, built_in_rules

BUILT_IN = [rule.name for rule in built_in_rules()]


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# Which rules.


def names(early_warning: AttentionEarlyWarning) -> list[str]:
    return [rule.name for rule in early_warning.rules]


def test_the_rules_of_the_package_by_default() -> None:
    assert AttentionEarlyWarning().rules == built_in_rules()


def test_a_rule_is_tuned_by_one_of_its_name() -> None:
    early_warning = AttentionEarlyWarning(LogitSpread(limits=[50.0], severity=["info"]))
    assert sorted(names(early_warning)) == sorted(BUILT_IN)
    (tuned,) = [rule for rule in early_warning.rules if rule.name == "logit_spread"]
    assert isinstance(tuned, LogitSpread) and tuned.limits == (50.0,)


@pytest.mark.parametrize("without", ["sink_takeover", ["sink_takeover", "logit_level"]])
def test_rules_are_left_out_by_name(without: Any) -> None:
    left_out = [without] if isinstance(without, str) else without
    assert names(AttentionEarlyWarning(without=without)) == [name for name in BUILT_IN if name not in left_out]


def test_own_rules_alone_or_beside_the_others() -> None:
    own = [SignsAt([1], "one"), SignsAt([2], "two")]
    assert names(AttentionEarlyWarning(own, "all")) == ["one", "two"]
    assert names(AttentionEarlyWarning(tuple(own))) == [*BUILT_IN, "one", "two"]  # type: ignore[arg-type]


class Wanders(Rule):
    """A few lines of somebody who knows their model: a head whose first token gains weight, with a limit of its own."""

    meaning = "The head wanders off."
    remedy = "hold it"

    def __init__(self, limit: float) -> None:
        super().__init__("wanders", ["sink_strength", "centred_stable_rank"], "critical", snapshots=3)
        self._keep(limit=limit)

    def signs(self, record: Record) -> Iterator[Sign]:
        series = record.series("sink_strength").last(self.snapshots)
        if len(series.steps_T) < self.snapshots:
            return
        for place, value in zip(series.places, series.last_P, strict=True):
            if value > self.limit:  # type: ignore[attr-defined]
                yield Sign(place, "sink_strength", value, self.limit)  # type: ignore[attr-defined]


def test_a_rule_of_ones_own_with_statistics_that_no_other_reads() -> None:
    early_warning = AttentionEarlyWarning(Wanders(1e-6), "all", every_n_steps=2, strict=True, print_summary=False)
    with hearing() as said:
        fit(Repeatable(), early_warning, steps=7)
    assert {(warning.step, warning.rule) for warning in early_warning.warnings} == {(4, "wanders")}
    assert len(early_warning.warnings) == 8 and len(said) == 1 and "The head wanders off." in said[0]


# A rule that fails.


class Fails(SignsAt):
    def signs(self, record: Record) -> list[Sign]:
        if record.step == 2:
            raise ZeroDivisionError("no head")
        return []


def test_a_rule_that_fails_is_told_of_once_and_the_others_go_on() -> None:
    early_warning = AttentionEarlyWarning(
        [Fails([], "fails"), SignsAt([4], "works")], "all", every_n_steps=1, print_summary=False
    )
    for _ in range(2):  # in a new run it is given another chance
        model = LanguageModel()
        with hearing() as said:
            fit(model, early_warning)
        assert len(model.losses) == 6
        assert [message for message in said if "fails" in message] == [
            "The rule 'fails' failed and is left out from now on: ZeroDivisionError: no head"
        ]
        assert [warning.rule for warning in early_warning.warnings] == ["works"]


@pytest.mark.parametrize("signs", [[None], [Sign(None, "entropy", 1.0)], [Sign(("site", 0), "entropy", "high")], 5])  # type: ignore[arg-type, list-item]
def test_a_rule_that_gives_something_else(signs: Any) -> None:
    class Odd(SignsAt):
        def signs(self, record: Record) -> Any:
            return signs

    early_warning = AttentionEarlyWarning(Odd([], "odd"), "all", every_n_steps=1, print_summary=False)
    with hearing() as said:
        fit(LanguageModel(), early_warning)
    assert len(said) == 1 and "'odd' failed" in said[0] and not early_warning.warnings


def test_strict_raises_what_a_rule_raises() -> None:
    early_warning = AttentionEarlyWarning(Fails([], "fails"), "all", every_n_steps=1, strict=True)
    with pytest.raises(ZeroDivisionError, match="no head"):
        fit(LanguageModel(), early_warning)


# Bad arguments.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rules": "logit_spread"}, ["`rules`", "'logit_spread'", "lightning_attn.warning.Rule"]),
        ({"rules": [LogitSpread]}, ["`rules`", "LogitSpread", "instances of"]),
        ({"rules": [SignsAt([]), SignsAt([])]}, ["`rules`", "'scripted'", "different names"]),
        ({"rules": 5}, ["`rules`", "5", "instances of"]),
        ({"without": "sinks"}, ["`without`", "'sinks'", "sink_takeover", "'all'"]),
        ({"without": ["logit_spread", 3]}, ["`without`", "3", "sink_takeover"]),
        ({"without": 3}, ["`without`", "3", "sink_takeover"]),
        ({"without": "all"}, ["`rules`", "`without`", "'all'", "no rule"]),
        ({"action": "halt"}, ["`action`", "'halt'", "'checkpoint'", "a function"]),
        ({"action": None}, ["`action`", "None", "'stop'"]),
        ({"action": {"fatal": "stop"}}, ["`action`", "'fatal'", "'critical'", "logit_spread"]),
        ({"every_n_steps": 0}, ["`every_n_steps`", "0", "positive integer"]),
        ({"max_sequences": 0}, ["`max_sequences`", "0"]),
        ({"quiet_steps": 0}, ["`quiet_steps`", "0", "positive integer"]),
        ({"quiet_steps": True}, ["`quiet_steps`", "True", "positive integer"]),
        ({"file": 3}, ["`file`", "3", "None"]),
        ({"file": ""}, ["`file`", "''", "None"]),
        ({"compiled": "graph"}, ["`compiled`", "'graph'", "'skip'"]),
        ({"max_overhead": 2}, ["`max_overhead`", "2", "between 0 and 1"]),
    ],
    ids=str,
)
def test_an_argument_that_is_not_allowed(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(MisconfigurationException) as error:
        AttentionEarlyWarning(**arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "action",
    [
        "halt",
        ["warn", "halt"],
        5,
        None,
        {"critical": "halt"},
        {"fatal": "stop"},
        {"critical": {"warn": "stop"}},
        [["stop"]],
    ],
)
def test_an_action_that_is_none(action: Any) -> None:
    with pytest.raises(ValueError, match=r"`action` .*(allowed|must be)"):
        WarningActions(action, ["early"])


def test_a_pattern_that_no_module_has() -> None:
    with pytest.raises(MisconfigurationException, match=r"layers\.\*"):
        fit(LanguageModel(), AttentionEarlyWarning(sites="layers.*"))


def test_two_that_cannot_be_told_apart_are_refused_by_lightning() -> None:
    with pytest.raises(RuntimeError, match="stateful callback"):
        trainer(AttentionEarlyWarning(), AttentionEarlyWarning())
    trainer(AttentionEarlyWarning(), AttentionEarlyWarning(sites="blocks.0.*"))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_work(duplicate: Any) -> None:
    rule = LimitRule("wide", "logit_std", above=0.01, patience=1)
    original = AttentionEarlyWarning(rule, "all", every_n_steps=1, print_summary=False)
    copied = duplicate(original)
    assert copied.rules == original.rules and copied.state_key == original.state_key
    with hearing():
        fit(LanguageModel(), copied, steps=2)
    assert copied.warnings and not original.warnings
