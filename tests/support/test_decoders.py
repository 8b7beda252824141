"""Decoders of Hugging Face transformers, with random weights from small configurations.

Shape suffixes as in `support.truth`, and T: all tokens of a sequence, those in a cache first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from support.cell import Arguments, Cell, Seen, cells_of, check
from support.truth import Attention, Tape, products, rotated, split_heads
from torch import Tensor, nn

FAMILY = "Hugging Face transformers, decoders"
#: Two sequences of twelve tokens.
SEQUENCES, TOKENS = 2, 12
IDS = torch.randint(3, 50, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
#: Shorter than the sequences, and than what a cache holds.
WINDOW = 5

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # The logits of the attention are of the order of one.
    "initializer_range": 0.2,
}

NOT_SEPARATED = (
    "transformers does not separate the documents of this model, so that they look at each other, and that is seen"
)

#: The queries (B, H, T, D) and keys (B, K, T, D) of an attention in float64, before rotary embedding.
Projections = Callable[[Tape, str], tuple[Tensor, Tensor]]


def projected(tape: Tape, site: str) -> tuple[Tensor, Tensor]:
    return split_heads(tape.gave(f"{site}.q_proj"), 4), split_heads(tape.gave(f"{site}.k_proj"), 2)


def projected_and_normalised(tape: Tape, site: str) -> tuple[Tensor, Tensor]:
    query_BTHD, key_BTKD = (tape.gave(f"{site}.{name}_norm").double() for name in ("q", "k"))
    return query_BTHD.transpose(1, 2), key_BTKD.transpose(1, 2)


def projected_at_once(tape: Tape, site: str) -> tuple[Tensor, Tensor]:
    query_BTX, key_BTX, _ = tape.gave(f"{site}.c_attn").chunk(3, dim=-1)
    return split_heads(query_BTX, 4), split_heads(key_BTX, 4)


@dataclass(frozen=True)
class Decoder:
    """A model and what defines its attention.

    Args:
        name: what the page calls it.
        kind: what its classes begin with.
        ways: how it computes attention.
        options: its configuration, beside `SMALL`.
        windows: of each layer, how many tokens a query sees.
        rotary_base: base of the rotary embedding, ``None`` where there is none.
        scales: of each layer, what products are multiplied with.
        soft_cap: ``c`` of ``c * tanh(logit / c)``.
        has_sinks: whether each head has a learned logit that takes weight and gives nothing.
        separates_documents: whether transformers separates documents that are packed into one sequence.
        projections: its queries and keys.
        site: the name of the attention in a layer.
        out: the last layer of the attention.
    """

    name: str
    kind: str
    ways: tuple[str, ...] = ("eager", "sdpa")
    options: dict[str, Any] = field(default_factory=dict)
    windows: tuple[int | None, ...] = (None, None)
    rotary_base: float | None = 1e4
    scales: tuple[float, ...] = (8**-0.5, 8**-0.5)
    soft_cap: float | None = None
    has_sinks: bool = False
    separates_documents: bool = True
    projections: Projections = projected
    site: str = "model.layers.{}.self_attn"
    out: str = "o_proj"

    def make(self, way: str) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{self.kind}Config")(**{**SMALL, **self.options}, attn_implementation=way)
        kind = "GPT2LMHeadModel" if self.kind == "GPT2" else f"{self.kind}ForCausalLM"
        model: nn.Module = getattr(transformers, kind)(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # biases that are zero and norms that are one would hide a mistake
                    parameter += 0.3 * torch.randn_like(parameter)
                if name.endswith("sinks"):
                    parameter += 1.0
        return model

    def attention(
        self, model: nn.Module, tape: Tape, text: Text, layer: int, queries: range, columns: list[int], prefix: str
    ) -> Attention:
        """One call.

        Args:
            model: the model.
            tape: what its modules gave.
            text: its tokens.
            layer: its number.
            queries: which tokens they are.
            columns: which tokens the keys are; -1 for a place in a cache that none was written to.
            prefix: what the names of modules begin with.
        """
        site = prefix + self.site.format(layer)
        query_BHTD, key_BKTD = self.projections(tape, site)
        if self.rotary_base is not None:
            query_BHTD = rotated(query_BHTD, text.positions_BT, self.rotary_base)
            key_BKTD = rotated(key_BKTD, text.positions_BT, self.rotary_base)
        logits_BHNM = products(query_BHTD[:, :, list(queries)], key_BKTD[:, :, columns], self.scales[layer])
        if self.soft_cap is not None:
            logits_BHNM = self.soft_cap * torch.tanh(logits_BHNM / self.soft_cap)
        visible_BTT = text.visible_BTT(self.windows[layer], self.separates_documents)
        visible_BNM = visible_BTT[:, list(queries)][:, :, columns]
        return Attention(
            site,
            logits_BHNM,
            (visible_BNM & (torch.tensor(columns) >= 0))[:, None],
            sink_logits_H=model.get_submodule(site).sinks.detach() if self.has_sinks else None,
            self_attention=columns == list(queries),
        )


@dataclass(frozen=True)
class Text:
    """The tokens of a batch.

    Args:
        real_BT: which are no padding.
        positions_BT: where they stand in their document.
        documents_BT: the document that each belongs to.
    """

    real_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor

    def visible_BTT(self, window: int | None, separates_documents: bool) -> Tensor:
        """Which tokens (last axis) each token sees."""
        number_T = torch.arange(self.real_BT.shape[1])
        back_TT = number_T[:, None] - number_T
        seen_TT = (back_TT >= 0) & (back_TT < (len(number_T) if window is None else window))
        is_alike_BTT = self.documents_BT[:, :, None] == self.documents_BT[:, None]
        return seen_TT & self.real_BT[:, None] & (is_alike_BTT | (not separates_documents))


@dataclass(frozen=True)
class Run:
    """How a decoder is run.

    Args:
        case: what the page calls it.
        text: its tokens.
        gives: what it is told of them, beside their numbers: ``"attention_mask"``, ``"position_ids"``.
        cached: so many tokens go into a cache first, unwatched.
        cache: its kind. A plain one knows nothing of windows.
    """

    case: str
    text: Text
    gives: tuple[str, ...] = ()
    cached: int = 0
    cache: Literal["", "dynamic", "plain", "static"] = ""

    def arguments(self, model: Any) -> Arguments:
        if not self.cache:
            return {**self._of(0, TOKENS), "use_cache": False}
        transformers = pytest.importorskip("transformers")
        cache = {
            "dynamic": lambda: transformers.DynamicCache(config=model.config),
            "plain": transformers.DynamicCache,
            "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=TOKENS + 3),
        }[self.cache]()
        model(**self._of(0, self.cached), past_key_values=cache)
        return {**self._of(self.cached, TOKENS), "past_key_values": cache}

    def _of(self, first: int, last: int) -> Arguments:
        told = {"attention_mask": self.text.real_BT[:, :last].long()}
        told["position_ids"] = self.text.positions_BT[:, first:last]
        return {"input_ids": IDS[:, first:last], **{name: told[name] for name in self.gives}}

    def columns(self, window: int | None) -> list[int]:
        """Which tokens the keys of a layer are."""
        if self.cache in ("", "plain") or (self.cache == "dynamic" and window is None):
            return list(range(TOKENS))
        if window is None:
            return [*range(TOKENS), -1, -1, -1]
        assert self.cached >= window
        return list(range(self.cached - (window - 1), TOKENS))  # a query sees itself and so many before it

    def truth(self, decoder: Decoder, model: nn.Module, tape: Tape) -> list[Attention]:
        found = []
        for layer, window in enumerate(decoder.windows):
            queries = range(self.cached, TOKENS)
            attention = decoder.attention(model, tape, self.text, layer, queries, self.columns(window), "")
            out = tape.given_at(f"{attention.site}.{decoder.out}", -1)
            found.append(replace(attention, output_BNX=out))
        return found


def text(
    padding: Literal["", "left", "right"] = "", documents: tuple[int, ...] = (TOKENS,), from_mask: bool = False
) -> Text:
    """Twelve tokens, of which the second sequence may have three or four less.

    Args:
        padding: where.
        documents: the lengths of the documents that are packed into each sequence.
        from_mask: whether positions are counted from the first token that is no padding, as `generate` does.
    """
    real_BT = torch.ones(SEQUENCES, TOKENS, dtype=torch.bool)
    if padding:
        real_BT[1, slice(0, 3) if padding == "left" else slice(8, TOKENS)] = False
    positions_T = torch.cat([torch.arange(length) for length in documents])
    positions_BT = (real_BT.cumsum(1) - 1).clamp(min=0) if from_mask else positions_T.expand(SEQUENCES, -1)
    return Text(real_BT, positions_BT, (positions_T == 0).cumsum(0).expand(SEQUENCES, -1))


ALL_AT_ONCE = (
    Run("no padding", text()),
    Run("right padding", text("right"), ("attention_mask",)),
    Run("left padding", text("left"), ("attention_mask",)),
    Run(
        "left padding, positions of the tokens alone", text("left", from_mask=True), ("attention_mask", "position_ids")
    ),
    Run("packed documents, told from `position_ids`", text(documents=(3, 7, 2)), ("position_ids",)),
)
BOTH = ("attention_mask", "position_ids")
WITH_A_CACHE = tuple(
    Run(f"{what} with a {cache} cache, {padding or 'no'} padding", text(padding, from_mask=True), gives, cached, cache)
    for cache in ("dynamic", "static")
    for what, cached in (("one token", TOKENS - 1), ("some tokens", TOKENS - 4))
    for padding, gives in (("", ()), ("left", BOTH))
)

DECODERS = (
    Decoder(
        "GPT-2",
        "GPT2",
        options={"n_positions": 20, "attn_pdrop": 0.0},
        rotary_base=None,
        projections=projected_at_once,
        site="transformer.h.{}.attn",
        out="c_proj",
    ),
    Decoder("Llama", "Llama"),
    Decoder("Mistral", "Mistral", options={"sliding_window": WINDOW}, windows=(WINDOW, WINDOW)),
    Decoder("Qwen3", "Qwen3", projections=projected_and_normalised),
    Decoder(
        "Gemma 2",
        "Gemma2",
        ("eager",),
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 1.5,
            "query_pre_attn_scalar": 4,
        },
        windows=(WINDOW, None),
        scales=(0.5, 0.5),
        soft_cap=1.5,
    ),
    Decoder(
        "gpt-oss",
        "GptOss",
        ("eager",),
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150.0},
        },
        windows=(WINDOW, None),
        rotary_base=150.0,
        has_sinks=True,
        separates_documents=False,
    ),
    Decoder("Mixtral", "Mixtral", options={"num_local_experts": 3, "num_experts_per_tok": 2}, rotary_base=1e6),
)


def cell(decoder: Decoder, way: str, run: Run, training: bool = False) -> Cell:
    is_packed = run.text.documents_BT.max() > run.text.documents_BT.min()
    return Cell(
        FAMILY,
        decoder.name,
        way,
        f"{'train' if training else 'eval'}, {run.case}",
        lambda: decoder.make(way),
        run.arguments,
        lambda model, tape, arguments: run.truth(decoder, model, tape),
        (decoder.site.format("*"),),
        Seen(NOT_SEPARATED if is_packed and not decoder.separates_documents else ""),
        training=training,
    )


def cells() -> Iterator[Cell]:
    for decoder in DECODERS:
        for way in decoder.ways:
            yield from (cell(decoder, way, run, training) for training in (True, False) for run in ALL_AT_ONCE)
            yield from (cell(decoder, way, run) for run in WITH_A_CACHE)


CELLS = list(cells())


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)
