"""Clipping brings the largest logit of a head to the threshold, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from clipping_models import HEADS, LENGTH, WIDTH, Biased, Fused, GroupedFused, Normalised, OfTorch, Separate, grown
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AttentionObserver
from lightning_attn.clipping import AttentionClip, HeadClip

Run = Callable[[], Any]
MaxLogits = dict[str, list[float]]


def max_logits(model: nn.Module, run: Run) -> MaxLogits:
    observer = AttentionObserver(model, statistics=["max_logit"], max_sequences=None)
    with observer, torch.no_grad():
        run()
    snapshot = observer.snapshot()
    return {site: snapshot[site, "max_logit"] for site in snapshot.sites}


def between_heads(largest: MaxLogits) -> float:
    """A threshold that about half of the heads exceed."""
    values = sorted(value for of_heads in largest.values() for value in of_heads)
    return (values[len(values) // 2 - 1] + values[len(values) // 2]) / 2


def changed_channels(before: dict[str, Tensor], model: nn.Module) -> dict[str, int]:
    """In how many rows, or columns if they are fewer, and entries of biases each parameter has changed."""
    changed = {}
    for name, parameter in model.named_parameters():
        differs = parameter != before[name]
        rows = differs.any(-1).sum() if differs.dim() == 2 else differs.sum()
        columns = differs.any(0).sum() if differs.dim() == 2 else rows
        if rows:
            changed[name] = int(min(rows, columns))
    return changed


def clipped(model: nn.Module, run: Run, alpha: float = 0.5) -> tuple[AttentionClip, list[HeadClip], dict[str, int]]:
    """Clip half of the heads of a model of one site, and see that just their largest logits are at the threshold."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    largest = max_logits(model, run)
    threshold = between_heads(largest)
    clip = AttentionClip(model)
    clip.find(run)
    assert not clip.refused
    clips = clip.clips(1, largest, threshold, alpha)
    clip.apply(clips)
    (site,) = largest
    after = max_logits(model, run)
    done = {one.head: one for one in clips}
    assert 0 < len(done) < len(largest[site])
    for head, (old, new) in enumerate(zip(largest[site], after[site], strict=True)):
        if head in done:
            assert done[head].factor == pytest.approx(threshold / old, rel=1e-9)
            assert new == pytest.approx(threshold, rel=1e-5)
        else:
            assert new == pytest.approx(old, rel=1e-6)
    return clip, clips, changed_channels(before, model)


def hidden() -> Tensor:
    return torch.randn(3, LENGTH, WIDTH)


WITH_KEYS = {
    "fused": (lambda: Fused("qkv h d"), "qkv"),
    "fused, head by head": (lambda: Fused("h qkv d"), "qkv"),
    "fused, channel by channel": (lambda: Fused("h d qkv"), "qkv"),
    "fused, queries last": (lambda: Fused("vkq h d"), "qkv"),
    "separate": (Separate, "query key"),
    "written out": (lambda: Separate(makes="softmax"), "query key"),
}


@pytest.mark.parametrize(("make", "names"), WITH_KEYS.values(), ids=WITH_KEYS)
def test_queries_and_keys_are_clipped(make: Callable[[], nn.Module], names: str) -> None:
    model, tokens = grown(make()), hidden()
    _, clips, changed = clipped(model, lambda: model(tokens))
    assert all(one.query_factor == pytest.approx(one.key_factor) for one in clips)
    rows = len(clips) * WIDTH // HEADS * (2 if names == "qkv" else 1)
    assert changed == {f"{name}.{part}": rows for name in names.split() for part in ("weight", "bias")}


OF_TORCH: dict[str, dict[str, Any]] = {
    "packed": {},
    "no bias": {"bias": False},
    "separate": {"kdim": 16, "vdim": 16},
    "add_zero_attn": {"add_zero_attn": True},
}


@pytest.mark.parametrize("arguments", OF_TORCH.values(), ids=OF_TORCH)
def test_attention_of_torch_is_clipped(arguments: dict[str, Any]) -> None:
    model, tokens = grown(OfTorch(**arguments)), hidden()
    _, clips, changed = clipped(model, lambda: model(tokens))
    assert all(one.key_factor < 1 for one in clips)
    rows = len(clips) * WIDTH // HEADS
    expected = {f"attention.{name}_proj_weight": rows for name in "qk"} if "kdim" in arguments else {}
    expected |= {} if expected else {"attention.in_proj_weight": 2 * rows}
    expected |= {} if "bias" in arguments else {"attention.in_proj_bias": 2 * rows}
    assert changed == expected
    assert type(model.attention) is nn.MultiheadAttention


