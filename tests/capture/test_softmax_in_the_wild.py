"""Attention as people write it, model by model: what is seen is what the model computed, or it is refused, or not seen.

Each case tells the weights that it multiplied its values with, and what came out, in the layout that a user would give
them: sequences, heads, queries, keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AttentionObserver, AttentionWarning, observe, record

SEQUENCES, HEADS, TOKENS, WIDTH = 2, 3, 7, 4
MODEL_WIDTH = HEADS * WIDTH

Attend = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """Has the layers that attention needs, and a function use them."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.query, self.key, self.value = (nn.Linear(MODEL_WIDTH, MODEL_WIDTH) for _ in range(3))
        self.experts = nn.Parameter(torch.randn(4, MODEL_WIDTH))
        self.register_buffer("causal", torch.ones(TOKENS, TOKENS).tril())
        self.register_buffer("cache", torch.zeros(SEQUENCES, HEADS, TOKENS + 3, WIDTH))
        self.told: list[tuple[Tensor, Tensor | None]] = []

    def heads(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(tokens).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for layer in layers)
        return query, key, value

    def tell(self, weights: Tensor, output: Tensor | None = None) -> None:
        with torch._C.DisableTorchFunction():
            self.told.append((weights.detach().clone(), None if output is None else output.detach().clone()))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attend(self, tokens)


def tokens() -> Tensor:
    return 2 * torch.randn(SEQUENCES, TOKENS, MODEL_WIDTH)


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.transpose(-1, -2) / math.sqrt(WIDTH)


def told(model: Model, scores: Tensor, value: Tensor) -> Tensor:
    """The usual end of attention, where a case is about its beginning."""
    weights = scores.softmax(-1)
    output = weights @ value
    model.tell(weights, output)
    return output


# Masks. A key is hidden exactly where its weight is zero.


