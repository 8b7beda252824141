"""The built-in rules: what each must speak of, what none may speak of, and that they are named and made alike."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from snapshot_series import Number, snapshot, warned

from lightning_attn import Snapshot
from lightning_attn.warning import (
    EntropyCollapse,
    LimitRule,
    LogitGrowth,
    LogitLevel,
    LogitSpread,
    NonFiniteLogits,
    PositionalTransition,
    RankCollapse,
    Record,
    Rule,
    Saturation,
    SharpHeads,
    SinkTakeover,
    TrendRule,
    UniformCollapse,
    Watch,
    built_in_rules,
    message,
)

NAN, INF = math.nan, math.inf

#: What a healthy head shows.
HEALTHY: dict[str, float] = {
    "entropy": 0.6,
    "entropy_without_sink": 0.6,
    "logit_std": 2.0,
    "max_logit": 8.0,
    "non_finite_share": 0.0,
    "positional_share": 0.5,
    "rank_residual": 0.7,
    "sink_strength": 0.3,
    "softmax_sensitivity": 0.6,
}
#: What is beyond all limits of the rules, at a head.
BROKEN: dict[str, float] = {
    "entropy_without_sink": 1e-5,
    "logit_std": 1e4,
    "max_logit": 1e6,
    "non_finite_share": 0.5,
    "rank_residual": 1e-6,
}
#: The rules that speak of a single head or site.
OF_ONE_HEAD = {
    "entropy_without_sink": "entropy_collapse",
    "logit_std": "logit_spread",
    "max_logit": "logit_level",
    "non_finite_share": "non_finite_logits",
    "rank_residual": "rank_collapse",
}
HEADS = {"blocks.0": 4, "blocks.1": 4}
ALL = sum(HEADS.values())
LONG = 120  # snapshots: past every warm-up


def rules() -> list[Rule]:
    return list(built_in_rules())


def healthy(step: int, **different: Number) -> Snapshot:
    return snapshot(step, HEADS, **{**HEALTHY, **different})


def run(statistic: str, values: Sequence[Number]) -> list[Snapshot]:
    """A healthy run but for one statistic."""
    return [healthy(10 * n, **{statistic: value}) for n, value in enumerate(values)]


def of_heads(number: int, value: float, otherwise: float) -> list[float]:
    return [value] * number + [otherwise] * (ALL - number)


def names(snapshots: Sequence[Snapshot]) -> set[str]:
    return {warning.rule for warning in warned(rules(), snapshots)}


# What each speaks of


@pytest.mark.parametrize(
    ("rule", "statistic", "values"),
    [
        (NonFiniteLogits(), "non_finite_share", [0, of_heads(1, 1e-6, 0)]),
        (LogitSpread(), "logit_std", [2.0, *[of_heads(1, 1e4, 2)] * 5]),
        (LogitGrowth(limit=25.0, horizon=50), "logit_std", [of_heads(1, 4 + n, 2) for n in range(30)]),
        (LogitGrowth(limit=25.0, horizon=50), "logit_std", [of_heads(1, 2 * 1.15**n, 2) for n in range(20)]),
        (LogitLevel(), "max_logit", [of_heads(1, 1e6, 2)] * 5),
        (EntropyCollapse(), "entropy_without_sink", [of_heads(1, 1e-5, 0.6)] * 9),
        (SharpHeads(), "entropy_without_sink", [of_heads(ALL, 0.02, 0.6)] * 9),
        (Saturation(), "entropy_without_sink", [of_heads(ALL // 2, 0.001, 0.6)] * 9),
        (UniformCollapse(), "entropy", [1.0] * LONG),
        (UniformCollapse(), "entropy", [0.6] * LONG + [0.9999] * 9),
        (RankCollapse(), "rank_residual", [1e-5] * 9),
        (SinkTakeover(), "sink_strength", [of_heads(ALL, 0.999, 0.3)] * 9),
        (PositionalTransition(), "positional_share", [of_heads(1, 0.9, 0.5)] * 20 + [of_heads(1, 0.1, 0.5)] * 20),
        (PositionalTransition(), "positional_share", [of_heads(1, 0.1, 0.5)] * 30 + [of_heads(1, 0.9, 0.5)] * 20),
    ],
)
def test_what_each_speaks_of(rule: Rule, statistic: str, values: list[Number]) -> None:
    found = warned(rule, run(statistic, values))
    assert len(found) >= 1
    for warning in found:
        assert warning.rule == rule.name
        assert warning.statistic == statistic
        assert warning.site in HEADS
        assert warning.meaning
        assert warning.remedy


@pytest.mark.parametrize(
    ("rule", "statistic", "values"),
    [
        # A sharp head alone is healthy, and so are some of them.
        (SharpHeads(), "entropy_without_sink", [of_heads(1, 0.0, 0.6)] * 9),
        (SharpHeads(), "entropy_without_sink", [of_heads(ALL // 2, 0.001, 0.6)] * 9),
        (Saturation(), "softmax_sensitivity", [of_heads(1, 0.0, 0.6)] * 9),
        # Sinks are healthy: the entropy is small, and that without the sink is not.
        (EntropyCollapse(), "entropy", [0.001] * 9),
        (SharpHeads(), "entropy", [0.001] * 9),
        (SinkTakeover(), "sink_strength", [of_heads(ALL // 2, 0.99, 0.3)] * 9),
        (SinkTakeover(), "sink_strength", [0.7] * 9),
        # All runs begin with uniform heads.
        (UniformCollapse(), "entropy", [1.0] * 20 + [0.9] * LONG),
        (UniformCollapse(), "entropy", [of_heads(ALL // 2, 1.0, 0.6)] * LONG),
        # Healthy growth levels off; what shrinks does no harm.
        (LogitGrowth(limit=25.0), "logit_std", [10 * (1 - math.exp(-n / 10)) for n in range(LONG)]),
        (LogitGrowth(limit=25.0), "logit_std", [60 * math.exp(-n / 10) for n in range(LONG)]),
        (LogitGrowth(limit=25.0), "logit_std", [8 + n % 3 for n in range(LONG)]),
        (LogitGrowth(limit=25.0), "logit_std", [2.0] * 9 + [30.0] * 20),  # a jump is for `logit_spread`
        # Once is no fault.
        (LogitSpread(), "logit_std", [2.0, 2.0, 1e4, 2.0, 2.0]),
        (RankCollapse(), "rank_residual", [0.7, 0.0, 0.7, 0.7]),
        (EntropyCollapse(), "entropy_without_sink", [0.6, 0.0, 0.0, 0.6]),
        # A drift and a spike are no transition.
        (PositionalTransition(), "positional_share", [0.9 - n / 100 for n in range(LONG)]),
        (PositionalTransition(), "positional_share", [0.9] * 20 + [0.1] * 2 + [0.9] * 20),
        (NonFiniteLogits(), "non_finite_share", [0.0] * 9),
        (NonFiniteLogits(), "non_finite_share", [NAN] * 9),
    ],
)
def test_what_each_is_silent_about(rule: Rule, statistic: str, values: list[Number]) -> None:
    assert warned(rule, run(statistic, values)) == []


def test_a_transition_is_told_once() -> None:
    """Not again while the window slides over it, and not when it has left."""
    random = np.random.default_rng(0)
    levels = np.where(np.arange(150) < 40, 0.9, 0.2)[:, None] + random.normal(0, 0.03, (150, ALL))
    levels[:, 1:] = 0.5 + random.normal(0, 0.03, (150, ALL - 1))
    (warning,) = warned(PositionalTransition(), run("positional_share", levels.tolist()))
    assert warning.place == "blocks.0 #0"
    assert warning.severity == "info"
    assert 400 < warning.step < 600
    assert warning.value == pytest.approx(0.2, abs=0.05)
    assert warning.since == 400
    assert " since step 400." in message([warning])


def test_transitions_of_many_heads_are_all_told() -> None:
    """Also where there are more than are looked at in one snapshot."""
    levels = np.where(np.arange(70) < 30, 0.9, 0.2) + np.random.default_rng(0).normal(0, 0.03, (64, 70))
    heads = {"attention": 64}
    run = [snapshot(10 * n, heads, positional_share=level) for n, level in enumerate(levels.T.tolist())]
    assert sorted(warning.head or 0 for warning in warned(PositionalTransition(), run)) == list(range(64))


def test_growth_is_told_before_its_limit() -> None:
    warning = warned(LogitGrowth(limit=25.0), run("logit_std", [0.1 + 0.5 * n for n in range(50)]))[0]
    assert warning.value < 25
    assert warning.predicted_step == pytest.approx(498, abs=2)


def test_growth_of_very_many_heads_is_told_of_all() -> None:
    heads = range(768)
    values = [[0.6 * n + head / 1e4 for head in heads] for n in range(50)]
    growing = [snapshot(10 * n, {"attention": 768}, logit_std=of_step) for n, of_step in enumerate(values)]
    assert {warning.head for warning in warned(LogitGrowth(), growing)} == set(heads)


def test_what_a_position_bias_spreads_is_no_growth() -> None:
    """The logits of a head with ALiBi are spread from the beginning, the more the longer a batch is."""
    biased = [of_heads(1, 74.0, 2), of_heads(1, 37.0, 2), of_heads(1, 140.0, 2)] * 7
    assert warned([LogitSpread(), LogitGrowth()], run("logit_std", biased)) == []
    found = warned(LogitSpread(), run("logit_std", [*biased, *[of_heads(1, 2 * 74.0 + 40.0, 2)] * 5]))
    assert [(warning.place, round(warning.value)) for warning in found] == [("blocks.0 #0", 188)]


@pytest.mark.parametrize("rule", [SharpHeads(), Saturation(), SinkTakeover(), UniformCollapse()])
def test_few_heads_are_not_many(rule: LimitRule) -> None:
    value = rule.limits[0] + (0.001 if rule.is_above else -0.001)
    few = [snapshot(100 * n, {"attention": 2}, **{rule.statistic: [value] * 2}) for n in range(30)]
    many = [snapshot(100 * n, {"attention": 4}, **{rule.statistic: [value] * 4}) for n in range(30)]
    assert (len(warned(rule, few)), len(warned(rule, many))) == (0, 1)


def test_heads_with_sinks_are_not_saturated() -> None:
    """Nor is it looked at what passes through the softmax with the sink."""
    assert {name for rule in (SharpHeads(), Saturation()) for name in rule.statistics} == {"entropy_without_sink"}


@pytest.mark.parametrize("limits", [[12.0], [12.0, 50.0], [12.0, 50.0, 200.0], [1.0, 2.0, 3.0, 4.0]])
def test_limits_are_tuned_without_severities(limits: list[float]) -> None:
    for rule in (LogitSpread(limits=limits), LogitLevel(limits=limits)):
        assert len(rule.severities) in (1, len(limits))
        assert rule.severities == ("warning",) or len(limits) == {"logit_spread": 2, "logit_level": 4}[rule.name]


def test_half_of_the_limit_is_where_growth_is_looked_at() -> None:
    assert (LogitGrowth(limit=12.0).beyond, LogitGrowth().beyond, LogitGrowth(beyond=3.0).beyond) == (6.0, 15.0, 3.0)


# All of them together


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "entropy": st.floats(0.1, 0.95),
            "entropy_without_sink": st.floats(0.35, 1),
            "logit_std": st.floats(0, 10),
            "max_logit": st.floats(-10, 25),
            "positional_share": st.floats(0, 1),
            "rank_residual": st.floats(0.1, 1),
            "sink_strength": st.floats(0, 0.7),
            "softmax_sensitivity": st.floats(0.3, 1),
        }
    ),
    st.integers(1, LONG),
)
def test_nothing_of_what_is_healthy_and_constant(levels: dict[str, float], points: int) -> None:
    assert names([healthy(10 * n, **levels) for n in range(points)]) == set()


@given(
    st.sampled_from(sorted(OF_ONE_HEAD)),
    st.integers(0, ALL - 1),
    st.integers(1, 15),
    st.integers(10, 30),
)
@settings(max_examples=60, deadline=None)
def test_exactly_one_of_a_step_change_of_one_head(statistic: str, head: int, before: int, after: int) -> None:
    head -= head % 4 if statistic == "rank_residual" else 0  # a site has one value, at its first head
    values = [HEALTHY[statistic]] * ALL
    changed = [*values]
    changed[head] = BROKEN[statistic]
    (warning,) = warned(rules(), run(statistic, [values] * before + [changed] * after))
    assert warning.rule == OF_ONE_HEAD[statistic]
    assert warning.site == f"blocks.{head // 4}"
    assert warning.head == (None if statistic == "rank_residual" else head % 4)
    assert warning.since == 10 * before


@pytest.mark.parametrize(
    ("statistic", "value", "rule"),
    [
        ("entropy", 1.0, "uniform_collapse"),
        ("sink_strength", 0.99, "sink_takeover"),
        ("entropy_without_sink", 0.06, "sharp_heads"),
    ],
)
def test_exactly_one_of_a_step_change_of_all_heads(statistic: str, value: float, rule: str) -> None:
    (warning,) = warned(rules(), run(statistic, [HEALTHY[statistic]] * LONG + [value] * 30))
    assert warning.rule == rule
    assert (warning.heads, warning.of_heads) == (ALL, ALL)


def any_run(seed: int) -> list[Snapshot]:
    """Anything a model could do: sites and statistics come and go, and values are what they like."""
    random = np.random.default_rng(seed)
    odd = np.array([NAN, INF, -INF, 0.0, -0.0, 1e308, -1e308, 5e-324])
    share_of_odd = random.choice([0.0, 0.1, 0.9])
    found = []
    for n in range(random.integers(1, 20)):
        heads = [HEADS, HEADS, HEADS, {"blocks.1": 4}, {"blocks.0": 2, "new": 1}, {}][random.integers(6)]
        statistics = [list(HEALTHY), list(HEALTHY), list(HEALTHY)[::2], []][random.integers(4)]
        rows = random.normal(size=(len(statistics), sum(heads.values()))) * 10.0 ** random.integers(-3, 7)
        rows = np.where(random.random(rows.shape) < share_of_odd, random.choice(odd, rows.shape), rows)
        found.append(snapshot(10 * n, heads, **dict(zip(statistics, rows.tolist(), strict=True))))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_whatever_comes_is_survived_in_silence(seed: int) -> None:
    """Also numpy's: nothing is divided by zero. What is found is the same when it is looked for again."""
    run = any_run(seed)
    before = [one.values.clone() for one in run]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, again = warned(rules(), run), warned(rules(), run)
    assert repr(found) == repr(again)  # NaN is not equal to itself
    for one, values in zip(run, before, strict=True):
        assert one.values.nan_to_num(7).equal(values.nan_to_num(7))


