"""`QKClip` keeps the logits of every head bounded, leaves healthy runs alone, and goes on after a restart."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from early_warning_runs import Repeatable
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from models import LanguageModel, batches, fit, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_attn import AdaptiveTemperature, AttentionMonitor, AttentionObserver, AttentionWarning, QKClip
from lightning_attn.callbacks import clip_log
from lightning_attn.temperature import attention_temperature
from lightning_attn.temperature.agreement import Finding

FILE = "attention_qk_clip.jsonl"
THRESHOLD = 4.0


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages."""
    messages: list[str] = []
    for name in ("rank_zero_warn", "rank_zero_info"):
        monkeypatch.setattr(clip_log, name, lambda text, **_: messages.append(text))
    return messages


class Hot(LanguageModel):
    """Learns so fast that its logits grow."""

    def __init__(self, blocks: int = 2, rate: float = 0.03, factor: float = 3.0) -> None:
        torch.manual_seed(1)
        super().__init__(blocks)
        self.rate = rate
        with torch.no_grad():
            for block in self.blocks:
                block.attention.qkv.weight[:64] *= factor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


class Still(Hot):
    """Learns nothing, so that the next forward pass sees what clipping did and nothing else; without dropout."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__(blocks, factor=6.0)
        for block in self.blocks:
            block.feed_forward[-1].p = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def clip(threshold: float = THRESHOLD, **arguments: Any) -> QKClip:
    return QKClip(threshold, **{"print_summary": False, **arguments})


def weights(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def max_logits(model: LanguageModel, tokens: Tensor) -> dict[str, list[float]]:
    observer = AttentionObserver(model, statistics=["max_logit"], max_sequences=None)
    with observer, torch.no_grad():
        model(tokens)
    snapshot = observer.snapshot()
    return {site: snapshot[site, "max_logit"] for site in snapshot.sites}


def lines(path: Path = Path(FILE)) -> list[dict[str, Any]]:
    said = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("time", "run")} for line in said]


# What is done.


def test_the_same_batch_then_has_the_threshold_for_its_largest_logit() -> None:
    model = Still()
    (tokens,) = batches(1).dataset.tensors
    (site,) = max_logits(model, tokens)
    before = max_logits(model, tokens)[site]
    threshold = (sorted(before)[1] + sorted(before)[2]) / 2
    fit(model, clip(threshold), steps=1)
    after = max_logits(model, tokens)[site]
    done = {line["head"]: line for line in lines()}
    assert sorted(done) == [head for head, value in enumerate(before) if value > threshold]
    for head, (old, new) in enumerate(zip(before, after, strict=True)):
        assert new == pytest.approx(min(old, threshold), rel=1e-5)
        if head in done:
            root = (threshold / old) ** 0.5
            assert done[head]["max_logit"] == pytest.approx(old, rel=1e-5)
            assert done[head] == {
                "step": 1,
                "site": site,
                "head": head,
                "max_logit": done[head]["max_logit"],
                "query_factor": pytest.approx(root, rel=1e-5),
                "key_factor": pytest.approx(root, rel=1e-5),
            }


def test_logits_of_a_hot_run_stay_bounded() -> None:
    def largest(*callbacks: pl.Callback) -> float:
        monitor = AttentionMonitor(every_n_steps=1, statistics=["max_logit"], max_sequences=None, print_summary=False)
        fit(Hot(), *callbacks, monitor, steps=60)
        return max(snapshot.summary("max_logit").max for snapshot in list(monitor.history)[-20:])

    one = clip(10.0)
    bounded, free = largest(one), largest()
    assert free > 30
    assert bounded < 13  # one step of the optimiser above the threshold
    assert sum(map(sum, one.counts.values())) == len(lines()) > 0


def test_a_head_below_the_threshold_keeps_its_weights() -> None:
    model = Still()
    (tokens,) = batches(1).dataset.tensors
    before = model.blocks[0].attention.qkv.weight.detach().clone()
    fit(model, clip(sorted(max_logits(model, tokens)["blocks.0.attention"])[1]), steps=1)
    changed = (model.blocks[0].attention.qkv.weight != before).any(-1).unflatten(0, (3, 4, 8))
    clipped = {line["head"] for line in lines()}
    assert 0 < len(clipped) < 4
    for head in range(4):
        assert changed[:2, head].all() == changed[:2, head].any() == (head in clipped)
    assert not changed[2].any()


def test_a_healthy_run_is_the_same_to_the_last_digit() -> None:
    runs = []
    for callbacks in ([], [clip(100.0)]):
        torch.manual_seed(2)
        model = LanguageModel()
        torch.manual_seed(3)  # of dropout
        fit(model, *callbacks, steps=8, validation=2)
        runs.append((model.losses, model.gradients, weights(model), torch.get_rng_state()))
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)
    assert not Path(FILE).exists()


def test_a_dry_run_changes_nothing_and_says_what_it_would_do(said: list[str]) -> None:
    runs, one = [], clip(dry_run=True)
    for callbacks in ([], [one]):
        model = Hot()
        torch.manual_seed(3)
        fit(model, *callbacks, steps=6)
        runs.append((model.losses, model.gradients, weights(model)))
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)
    assert sum(map(sum, one.counts.values())) == len(lines()) > 0
    assert all("QKClip (dry run)" in message for message in said)


def test_the_largest_of_all_micro_batches_counts_and_is_acted_on_once() -> None:
    model = Still()
    (tokens,) = batches(6).dataset.tensors
    parts = tokens.split(4)[3:]
    micro_batches = [max_logits(model, part) for part in parts]
    (site,) = micro_batches[0]
    largest = [max(of_batch[site][head] for of_batch in micro_batches) for head in range(4)]
    assert any(largest[head] > micro_batches[0][site][head] for head in range(4))
    running = trainer(clip(0.5 * min(largest)), accumulate_grad_batches=3)
    running.fit(model, DataLoader([[part] for part in parts], batch_size=None))
    assert [line["step"] for line in lines()] == [1] * 4
    assert [line["max_logit"] for line in lines()] == pytest.approx(largest, rel=1e-5)


def test_only_steps_that_are_due_are_watched() -> None:
    fit(Hot(), clip(every_n_steps=3), steps=8)
    assert {line["step"] for line in lines()} == {1, 4, 7}


def test_momentum_stays_as_it_is() -> None:
    class Looks(pl.Callback):
        """Runs behind the clip, and keeps what the optimiser has made of the first step."""

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            state = trainer.optimizers[0].state
            self.moments = [state[p]["exp_avg"].clone() for p in trainer.lightning_module.parameters()]

    moments = []
    for callbacks in ([], [clip()]):
        looks = Looks()
        torch.manual_seed(3)
        fit(Hot(), *callbacks, looks, steps=1)
        moments.append(looks.moments)
    torch.testing.assert_close(moments[1], moments[0], rtol=0, atol=0)


class ByHand(Hot):
    """Steps its optimiser itself, in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimisation() -> None:
    fit(ByHand(), clip(), steps=6)
    assert {line["step"] for line in lines()} == {1, 2, 3}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision: str) -> None:
    model = Still()
    (tokens,) = batches(1).dataset.tensors
    threshold = 0.5 * min(max_logits(model, tokens)["blocks.0.attention"])
    fit(model, clip(threshold), steps=1, precision=precision)
    assert all(line["key_factor"] < 1 for line in lines())
    after = max_logits(model.float(), tokens)["blocks.0.attention"]
    assert after == pytest.approx([threshold] * 4, rel=1e-5 if precision == "64-true" else 0.03)


