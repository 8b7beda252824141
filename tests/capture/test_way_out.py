"""The way out that a refusal names: with `observe` in the line before, it is seen, once, and nothing is said."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AttentionObserver, AttentionWarning, observe, record

SEQUENCES, HEADS, TOKENS, WIDTH = 2, 3, 6, 4
MODEL_WIDTH = HEADS * WIDTH
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()

Tell = Callable[..., None]
Attend = Callable[["Model", Tell, Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Attends by a function, which tells of that, or does not."""

    def __init__(self, attend: Attend, tells: bool) -> None:
        super().__init__()
        self.attend, self.tell = attend, observe if tells else lambda *_, **__: None
        self.project = nn.Linear(MODEL_WIDTH, 3 * MODEL_WIDTH)
        self.mix = nn.Parameter(torch.randn(HEADS, HEADS))
        self.child = Child()

    def forward(self, tokens: Tensor) -> Tensor:
        heads = (tokens @ self.project.weight.mT).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        return self.attend(self, self.tell, *heads)


class Child(nn.Module):
    """Has parameters of its own, so that it is a site."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scores_of(query, key).softmax(-1) @ self.layer(value)


def tokens() -> Tensor:
    return 2 * torch.randn(SEQUENCES, TOKENS, MODEL_WIDTH)


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.transpose(-1, -2) / math.sqrt(WIDTH)


# What is refused by itself.


def drawn(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tell(query, key, value)
    return functional.gumbel_softmax(scores_of(query, key), dim=-1) @ value


def divided_at_the_end(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tell(query, key, value)
    exponentials = scores_of(query, key).exp()
    return exponentials @ value / exponentials.sum(-1, keepdim=True)


def one_more_in_the_sum(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tell(query, key, value, sink_logits=torch.zeros(HEADS))
    exponentials = scores_of(query, key).exp()
    return (exponentials / (1 + exponentials.sum(-1, keepdim=True))) @ value


def another_column_in_every_row(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    more = key.new_ones(SEQUENCES, HEADS, 1, WIDTH)
    tell(query, torch.cat([key, more], dim=2), torch.cat([value, 0 * more], dim=2))
    scores = torch.cat([scores_of(query, key), query.sum(-1, keepdim=True) / math.sqrt(WIDTH)], dim=-1)
    return scores.softmax(-1)[..., :-1] @ value


def scaled_after_the_maximum(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tell(query, key, value, scale=2 / math.sqrt(WIDTH), is_causal=True)
    scores = scores_of(query, key)
    scores = (scores - scores.amax(-1, keepdim=True)) * 2
    return scores.masked_fill(~CAUSAL, -math.inf).softmax(-1) @ value


def overwritten(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tell(query, key, value, attn_mask=CAUSAL)
    scores = scores_of(query, key).masked_fill(~CAUSAL, -math.inf)
    weights = scores.softmax(-1)
    scores.zero_()
    return weights @ value


def soft_capped_in_foreign_memory(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tell(query, key, value, soft_cap=2.0)
    scores = torch.from_numpy(2 * (scores_of(query, key).detach().numpy() / 2))
    return (2 * (scores / 2).tanh()).softmax(-1) @ value


def keys_of_every_query(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (functional.pad(part, (0, 0, 2, 0)).unfold(2, 3, 1).mT for part in (key, value))
    tell(*(part.transpose(1, 2).flatten(0, 1) for part in (query[:, :, :, None], key, value)), scale=1.0)
    weights = torch.einsum("bhnd,bhnwd->bhnw", query, key).softmax(-1)
    return torch.einsum("bhnw,bhnwd->bhnd", weights, value)


def chunks(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (torch.randn(part.shape).unflatten(2, (-1, 2)) for part in (query, key, value))  # of no layer
    tell(*(part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)))
    return scores_of(query, key).softmax(-1) @ value


def as_many_heads_as_tokens(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (part[:, :, :HEADS] for part in (query, key[:, :1], value[:, :1]))
    tell(query, key, value)
    scores = torch.einsum("bhid,bjd->bhij", query, key[:, 0]) / math.sqrt(WIDTH)
    return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), value[:, 0])


REFUSED: dict[Attend, str] = {
    drawn: "drawn at random",
    divided_at_the_end: "before they are divided by their sum",
    one_more_in_the_sum: r"`sink_logits=torch.zeros\(heads\)`",
    another_column_in_every_row: "With keys of their own for these, and values of zero",
    scaled_after_the_maximum: "after the subtraction of its row maximum 'mul' changes its logits",
    overwritten: "overwritten",
    soft_capped_in_foreign_memory: "cannot be followed from the product of queries and keys",
    keys_of_every_query: "keys of its own",
    chunks: "with windows or chunks as sequences of their own",
    as_many_heads_as_tokens: "as many heads as tokens",
}


@pytest.mark.parametrize("attend", REFUSED, ids=lambda attend: attend.__name__)
def test_a_refusal_names_the_site_the_reason_and_the_way_out(attend: Attend) -> None:
    model = nn.Sequential(Model(attend, tells=False))
    with pytest.warns(AttentionWarning) as warned, record(model) as recording:
        model(tokens())
    assert not recording.calls
    (message,) = [str(each.message) for each in warned if each.category is AttentionWarning]
    assert (
        message.removeprefix("A call of the attention")
        .removeprefix("The attention")
        .startswith(" at '0' is not watched: ")
    )
    assert REFUSED[attend].replace("\\", "") in message
    assert "`lightning_attn.observe(query, key, value)` in the line before it tells of it" in message
    assert "choose `sites` without it" in message


@pytest.mark.filterwarnings("error::lightning_attn.AttentionWarning")
@pytest.mark.parametrize("attend", REFUSED, ids=lambda attend: attend.__name__)
def test_the_way_out_works(attend: Attend) -> None:
    model = nn.Sequential(Model(attend, tells=True))
    with record(model) as recording:
        output = model(tokens())
    (call,) = recording.calls
    assert call.site == "0"
    if attend is not drawn:
        expected = output.transpose(1, 2).flatten(0, 1) if attend is keys_of_every_query else output
        expected = output.transpose(1, 2).flatten(0, 1) if attend is chunks else expected
        torch.testing.assert_close(call.output(), expected.detach().view_as(call.output()), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("error::lightning_attn.AttentionWarning")
def test_other_sites_can_be_chosen_instead() -> None:
    model = nn.Sequential(Model(drawn, tells=False), Model(seen_as_well, tells=False))
    with record(model, sites="1") as recording:
        for layer in model:
            layer(tokens())
    assert [call.site for call in recording.calls] == ["1"]


# What is told of, and seen as well.


def seen_as_well(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tell(query, key, value)
    return scores_of(query, key).softmax(-1) @ value


def fused(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tell(query, key, value, is_causal=True)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def seen_in_a_child(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tell(query, key, model.child.layer(value))
    return model.child(query, key, value)


def head_by_head(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tell(query, key, value)
    heads = [scores_of(query[:, h], key[:, h]).softmax(-1) @ value[:, h] for h in range(HEADS)]
    return torch.stack(heads, dim=1)


def mixed_afterwards(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tell(query, key, value)
    return torch.einsum("gh,bhij->bgij", model.mix, scores_of(query, key).softmax(-1)) @ value


@pytest.mark.filterwarnings("error::lightning_attn.AttentionWarning")
@pytest.mark.parametrize(
    "attend", [seen_as_well, fused, seen_in_a_child, head_by_head, mixed_afterwards], ids=lambda attend: attend.__name__
)
def test_it_is_one(attend: Attend) -> None:
    model = nn.Sequential(Model(attend, tells=True))
    with record(model) as recording:
        output = model(tokens())
    (call,) = recording.calls
    assert (call.site, call.heads) == ("0", HEADS)
    if attend is not mixed_afterwards:
        torch.testing.assert_close(call.output(), output.detach(), rtol=0, atol=1e-5)
    observer = AttentionObserver(model, statistics="entropy")
    for _ in range(2):
        with observer:
            model(tokens())
    assert len(observer.snapshot()["0", "entropy"]) == HEADS


def one_of_two(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What is told of is another attention than what is seen, of the same shape."""
    tell(query, key, value)
    return scores_of(key, query).softmax(-1) @ value


def test_another_attention_of_the_same_module_is_another() -> None:
    model = Model(one_of_two, tells=True)
    with record(model) as recording:
        output = model(tokens())
    assert len(recording.calls) == 2
    torch.testing.assert_close(recording.calls[1].output(), output.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, TOKENS), (SEQUENCES, 0)])
def test_nothing_is_told_and_seen(shape: tuple[int, int]) -> None:
    model = Model(seen_as_well, tells=True)
    with record(model) as recording:
        model(torch.zeros(*shape, MODEL_WIDTH))
    assert len(recording.calls) == 1


def test_a_refusal_of_other_rows_is_still_said() -> None:
    def attend(model: Model, tell: Tell, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tell(query[:, :, :5], key, value)
        return drawn(model, lambda *_: None, query, key, value)

    model = Model(attend, tells=True)
    with pytest.warns(AttentionWarning, match="drawn at random"), record(model) as recording:
        model(tokens())
    assert len(recording.calls) == 1


def test_a_transform_is_refused_with_a_way_out() -> None:
    model = Model(seen_as_well, tells=False)
    with pytest.warns(AttentionWarning, match="call the model without the transform"), record(model) as recording:
        torch.vmap(lambda one: model(one[None]))(tokens())
    assert not recording.calls