def test_rules_are_functions_of_the_record_alone() -> None:
    snapshots = [
        healthy(10 * n, logit_std=5.0 + n, max_logit=40.0, positional_share=0.1 if n < 10 else 0.9) for n in range(20)
    ]
    for rule in rules():
        one, two = Record(snapshots), Record(snapshots)
        signs = list(rule.signs(one))
        assert list(rule.signs(one)) == signs == list(rule.signs(two))
        assert list(rule.signs(Record(snapshots[-rule.snapshots :]))) == signs  # what came before does not count


def test_thousands_of_heads() -> None:
    heads = {f"blocks.{site}": 64 for site in range(100)}
    watch = Watch(built_in_rules())
    growing = [snapshot(10 * n, heads, **{**HEALTHY, "logit_std": 2 * 1.3**n}) for n in range(20)]
    found = [warning for one in growing for warning in watch.look(one)]
    assert {warning.rule for warning in found} == {"logit_growth", "logit_spread"}
    assert watch.raised()["logit_spread"] == 6400


def test_one_snapshot() -> None:
    (warning,) = warned(rules(), [healthy(0, non_finite_share=of_heads(1, 0.5, 0))])
    assert warning.slope is None


# What they are


EVERY = [*built_in_rules(), LimitRule("wide", "max_logit", above=[1.0, 2.0]), TrendRule("trend", "entropy", below=0.1)]


