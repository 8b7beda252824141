"""Attention that is written out with a softmax: what is found, what it is found to be, and what must not be found."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AttentionObserver, AttentionWarning, record
from lightning_attn.capture.call import AttentionCall

SEQUENCES, HEADS, TOKENS, WIDTH = 2, 3, 7, 4
MODEL_WIDTH = HEADS * WIDTH
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()

Attend = Callable[["Site", Tensor, Tensor, Tensor], Tensor]


class Site(nn.Module):
    """Projects tokens to queries, keys and values of several heads, and has a function attend."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.project = nn.Linear(MODEL_WIDTH, 3 * MODEL_WIDTH)
        self.mix = nn.Parameter(torch.eye(HEADS) + 0.1 * torch.randn(HEADS, HEADS))
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.difference = nn.Parameter(torch.tensor(0.4))
        self.register_buffer("bias", torch.randn(1, HEADS, TOKENS, TOKENS))
        self.tracked: list[Tensor] = []

    def heads(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.project(tokens).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        return query, key, value

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.heads(tokens)
        return self.attend(self, query, key, value)


class Model(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MODEL_WIDTH)
        self.attention = Site(attend)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.attention(self.norm(tokens))
        return output


def tokens() -> Tensor:
    return 2 * torch.randn(SEQUENCES, TOKENS, MODEL_WIDTH)


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.transpose(-1, -2) / math.sqrt(WIDTH)


# Each is written as models write it. The weights that they mean are computed anew, in float64, from queries and keys.


def plain(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.softmax(scores_of(query, key), dim=-1) @ value


def by_bmm(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    weights = torch.baddbmm(torch.zeros(1, 1, 1), query, key.mT, alpha=1 / math.sqrt(WIDTH)).softmax(-1)
    return torch.bmm(weights, value).unflatten(0, (SEQUENCES, HEADS))


def by_bmm_through_four_dimensions(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT) / math.sqrt(WIDTH)
    weights = scores.view(SEQUENCES, HEADS, TOKENS, TOKENS).softmax(-1)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).unflatten(0, (SEQUENCES, HEADS))


def by_addmm(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One matrix after the other, each with its mask."""
    hidden = torch.zeros(TOKENS, TOKENS).masked_fill(~CAUSAL, -1e9)
    pairs = zip(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), strict=True)
    each = [torch.addmm(hidden, q, k.T, alpha=1 / math.sqrt(WIDTH)).softmax(-1) @ v for q, k, v in pairs]
    return torch.stack(each).unflatten(0, (SEQUENCES, HEADS))


def by_einsum(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", query, key) / math.sqrt(WIDTH)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), value)


def by_einsum_with_heads_last(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    scores = torch.einsum("bqhd,bkhd->bqkh", query, key) / math.sqrt(WIDTH)
    return torch.einsum("bqkh,bkhd->bqhd", scores.softmax(dim=2), value).transpose(1, 2)


def by_einsum_with_an_ellipsis(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (torch.einsum("...id,...jd", query, key) / math.sqrt(WIDTH)).softmax(-1)
    return torch.einsum("...ij, ...jd -> ...id", weights, value)


def keys_times_queries(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The transposed matrix, as convolutional networks with attention have it."""
    weights = (key @ query.mT / math.sqrt(WIDTH)).softmax(dim=-2)
    return (value.mT @ weights).mT


def transposed_weights(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    return torch.matmul(value.mT, weights.permute(0, 1, 3, 2)).mT


def masked_fill(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scores_of(query, key).masked_fill(~CAUSAL, float("-inf"))
    return functional.dropout(scores.softmax(-1), 0.0) @ value


def masked_fill_in_place(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scores_of(query, key)
    scores.masked_fill_(~CAUSAL[None, None], torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ value


def mask_added(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (scores_of(query, key) + torch.where(CAUSAL, 0.0, -1e4)).softmax(-1) @ value


def mask_subtracted(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scores_of(query, key)
    scores -= 1e9 * (1 - CAUSAL.float())
    return scores.softmax(-1) @ value


def mask_assigned(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scores_of(query, key)
    scores[..., ~CAUSAL] = -1e9
    return scores.softmax(-1) @ value


def mask_chosen(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.where(CAUSAL, scores_of(query, key), torch.tensor(-1e9))
    return scores.softmax(-1) @ value


def mask_chosen_by_method(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scores_of(query, key).where(CAUSAL, float("-inf")).softmax(-1) @ value


def mask_in_another_shape(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As windowed attention adds its mask."""
    scores = scores_of(query, key).view(1, SEQUENCES, HEADS, TOKENS, TOKENS)
    scores = scores + torch.where(CAUSAL, 0.0, torch.finfo(torch.float16).min)
    return scores.view(-1, HEADS, TOKENS, TOKENS).softmax(-1) @ value


def cast(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.softmax(scores_of(query, key), dim=-1, dtype=torch.float64).to(query.dtype)
    return scores.type_as(value).contiguous() @ value


def log_softmax_then_exp(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.log_softmax(scores_of(query, key), dim=-1).exp() @ value


def exponentials_over_sum(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    exponentials = torch.exp(scores_of(query, key))
    return (exponentials / exponentials.sum(dim=-1, keepdim=True)) @ value


def exponentials_over_sum_and_epsilon(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scores_of(query, key)
    exponentials = (scores - scores.amax(dim=-1, keepdim=True).detach()).exp()
    return (exponentials / (exponentials.sum(-1, keepdim=True) + 1e-6)) @ value


def logsumexp_subtracted(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scores_of(query, key)
    return (scores - scores.logsumexp(dim=-1, keepdim=True)).exp() @ value


def row_maximum_subtracted(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scores_of(query, key)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return scores.softmax(-1) @ value


def largest_of_all_subtracted(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scores_of(query, key)
    return (scores - scores.max()).softmax(-1) @ value


def weighted_sum(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    return (weights[..., None] * value[:, :, None]).sum(dim=-2)


def weighted_sum_from_the_left(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    return torch.sum(value.unsqueeze(2) * weights.unsqueeze(-1), dim=3)


def relative_positions(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Two products, the second one looked up (DeBERTa), and a bias (T5)."""
    positions = torch.randn(1, HEADS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    scores = scores_of(query, key) + scores_of(query, positions) + site.bias
    return scores.softmax(-1) @ value


def soft_capped(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (torch.tanh(scores_of(query, key) / 2) * 2).softmax(-1) @ value


def learned_scale(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Cosines times a temperature of each head (Swin v2)."""
    scores = functional.normalize(query, dim=-1) @ functional.normalize(key, dim=-1).mT
    return (scores * site.sinks.exp()[:, None, None]).softmax(-1) @ value


def heads_mixed_before(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bhij,hg->bgij", scores_of(query, key), site.mix)
    return scores.softmax(-1) @ value


def one_key_head(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (torch.einsum("bhid,bjd->bhij", query, key[:, 0]) / math.sqrt(WIDTH)).softmax(-1)
    return torch.einsum("bhij,bjd->bhid", weights, value[:, 0])


def values_that_are_a_product(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As where the weights that project them come from data."""
    return scores_of(query, key).softmax(-1) @ (value @ (value.mT @ value))


def weighted_sum_of_values_that_are_a_product(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return weighted_sum(site, query, key, value @ (value.mT @ value))


def weights_that_are_joined(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Under the other name of `torch.cat`."""
    weights = torch.concat([scores_of(query[part], key[part]).softmax(-1) for part in (slice(1), slice(1, None))])
    return weights @ value


WRITTEN: list[Attend] = [
    plain,
    values_that_are_a_product,
    weighted_sum_of_values_that_are_a_product,
    by_bmm,
    by_bmm_through_four_dimensions,
    by_einsum,
    by_einsum_with_heads_last,
    by_einsum_with_an_ellipsis,
    keys_times_queries,
    transposed_weights,
    masked_fill,
    masked_fill_in_place,
    mask_added,
    mask_subtracted,
    mask_assigned,
    mask_chosen,
    mask_chosen_by_method,
    mask_in_another_shape,
    cast,
    log_softmax_then_exp,
    exponentials_over_sum,
    exponentials_over_sum_and_epsilon,
    logsumexp_subtracted,
    row_maximum_subtracted,
    largest_of_all_subtracted,
    weighted_sum,
    weighted_sum_from_the_left,
    relative_positions,
    soft_capped,
    learned_scale,
    heads_mixed_before,
    one_key_head,
]
MASKED = [attend for attend in WRITTEN if "mask" in attend.__name__]


def reference_logits(attend: Attend, site: Site, source: Tensor) -> Tensor:
    """What enters the softmax, in float64; hidden keys aside."""
    query, key, _ = (part.double() for part in site.heads(source))
    if attend is one_key_head:
        key = key[:, :1]
    if attend is learned_scale:
        query, key = query / query.norm(dim=-1, keepdim=True), key / key.norm(dim=-1, keepdim=True)
        return query @ key.mT * site.sinks.double().exp()[:, None, None]
    logits = query @ key.mT / math.sqrt(WIDTH)
    if attend is relative_positions:
        positions = torch.randn(1, HEADS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
        logits = logits + query @ positions.double().mT / math.sqrt(WIDTH) + site.bias.double()
    if attend is soft_capped:
        logits = 2 * torch.tanh(logits / 2)
    if attend is heads_mixed_before:
        logits = torch.stack(
            [sum(site.mix[h, g].double() * logits[:, h] for h in range(HEADS)) for g in range(HEADS)], 1
        )
    return logits


def only_call(model: nn.Module, source: Tensor) -> tuple[AttentionCall, Tensor]:
    with record(model) as recording:
        output = model(source)
    (call,) = recording.calls
    return call, output


@pytest.mark.parametrize("training", [True, False], ids=["train", "no_grad"])
@pytest.mark.parametrize("attend", WRITTEN, ids=lambda attend: attend.__name__)
def test_logits_visibility_and_output_are_the_model_s(attend: Attend, training: bool) -> None:
    model, source = Model(attend), tokens()
    with torch.set_grad_enabled(training):
        call, output = only_call(model, source)
    assert call.site == "attention"
    logits, visible = call.logits()
    expected = CAUSAL.expand_as(visible) if attend in MASKED else torch.ones_like(visible)
    assert torch.equal(visible, expected)
    reference = reference_logits(attend, model.attention, model.norm(source)).detach()
    torch.testing.assert_close(logits.double()[visible], reference[visible], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(call.output(), output.detach(), rtol=0, atol=1e-5)


def test_the_first_sequences_where_heads_are_in_the_batch() -> None:
    model = Model(by_bmm)
    with record(model, max_sequences=1) as recording:
        output = model(tokens())
    (call,) = recording.calls
    assert (call.sequences, call.heads) == (1, HEADS)
    torch.testing.assert_close(call.output(), output.detach()[:1], rtol=0, atol=1e-5)


def test_matrices_one_after_the_other_are_each_a_sequence_of_one_head() -> None:
    model, source = Model(by_addmm), tokens()
    with record(model) as recording:
        output = model(source)
    assert len(recording.calls) == SEQUENCES * HEADS
    for call, expected in zip(recording.calls, output.detach().flatten(0, 1), strict=True):
        assert torch.equal(call.logits()[1][0, 0], CAUSAL)
        torch.testing.assert_close(call.output()[0, 0], expected, rtol=0, atol=1e-5)


# What is beside the logits, or becomes of the weights.


def sinks_in_the_last_column(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As gpt-oss does: the maximum is that of the sink as well."""
    scores = scores_of(query, key).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)
    scores = torch.cat([scores, site.sinks.view(1, -1, 1, 1).expand(SEQUENCES, -1, TOKENS, -1)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return functional.softmax(scores, dim=-1)[..., :-1] @ value


def sinks_in_the_first_column(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As x-transformers does."""
    scores = scores_of(query, key).masked_fill(~CAUSAL, -torch.finfo(torch.float32).max)
    scores = torch.cat((site.sinks[None, :, None, None].expand(SEQUENCES, HEADS, TOKENS, 1), scores), dim=-1)
    return scores.softmax(-1)[..., 1:] @ value


@pytest.mark.parametrize("attend", [sinks_in_the_last_column, sinks_in_the_first_column])
def test_learned_sinks(attend: Attend) -> None:
    model, source = Model(attend), tokens()
    call, output = only_call(model, source)
    assert call.sink_logits is not None
    torch.testing.assert_close(call.sink_logits, model.attention.sinks.detach(), rtol=0, atol=1e-5)
    logits, visible = call.logits()
    assert torch.equal(visible, CAUSAL.expand_as(visible))
    reference = reference_logits(attend, model.attention, model.norm(source)).detach()
    torch.testing.assert_close(logits.double()[visible], reference[visible], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(call.output(), output.detach(), rtol=0, atol=1e-5)


def differential(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    first, second = scores_of(query, key).softmax(-1), scores_of(key, query).softmax(-1)
    return (first - site.difference * second) @ value


def differential_of_one_softmax(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.stack([scores_of(query, key), scores_of(key, query)], dim=2).flatten(1, 2)
    weights = scores.softmax(-1).view(SEQUENCES, HEADS, 2, TOKENS, TOKENS)
    return (weights[:, :, 0] - site.difference * weights[:, :, 1]) @ value


def talking_heads(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    return torch.einsum("bhij,hg->bgij", weights, site.mix) @ value


def talking_heads_by_a_layer(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    return functional.linear(weights.permute(0, 2, 3, 1), site.mix).permute(0, 3, 1, 2) @ value


def decayed(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (scores_of(query, key).softmax(-1) * torch.rand(TOKENS)) @ value


CHANGED: dict[Attend, int] = {
    differential: HEADS,
    differential_of_one_softmax: 2 * HEADS,
    talking_heads: HEADS,
    talking_heads_by_a_layer: HEADS,
    decayed: HEADS,
}


@pytest.mark.parametrize("attend", CHANGED, ids=lambda attend: attend.__name__)
def test_weights_that_are_changed_after_the_softmax_come_in_without_values_and_it_is_said(attend: Attend) -> None:
    model, source = Model(attend), tokens()
    with pytest.warns(AttentionWarning, match=r"'attention'.*after the softmax") as said, record(model) as recording:
        model(source)
    assert sum("after the softmax" in str(warning.message) for warning in said) == 1
    for call in recording.calls:
        assert call.value is None
        assert call.heads == CHANGED[attend]
        weights = call.weights()
        torch.testing.assert_close(weights.sum(-1), torch.ones(call.sequences, call.heads, TOKENS))
    assert len(recording.calls) == (2 if attend is differential else 1)


def masked_again(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).masked_fill(~CAUSAL, -1e9).softmax(-1)
    weights = torch.nan_to_num(weights.masked_fill(~CAUSAL, 0.0))
    return functional.dropout(weights * torch.tensor([1.0, 0.0, 1.0])[:, None, None], 0.2) @ value


def test_weights_that_are_set_to_zero_afterwards_or_dropped_are_still_those_of_the_softmax() -> None:
    call, _ = only_call(Model(masked_again), tokens())
    assert call.value is not None


# What looks like attention to some degree and is none.


def router(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ site.mix[:, :1].expand(HEADS, WIDTH).mT).softmax(-1) @ value[..., :HEADS, :]


def router_by_a_layer(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    experts = functional.linear(query.transpose(1, 2).flatten(2), site.project.weight[:5]).softmax(-1)
    outputs = torch.stack([value.transpose(1, 2).flatten(2)] * 5, dim=-2)
    return (experts[..., None] * outputs).sum(-2)


def router_by_a_layer_whose_weights_are_computed(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of two matrices that nobody knows, as of adapters, or of the data, as in a hypernetwork."""
    tokens = query.transpose(1, 2).flatten(2)
    unknown = torch.from_numpy(torch.randn(5, 2).numpy()) @ torch.from_numpy(torch.randn(2, MODEL_WIDTH).numpy())
    of_data = tokens[0, :5]
    for weight in (unknown, of_data, of_data.flatten(0, 1).view_as(of_data)):
        experts = functional.linear(tokens.flatten(0, 1), weight).softmax(-1)
        tokens = tokens + (experts @ functional.normalize(weight, dim=-1)).view_as(tokens)
    return tokens


def codebook(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    codes = functional.normalize(site.project.weight[:, :WIDTH], dim=-1)
    return (query @ codes.t()).softmax(-1) @ codes


def codebook_in_a_buffer(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    codes = site.bias[0, 0, :, :WIDTH]
    return torch.matmul((query @ codes.t()).softmax(-1), codes)


def distributional_head(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Probabilities of returns times the returns themselves."""
    support = torch.linspace(-1, 1, TOKENS)
    return scores_of(query, key).softmax(-1) @ support


def soft_mixture_of_experts(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Slots of learned directions gather tokens and give them back."""
    together = value.transpose(1, 2).flatten(2)
    logits = together @ functional.normalize(site.project.weight[:5], dim=-1).mT
    slots = logits.softmax(dim=1).mT @ together
    return logits.softmax(dim=-1) @ slots


def gating(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return value * functional.softmax(query * key, dim=-1)


def contrastive(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    first, second = query.mean((1, 2)), key.mean((1, 2))
    return functional.cross_entropy(first @ second.t() / 0.1, torch.arange(SEQUENCES))


def contrastive_with_soft_targets(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    first, second = query.flatten(0, 2), key.flatten(0, 2)
    logits = first @ second.t()
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def linear_attention(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query.softmax(-1) @ (key.softmax(-2).mT @ value)


def softmax_over_heads(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scores_of(query, key).softmax(dim=1) @ value


def slots_compete(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Slot attention: the softmax is over the queries, so that no row is a distribution over keys."""
    weights = scores_of(query, key).softmax(dim=-2)
    return (weights / weights.sum(-1, keepdim=True)) @ value


def graph_without_values(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scores_of(query, key).softmax(-1).sum(-2)


DECOYS: list[Attend] = [
    router,
    router_by_a_layer,
    router_by_a_layer_whose_weights_are_computed,
    codebook,
    codebook_in_a_buffer,
    distributional_head,
    soft_mixture_of_experts,
    gating,
    contrastive,
    contrastive_with_soft_targets,
    linear_attention,
    softmax_over_heads,
    slots_compete,
    graph_without_values,
]


@pytest.mark.parametrize("training", [True, False], ids=["train", "no_grad"])
@pytest.mark.parametrize("attend", DECOYS, ids=lambda attend: attend.__name__)
def test_what_is_not_attention_stays_out(attend: Attend, training: bool) -> None:
    model = Model(attend)
    with (
        torch.set_grad_enabled(training),
        pytest.warns(AttentionWarning, match="No attention was seen"),
        record(model) as recording,
    ):
        model(tokens())
    assert not recording.calls


# What is attention and cannot be read.


def one_more_in_the_sum(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    exponentials = scores_of(query, key).exp()
    return (exponentials / (1 + exponentials.sum(-1, keepdim=True))) @ value


def a_column_of_its_own_for_every_row(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.cat([scores_of(query, key), query.sum(-1, keepdim=True)], dim=-1)
    return scores.softmax(-1)[..., :-1] @ value


def scaled_after_the_maximum(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scores_of(query, key)
    return ((scores - scores.amax(-1, keepdim=True)) * 2).softmax(-1) @ value


REFUSED: dict[Attend, str] = {
    one_more_in_the_sum: "something else than their sum",
    a_column_of_its_own_for_every_row: "differ from row to row",
    scaled_after_the_maximum: "subtraction of its row maximum",
}


@pytest.mark.parametrize("attend", REFUSED, ids=lambda attend: attend.__name__)
def test_what_cannot_be_read_is_refused_by_name(attend: Attend) -> None:
    model = Model(attend)
    with pytest.warns(AttentionWarning, match=f"'attention'.*{REFUSED[attend]}"), record(model) as recording:
        model(tokens())
    assert not recording.calls


# Where it happens.


class Softmax(nn.Module):
    """A child that only takes the softmax, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, scores: Tensor) -> Tensor:
        return (scores / self.temperature).softmax(-1)


class Inner(nn.Module):
    """A child without parameters that computes the attention of its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.softmax(scores_of(query, key)) @ value


@pytest.mark.parametrize("child", [Softmax, Inner])
def test_the_site_is_the_innermost_module_that_computes_both_ends_and_has_parameters(child: type[nn.Module]) -> None:
    def attend(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if child is Inner:
            return site.child(query, key, value)
        return site.child(scores_of(query, key)) @ value

    model = Model(attend)
    model.attention.child = child()
    call, output = only_call(model, tokens())
    assert call.site == "attention"
    torch.testing.assert_close(call.output(), output.detach(), rtol=0, atol=1e-5)


def loop_over_heads(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = []
    for head in range(HEADS):
        weights = scores_of(query[:, head], key[:, head]).masked_fill(~CAUSAL, -1e9).softmax(-1)
        heads.append(weights @ value[:, head])
    return torch.stack(heads, dim=1)


def loop_over_heads_by_the_fused_function(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    attend = functional.scaled_dot_product_attention
    return torch.stack([attend(query[:, h], key[:, h], value[:, h], is_causal=True) for h in range(HEADS)], dim=1)


def fused(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("attend", [loop_over_heads, loop_over_heads_by_the_fused_function])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_loop_over_heads_is_one_call_of_all_heads(attend: Attend, passes: int) -> None:
    model, sources = Model(attend), [tokens() for _ in range(passes)]
    observer = AttentionObserver(model, spectral_sequences=None)
    with observer:
        for source in sources:
            model(source)
    looped = observer.snapshot()
    model.attention.attend = fused
    with observer:
        for source in sources:
            model(source)
    assert looped.heads == {"attention": HEADS}
    expected = observer.snapshot()
    torch.testing.assert_close(looped.values, expected.values, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings("error::lightning_attn.AttentionWarning")
def test_the_same_input_again_is_another_pass_not_another_head() -> None:
    def one_head(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scores_of(query[:, :1], key[:, :1]).softmax(-1) @ value[:, :1]

    model, source = Model(one_head), tokens()
    for blocks in (1, 2):
        observer = AttentionObserver(model)
        for _ in range(blocks):
            with observer:
                for _ in range(2 // blocks):
                    model(source)
        assert observer.snapshot().heads == {"attention": 1}


@pytest.mark.parametrize("attend", [masked_fill, sinks_in_the_last_column, exponentials_over_sum, weighted_sum])
def test_statistics_are_those_of_the_dense_weights(attend: Attend) -> None:
    model, source = Model(attend), tokens()
    call, _ = only_call(model, source)
    weights = call.weights().double()
    observer = AttentionObserver(model, statistics=["max_weight", "self_weight", "max_logit"])
    with observer:
        model(source)
    snapshot = observer.snapshot()
    choosing = call.logits()[1].sum(-1) >= 2
    for head in range(HEADS):
        chosen = weights[:, head].amax(-1)[choosing[:, head]]
        assert snapshot["attention", "max_weight"][head] == pytest.approx(chosen.mean().item(), rel=1e-5)
        diagonal = weights[:, head].diagonal(dim1=-2, dim2=-1)
        assert snapshot["attention", "self_weight"][head] == pytest.approx(diagonal.mean().item(), rel=1e-5)
    reference = reference_logits(attend, model.attention, model.norm(source))
    visible = call.logits()[1]
    for head, largest in enumerate(snapshot["attention", "max_logit"]):
        assert largest == pytest.approx(reference[:, head][visible[:, head]].max().item(), rel=1e-5)


def test_only_the_first_sequences_are_read() -> None:
    with record(model := Model(masked_fill), max_sequences=1) as recording:
        output = model(tokens())
    (call,) = recording.calls
    assert call.sequences == 1
    torch.testing.assert_close(call.output(), output[:1].detach(), rtol=0, atol=1e-5)


# What it leaves behind.


def tracked(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scores_of(query, key).masked_fill(~CAUSAL, -1e9)
    weights = scores.softmax(-1)
    output = weights @ value
    site.alive = [weakref.ref(part) for part in (query, key, value, scores, weights)]
    return output


@pytest.mark.parametrize("training", [True, False], ids=["train", "no_grad"])
def test_no_tensor_of_the_model_is_kept_alive(training: bool) -> None:
    model = Model(tracked)
    observer = AttentionObserver(model)
    with observer, torch.set_grad_enabled(training):
        output = model(tokens())
        if training:
            output.sum().backward()
        del output
        gc.collect()
        assert [reference() for reference in model.attention.alive] == [None] * 5
    assert observer.snapshot()


def test_logits_are_let_go_as_soon_as_the_values_were_multiplied() -> None:
    seen: list[bool] = []

    def attend(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = scores_of(query, key)
        storage = weakref.ref(scores.untyped_storage())
        weights = scores.softmax(-1)
        del scores
        output = weights @ value
        gc.collect()
        seen.append(storage() is None)
        return output

    model = Model(attend)
    with torch.no_grad(), AttentionObserver(model):
        model(tokens())
    assert seen == [True]


@pytest.mark.parametrize(
    "attend", [*WRITTEN, sinks_in_the_last_column, talking_heads, *DECOYS], ids=lambda a: a.__name__
)
@pytest.mark.filterwarnings("ignore::lightning_attn.AttentionWarning")
def test_outputs_and_gradients_are_bit_identical(attend: Attend) -> None:
    model, source = Model(attend), tokens().requires_grad_()

    def step() -> list[Tensor]:
        torch.manual_seed(3)
        output = model(source)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), [source, model.attention.project.weight])]

    alone = step()
    state = torch.random.get_rng_state()
    with AttentionObserver(model):
        watched = step()
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_fault_in_following_is_said_and_the_pass_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr("lightning_attn.capture.softmax.layout.axes_after", fail)
    model = Model(masked_fill)
    with pytest.warns(AttentionWarning, match="written out with softmax failed.*injected"), record(model) as recording:
        model(tokens())
    assert not recording.calls
    with pytest.raises(ZeroDivisionError), AttentionObserver(model, strict=True):
        model(tokens())