def test_an_average_of_the_weights_is_of_clipped_ones() -> None:
    runs = []
    for callbacks in ([], [EMAWeightAveraging(decay=0.0, update_starting_at_step=0)]):  # of the last weights alone
        torch.manual_seed(3)
        model = Hot()
        fit(model, clip(), *callbacks, steps=4)
        runs.append(weights(model))
    assert max(line["step"] for line in lines()) == 4
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-6, atol=1e-7)


def test_a_compiled_model_is_not_compiled_again() -> None:
    torch._dynamo.reset()
    model = Hot()
    model.blocks = torch.compile(torch.nn.Sequential(*model.blocks), backend="eager", fullgraph=True)

    def forward(tokens: Tensor) -> Tensor:
        return model.head(model.blocks(model.embedding(tokens)))

    model.forward = forward  # type: ignore[method-assign]
    one, compiled = clip(every_n_steps=4), []
    torch._dynamo.utils.counters.clear()

    class Counts(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    fit(model, one, Counts(), steps=10)
    assert {line["step"] for line in lines()} == {1, 5, 9}
    assert compiled[1] == compiled[-1] == 1
    torch._dynamo.reset()


# What goes on after a restart.


class KeepsSaving(ModelCheckpoint):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, every_n_train_steps=1, save_top_k=-1)


