"""Who says what when."""

from __future__ import annotations

import json

import pytest

from lightning_attn.warning import EarlyWarning, Severity
from lightning_attn.warning.announcer import Announcer


def found(step: int, rule: str = "wide", severity: Severity = "warning", head: int = 0) -> EarlyWarning:
    return EarlyWarning(step, rule, severity, "attention", head, "logit_std", 30.0, 25.0, remedy="wait")


def said(announcer: Announcer, step: int, *warnings: EarlyWarning) -> list[str]:
    return [text for _, text in announcer.messages(step, warnings)]


def test_one_message_however_many_heads() -> None:
    ((severity, text),) = Announcer(100).messages(5, [found(5, head=head) for head in range(64)])
    assert severity == "warning"
    assert "so have 63 more heads" in text


def test_one_message_for_each_rule() -> None:
    texts = said(Announcer(100), 5, found(5, "wide"), found(5, "sharp"), found(5, "wide", head=1))
    assert len(texts) == 2
    assert ["wide:" in text for text in texts] == [True, False]


def test_it_keeps_quiet_for_a_while_and_loses_nothing() -> None:
    announcer = Announcer(100)
    assert len(said(announcer, 0, found(0))) == 1
    assert said(announcer, 10, found(10, head=1)) == []
    assert said(announcer, 50, found(50, head=2)) == []
    assert said(announcer, 99) == []
    (text,) = said(announcer, 100)
    assert "so has 1 more head" in text
    assert "What to try" not in text
    assert said(announcer, 110) == []
    assert said(announcer, 300) == []


def test_another_rule_need_not_wait() -> None:
    announcer = Announcer(100)
    said(announcer, 0, found(0))
    assert len(said(announcer, 10, found(10, "sharp"))) == 1


def test_what_is_more_severe_is_told_at_once() -> None:
    announcer = Announcer(100)
    assert len(said(announcer, 0, found(0, severity="info"))) == 1
    assert said(announcer, 10, found(10, severity="info", head=1)) == []
    ((severity, text),) = announcer.messages(20, [found(20, severity="critical", head=2)])
    assert severity == "critical"
    assert "so has 1 more head" in text  # what was held back too
    assert "What to try: wait" in text
    assert said(announcer, 30, found(30, severity="critical", head=3)) == []
    assert said(announcer, 40, found(40, severity="warning", head=4)) == []


def test_without_quiet_all_is_told() -> None:
    announcer = Announcer(0)
    assert [len(said(announcer, step, found(step))) for step in (0, 1, 2)] == [1, 1, 1]


def test_steps_that_go_back() -> None:
    """Not quiet until the step is reached at which something was said."""
    announcer = Announcer(100)
    said(announcer, 1000, found(1000))
    assert said(announcer, 50, found(50)) == []
    assert said(announcer, 140) == []
    assert len(said(announcer, 150)) == 1


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_checkpoint_is_no_interruption(at: int) -> None:
    steps = [(0, [found(0)]), (10, [found(10, head=1)]), (60, [found(60, "sharp")]), (100, []), (120, [found(120)])]
    whole = Announcer(100)
    expected = [whole.messages(step, warnings) for step, warnings in steps]
    first, second = Announcer(100), Announcer(100)
    told = [first.messages(step, warnings) for step, warnings in steps[:at]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    told += [second.messages(step, warnings) for step, warnings in steps[at:]]
    assert told == expected


def test_clear() -> None:
    announcer = Announcer(100)
    said(announcer, 0, found(0))
    said(announcer, 10, found(10, head=1))
    announcer.clear()
    assert said(announcer, 20) == []
    assert len(said(announcer, 30, found(30))) == 1
