"""The worked example of CONTRIBUTING.md is a statistic like any other."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import generate
import pytest
import torch

import lightning_attn.functional as functional
import lightning_attn.metrics as metrics
from lightning_attn import AttentionObserver
from lightning_attn.statistics import Statistic, known_statistics, registry
from lightning_attn.tensorboard import statistics_table

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
CODE = TEXT.split("## Add a statistic")[1].split("```python\n")[1].split("```")[0]
WEIGHTS = torch.tensor([[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.5, 0.3, 0.2, 0], [0.7, 0.1, 0.1, 0.1]])
#: Of its rows with two keys at least: (0.36 + 0.16, 0.25 + 0.09 + 0.04, 0.49 + 3 * 0.01).
CONCENTRATION = (0.52 + 0.38 + 0.52) / 3


@pytest.fixture
def statistic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Statistic]]:
    """The statistic of the example, in a file of its own; forgotten after the test."""
    monkeypatch.setattr(registry, "_STATISTICS", dict(known_statistics()))
    file = tmp_path / "concentration.py"
    file.write_text(CODE)
    specification = importlib.util.spec_from_file_location("concentration", file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "concentration", module)
    specification.loader.exec_module(module)
    yield module.Concentration


def test_it_is_short() -> None:
    assert len(CODE.splitlines()) < 80


def test_it_has_a_function_and_a_metric(statistic: type[Statistic]) -> None:
    (value,) = functional.attention_concentration(WEIGHTS, is_causal=True).tolist()
    assert value == pytest.approx(CONCENTRATION)
    metric = metrics.AttentionConcentration(num_heads=1)
    metric.update(WEIGHTS, is_causal=True)
    assert metric.compute().item() == pytest.approx(CONCENTRATION)


def test_it_is_observed_while_a_model_runs(statistic: type[Statistic]) -> None:
    layer = torch.nn.MultiheadAttention(16, num_heads=4, batch_first=True)
    observer = AttentionObserver(layer, statistics="concentration")
    tokens = torch.randn(2, 7, 16)
    with observer:
        _, weights = layer(tokens, tokens, tokens, average_attn_weights=False)
    expected = weights.square().sum(-1).mean((0, 2))
    snapshot = observer.snapshot()
    assert snapshot["(root)", "concentration"] == pytest.approx(expected.tolist())
    assert "attention/concentration/mean" in snapshot.scalars()


def test_it_is_in_the_page_and_in_the_key_of_tensorboard(statistic: type[Statistic]) -> None:
    assert "### `concentration`" in generate.section(statistic)
    assert statistic.reading in statistics_table(["entropy", "concentration"])


def test_its_example_is_true(statistic: type[Statistic]) -> None:
    uniform = torch.zeros(1, 1, 64, 8)
    found = functional.attention_concentration(query=uniform, key=uniform, is_causal=True)
    expected = sum(1 / m for m in range(2, 65)) / 63
    assert (found.item(), statistic.example) == (pytest.approx(expected), pytest.approx(expected, rel=1e-4))