@pytest.mark.parametrize(
    ("every_n_steps", "accumulate"), [(1, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 1), (1, 2)))]
)
def test_a_resumed_run_is_the_uninterrupted_one(every_n_steps: int, accumulate: int, tmp_path: Path) -> None:
    def run(folder: str, path: Path | None = None, **arguments: Any) -> tuple[Repeatable, QKClip]:
        model, one = Repeatable(), clip(1.0, every_n_steps=every_n_steps)
        arguments |= {"max_epochs": 3, "default_root_dir": tmp_path / folder, "accumulate_grad_batches": accumulate}
        running = trainer(one, *([KeepsSaving(tmp_path / "saved")] if path is None else []), **arguments)
        running.fit(model, batches(4), ckpt_path=path, weights_only=False)
        return model, one

    whole, expected = run("whole", enable_checkpointing=True)
    assert sum(map(sum, expected.counts.values())) > 4
    text = (tmp_path / "whole" / FILE).read_text()
    paths = sorted((tmp_path / "saved").glob("*.ckpt"), key=lambda path: int(path.stem.split("step=")[1]))
    for path in paths[:: max(len(paths) // 4, 1)]:
        (tmp_path / "whole" / FILE).write_text(text)
        resumed, one = run("whole", path)
        torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
        assert one.counts == expected.counts
        assert lines(tmp_path / "whole" / FILE) == [
            {name: value for name, value in json.loads(line).items() if name not in ("time", "run")}
            for line in text.splitlines()
        ]


def test_nothing_is_searched_again_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(Hot(), clip(), KeepsSaving(tmp_path), steps=2, enable_checkpointing=True)
    path = next(tmp_path.glob("*step=1.ckpt"))
    assert "callbacks" in torch.load(path, weights_only=True)  # plain values
    monkeypatch.setattr("lightning_attn.clipping.attention_clip.search", None)
    trainer(clip()).fit(Hot(), batches(2), ckpt_path=path, weights_only=False)


def test_the_same_trainer_goes_on_and_another_begins_anew() -> None:
    model, one = Hot(), clip()
    running = fit(model, one, steps=3)
    counts = copy.deepcopy(one.counts)
    running.fit_loop.max_epochs = 2
    running.fit(model, batches(3))
    assert sum(map(sum, one.counts.values())) > sum(map(sum, counts.values()))
    assert max(line["step"] for line in lines()) == 6
    fit(Hot(), one, steps=1)
    assert all(count <= 1 for of_heads in one.counts.values() for count in of_heads)


def test_evaluation_takes_nothing_up(tmp_path: Path) -> None:
    one = clip()
    fit(Hot(), one, KeepsSaving(tmp_path), steps=2, enable_checkpointing=True)
    counts, before = copy.deepcopy(one.counts), Path(FILE).read_text()
    trainer(one).validate(Hot(), batches(1), ckpt_path=next(tmp_path.glob("*step=1.ckpt")), weights_only=False)
    assert (one.counts, Path(FILE).read_text()) == (counts, before)


def test_it_pickles_and_copies() -> None:
    one = clip(sites=["blocks.*"])
    for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        fit(Hot(), again, steps=2)
        assert again.state_key == one.state_key
        assert again.counts
    assert not one.counts


# What is said.


class Remembers(Logger):
    """Keeps what it is told."""

    name = version = "remembers"

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.told.append((step, {name: value for name, value in metrics.items() if "qk_clip" in name}))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def test_every_clip_is_logged(said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    logger, one = Remembers(), clip(print_summary=True)
    fit(Hot(), one, steps=5, logger=logger)
    by_step = {step: told for step, told in logger.told if told}
    for step in range(1, 6):
        of_step = [line for line in lines() if line["step"] == step]
        factors = [line["query_factor"] * line["key_factor"] for line in of_step]
        assert by_step[step]["attention_qk_clip/heads_clipped"] == len(of_step) > 0
        assert by_step[step]["attention_qk_clip/smallest_factor"] == pytest.approx(min(factors))
        largest = by_step[step]["attention_qk_clip/max_logit"]
        assert largest == pytest.approx(max(line["max_logit"] for line in of_step))
    assert len(said) == 2  # once for each site
    assert all("is clipped, whose max_logit was" in message for message in said)
    printed = capsys.readouterr().out
    assert f"QKClip: {sum(count > 0 for of in one.counts.values() for count in of)} of 8 heads were clipped" in printed
    assert "times  blocks." in printed


def test_a_run_without_clips_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    fit(LanguageModel(), clip(1000.0, print_summary=True), steps=2)
    assert "QKClip: none of 8 heads was clipped." in capsys.readouterr().out


class NormalisedModel(LanguageModel):
    """Queries and keys of its first block are normalised after their projection."""

    def __init__(self) -> None:
        super().__init__()
        attention = self.blocks[0].attention
        attention.norm = torch.nn.RMSNorm(8)

        def forward(tokens: Tensor) -> Tensor:
            query, key, value = attention.qkv(tokens).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            query, key = attention.norm(query), torch.nn.functional.normalize(key, dim=-1)
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return attention.out(mixed.transpose(1, 2).flatten(2))

        attention.forward = forward


def test_what_is_left_alone_is_said_once(said: list[str]) -> None:
    one = clip(0.01)
    fit(NormalisedModel(), one, steps=4)
    (refused,) = [message for message in said if "cannot be clipped" in message]
    assert "blocks.0.attention" in refused
    assert "normalised" in refused
    assert set(one.counts) == {"blocks.1.attention"}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("start", [0, 2])
def test_a_site_whose_temperature_is_held_is_left_to_that(said: list[str], start: int, order: int) -> None:
    """Whichever comes first; what the other does not govern is clipped."""
    temperature = AdaptiveTemperature(start=start, every_n_steps=1, sites="blocks.0*", print_summary=False, file=None)
    one = clip()
    fit(Hot(), *[temperature, one][::order], steps=3)
    (message,) = [message for message in said if "AdaptiveTemperature" in message]
    assert message.startswith("QKClip: blocks.0.attention cannot be clipped")
    assert {line["site"] for line in lines()} == {"blocks.1.attention"} == set(one.counts)


@pytest.mark.parametrize("order", [1, -1])
def test_a_site_whose_temperature_cannot_be_held_is_clipped(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention_temperature, "search", lambda *_: Finding(reason="it is not to be found", is_for_later=False)
    )
    temperature = AdaptiveTemperature(every_n_steps=1, print_summary=False, file=None)
    fit(Hot(), *[temperature, one := clip()][::order], steps=3)
    assert set(one.counts) == {"blocks.0.attention", "blocks.1.attention"}
    assert sum(map(sum, one.counts.values())) > 0


class Zero(LanguageModel):
    """Its queries are zero and remain so."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        with torch.no_grad():
            self.blocks[0].attention.qkv.weight.zero_()
            self.blocks[0].attention.qkv.bias.zero_()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_queries_that_are_zero_are_given_up_after_some_captures(said: list[str]) -> None:
    fit(Zero(), clip(), steps=14)
    (message,) = said
    assert "could not be told in 10 captures" in message


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 0}, "`threshold` must be a positive number, got 0"),
        ({"threshold": float("nan")}, "`threshold` must be a positive number, got nan"),
        ({"threshold": True}, "`threshold` must be a positive number, got True"),
        ({"threshold": "100"}, "`threshold` must be a positive number, got '100'"),
        ({"alpha": -0.1}, "`alpha` must be a number from 0 to 1, got -0.1"),
        ({"alpha": 1.1}, "`alpha` must be a number from 0 to 1, got 1.1"),
        ({"every_n_steps": 0}, "`every_n_steps` must be a positive integer"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"dry_run": "no"}, "`dry_run` must be True or False, got 'no'"),
        ({"file": 3}, "`file` must be the name of a file"),
        ({"compiled": "perhaps"}, "`compiled` must be 'eager' or 'skip'"),
        ({"max_overhead": 2}, "`max_overhead` must be a number between 0 and 1"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        QKClip(**arguments)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="decoder"):
        fit(LanguageModel(), clip(sites="decoder.*"), steps=1)


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
def test_strategies_that_flatten_parameters_are_refused_by_name(name: str) -> None:
    running, one = trainer(), clip()
    running.strategy.__class__ = type(name, (type(running.strategy),), {})
    with pytest.raises(MisconfigurationException, match=f"QKClip cannot change the parameters that {name} shards"):
        one.on_fit_start(running, LanguageModel())


def test_a_fault_of_the_search_does_not_end_training(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("of the site's module")

    monkeypatch.setattr("lightning_attn.temperature.search.prove", fails)
    fit(Hot(), clip(), steps=2)
    assert any("of the site's module" in message for message in said)


def test_warnings_are_of_this_package() -> None:
    with pytest.warns(AttentionWarning, match="cannot be clipped"):
        fit(NormalisedModel(), clip(), steps=1)