def ids(rule: Rule) -> str:
    return rule.name


def test_the_default_rules() -> None:
    assert [rule.name for rule in built_in_rules()] == [
        "non_finite_logits",
        "logit_growth",
        "logit_spread",
        "sharp_heads",
        "saturation",
        "rank_collapse",
        "logit_level",
        "logit_precision",
        "entropy_collapse",
        "uniform_collapse",
        "sink_takeover",
        "positional_transition",
    ]
    assert [rule.limits for rule in built_in_rules() if rule.name == "logit_level"] == [(30, 100, 1e3, 1e4)]


@pytest.mark.parametrize("rule", EVERY, ids=ids)
def test_rules_do_not_change(rule: Rule) -> None:
    with pytest.raises(AttributeError, match=f"A {type(rule).__name__} cannot be changed once it is made"):
        rule.patience = 7
    with pytest.raises(AttributeError, match="cannot be changed"):
        del rule.patience
    with pytest.raises(AttributeError, match="cannot be changed"):
        rule.something_else = 7  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", EVERY, ids=ids)
def test_copies_are_equal(rule: Rule) -> None:
    for another in (pickle.loads(pickle.dumps(rule)), copy.copy(rule), copy.deepcopy(rule)):
        assert another == rule
        assert hash(another) == hash(rule)
        assert repr(another) == repr(rule)


