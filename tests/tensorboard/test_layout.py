"""The layout of custom scalars, as TensorBoard's own plugin reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from models import LanguageModel, fit
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin
from torch.utils.tensorboard import SummaryWriter

from lightning_attn import AttentionMonitor, Snapshot
from lightning_attn.snapshot import PER_SITE
from lightning_attn.tensorboard import scalar_layout


class Dashboard:
    """What the browser would get of a folder of event files."""

    def __init__(self, folder: Path) -> None:
        multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
        multiplexer.Reload()
        self.multiplexer = multiplexer
        provider = MultiplexerDataProvider(multiplexer, str(folder))
        plugins: dict[str, Any] = {}
        context = TBContext(data_provider=provider, plugin_name_to_instance=plugins, logdir=str(folder))
        plugins["scalars"] = ScalarsPlugin(context)
        self.plugin = CustomScalarsPlugin(context)

    def charts(self) -> dict[str, dict[str, dict[str, Any]]]:
        layout = self.plugin.layout_impl(RequestContext(), "")
        return {
            category["title"]: {chart["title"]: chart for chart in category["chart"]}
            for category in (layout and _parsed(layout))["category"]
        }

    def lines(self, chart: dict[str, Any]) -> set[str]:
        """The tags that the browser asks for to draw a chart of lines, and gets."""
        (pattern,) = chart["multiline"]["tag"]
        found = self.plugin.scalars_impl(RequestContext(), ".", pattern, "")
        assert found["regex_valid"]
        return set(found["tag_to_events"])

    def layouts_written(self) -> int:
        return len(self.multiplexer.Tensors(".", "custom_scalars__config__"))


def _parsed(layout: Any) -> Any:
    import json

    return json.loads(layout) if isinstance(layout, str) else layout


def a_snapshot(*sites: str) -> Snapshot:
    values = torch.rand(3, 2 * len(sites), dtype=torch.float64)
    return Snapshot(0, dict.fromkeys(sites, 2), ("entropy", "self_weight", "max_logit"), values)


AWKWARD_SITES = (
    "(root)",
    "blocks.0.attn",
    "blocks.1.attn",
    "blocks.1.attn_2",
    "blocksx1yattn",
    "a|b",
    "[0]*+?",
    "$^\\",
)


def write(folder: Path, prefix: str, *sites: str) -> None:
    with SummaryWriter(str(folder)) as writer:
        tagged = a_snapshot(*sites).scalars(prefix)
        for tag, value in tagged.items():
            writer.add_scalar(tag, value, 0)
        writer.add_scalar(f"{prefix}_2/entropy/elsewhere", 0.0, 0)
        writer.add_scalar(f"my{prefix}/entropy/elsewhere", 0.0, 0)
        writer.add_custom_scalars(scalar_layout(tagged, prefix))


@pytest.mark.parametrize("prefix", ["attention", "a.b (c) [d]+"])
def test_a_chart_of_each_statistic_shows_its_sites_and_nothing_else(tmp_path: Path, prefix: str) -> None:
    write(tmp_path, prefix, *AWKWARD_SITES)
    dashboard = Dashboard(tmp_path)
    charts = dashboard.charts()
    assert list(charts) == [f"{prefix}, all heads", f"{prefix}, by site"]
    assert list(charts[f"{prefix}, by site"]) == ["entropy", "max_logit"]
    for statistic, chart in charts[f"{prefix}, by site"].items():
        assert dashboard.lines(chart) == {f"{prefix}/{statistic}/{site}" for site in AWKWARD_SITES}


def test_the_margins_are_tags_that_exist(tmp_path: Path) -> None:
    """TensorBoard escapes these itself and takes them literally."""
    write(tmp_path, "a.b (c)", "(root)")
    dashboard = Dashboard(tmp_path)
    margins = dashboard.charts()["a.b (c), all heads"]
    assert list(margins) == ["entropy", "self_weight", "max_logit"]
    logged = dashboard.multiplexer.Runs()["."]["tensors"]
    for statistic, chart in margins.items():
        (series,) = chart["margin"]["series"]
        start = f"a.b (c)/{statistic}"
        assert series == {"value": f"{start}/mean", "lower": f"{start}/min", "upper": f"{start}/max"}
        assert set(series.values()) <= set(logged)


def test_sites_met_later_are_in_the_chart(tmp_path: Path) -> None:
    write(tmp_path, "attention", "expert.0")
    with SummaryWriter(str(tmp_path), filename_suffix=".later") as writer:
        writer.add_scalar("attention/entropy/expert.1", 0.5, 10)
    dashboard = Dashboard(tmp_path)
    chart = dashboard.charts()["attention, by site"]["entropy"]
    assert dashboard.lines(chart) == {"attention/entropy/expert.0", "attention/entropy/expert.1"}


def test_what_is_no_scalar_of_a_snapshot_is_left_out() -> None:
    assert (
        scalar_layout(["attention/every_n_steps", "loss", "other/entropy/min", "attentions/entropy/x"], "attention")
        == {}
    )
    assert scalar_layout(["attention/entropy/min", "attention/entropy/max"], "attention") == {}


# In a run


def test_two_monitors_of_one_run_share_the_layout(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    monitors = [
        AttentionMonitor(every_n_steps=2, print_summary=False),
        AttentionMonitor(every_n_steps=2, prefix="first", sites="blocks.0.*", statistics=["entropy", "max_weight"]),
    ]
    fit(LanguageModel(), *monitors, logger=logger, steps=5)
    dashboard = Dashboard(tmp_path)
    charts = dashboard.charts()
    assert list(charts) == ["attention, all heads", "attention, by site", "first, all heads", "first, by site"]
    assert set(charts["attention, by site"]) == set(PER_SITE)
    assert list(charts["first, all heads"]) == ["entropy", "max_weight"]
    assert dashboard.lines(charts["first, by site"]["entropy"]) == {"first/entropy/blocks.0.attention"}
    assert dashboard.lines(charts["attention, by site"]["entropy"]) == {
        f"attention/entropy/blocks.{block}.attention" for block in (0, 1)
    }
    assert dashboard.layouts_written() == 2  # once for each monitor, however many snapshots there are


def test_a_resumed_run_keeps_its_layout(tmp_path: Path) -> None:
    for epochs, checkpoint in ((1, None), (2, tmp_path / "last.ckpt")):
        from models import batches, trainer

        logger = TensorBoardLogger(tmp_path / "log", name="", version="")
        running = trainer(AttentionMonitor(every_n_steps=2), logger=logger, max_epochs=epochs)
        running.fit(LanguageModel(), batches(3), ckpt_path=checkpoint, weights_only=False)
        running.save_checkpoint(tmp_path / "last.ckpt")
    charts = Dashboard(tmp_path / "log").charts()
    assert set(charts["attention, by site"]) == set(PER_SITE)


def test_a_monitor_lays_out_every_run_it_watches(tmp_path: Path) -> None:
    monitor = AttentionMonitor(print_summary=False)
    for run in ("first", "second"):
        fit(LanguageModel(), monitor, logger=TensorBoardLogger(tmp_path / run, name="", version=""), steps=1)
        assert "attention, by site" in Dashboard(tmp_path / run).charts()
