"""What is said of warnings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_attn.warning import EarlyWarning
from lightning_attn.warning.message import message, summary, worst_first

WIDE = EarlyWarning(
    step=120,
    rule="logit_spread",
    severity="warning",
    site="blocks.2",
    head=3,
    statistic="logit_std",
    value=31.25,
    limit=25.0,
    since=100,
    slope=0.31,
    meaning="The softmax is hard.",
    remedy="lower the rate",
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "head 3 of blocks.2 has logit_std 31.2, above 25 since step 100, rising by 31 per 100 steps."),
        ({"since": 120}, "has logit_std 31.2, above 25, rising"),
        ({"since": None}, "has logit_std 31.2, above 25, rising"),
        ({"value": 3.0, "slope": -0.5}, "has logit_std 3, below 25 since step 100, falling by 50 per 100 steps."),
        ({"slope": None}, "above 25 since step 100."),
        ({"slope": 0.0}, "above 25 since step 100."),
        ({"limit": None}, "has logit_std 31.2 since step 100, rising by 31 per 100 steps."),
        ({"slope": 1e-9}, "above 25 since step 100."),  # that is no pace
        ({"head": None}, ": blocks.2 has logit_std 31.2"),
        ({"site": None, "head": None}, ": the mean of all heads has logit_std 31.2"),
        ({"predicted_step": 180, "value": 18.0}, "has logit_std 18, rising by 31 per 100 steps."),
        ({"predicted_step": 180, "value": 18.0}, "Going on like this it passes 25 at about step 180."),
        ({"predicted_step": 120}, "It has passed 25. The softmax is hard."),
        ({"severity": "critical"}, "Step 120, critical, logit_spread: "),
        (
            {"heads": 36, "of_heads": 48, "value": 0.02, "limit": 0.3, "statistic": "entropy_without_sink"},
            "36 of 48 heads have entropy_without_sink below 0.3 since step 100; head 3 of blocks.2 is farthest with",
        ),
        (
            {"heads": 2, "of_heads": 4, "since": 120},
            "2 of 4 heads have logit_std above 25; head 3 of blocks.2 is farthest with 31.2",
        ),
        (
            {"heads": 2, "of_heads": 4, "scope": "site"},
            "2 of 4 heads of blocks.2 have logit_std above 25 since step 100; head 3 is farthest with 31.2",
        ),
        (
            {"heads": 2, "of_heads": 4, "limit": None},
            "2 of 4 heads; head 3 of blocks.2 is the worst: logit_std 31.2",
        ),
        ({"value": float("inf")}, "has logit_std inf, above 25"),
    ],
)
def test_what_is_said_of_one(changes: dict[str, object], words: str) -> None:
    assert words in message([replace(WIDE, **changes)])  # type: ignore[arg-type]


def test_what_follows_and_what_to_try() -> None:
    found, meaning, remedy = message([WIDE]).split("\n")
    assert found.startswith("Step 120, warning, logit_spread: head 3")
    assert meaning == "The softmax is hard."
    assert remedy == "What to try: lower the rate. More: docs/early-warning.md#logit_spread"


def test_words_that_are_not_there() -> None:
    assert message([replace(WIDE, meaning="", remedy="")]).split("\n")[1:] == [
        "More: docs/early-warning.md#logit_spread"
    ]


def test_the_second_time_it_is_short() -> None:
    assert "\n" not in message([WIDE], is_first=False)
    assert "What to try" not in message([WIDE], is_first=False)
    again = message([replace(WIDE, predicted_step=180)], is_first=False)
    assert again.endswith("Going on like this it passes 25 at about step 180.")


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([("a", 0)], None),
        ([("a", 0), ("a", 0)], None),  # one head, twice
        ([("a", 0), ("a", 1)], "; so has 1 more head."),
        ([("a", 0), ("a", 1), ("b", 0)], "; so have 2 more heads at 2 sites."),
        ([("a", None), ("b", None)], "; so has 1 more site."),
        ([("a", None), ("b", None), ("c", None)], "; so have 2 more sites."),
        (
            [(f"blocks.{site}", head) for site in range(48) for head in range(16)],
            "; so have 767 more heads at 48 sites.",
        ),
    ],
)
def test_many_are_one_message(places: list[tuple[str, int | None]], words: str | None) -> None:
    text = message(
        [replace(WIDE, site=site, head=head, scope="site" if head is None else "head") for site, head in places]
    )
    assert (words in text) if words else "more" not in text.split("More")[0]
    assert len(text) < 400


def test_the_worst_comes_first() -> None:
    mild = replace(WIDE, severity="info", value=1e6)
    crossed, farther = WIDE, replace(WIDE, value=80.0)
    soon, later = replace(WIDE, predicted_step=130), replace(WIDE, predicted_step=170)
    critical = replace(WIDE, severity="critical", predicted_step=900)
    assert worst_first([later, mild, soon, crossed, critical, farther]) == [
        critical,
        farther,
        crossed,
        soon,
        later,
        mild,
    ]


def test_the_summary() -> None:
    found = [
        replace(WIDE, step=90, rule="b_rule", value=26.0, head=1),
        replace(WIDE, step=70, rule="c_rule", severity="info", site="blocks.0", head=None),
        WIDE,
        replace(WIDE, step=110, rule="b_rule", severity="critical", value=30.0),
    ]
    lines = summary(found).split("\n")
    assert [line.split() for line in lines] == [
        ["Early", "warnings:"],
        ["rule", "severity", "first", "at", "step", "times", "worst", "place", "statistic", "value"],
        ["c_rule", "info", "70", "1", "blocks.0", "logit_std", "31.25"],
        ["b_rule", "critical", "90", "2", "blocks.2", "#3", "logit_std", "30"],
        ["logit_spread", "warning", "120", "1", "blocks.2", "#3", "logit_std", "31.25"],
    ]
    assert summary([]) == "Early warnings: none."


def test_early_warnings_are_plain_values() -> None:
    values = WIDE.to_dict()
    assert EarlyWarning.from_dict(values) == WIDE
    assert EarlyWarning.from_dict({**values, "of_a_later_version": 1}) == WIDE
    assert [replace(WIDE, **at).place for at in ({}, {"head": None}, {"site": None, "head": None})] == [
        "blocks.2 #3",
        "blocks.2",
        "all sites",
    ]


def test_places_that_are_not_as_bad_are_counted_apart() -> None:
    worse = replace(WIDE, value=120.0, limit=100.0)
    others = [replace(WIDE, head=head) for head in (4, 5)]
    assert "above 100" in message([worse, *others])
    assert "; 2 more are beyond a lower limit." in message([worse, *others])
    assert "; so has 1 more head; 1 more is beyond" in message([worse, replace(worse, head=7), others[0]])


def test_sites_and_models_whose_heads_are_counted() -> None:
    of_site = replace(WIDE, scope="site", heads=2, of_heads=4)
    assert "; so has 1 more site." in message([of_site, replace(of_site, site="blocks.0", head=1)])
    of_model = replace(WIDE, scope="model", heads=2, of_heads=4)
    assert "more" not in message([of_model, replace(of_model, site="blocks.0", head=1)]).split("More")[0]