def test_rules_are_equal_by_their_arguments() -> None:
    assert LogitSpread([5.0, 6.0]) == LogitSpread(limits=[5.0, 6.0])
    assert LogitSpread([5, 6]) == LogitSpread([5.0, 6.0])
    assert hash(LogitSpread([5, 6])) == hash(LogitSpread([5.0, 6.0]))
    assert LogitSpread([5.0, 6.0]) != LogitSpread([5.0, 7.0])
    assert LogitSpread(patience=3) != LogitSpread(patience=4)
    assert LogitSpread() != LogitLevel()
    assert LogitSpread() != "logit_spread"
    assert len({*built_in_rules(), *built_in_rules()}) == len(built_in_rules())


def test_what_tells_rules_apart_is_in_their_repr() -> None:
    for one, another in [
        (LogitSpread(patience=3), LogitSpread(patience=4)),
        (LogitSpread(warmup_steps=3), LogitSpread()),
        (LogitSpread(severity=["info", "info"]), LogitSpread()),
        (LimitRule("a", "entropy", above=1), LimitRule("b", "entropy", above=1)),
        (TrendRule("a", "entropy", above=1), TrendRule("a", "entropy", below=1)),
        (TrendRule("a", "entropy", above=1, window=9), TrendRule("a", "entropy", above=1)),
        (LimitRule("a", "entropy", above=1), LimitRule("a", "max_logit", above=1)),
        (PositionalTransition(window=30), PositionalTransition()),
    ]:
        assert repr(one) != repr(another)


