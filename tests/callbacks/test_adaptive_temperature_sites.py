"""Sites that are skipped at times, and callbacks that are used again."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import LanguageModel, batches, fit, trainer
from torch import Tensor

from lightning_attn import AdaptiveTemperature


class Skipping(LanguageModel):
    """Its second block is skipped in the first steps, as by stochastic depth."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self.until = until

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks[0](self.embedding(tokens))
        return self.head(hidden if self.global_step < self.until else self.blocks[1](hidden))


def test_a_schedule_reaches_a_site_that_is_skipped_at_first(tmp_path: Path) -> None:
    model = Skipping(until=3)
    callback = AdaptiveTemperature(3.0, every_n_steps=2, file=None, print_summary=False)
    fit(model, callback, steps=8, default_root_dir=tmp_path)
    assert list(callback.temperatures) == ["blocks.0.attention", "blocks.1.attention"]
    assert all(values == pytest.approx([3.0] * 4) for values in callback.temperatures.values())


def test_what_never_computes_attention_is_left_alone_again(tmp_path: Path) -> None:
    callback = AdaptiveTemperature(3.0, every_n_steps=1, file=None, print_summary=False)
    with pytest.warns(match="blocks.1.attention computed no attention in 10 captures"):
        fit(Skipping(until=100), callback, steps=14, default_root_dir=tmp_path)
    assert list(callback.temperatures) == ["blocks.0.attention"]


def test_a_callback_that_is_used_again_begins_anew_with_another_trainer(tmp_path: Path) -> None:
    plain = fit(LanguageModel(), steps=4, default_root_dir=tmp_path)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    callback = AdaptiveTemperature(3.0, file=None, print_summary=False)
    fit(LanguageModel(), callback, steps=4, default_root_dir=tmp_path)
    callback._plan = type(callback._plan)(1.0)
    going_on = trainer(callback, max_epochs=2, default_root_dir=tmp_path)
    going_on.fit(LanguageModel(), batches(4), ckpt_path=tmp_path / "plain.ckpt")
    assert {value for values in callback.temperatures.values() for value in values} == {1.0}