def old_gpt(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    scores = scores_of(query, key) * model.causal + -1e9 * (1 - model.causal)
    return told(model, scores, value)


def mask_times_alpha(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    return told(model, torch.add(scores_of(query, key), 1 - model.causal, alpha=-1e4), value)


def mask_subtracted_times_alpha(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    return told(model, torch.sub(scores_of(query, key), 1 - model.causal, alpha=1e4), value)


def mask_that_scores_are_added_to(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    return told(model, torch.zeros(TOKENS, TOKENS).masked_fill(model.causal == 0, -1e4) + scores_of(query, key), value)


def bloom(model: Model, source: Tensor) -> Tensor:
    """A bias is added in the product itself, twice as strong, and a mask after it, in another shape."""
    query, key, value = (part.flatten(0, 1) for part in model.heads(source))
    alibi = torch.randn(SEQUENCES * HEADS, 1, TOKENS)
    scores = alibi.baddbmm(query, key.mT, beta=2.0, alpha=0.5).view(SEQUENCES, HEADS, TOKENS, TOKENS)
    scores = scores + torch.zeros(TOKENS, TOKENS).masked_fill(model.causal == 0, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    output = torch.bmm(weights.view(SEQUENCES * HEADS, TOKENS, TOKENS), value).view(SEQUENCES, HEADS, TOKENS, WIDTH)
    model.tell(weights, output)
    return output


def kept_finite(model: Model, source: Tensor) -> Tensor:
    """As OPT does after adding its mask."""
    query, key, value = model.heads(source)
    lowest = torch.finfo(torch.float32).min
    scores = scores_of(query, key) + torch.zeros(TOKENS, TOKENS).masked_fill(model.causal == 0, lowest)
    return told(model, torch.max(scores, torch.tensor(lowest)), value)


def chosen_from_a_tensor(model: Model, source: Tensor) -> Tensor:
    """As graph attention does."""
    query, key, value = model.heads(source)
    scores = scores_of(query, key)
    return told(model, torch.where(model.causal > 0, scores, -9e15 * torch.ones_like(scores)), value)


def chosen_the_other_way(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    scores = scores_of(query, key)
    return told(model, torch.where(model.causal == 0, -1e4 * torch.ones_like(scores), scores), value)


def exchanged_after_the_mask(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    scores = scores_of(query, key).masked_fill(model.causal == 0, -1e4).permute(0, 2, 1, 3)
    weights = scores.softmax(-1)
    output = torch.einsum("bihj,bhjd->bihd", weights, value)
    model.tell(weights.transpose(1, 2), output.transpose(1, 2))
    return output


def masked_through_a_view(model: Model, source: Tensor) -> Tensor:
    with torch.no_grad():
        query, key, value = model.heads(source)
        scores = scores_of(query, key)
        scores.view(SEQUENCES * HEADS, TOKENS, TOKENS).masked_fill_(model.causal == 0, -1e4)
        return told(model, scores, value)


def a_head_at_a_time(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    scores = scores_of(query, key).masked_fill(model.causal == 0, -1e4)
    parts = zip(scores.chunk(HEADS, dim=1), value.chunk(HEADS, dim=1), strict=True)
    return torch.cat([told(model, *part) for part in parts], dim=1)


def cut_after_the_mask(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    scores = scores_of(query, key).masked_fill(model.causal == 0, -1e4)
    return told(model, scores[..., :5], value[:, :, :5])


def flipped_after_the_mask(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    scores = scores_of(query, key).masked_fill(model.causal == 0, -1e4)
    return told(model, scores.flip(-1), value.flip(-2))


def rolled_after_the_mask(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    scores = scores_of(query, key).masked_fill(model.causal == 0, -1e4)
    return told(model, scores.roll(1, -1), value.roll(1, -2))


def largest_only(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    scores = scores_of(query, key)
    return told(model, scores.masked_fill(scores < scores.topk(3, dim=-1).values[..., -1:], -1e9), value)


# Layouts.


def preallocated(model: Model, source: Tensor) -> Tensor:
    """As diffusers and GPT-BigCode do: what is added is memory that nobody has written, times zero."""
    query, key, value = model.heads(source)
    query, key, value = (part.flatten(0, 1) for part in (query, key, value))
    nothing = torch.full((SEQUENCES * HEADS, TOKENS, TOKENS), -1e30)
    weights = torch.baddbmm(nothing, query, key.mT, beta=0, alpha=0.5).softmax(-1)
    output = torch.bmm(weights, value)
    model.tell(*(tensor.unflatten(0, (SEQUENCES, HEADS)) for tensor in (weights, output)))
    return output


def values_that_are_products(model: Model, source: Tensor) -> Tensor:
    """As where data make the layer of the values: they descend from a product of two activations, too."""
    query, key, value = model.heads(source)
    return told(model, scores_of(query, key), value @ (key.mT @ value / TOKENS))


def values_put_together(model: Model, source: Tensor) -> Tensor:
    """As chunks of a linear attention are: they descend from products, and are no logits."""
    query, key, value = model.heads(source)
    together = torch.zeros(SEQUENCES, HEADS, TOKENS, WIDTH)
    for start in range(0, TOKENS, 2):
        together[:, :, start : start + 2] = query[:, :, start : start + 2] @ (key.mT @ value / TOKENS)
    return told(model, scores_of(query, key), together)


def queries_put_together(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    together = torch.zeros(SEQUENCES, HEADS, TOKENS, WIDTH)
    for start in range(0, TOKENS, 2):
        together[:, :, start : start + 2] = query[:, :, start : start + 2] @ (key.mT @ value / TOKENS)
    return told(model, scores_of(together, key), value)


def learned_queries_among_each_other(model: Model, source: Tensor) -> Tensor:
    """As in the first layer of DETR's decoder: no data have come in yet."""
    query, key, value = model.heads(model.experts.expand(SEQUENCES, -1, -1))
    return told(model, scores_of(query, key), value)


def one_key_head(model: Model, source: Tensor) -> Tensor:
    """As GPT-BigCode does: queries of all heads are one axis in both products, two axes between them."""
    query = model.query(source).view(SEQUENCES, TOKENS * HEADS, WIDTH)
    key, value = model.key(source)[..., :WIDTH], model.value(source)[..., :WIDTH]
    scores = torch.bmm(query, key.mT).view(SEQUENCES, TOKENS, HEADS, TOKENS)
    weights = scores.masked_fill(model.causal[:, None] == 0, -1e9).softmax(-1)
    output = torch.bmm(weights.view(SEQUENCES, TOKENS * HEADS, TOKENS), value).view(SEQUENCES, TOKENS, HEADS, WIDTH)
    model.tell(weights.transpose(1, 2), output.transpose(1, 2))
    return output


def one_key_head_and_queries_inside(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    scores = torch.bmm(query.flatten(1, 2), key[:, 0].mT).view(SEQUENCES, HEADS, TOKENS, TOKENS)
    weights = scores.softmax(-1)
    output = torch.bmm(weights.flatten(1, 2), value[:, 0]).view(SEQUENCES, HEADS, TOKENS, WIDTH)
    model.tell(weights, output)
    return output


def grouped_heads(model: Model, source: Tensor) -> Tensor:
    query = model.query(source).view(SEQUENCES, TOKENS, 1, HEADS, WIDTH)
    key, value = (layer(source)[..., :WIDTH].unsqueeze(2) for layer in (model.key, model.value))
    scores = torch.einsum("b i g r d, b j g d -> b g r i j", query, key) / math.sqrt(WIDTH)
    weights = scores.masked_fill(model.causal == 0, -1e9).softmax(-1)
    output = torch.einsum("b g r i j, b j g d -> b g r i d", weights, value)
    model.tell(weights.flatten(1, 2), output.flatten(1, 2))
    return output


def transformer_xl(model: Model, source: Tensor) -> Tensor:
    source = source.transpose(0, 1)
    query, key, value = (layer(source).unflatten(-1, (HEADS, WIDTH)) for layer in (model.query, model.key, model.value))
    positions = model.key(torch.randn(TOKENS, MODEL_WIDTH)).unflatten(-1, (HEADS, WIDTH))
    by_content = torch.einsum("ibnd,jbnd->ijbn", query, key)
    by_position = torch.einsum("ibnd,jnd->ijbn", query, positions)
    padded = torch.cat([torch.zeros(TOKENS, 1, SEQUENCES, HEADS), by_position], dim=1)
    by_position = padded.view(TOKENS + 1, TOKENS, SEQUENCES, HEADS)[1:].view_as(by_position)
    scores = (by_content + by_position).mul_(WIDTH**-0.5)
    weights = scores.float().masked_fill(model.causal[..., None, None] == 0, -math.inf).type_as(scores).softmax(dim=1)
    output = torch.einsum("ijbn,jbnd->ibnd", weights, value)
    model.tell(weights.permute(2, 3, 0, 1), output.permute(1, 2, 0, 3))
    return output


def relative_shift_first(model: Model, source: Tensor) -> Tensor:
    """As in a conformer, where the shift mixes queries and keys in one axis for a while."""
    query, key, value = model.heads(source)
    positions = model.key(torch.randn(1, 2 * TOKENS - 1, MODEL_WIDTH)).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    by_position = query @ positions.mT
    padded = torch.cat([torch.zeros(SEQUENCES, HEADS, TOKENS, 1), by_position], dim=-1)
    shifted = padded.view(SEQUENCES, HEADS, 2 * TOKENS, TOKENS)[:, :, 1:].view_as(by_position)[..., :TOKENS]
    return told(model, (shifted + query @ key.mT) / math.sqrt(WIDTH), value)


def one_query(model: Model, source: Tensor) -> Tensor:
    """Luong's attention: one decoder state looks at all encoder states."""
    state, memory = model.query(source[:, -1]), model.key(source)
    weights = torch.bmm(memory, state.unsqueeze(2)).squeeze(2).softmax(dim=1)
    output = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
    model.tell(weights[:, None, None], output[:, None, None])
    return output


def one_query_by_einsum(model: Model, source: Tensor) -> Tensor:
    state, memory = model.query(source[:, -1]), model.key(source)
    weights = torch.einsum("bd,bnd->bn", state, memory).softmax(-1)
    output = torch.einsum("bn,bnd->bd", weights, memory)
    model.tell(weights[:, None, None], output[:, None, None])
    return output


def one_query_and_a_sum(model: Model, source: Tensor) -> Tensor:
    state, memory = model.query(source[:, -1]), model.key(source)
    weights = (memory @ state[..., None]).squeeze(-1).softmax(-1)
    output = (memory * weights[..., None]).sum(dim=1)
    model.tell(weights[:, None, None], output[:, None, None])
    return output


def keys_in_a_buffer(model: Model, source: Tensor) -> Tensor:
    """A cache of keys, as for generation."""
    with torch.no_grad():
        query, key, value = model.heads(source)
        model.cache[:, :, :TOKENS] = key
        return told(model, scores_of(query, model.cache[:, :, :TOKENS]), value)


def chunks_of_heads(model: Model, source: Tensor) -> Tensor:
    """Heads are parts of what a layer made, which chunks are not: these are sequences of their own."""
    query, key, value = (part.unflatten(2, (-1, 2)) for part in model.heads(source[:, :6]))
    weights = scores_of(query, key).softmax(-1)
    output = weights @ value
    model.tell(*(part.transpose(1, 2).flatten(0, 1) for part in (weights, output)))
    return output


def heads_of_chunks(model: Model, source: Tensor) -> Tensor:
    query, key, value = (part.unflatten(2, (-1, 2)).transpose(1, 2) for part in model.heads(source[:, :6]))
    hidden = torch.zeros(3, 1, 2, 2)
    hidden[2, :, 0, 1] = -1e9  # in the last chunk alone
    weights = (scores_of(query, key) + torch.randn(HEADS, 2, 2) + hidden).softmax(-1)
    output = weights @ value
    model.tell(weights.flatten(0, 1), output.flatten(0, 1))
    return output


def heads_first(model: Model, source: Tensor) -> Tensor:
    query, key, value = (part.transpose(0, 1) for part in model.heads(source))
    weights = scores_of(query, key).softmax(-1)
    output = weights @ value
    model.tell(weights.transpose(0, 1), output.transpose(0, 1))
    return output


def blocks_after_folded_heads(model: Model, source: Tensor) -> Tensor:
    """Sequences and heads are one axis, blocks another, which holds no heads."""
    query, key, value = (part.flatten(0, 1).unflatten(1, (-1, 2)) for part in model.heads(source[:, :6]))
    weights = scores_of(query, key).softmax(-1)
    output = weights @ value
    by_head = (part.unflatten(0, (SEQUENCES, -1)).transpose(1, 2).flatten(0, 1) for part in (weights, output))
    model.tell(*by_head)
    return output


def chunks_of_one_head(model: Model, source: Tensor) -> Tensor:
    layers = (model.query, model.key, model.value)
    query, key, value = (layer(source[:, :6]).view(SEQUENCES, 1, 3, 2, MODEL_WIDTH) for layer in layers)
    weights = scores_of(query, key).softmax(-1)
    output = weights @ value
    model.tell(*(part.flatten(0, 2)[:, None] for part in (weights, output)))
    return output


def a_layer_for_each_head(model: Model, source: Tensor) -> Tensor:
    """One layer projects every head on its own, so that it does not tell them from sequences."""
    own = model.query.weight[:WIDTH, :WIDTH]
    query, key, value = (
        functional.linear(part, own) for part in source.view(SEQUENCES, 1, 7, HEADS, WIDTH).unbind(1) * 3
    )
    scores = torch.einsum("nqhd,nkhd->nhqk", query, key)
    weights = scores.softmax(dim=3)
    output = torch.einsum("nhql,nlhd->nqhd", weights, value)
    model.tell(weights, output.transpose(1, 2))
    return output


def layers_of_heads_stacked(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    query, key, value = (torch.stack(list(part.unbind(1)), dim=1) for part in (query, key, value))
    return told(model, scores_of(query, key), value)


def not_contiguous(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source.permute(2, 1, 0).contiguous().permute(2, 1, 0))
    return told(model, (key @ query.mT).mT / math.sqrt(WIDTH), value)


def random_tokens(model: Model, source: Tensor) -> Tensor:
    """Without a layer between what was drawn and the products; numbers that are drawn are data, and no constants."""
    query, key, value = torch.randn(3, SEQUENCES, HEADS, TOKENS, WIDTH)
    return told(model, scores_of(query, key), value)


def one_token(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source[:1, :1])
    return told(model, scores_of(query, key), value)


def heads_put_together(model: Model, source: Tensor) -> Tensor:
    """Along the last axis, with as many heads as tokens, so that shapes tell nothing."""
    query, key, value = model.heads(source[:, :HEADS])
    each = [scores_of(query[:, head], key[:, head]) for head in range(HEADS)]
    weights = torch.stack(each, dim=-1).softmax(dim=-2)
    output = torch.einsum("bijh,bhjd->bhid", weights, value)
    model.tell(weights.permute(0, 3, 1, 2), output)
    return output


def after_linear_attention(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    linear = (query.softmax(-1) @ (key.mT @ value)).transpose(1, 2).flatten(2)
    query, key, value = model.heads(source + linear)
    return told(model, scores_of(query, key), value)


# Between softmax and values.


def dropped_by_hand(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    weights = scores_of(query, key).softmax(-1)
    keep = torch.bernoulli(torch.full_like(weights, 0.7))
    model.tell(weights, weights @ value)
    return (weights * keep / 0.7) @ value


def rows_without_a_key(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    padding = torch.zeros(SEQUENCES, 1, 1, TOKENS, dtype=torch.bool)
    padding[0] = True
    weights = scores_of(query, key).masked_fill(padding, -math.inf).softmax(-1)
    weights = torch.where(torch.isnan(weights), torch.zeros_like(weights), weights)
    output = weights @ value
    model.tell(weights, output)
    return output


def values_of_every_query(model: Model, source: Tensor) -> Tensor:
    """The values of the nearest keys are gathered, so that each query has values of its own."""
    query, key, value = model.heads(source)
    nearest, numbers = scores_of(query, key).topk(3, dim=-1)
    weights = nearest.softmax(-1)
    gathered = value[:, :, None].expand(-1, -1, TOKENS, -1, -1)
    gathered = gathered.gather(3, numbers[..., None].expand(-1, -1, -1, -1, WIDTH))
    model.tell(weights)
    return torch.einsum("bhnk,bhnkd->bhnd", weights, gathered)


def head_by_head_after_the_softmax(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    weights = scores_of(query, key).softmax(-1)
    model.tell(weights)
    return torch.stack([weights[:, head] @ value[:, head] for head in range(HEADS)], dim=1)


def weights_used_again(model: Model, source: Tensor) -> Tensor:
    """The weights of two layers are multiplied with each other, and with the tokens (rollout)."""
    rollout = torch.eye(TOKENS)
    for _ in range(2):
        query, key, value = model.heads(source)
        weights = scores_of(query, key).softmax(-1)
        output = weights @ value
        model.tell(weights, output)
        source, rollout = source + output.transpose(1, 2).flatten(2), weights.mean(1) @ rollout
    return rollout @ source


def learned_queries_for_all_sequences(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.query(model.experts), model.key(source), model.value(source)
    weights = (query @ key.mT / 4).softmax(-1)
    output = weights @ value
    model.tell(weights[:, None], output[:, None])
    return output


def learned_queries_by_einsum(model: Model, source: Tensor) -> Tensor:
    query = model.query(model.experts).unflatten(-1, (HEADS, WIDTH)).transpose(0, 1)
    _, key, value = model.heads(source)
    weights = torch.einsum("hqd,bhkd->bhqk", query, key).softmax(-1)
    output = torch.einsum("bhqk,bhkd->bhqd", weights, value)
    model.tell(weights, output)
    return output


def pooled_by_one_vector(model: Model, source: Tensor) -> Tensor:
    weights = (model.key(source) @ model.query(model.experts[0])).softmax(1)
    output = torch.einsum("bn,bnd->bd", weights, model.value(source))
    model.tell(weights[:, None, None], output[:, None, None])
    return output


SEEN: list[Attend] = [
    learned_queries_for_all_sequences,
    learned_queries_by_einsum,
    pooled_by_one_vector,
    old_gpt,
    mask_times_alpha,
    mask_subtracted_times_alpha,
    mask_that_scores_are_added_to,
    bloom,
    kept_finite,
    chosen_from_a_tensor,
    chosen_the_other_way,
    exchanged_after_the_mask,
    masked_through_a_view,
    a_head_at_a_time,
    cut_after_the_mask,
    flipped_after_the_mask,
    rolled_after_the_mask,
    largest_only,
    preallocated,
    one_key_head,
    one_key_head_and_queries_inside,
    grouped_heads,
    transformer_xl,
    relative_shift_first,
    one_query,
    one_query_by_einsum,
    one_query_and_a_sum,
    keys_in_a_buffer,
    chunks_of_heads,
    heads_of_chunks,
    heads_first,
    blocks_after_folded_heads,
    chunks_of_one_head,
    a_layer_for_each_head,
    layers_of_heads_stacked,
    not_contiguous,
    random_tokens,
    one_token,
    heads_put_together,
    after_linear_attention,
    dropped_by_hand,
    rows_without_a_key,
    values_of_every_query,
    head_by_head_after_the_softmax,
    weights_used_again,
    values_that_are_products,
    values_put_together,
    queries_put_together,
    learned_queries_among_each_other,
]
WITHOUT_VALUES = (values_of_every_query, head_by_head_after_the_softmax)


@pytest.mark.filterwarnings(
    "error::lightning_attn.AttentionWarning",
    "ignore:.* computes attention several times in one forward pass:lightning_attn.AttentionWarning",  # some do
)
@pytest.mark.parametrize("attend", SEEN, ids=lambda attend: attend.__name__)
def test_what_is_seen_is_what_the_model_computed(attend: Attend) -> None:
    model, source = Model(attend), tokens()
    with record(model) as recording:
        model(source)
    assert len(recording.calls) == len(model.told)
    for call, (weights, output) in zip(recording.calls, model.told, strict=True):
        assert call.site == "(root)"
        torch.testing.assert_close(call.weights(), weights.nan_to_num(), rtol=0, atol=1e-5)
        assert torch.equal(call.logits()[1], weights != 0)
        assert (call.value is None) == (attend in WITHOUT_VALUES)
        if output is not None:
            torch.testing.assert_close(call.output(), output, rtol=0, atol=1e-5)


# What is refused, and what is none.


def logits_overwritten_by_their_softmax(model: Model, source: Tensor) -> Tensor:
    with torch.no_grad():
        query, key, value = model.heads(source)
        scores = scores_of(query, key)
        return torch.softmax(scores, -1, out=scores) @ value


def logits_overwritten_after_the_softmax(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    scores = scores_of(query, key)
    weights = scores.softmax(-1)
    scores.zero_()
    return weights @ value


@pytest.mark.parametrize("attend", [logits_overwritten_by_their_softmax, logits_overwritten_after_the_softmax])
def test_logits_that_are_gone_are_refused(attend: Attend) -> None:
    model, source = Model(attend), tokens()
    with pytest.warns(AttentionWarning, match="overwritten"), record(model) as recording:
        model(source)
    assert not recording.calls


def as_many_heads_as_tokens(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source[:, :HEADS])
    scores = (query.transpose(1, 2).flatten(1, 2) @ key[:, 0].mT).view(SEQUENCES, HEADS, HEADS, HEADS)
    return scores.softmax(-1).view(SEQUENCES, HEADS * HEADS, HEADS) @ value[:, 0]


def window_of_every_query(model: Model, source: Tensor) -> Tensor:
    """Which of the shared axes holds the queries cannot be told."""
    query, key, value = model.heads(source)
    key, value = (functional.pad(part, (0, 0, 2, 0)).unfold(2, 3, 1) for part in (key, value))
    weights = torch.einsum("bhnd,bhndw->bhnw", query, key).softmax(-1)
    return torch.einsum("bhnw,bhndw->bhnd", weights, value)


def windows_of_one_query(model: Model, source: Tensor) -> Tensor:
    """The queries are one of the axes beside the heads."""
    query, key, value = model.heads(source)
    key, value = (functional.pad(part, (0, 0, 1, 1)).unfold(2, 3, 1) for part in (key, value))
    return (query[..., None, :] @ key / 2).softmax(-1) @ value.mT


def single_query(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    weights = torch.einsum("bhd,bhnd->bhn", query[:, :, -1], key).softmax(-1)
    return torch.einsum("bhn,bhnd->bhd", weights, value)


def chunks(model: Model, source: Tensor) -> Tensor:
    """Whether heads or chunks come first cannot be told: no layer made them."""
    query, key, value = torch.randn(3, SEQUENCES, HEADS, 4, 2, WIDTH)
    return (query @ key.mT / 2).softmax(-1) @ value


def gumbel(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    return functional.gumbel_softmax(query @ key.mT, dim=-1) @ value


def divided_at_the_end(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    exponentials = (query @ key.mT / 4).exp()
    return exponentials @ value / exponentials.sum(-1, keepdim=True)


def exponentials_masked(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    exponentials = (query @ key.mT / 4).exp() * torch.ones(source.shape[1], source.shape[1]).tril()
    return (exponentials / exponentials.sum(-1, keepdim=True)) @ value


def ragged(model: Model, source: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor([source[0], source[1, :3]])
    weights = torch.matmul(model.query(nested), model.key(nested).transpose(1, 2)).softmax(-1)
    return torch.matmul(weights, model.value(nested))


def windows_that_overlap(model: Model, source: Tensor) -> Tensor:
    """As Longformer does: diagonals of blocks become columns, by a row of padding, and become diagonals again."""
    query, key, value = (part[:, :, :6] for part in model.heads(source))
    key, value = (functional.pad(part, (0, 0, 1, 1)).unfold(2, 4, 2).mT for part in (key, value))
    scores = query.unflatten(2, (3, 2)) @ key.mT
    columns = functional.pad(scores, (0, 1)).flatten(-2)[..., :-1].unflatten(-1, (3, 3))[..., :2, :]
    weights = columns.flatten(2, 3).softmax(-1).unflatten(2, (3, 2))
    diagonals = functional.pad(weights, (0, 2)).flatten(-2)[..., :-2].unflatten(-1, (2, 4))
    return diagonals @ value


def blocks_put_together(model: Model, source: Tensor) -> Tensor:
    """Which of its rows and columns are whose is not followed."""
    query, key, value = model.heads(source)
    scores = torch.empty(SEQUENCES, HEADS, TOKENS, TOKENS)
    for start in range(0, TOKENS, 2):
        scores[:, :, start : start + 2] = query[:, :, start : start + 2] @ key.mT
    return scores.softmax(-1) @ value


def weights_put_together(model: Model, source: Tensor) -> Tensor:
    query, key, value = model.heads(source)
    weights = source.new_zeros(SEQUENCES, HEADS, TOKENS, TOKENS)
    for start in range(0, TOKENS, 2):
        weights[:, :, start : start + 2].copy_((query[:, :, start : start + 2] @ key.mT).softmax(-1))
    return weights @ value


def columns_with_values_of_their_own(model: Model, source: Tensor) -> Tensor:
    """As of global tokens and those that are near."""
    query, key, value = model.heads(source)
    weights = (query @ key.mT).softmax(-1)
    return weights[..., :2] @ value[:, :, :2] + weights[..., 2:] @ value[:, :, 2:]


REFUSED: dict[Attend, str] = {
    windows_that_overlap: "rearranged",
    blocks_put_together: "rearranged",
    weights_put_together: "rearranged",
    columns_with_values_of_their_own: "columns without a value",
    ragged: "written out with nested tensors; `scaled_dot_product_attention` can be read",
    window_of_every_query: "which axes are heads and queries",
    windows_of_one_query: "each query has keys of its own",
    single_query: "which axes are heads and queries",
    chunks: "which of them are heads",
    gumbel: "drawn at random",
    divided_at_the_end: "before they are divided by their sum",
    exponentials_masked: "something else than their sum",
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("attend", REFUSED, ids=lambda attend: attend.__name__)
def test_what_cannot_be_read_is_refused_by_name(attend: Attend) -> None:
    model, source = Model(attend), tokens()
    with pytest.warns(AttentionWarning, match=f"is not watched: .*{REFUSED[attend]}"), record(model) as recording:
        model(source)
    assert not recording.calls


def rows_and_chunks(model: Model, source: Tensor) -> Tensor:
    """As BigBird does: the first rows see everything, the others their chunk and the one before it."""
    query, key, value = model.heads(source[:, :6])
    first = (query[:, :, :2] @ key.mT).softmax(-1) @ value
    query, key, value = (part.unflatten(2, (3, 2))[:, :, 1:] for part in (query, key, value))
    key, value = (torch.cat([part.roll(1, 2), part], 3) for part in (key, value))
    others = (query @ key.mT).softmax(-1) @ value
    return torch.cat([first, others.flatten(2, 3)], 2)


def test_of_an_attention_in_pieces_no_piece_is_taken() -> None:
    model, source = Model(rows_and_chunks), tokens()
    message = r"The attention at '\(root\)' is not watched: .*observe"
    with pytest.warns(AttentionWarning, match=message), record(model) as recording:
        model(source)
    assert not recording.calls
    observer = AttentionObserver(model, statistics="entropy")
    with pytest.warns(AttentionWarning, match="is not watched") as said, observer:
        model(source)
        model(source)
    assert len(said) == 1
    assert observer.snapshot().sites == ()


@pytest.mark.parametrize("is_told_last", [False, True])
def test_an_attention_in_pieces_is_seen_where_the_model_tells_of_it(is_told_last: bool) -> None:
    def attend(model: Model, source: Tensor) -> Tensor:
        query, key, value = model.heads(source)
        if not is_told_last:
            observe(query, key, value)
        output = rows_and_chunks(model, source)
        if is_told_last:
            observe(query, key, value)
        return output

    model, source = Model(attend), tokens()
    with pytest.warns(AttentionWarning, match="is not watched"), record(model) as recording:
        model(source)
    (call,) = recording.calls
    query, key, _ = model.heads(source)
    torch.testing.assert_close(call.logits()[0], query @ key.mT / WIDTH**0.5)


def test_learned_keys_beside_those_of_data_are_no_codebook() -> None:
    """As of tokens that are the same in all sequences: their keys make one column more each."""

    def attend(model: Model, source: Tensor) -> Tensor:
        query, key, value = model.heads(source)
        key_of_learned, value_of_learned = (
            layer(model.experts).unflatten(-1, (HEADS, WIDTH)).transpose(0, 1).expand(SEQUENCES, -1, -1, -1)
            for layer in (model.key, model.value)
        )
        scores = torch.cat([query @ key_of_learned.mT, query @ key.mT], -1)
        return told(model, scores, torch.cat([value_of_learned, value], 2))

    model, source = Model(attend), tokens()
    with record(model) as recording:
        model(source)
    ((weights, output),) = model.told
    (call,) = recording.calls
    torch.testing.assert_close(call.weights(), weights, rtol=0, atol=1e-5)
    assert output is not None
    torch.testing.assert_close(call.output(), output, rtol=0, atol=1e-5)


def test_queries_that_cannot_be_told_from_heads_are_refused() -> None:
    model, source = Model(as_many_heads_as_tokens), tokens()
    with pytest.warns(AttentionWarning, match="as many heads as tokens"), record(model) as recording:
        model(source)
    assert not recording.calls


def experts(model: Model, source: Tensor) -> Tensor:
    return torch.stack([model.query(source), model.key(source), model.value(source), source], dim=-2)


def router_after_linear_attention(model: Model, source: Tensor) -> Tensor:
    """The product of keys and values is one of two activations too, and everything after it descends from it."""
    hidden = source + model.query(source) @ (model.key(source).mT @ model.value(source))
    gates = functional.linear(hidden, model.experts).softmax(-1)
    return torch.einsum("bne,bned->bnd", gates, experts(model, hidden))


def cosine_router(model: Model, source: Tensor) -> Tensor:
    directions = functional.normalize(model.experts, dim=-1)
    gates = (functional.normalize(source, dim=-1) @ directions.T / 0.1).softmax(-1)
    return (gates[..., None] * experts(model, source)).sum(-2)


def supervised_contrastive(model: Model, source: Tensor) -> Tensor:
    features = functional.normalize(model.query(source).flatten(0, 1), dim=-1)
    logits = features @ features.T / 0.1
    logits = logits - logits.max(dim=1, keepdim=True).values.detach()
    others = 1 - torch.eye(len(features))
    log_probabilities = logits - (logits.exp() * others).sum(1, keepdim=True).log()
    return -(log_probabilities * others).sum(1).mean()


def prototypes(model: Model, source: Tensor) -> Tensor:
    support = model.query(source[0]).view(-1, 1, MODEL_WIDTH).mean(1)
    return (model.query(source[1]) @ support.T).log_softmax(-1)


def pointer(model: Model, source: Tensor) -> Tensor:
    return (model.query(source[:, :1]) @ model.key(source).mT).softmax(-1)


def policy_gradient(model: Model, source: Tensor) -> Tensor:
    probabilities = (model.query(source) @ model.key(source).mT).softmax(-1)
    return -(probabilities * torch.rand(SEQUENCES, TOKENS, TOKENS)).sum(-1).mean()


EXPERTS = nn.Embedding(4, 12)
LAYER = nn.Linear(12, 12)


def router_of_embedded_experts(model: Model, source: Tensor) -> Tensor:
    experts = functional.embedding(torch.arange(4), EXPERTS.weight)
    shares = (model.query(source) @ experts.T).softmax(-1)
    return (shares[..., None] * torch.stack([source] * 4, dim=-2)).sum(-2)


def router_of_projected_experts(model: Model, source: Tensor) -> Tensor:
    experts = functional.normalize(LAYER(EXPERTS.weight), dim=-1)
    return (model.query(source) @ experts.T).softmax(-1) @ torch.stack([source[:, 0]] * 4, dim=1)


def codebook_through_a_layer(model: Model, source: Tensor) -> Tensor:
    codes = LAYER(EXPERTS.weight)
    return (model.query(source) @ codes.T).softmax(-1) @ codes


def codebook_with_a_slot_of_zeros(model: Model, source: Tensor) -> Tensor:
    slot = torch.zeros_like(source[0, :1])
    codes = torch.cat([LAYER(EXPERTS.weight), slot]) + source.new_zeros(1)
    return (model.query(source) @ codes.T).softmax(-1) @ codes


def contrastive_against_soft_targets(model: Model, source: Tensor) -> Tensor:
    first, second = model.query(source).mean(1), source.mean(1)
    targets = (second @ second.T).softmax(-1)
    return -(targets @ (first @ second.T).log_softmax(-1).T).trace()


def gradient_by_a_transform(model: Model, source: Tensor) -> Tensor:
    def loss(weight: Tensor) -> Tensor:
        return functional.linear(source, weight).tanh().square().sum()

    return torch.func.grad(loss)(model.query.weight)


def router_of_a_composed_weight(model: Model, source: Tensor) -> Tensor:
    """A weight that is a product of products, as some parametrisations make."""
    weight = (model.query.weight @ model.key.weight) @ (model.value.weight @ model.query.weight)
    gates = functional.linear(source, weight[:4]).softmax(-1)
    outputs = torch.stack([layer(source) for layer in (model.query, model.key, model.value, model.query)], 2)
    return torch.einsum("bte,btew->btw", gates, outputs)


NOT_SEEN: list[Attend] = [
    router_after_linear_attention,
    cosine_router,
    supervised_contrastive,
    prototypes,
    pointer,
    policy_gradient,
    gradient_by_a_transform,
    router_of_embedded_experts,
    router_of_projected_experts,
    codebook_through_a_layer,
    contrastive_against_soft_targets,
    codebook_with_a_slot_of_zeros,
    router_of_a_composed_weight,
]


@pytest.mark.parametrize("attend", NOT_SEEN, ids=lambda attend: attend.__name__)
def test_what_is_not_attention_stays_out(attend: Attend) -> None:
    model, source = Model(attend), tokens()
    with pytest.warns(AttentionWarning) as warned, record(model) as recording:
        model(source)
    assert not recording.calls
    (warning,) = [each for each in warned if each.category is AttentionWarning]
    assert "No attention was seen" in str(warning.message)


# The same numbers as from the fused function.

_PADDING = torch.ones(SEQUENCES, 1, 1, TOKENS, dtype=torch.bool)
_PADDING[0, ..., 4:] = False
_BIAS = torch.randn(1, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))
MASKS: dict[str, Tensor | None] = {
    "none": None,
    "causal": torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(),
    "padding": _PADDING,
    "bias": _BIAS,
    "causal bias": _BIAS.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -math.inf),
    "window": (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs() < 3,
}


@pytest.mark.filterwarnings("error::lightning_attn.AttentionWarning")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapshots_are_those_of_the_fused_function(mask: Tensor | None, dtype: torch.dtype) -> None:
    def written(model: Model, source: Tensor) -> Tensor:
        query, key, value = (part.to(dtype).float() for part in model.heads(source))
        scores = scores_of(query, key)
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1) @ value

    def fused(model: Model, source: Tensor) -> Tensor:
        query, key, value = (part.to(dtype).float() for part in model.heads(source))
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    model, source = Model(written), tokens()
    snapshots = []
    for attend in (written, fused):
        model.attend = attend
        observer = AttentionObserver(model, spectral_sequences=None)
        with observer:
            model(source)
        snapshots.append(observer.snapshot())
    seen, expected = snapshots
    assert seen.heads == expected.heads
    torch.testing.assert_close(seen.values, expected.values, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings("ignore::lightning_attn.AttentionWarning", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("attend", [*SEEN, *REFUSED, *NOT_SEEN], ids=lambda attend: attend.__name__)
def test_outputs_gradients_and_random_numbers_are_bit_identical(attend: Attend) -> None:
    model, source = Model(attend), tokens().requires_grad_()

    def step() -> list[Tensor]:
        torch.manual_seed(3)
        output = model(source)
        output = output.to_padded_tensor(0.0) if output.is_nested else output
        found = [output.detach(), torch.random.get_rng_state()]
        if output.requires_grad:
            found += torch.autograd.grad(
                output.square().sum(), list(model.parameters()), allow_unused=True, materialize_grads=True
            )
        return found

    alone = step()
    with AttentionObserver(model):
        watched = step()
    assert len(alone) == len(watched)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(alone, watched, strict=True))