#: What no argument of that name may be.
REFUSED: dict[str, list[Any]] = {
    "limit": ["high", NAN, INF, None, True],
    "limits": ["high", [], [2.0, 1.0], [1.0, NAN], ["high"]],
    "severity": ["loud", [], ["warning", "loud"], ["warning"] * 9],
    "patience": [0, -1, 1.5, "two", True],
    "warmup_steps": [-1, 0.5, "none", None],
    "share_of_heads": [0, -0.5, 1.5, NAN, "half", True],
    "beyond": ["far", NAN, INF, True],
    "horizon": [0, -1, 1.5, "long"],
    "window": [3, -1, 8.0, "long"],
    "min_change": [0, -1, 2, NAN, "much", None],
    "min_certainty": [-0.1, 1, NAN, "sure"],
}
#: By what name the argument of a built-in rule goes in a message.
SAID = {"limit": "limit", "limits": "The limit, "}


@pytest.mark.parametrize("rule", built_in_rules(), ids=ids)
def test_what_is_refused(rule: Rule) -> None:
    for name in inspect.signature(type(rule)).parameters:
        for value in REFUSED[name]:
            with pytest.raises(ValueError, match=f"{SAID.get(name, f'`{name}`')}.* got ") as refusal:
                type(rule)(**{name: value})
            assert repr(value) in str(refusal.value)


