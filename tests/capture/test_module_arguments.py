"""What the arguments of a module tell of its attention: which part of the batch is heads, and whose tokens keys are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AttentionCall, record

SEQUENCES, HEADS, TOKENS, KEYS, WIDTH = 2, 3, 7, 5, 4

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, mask)


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.bmm(query, key.mT) / WIDTH**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.bmm(scores.softmax(-1), value)


class HeadsInBatch(nn.Module):
    """As fairseq and what was made of it do: (B H, N, D), of tokens that come after the sequences, or before."""

    def __init__(self, attend: Attend, is_batch_first: bool = True) -> None:
        super().__init__()
        self.attend, self.is_batch_first = attend, is_batch_first
        self.query, self.key, self.value = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(3))
        self.plain: list[Tensor] = []

    def heads(self, states: Tensor) -> Tensor:
        states = states if self.is_batch_first else states.transpose(0, 1)
        return states.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)

    def forward(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        source = hidden_states if key_value_states is None else key_value_states
        query, key, value = self.query(hidden_states), self.key(source), self.value(source)
        self.plain = [self.heads(states).detach() for states in (query, key, value)]
        return self.attend(*(self.heads(states).flatten(0, 1) for states in (query, key, value)), mask)


def only_call(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> tuple[AttentionCall, Tensor]:
    with record(model) as recording:
        output = model(*args, **kwargs)
    (call,) = recording.calls
    return call, output


def states(tokens: int, is_batch_first: bool = True) -> Tensor:
    made = torch.randn(SEQUENCES, tokens, HEADS * WIDTH)
    return made if is_batch_first else made.transpose(0, 1)


@pytest.mark.parametrize("is_batch_first", [True, False])
@pytest.mark.parametrize("attend", [fused, written_out], ids=lambda attend: attend.__name__)
@pytest.mark.parametrize("mask", [None, (1, TOKENS), (SEQUENCES * HEADS, TOKENS), (SEQUENCES * HEADS, 1)], ids=str)
@pytest.mark.parametrize("is_cross", [False, True])
def test_heads_in_the_batch(attend: Attend, is_batch_first: bool, mask: tuple[int, int] | None, is_cross: bool) -> None:
    model = HeadsInBatch(attend, is_batch_first)
    keys = KEYS if is_cross else TOKENS
    visible = None if mask is None else torch.rand(*mask, keys) < 0.6
    if visible is not None:
        visible[..., 0] = True
    others = {"key_value_states": states(keys, is_batch_first)} if is_cross else {}
    call, output = only_call(model, states(TOKENS, is_batch_first), mask=visible, **others)
    query, key, _ = model.plain
    assert (call.sequences, call.heads) == (SEQUENCES, HEADS)
    expected = query @ key.mT / WIDTH**0.5
    if visible is not None:
        visible = visible.expand(SEQUENCES * HEADS, TOKENS, -1).unflatten(0, (SEQUENCES, HEADS))
        assert torch.equal(call.logits()[1], visible)
        expected = expected.masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(call.weights(), expected.softmax(-1))
    torch.testing.assert_close(call.output(), output.detach().unflatten(0, (SEQUENCES, HEADS)))


@pytest.mark.parametrize("attend", [fused, written_out], ids=lambda attend: attend.__name__)
def test_heads_of_one_sequence(attend: Attend) -> None:
    call, _ = only_call(HeadsInBatch(attend), states(TOKENS)[:1])
    assert (call.sequences, call.heads, call.queries) == (1, HEADS, TOKENS)


class OfPictures(HeadsInBatch):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.flatten(1, 2))


class WithLearnedQueries(HeadsInBatch):
    def __init__(self, attend: Attend) -> None:
        super().__init__(attend)
        self.latents = nn.Parameter(torch.randn(KEYS, HEADS * WIDTH))

    def forward(self, memory: Tensor) -> Tensor:
        return super().forward(self.latents.expand(SEQUENCES, -1, -1), memory)


@pytest.mark.parametrize("attend", [fused, written_out], ids=lambda attend: attend.__name__)
def test_heads_of_pictures(attend: Attend) -> None:
    call, _ = only_call(OfPictures(attend), torch.randn(SEQUENCES, 2, 4, HEADS * WIDTH))
    assert (call.sequences, call.heads, call.queries) == (SEQUENCES, HEADS, 8)
    assert call.self_attention


@pytest.mark.parametrize("attend", [fused, written_out], ids=lambda attend: attend.__name__)
def test_heads_of_learned_queries_are_told_by_the_keys(attend: Attend) -> None:
    call, _ = only_call(WithLearnedQueries(attend), states(TOKENS))
    assert (call.sequences, call.heads, call.queries, call.keys) == (SEQUENCES, HEADS, KEYS, TOKENS)


class Windows(nn.Module):
    """Windows of a sequence are in the batch, of a single head."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.layer = attend, nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        windows = self.layer(hidden_states).unflatten(1, (-1, 3)).flatten(0, 1)
        return self.attend(windows, windows, windows, None)


@pytest.mark.parametrize("attend", [fused, written_out], ids=lambda attend: attend.__name__)
def test_windows_in_the_batch_are_no_heads(attend: Attend) -> None:
    call, _ = only_call(Windows(attend), torch.randn(SEQUENCES, 6, WIDTH))
    assert (call.sequences, call.heads, call.queries) == (2 * SEQUENCES, 1, 3)


@pytest.mark.parametrize("attend", [fused, written_out], ids=lambda attend: attend.__name__)
def test_as_many_sequences_as_in_the_batch_have_one_head_each(attend: Attend) -> None:
    class OneHead(HeadsInBatch):
        def heads(self, states: Tensor) -> Tensor:
            return states[:, None]

    call, _ = only_call(OneHead(attend), states(TOKENS))
    assert (call.sequences, call.heads, call.queries) == (SEQUENCES, 1, TOKENS)


@pytest.mark.parametrize("keys", [TOKENS, KEYS])
@pytest.mark.parametrize("attend", [fused, written_out], ids=lambda attend: attend.__name__)
def test_as_many_tokens_of_others_are_no_self_attention(attend: Attend, keys: int) -> None:
    model = HeadsInBatch(attend)
    own = states(TOKENS)
    assert only_call(model, own)[0].self_attention
    assert only_call(model, own, own)[0].self_attention
    assert not only_call(model, states(TOKENS), states(keys))[0].self_attention
    assert not only_call(model, states(TOKENS), key_value_states=states(keys))[0].self_attention


def test_tokens_that_are_put_beside_others_are_self_attention() -> None:
    """As in a transformer for pictures and text together, each of which attends to both."""

    class Joint(HeadsInBatch):
        def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
            return super().forward(torch.cat([hidden_states, encoder_hidden_states], 1))

    assert only_call(Joint(fused), states(TOKENS), states(KEYS))[0].self_attention