QUERIES_ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shared by neighbours": (lambda: Separate(key_heads=2), "shared by several heads"),
    "shared in turns": (lambda: Separate(key_heads=2, takes_turns=True), "shared by several heads"),
    "shared by all": (lambda: Separate(key_heads=1), "shared by several heads"),
    "written out": (lambda: Separate(key_heads=2, makes="softmax"), "shared by several heads"),
    "fused groups": (GroupedFused, "shared by several heads"),
    "a learned key": (lambda: OfTorch(add_bias_kv=True), "not proven"),
}


@pytest.mark.parametrize(("make", "reason"), QUERIES_ALONE.values(), ids=QUERIES_ALONE)
def test_queries_are_clipped_alone_where_keys_are_shared(make: Callable[[], nn.Module], reason: str) -> None:
    model, tokens = grown(make()), hidden()
    clip, clips, changed = clipped(model, lambda: model(tokens))
    (held,) = clip.sites.values()
    assert held.keys is None
    assert reason in held.reason
    assert all(one.key_factor == 1 for one in clips)
    assert set(changed.values()) == {len(clips) * WIDTH // HEADS}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_alpha_divides_a_factor_between_queries_and_keys(alpha: float) -> None:
    model, tokens = grown(Separate()), hidden()
    _, clips, changed = clipped(model, lambda: model(tokens), alpha)
    for one in clips:
        assert one.query_factor == pytest.approx(one.factor**alpha)
        assert one.key_factor == pytest.approx(one.factor ** (1 - alpha))
    assert ("query.weight" in changed) is (alpha > 0)
    assert ("key.weight" in changed) is (alpha < 1)


def test_the_factors_of_the_paper() -> None:
    model, tokens = Separate(), hidden()
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    (site,) = clip.sites
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    (one,) = clip.clips(7, {site: [250.0, 100.0, -3.0, 99.9]}, threshold=100.0)
    assert (one.step, one.site, one.head, one.max_logit) == (7, site, 0, 250.0)
    assert one.factor == pytest.approx(0.4)
    assert one.query_factor == pytest.approx(0.632456, abs=1e-6)
    assert one.key_factor == pytest.approx(0.632456, abs=1e-6)
    clip.apply([one])
    for name, rows in (("query", slice(0, 8)), ("key", slice(0, 8))):
        layer = model.get_submodule(name)
        assert torch.allclose(layer.weight[rows], before[f"{name}.weight"][rows] * 0.4**0.5, rtol=1e-6)
        assert torch.equal(layer.weight[8:], before[f"{name}.weight"][8:])
    assert torch.equal(model.value.weight, before["value.weight"])


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf"), -250.0, 0.0, 100.0])
def test_what_is_no_large_logit_clips_nothing(value: float | None) -> None:
    model, tokens = Separate(), hidden()
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    (site,) = clip.sites
    assert clip.clips(1, {site: [value] * HEADS}, threshold=100.0) == []


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "norm of a head": (partial(Normalised, nn.RMSNorm, WIDTH // HEADS), "normalised"),
    "norm of all heads": (partial(Normalised, nn.LayerNorm, WIDTH), "normalised"),
    "norm without a gain": (partial(Normalised, partial(nn.RMSNorm, elementwise_affine=False), 8), "normalised"),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_normalised_queries_are_left_alone(make: Callable[[], nn.Module], reason: str) -> None:
    model, tokens = make(), hidden()
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    assert not clip.sites
    assert reason in clip.refused["(root)"]


def test_frozen_queries_are_left_alone_and_frozen_keys_too() -> None:
    tokens = hidden()
    model = grown(Separate())
    model.query.requires_grad_(False)
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    assert "frozen" in clip.refused["(root)"]
    model = grown(Separate())
    model.key.requires_grad_(False)
    _, _, changed = clipped(model, lambda: model(tokens))
    assert set(changed) == {"query.weight", "query.bias"}


class TwoSites(nn.Module):
    """Two sites that have the same layer of keys, or of queries."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.first, self.second = Separate(), Separate()
        setattr(self.second, shared, getattr(self.first, shared))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.first(tokens))


def test_a_layer_that_serves_two_sites_is_left_alone() -> None:
    tokens = hidden()
    model = TwoSites("key")
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    assert {site: held.keys for site, held in clip.sites.items()} == {"first": None, "second": None}
    model = TwoSites("query")
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    assert not clip.sites
    assert set(clip.refused) == {"first", "second"}


class Tied(Separate):
    """Queries and keys are made by the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.key = self.query


def test_queries_that_are_keys_too_are_refused() -> None:
    model, tokens = Tied(), hidden()
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    assert not clip.sites


class AddedBehind(Separate):
    """Queries or keys are added to what the attention gives."""

    def __init__(self, added: str) -> None:
        super().__init__()
        self.added = added

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + getattr(self, self.added)(tokens)


class AddedBefore(AddedBehind):
    """The same, by a layer that runs once."""

    def forward(self, tokens: Tensor) -> Tensor:
        made = {name: getattr(self, name)(tokens) for name in ("query", "key", "value")}
        split = (channels.unflatten(-1, (HEADS, -1)).transpose(1, 2) for channels in made.values())
        mixed = functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
        return self.out(mixed + made[self.added])


@pytest.mark.parametrize("kind", [AddedBehind, AddedBefore])
def test_keys_that_something_else_reads_are_left_alone(kind: type[AddedBehind]) -> None:
    model, tokens = grown(kind("key")), hidden()
    clip, clips, changed = clipped(model, lambda: model(tokens))
    assert clip.sites["(root)"].keys is None and "and nothing else" in clip.sites["(root)"].reason
    assert clips and set(changed) == {"query.weight", "query.bias"}


@pytest.mark.parametrize("kind", [AddedBehind, AddedBefore])
def test_queries_that_something_else_reads_are_refused(kind: type[AddedBehind]) -> None:
    model, tokens = kind("query"), hidden()
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    assert not clip.sites and "read by something else" in clip.refused["(root)"]


@pytest.mark.parametrize("sign", [-1, 1], ids=["ALiBi", "positive"])
def test_a_bias_is_not_made_smaller(sign: int) -> None:
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    bias = sign * distance * torch.tensor([0.5, 0.25, 0.125, 1.0])[:, None, None]
    model, tokens = grown(Biased(bias)), hidden()
    before = max_logits(model, lambda: model(tokens))
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    (held,) = clip.sites.values()
    assert held.keys is not None
    largest_bias = [max(0.0, float(of_head.max())) for of_head in bias]
    assert held.largest_bias == pytest.approx(largest_bias, abs=1e-6)
    threshold = 0.5 * min(before["(root)"])
    assert max(largest_bias) < threshold
    clips = clip.clips(1, before, threshold)
    for one, largest, added in zip(clips, before["(root)"], largest_bias, strict=True):
        assert one.factor == pytest.approx((threshold - added) / (largest - added))
    clip.apply(clips)
    after = max_logits(model, lambda: model(tokens))["(root)"]
    assert all(0.5 * threshold < largest <= threshold + 1e-4 for largest in after)
    assert torch.equal(model.bias, bias)


def test_a_head_whose_bias_alone_is_above_the_threshold_is_left_alone() -> None:
    bias = torch.tensor([50.0, 1.0, 0.0, 0.0])[:, None, None] * torch.eye(LENGTH)
    model, tokens = grown(Biased(bias)), hidden()
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    clips = clip.clips(1, {"(root)": [90.0, 90.0, 30.0, 90.0]}, threshold=40.0)
    assert [one.head for one in clips] == [1, 3]


def test_several_clips_end_at_the_threshold() -> None:
    model, tokens = grown(Fused("qkv h d")), hidden()
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    threshold = between_heads(max_logits(model, lambda: model(tokens)))
    for step in range(3):
        largest = max_logits(model, lambda: model(tokens))
        clip.apply(clip.clips(step, largest, threshold))
    assert max(max_logits(model, lambda: model(tokens))["(root)"]) == pytest.approx(threshold, rel=1e-5)


def test_what_was_found_goes_into_a_state_and_comes_out_again() -> None:
    model, tokens = grown(Separate(key_heads=2)), hidden()
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    again = AttentionClip(model)
    again.load_state_dict(clip.state_dict())
    largest = {"(root)": [250.0, 10.0, 300.0, 10.0]}
    assert again.clips(1, largest, 100.0) == clip.clips(1, largest, 100.0) != []
    other = AttentionClip(nn.Linear(2, 2))
    other.load_state_dict(clip.state_dict())
    assert not other.sites


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    model, tokens = grown(Fused("qkv h d")).to(dtype), hidden().to(dtype)
    before = model.qkv.weight.detach().clone()
    clip = AttentionClip(model)
    clip.find(lambda: model(tokens))
    (held,) = clip.sites.values()
    assert held.keys is not None
    clip.apply(clip.clips(1, {"(root)": [400.0, 1.0, 1.0, 1.0]}, 100.0))
    assert torch.equal(model.qkv.weight[:8], before[:8] / 2)  # exact: a power of two
    assert torch.equal(model.qkv.weight[32:40], before[32:40] / 2)
    assert torch.equal(model.qkv.weight[40:], before[40:])
