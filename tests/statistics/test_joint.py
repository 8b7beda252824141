"""Small calls measured together have the values that they have alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_attn import AttentionCall
from lightning_attn.capture import HiddenStates, Visibility
from lightning_attn.statistics import joint, known_statistics, measure, measure_states
from lightning_attn.statistics.joint import SmallCalls

STATISTICS = tuple(known_statistics().values())
SEQUENCES, HEADS, KEY_HEADS, TOKENS, WIDTH = 2, 4, 2, 9, 4
MASK = torch.rand(SEQUENCES, 1, TOKENS, TOKENS) > 0.3


def a_call(
    site: str = "site", visibility: Visibility | None = None, sinks: Tensor | None = None, **changes: object
) -> AttentionCall:
    call = AttentionCall(
        site=site,
        query=torch.randn(SEQUENCES, HEADS, TOKENS, WIDTH),
        key=torch.randn(SEQUENCES, KEY_HEADS, TOKENS, WIDTH),
        value=torch.randn(SEQUENCES, KEY_HEADS, TOKENS, 3),
        scale=0.5,
        visibility=visibility or Visibility(causal_offset=0),
        self_attention=True,
        sink_logits=sinks,
    )
    return replace(call, **changes)


def small_calls(*calls: AttentionCall) -> SmallCalls:
    small = SmallCalls(STATISTICS, spectral_sequences=None)
    for call in calls:
        assert small.take(call)
    return small


def assert_as_alone(*calls: AttentionCall) -> None:
    found = list(small_calls(*calls).measured())
    assert [call.site for call, _ in found] == [call.site for call in calls]
    names = [statistic.name for statistic in STATISTICS]
    for (_, together), call in zip(found, calls, strict=True):
        alone = measure(call, STATISTICS)
        torch.testing.assert_close(
            together().head_values(names), alone.head_values(names), rtol=1e-5, atol=1e-6, equal_nan=True
        )


@pytest.fixture
def measured_heads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many heads were measured at once, each time."""
    counts: list[int] = []

    def counting(call: AttentionCall, *arguments: object, **options: object) -> object:
        counts.append(call.heads)
        return measure(call, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(joint, "measure", counting)
    return counts


SAME: dict[str, Callable[[], AttentionCall]] = {
    "causal": a_call,
    "full": lambda: a_call(visibility=Visibility()),
    "one mask for all": lambda: a_call(visibility=Visibility(mask=MASK)),
    "one bias for all": lambda: a_call(visibility=Visibility(bias=torch.where(MASK, 0.0, -1e9))),
    "learned sinks": lambda: a_call(sinks=torch.randn(HEADS)),
    "soft cap": lambda: a_call(soft_cap=2.0),
    "no values": lambda: a_call(value=None),
    "half precision": lambda: a_call(query=torch.randn(SEQUENCES, HEADS, TOKENS, WIDTH).bfloat16()),
}


@pytest.mark.parametrize("kind", SAME)
def test_calls_of_equal_shape(kind: str) -> None:
    assert_as_alone(*[replace(SAME[kind](), site=f"layers.{number}") for number in range(3)])


def test_they_are_measured_at_once(measured_heads: list[int]) -> None:
    bias = torch.zeros(1, 1, TOKENS, TOKENS)
    calls = [a_call(f"layers.{i}", Visibility(bias=bias)) for i in range(3)] + [a_call(f"more.{i}") for i in range(2)]
    for _, found in small_calls(*calls).measured():
        found()
    assert measured_heads == [3 * HEADS, 2 * HEADS]


def test_calls_that_differ_are_kept_apart() -> None:
    assert_as_alone(
        a_call("causal"),
        a_call("full", Visibility()),
        a_call("masked", Visibility(mask=MASK)),
        a_call("masked in another way", Visibility(mask=~MASK)),
        a_call("a mask for each head", Visibility(mask=torch.rand(1, HEADS, TOKENS, TOKENS) > 0.3)),
        a_call("another for each head", Visibility(mask=torch.rand(1, HEADS, TOKENS, TOKENS) > 0.3)),
        a_call("scaled", scale=2.0),
        a_call("capped", soft_cap=1.0),
        a_call("cross", self_attention=False),
        a_call("one head", query=torch.randn(SEQUENCES, 2, TOKENS, WIDTH)),
        a_call("causal again"),
    )


def test_a_tensor_that_is_overwritten_later_is_measured_as_it_was() -> None:
    mask = MASK.clone()
    first, second = a_call("first", Visibility(mask=mask)), a_call("second", Visibility(mask=mask))
    expected = measure(first, STATISTICS), measure(replace(second, visibility=Visibility(mask=~MASK)), STATISTICS)
    small = small_calls(first)
    mask.logical_not_()
    assert small.take(second)
    for tensor in (first.query, first.key, first.value, second.query):
        tensor.zero_()
    mask.fill_(True)
    names = [statistic.name for statistic in STATISTICS]
    for (_, found), alone in zip(small.measured(), expected, strict=True):
        torch.testing.assert_close(
            found().head_values(names), alone.head_values(names), rtol=1e-5, atol=1e-6, equal_nan=True
        )


def test_masks_that_live_one_after_the_other_in_the_same_memory() -> None:
    small, calls = SmallCalls(STATISTICS, None), []
    for number in range(6):
        mask = torch.full((SEQUENCES, 1, TOKENS, TOKENS), float(number))
        mask[..., number:] = -1e9
        mask[..., 0] = 0.0
        calls.append(a_call(f"layers.{number}", Visibility(bias=mask.clone())))
        assert small.take(replace(calls[-1], visibility=Visibility(bias=mask)))
        del mask
    names = [statistic.name for statistic in STATISTICS]
    for (_, found), call in zip(small.measured(), calls, strict=True):
        torch.testing.assert_close(
            found().head_values(names),
            measure(call, STATISTICS).head_values(names),
            rtol=1e-5,
            atol=1e-6,
            equal_nan=True,
        )


@pytest.mark.parametrize("overwrite", [lambda b, i: b.fill_(i), lambda b, i: b.data.fill_(i)])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_buffer_that_is_overwritten_between_calls(
    overwrite: Callable[[Tensor, float], object], context: Callable[[], AbstractContextManager[None]]
) -> None:
    call, small = a_call(visibility=Visibility()), SmallCalls(STATISTICS, None)
    with context():
        buffer = torch.zeros(1, 1, TOKENS, TOKENS)
        for number in range(4):
            overwrite(buffer, float(number))
            assert small.take(replace(call, visibility=Visibility(bias=buffer)))
    largest = [found()["max_logit"].or_nan.max().item() for _, found in small.measured()]
    assert largest == pytest.approx([largest[0] + number for number in range(4)])


def test_masks_of_inference_mode() -> None:
    with torch.inference_mode():
        mask = torch.rand(SEQUENCES, 1, TOKENS, TOKENS) > 0.3
    assert_as_alone(a_call("first", Visibility(mask=mask)), a_call("second", Visibility(mask=mask)))


def test_a_large_call_is_not_taken() -> None:
    small = SmallCalls(STATISTICS, None)
    assert not small.take(a_call(query=torch.randn(1, HEADS, 600, WIDTH), key=torch.randn(1, KEY_HEADS, 600, WIDTH)))
    assert small.take(a_call())
    assert not small.is_full


def test_what_is_held_is_bounded() -> None:
    small, taken = SmallCalls(STATISTICS, None), 0
    while not small.is_full:
        assert small.take(a_call(query=torch.randn(1, HEADS, 100, WIDTH), key=torch.randn(1, KEY_HEADS, 100, WIDTH)))
        taken += 1
    assert taken == 25  # 160 kB of weights and 10 of what they are made of each, until there are 4 MB
    assert len(list(small.measured())) == taken
    assert small.take(a_call()) and not small.is_full


def test_calls_and_states_come_back_in_their_order() -> None:
    small, states = SmallCalls(STATISTICS, None), HiddenStates("first", torch.randn(2, 5, 3), None, None)
    assert small.take(a_call("first")) and small.take_states(states) and small.take(a_call("second"))
    assert [(type(item), item.site) for item, _ in small.measured()] == [
        (AttentionCall, "first"),
        (HiddenStates, "first"),
        (AttentionCall, "second"),
    ]


def test_a_fault_belongs_to_the_call_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_for_nan(call: AttentionCall, *arguments: object, **options: object) -> object:
        if call.query.isnan().any():
            raise ArithmeticError("not a number")
        return measure(call, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(joint, "measure", fails_for_nan)
    calls = [a_call("sound"), a_call("broken"), a_call("sound too")]
    calls[1].query[0, 0, 0, 0] = torch.nan
    faults = []
    for call, found in small_calls(*calls).measured():
        try:
            assert found().heads == HEADS
        except ArithmeticError:
            faults.append(call.site)
    assert faults == ["broken"]


@pytest.mark.parametrize("real", [None, "some", "one for all"])
@pytest.mark.parametrize("has_leaving", [True, False])
def test_hidden_states(has_leaving: bool, real: str | None) -> None:
    def states(number: int) -> HiddenStates:
        tokens = {"some": torch.rand(SEQUENCES, TOKENS) > 0.2, "one for all": torch.rand(1, TOKENS) > 0.2}
        leaving = torch.randn(SEQUENCES, TOKENS, 5) if has_leaving else None
        is_real = None if number == 1 else tokens.get(real or "")
        return HiddenStates(f"layers.{number}", torch.randn(SEQUENCES, TOKENS, 6), leaving, is_real)

    held = [states(number) for number in range(3)]
    small = SmallCalls(STATISTICS, None)
    for of_site in held:
        assert small.take_states(of_site)
    found = list(small.measured())
    assert [of_site.site for of_site, _ in found] == [of_site.site for of_site in held]
    for (_, together), of_site in zip(found, held, strict=True):
        alone = measure_states(of_site, STATISTICS)
        assert list(together()) == list(alone)
        for name, expected in alone.items():
            for got, tensor in zip(together()[name], expected, strict=True):
                torch.testing.assert_close(got, tensor, rtol=1e-9, atol=1e-12)
