"""The demo: both domains run and are drawn, and what it says is made of the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import demo
import pytest
import torch
from comparison import Comparison
from PIL import Image
from watched_run import Domain, Run, train

from lightning_attn import EarlyWarning, History, Snapshot


@pytest.mark.parametrize("domain", [demo.language_model, demo.vision_transformer])
def test_a_domain_is_trained_three_times_compared_and_drawn(
    domain: Callable[[], Domain], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short = replace(domain(), steps=40)
    demo.compare(short, healthy_rate=0.001, hot_rate=0.03)
    printed = capsys.readouterr().out
    assert "Steps 8 to 10 of 40" in printed
    assert ("test accuracy" in printed) == (short.test_data is not None)
    assert f"Every head over training: demo_output/{short.name}.png" in printed
    assert Image.open(f"demo_output/{short.name}.png").size == (1200, 792)
    for run in ("healthy", "too_hot", "rescued"):
        assert list(Path("demo_output", short.name, run).glob("events.out.tfevents.*"))


def a_run(early_loss: float, final_loss: float, logits: float, entropy: float, accuracy: float | None = None) -> Run:
    """A run of 100 steps, watched every 5, with one loss before step 50 and another after it."""
    history = History(100)
    for step in range(0, 100, 5):
        values = torch.tensor([[logits / 2, logits], [logits, 2 * logits], [entropy, entropy]], dtype=torch.float64)
        history.append(Snapshot(step, {"attention": 2}, ("logit_std", "max_logit", "entropy"), values))
    return Run("a run", 0.001, [early_loss] * 50 + [final_loss] * 50, history, [], accuracy)


HEALTHY = a_run(early_loss=2.0, final_loss=1.0, logits=2.0, entropy=0.9, accuracy=0.8)
RESCUED = replace(a_run(early_loss=2.1, final_loss=1.1, logits=4.0, entropy=0.6, accuracy=0.75), rescued_at=15)


@pytest.mark.parametrize(
    ("hot", "headline"),
    [
        (a_run(2.1, 1.5, 20.0, 0.3), "A quarter in, the losses are 5% apart, the attention logits 10-fold"),
        (a_run(1.8, 1.5, 20.0, 0.3), "A quarter in, the too hot run's loss is 10% lower, its logits 10-fold"),
        (a_run(3.0, 1.5, 20.0, 0.3), "A quarter in, the losses and the heads both tell the runs apart"),
        (a_run(2.1, 1.5, 4.0, 0.3), "A quarter in, the heads do not yet tell the runs apart"),
        (a_run(2.1, 1.5, 20.0, 0.8), "A quarter in, the heads do not yet tell the runs apart"),
    ],
)
def test_the_headline_says_what_was_found(hot: Run, headline: str) -> None:
    found = Comparison(HEALTHY, hot, RESCUED)
    assert found.headline() == headline
    assert len(headline) < 75, "a longer one would leave the picture"
    assert found.conclusion() == f"{headline}; in the end the too hot run's loss is 50% higher."


def test_the_table_holds_all_runs() -> None:
    table = Comparison(HEALTHY, a_run(2.1, 0.9, 20.0, 0.3, accuracy=0.5), RESCUED).table().splitlines()
    assert [line.split() for line in table] == [
        ["Steps", "20", "to", "25", "of", "100", "healthy", "too", "hot", "rescued"],
        ["loss", "2.00", "2.10", "+5%", "2.10", "+5%"],
        ["logit_std,", "largest", "head", "2.00", "20.00", "×10", "4.00", "×2"],
        ["max_logit,", "largest", "head", "4.00", "40.00", "×10", "8.00", "×2"],
        ["entropy,", "mean", "of", "heads", "0.90", "0.30", "-0.60", "0.60", "-0.30"],
        ["The", "last", "30", "steps"],
        ["loss", "1.00", "0.90", "-10%", "1.10", "+10%"],
        ["Afterwards"],
        ["test", "accuracy", "0.80", "0.50", "-0.30", "0.75", "-0.05"],
    ]


def test_what_was_warned_of_is_said() -> None:
    assert demo.warnings_of(HEALTHY) == "AttentionEarlyWarning in the a run run: no warnings."
    event = EarlyWarning(5, "transition", "info", "attention", 0, "positional_share", 0.1)
    first = EarlyWarning(15, "growth", "warning", "attention", 1, "logit_std", 9.0, remedy="cool it")
    second = EarlyWarning(20, "spread", "critical", "attention", 0, "logit_std", 99.0)
    said = demo.warnings_of(replace(HEALTHY, title="too hot", warnings=[event, first, second]))
    assert "in the too hot run, first at 15% of it:" in said
    assert "What to try: cool it" in said and "spread" in said and "transition" not in said
    assert demo.warnings_of(replace(HEALTHY, warnings=[event])).endswith("no warnings.")


@pytest.mark.slow
@pytest.mark.parametrize(("domain", "hot_rate"), [(demo.language_model, 0.02), (demo.vision_transformer, 0.03)])
def test_hot_runs_are_warned_of_in_their_first_quarter_and_healthy_ones_never(
    domain: Callable[[], Domain], hot_rate: float, tmp_path: Path
) -> None:
    whole = domain()
    until_a_quarter = replace(whole, steps=whole.steps // 4 + 1)  # the last capture is at a quarter of the run
    assert train(until_a_quarter, "too hot", hot_rate, demo.SEED, tmp_path).faults
    assert not train(whole, "healthy", 0.001, demo.SEED, tmp_path).faults


def test_without_a_test_there_is_no_accuracy() -> None:
    hot = a_run(2.1, 0.9, 20.0, 0.3)
    assert "accuracy" not in Comparison(replace(HEALTHY, test_accuracy=None), hot, RESCUED).table()


def test_what_the_rescue_made_of_the_run_is_said() -> None:
    said = Comparison(HEALTHY, a_run(2.1, 1.5, 20.0, 0.3), RESCUED).rescue()
    assert "switched on by the warning, at 15% of it" in said
    assert "its loss is 10% higher than that of the healthy run; without the rescue it is 50% higher" in said
    never = Comparison(HEALTHY, a_run(2.1, 1.5, 20.0, 0.3), replace(RESCUED, rescued_at=None)).rescue()
    assert "nothing was done" in never