class Own(Rule):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"name": "own", "statistics": ["entropy"], **settings})

    def signs(self, record: Record) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": ""}, "`name` .*got ''"),
        ({"statistics": []}, "must name at least one statistic"),
        ({"statistics": ["entropie"]}, "'entropie', which is none of .* Did you mean 'entropy'"),
        ({"severity": [["info"]]}, r"`severity` .*got \[\['info'\]\]"),
        ({"snapshots": 0}, "`snapshots` .*got 0"),
        ({"patience": None}, "`patience` .*got None"),
    ],
)
def test_what_a_rule_of_ones_own_may_not_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Own(**settings)


def test_one_statistic_may_be_given_as_it_is() -> None:
    assert Own(statistics="entropy") == Own()


# YAML


@pytest.mark.parametrize("rule", built_in_rules(), ids=ids)
def test_named_in_yaml(rule: Rule) -> None:
    assert parsed([{"class_path": f"lightning_attn.warning.{type(rule).__name__}"}]) == [rule]


@pytest.mark.parametrize(
    ("name", "arguments", "rule"),
    [
        ("LogitSpread", {"limits": [30.0, 90.0], "patience": 4}, LogitSpread([30.0, 90.0], patience=4)),
        ("LogitSpread", {"limits": [30.0], "severity": ["info"]}, LogitSpread([30.0], severity=["info"])),
        ("SharpHeads", {"share_of_heads": 0.5}, SharpHeads(share_of_heads=0.5)),
        (
            "LimitRule",
            {"name": "wide", "statistic": "max_logit", "above": 9, "scope": "site"},
            LimitRule("wide", "max_logit", above=9.0, scope="site"),
        ),
        (
            "LimitRule",
            {"name": "low", "statistic": "entropy", "below": [0.2, 0.1], "severity": ["info", "critical"]},
            LimitRule("low", "entropy", below=[0.2, 0.1], severity=["info", "critical"]),
        ),
        (
            "TrendRule",
            {"name": "soon", "statistic": "entropy", "below": 0.1, "horizon": 200},
            TrendRule("soon", "entropy", below=0.1, horizon=200),
        ),
    ],
)
def test_arguments_in_yaml(name: str, arguments: dict[str, Any], rule: Rule) -> None:
    assert parsed([{"class_path": f"lightning_attn.warning.{name}", "init_args": arguments}]) == [rule]


def parsed(rules: list[dict[str, Any]]) -> list[Rule]:
    """What a command line makes of a list of rules."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rules", type=list[Rule])
    made: list[Rule] = parser.instantiate_classes(parser.parse_object({"rules": rules})).rules
    return made
