"""What defines the attention of a decoder of Hugging Face transformers, and the ways in which it is run.

Shape suffixes as in `support.truth`, and T: all tokens of a sequence, those in a cache first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from support.cell import Arguments, Cell, Seen
from support.truth import Attention, Tape, products, rotated, split_heads
from torch import Tensor, nn

#: Two sequences of twelve tokens.
SEQUENCES, TOKENS = 2, 12
IDS = torch.randint(3, 50, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": HEADS * WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": WIDTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # The logits of the attention are of the order of one.
    "initializer_range": 0.2,
}
NOT_SEPARATED = (
    "transformers does not separate the packed documents of this model, so that they look at each other, and that is "
    "seen"
)

#: The queries (B, H, T, D) and keys (B, K, T, D) of a site in float64, as they are compared, from what its layers gave
#: and the positions (B, T).
Projections = Callable[[Tape, str, Tensor], tuple[Tensor, Tensor]]


def projected(base: float) -> Projections:
    """Layers of their own for queries and keys, and rotary embedding."""

    def of(tape: Tape, site: str, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        query_BHTD = split_heads(tape.gave(f"{site}.q_proj"), HEADS)
        key_BKTD = split_heads(tape.gave(f"{site}.k_proj"), KEY_HEADS)
        return rotated(query_BHTD, positions_BT, base), rotated(key_BKTD, positions_BT, base)

    return of


@dataclass(frozen=True)
class Text:
    """The tokens of a batch.

    Args:
        real_BT: which are no padding.
        positions_BT: where the model is told that they stand.
        documents_BT: the document that each belongs to.
    """

    real_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor

    @property
    def is_packed(self) -> bool:
        return bool((self.documents_BT > self.documents_BT[:, :1]).any())

    def places_BT(self) -> Tensor:
        """Where tokens stand in their document, counted from its first one that is no padding."""
        is_first_BT = self.real_BT.clone()
        is_first_BT[:, 1:] &= ~self.real_BT[:, :-1] | (self.documents_BT[:, 1:] != self.documents_BT[:, :-1])
        number_T = torch.arange(self.real_BT.shape[1])
        return number_T - torch.where(is_first_BT, number_T, 0).cummax(1).values

    def visible_BTT(self, window: int | None, chunk: int | None, *, is_causal: bool, separates: bool) -> Tensor:
        """Which tokens (last axis) each token sees."""
        number_T = torch.arange(self.real_BT.shape[1])
        back_TT = number_T[:, None] - number_T
        if not is_causal:
            back_TT = back_TT.abs()
        seen_TT = (back_TT >= 0) & (back_TT < (len(number_T) if window is None else window))
        visible_BTT = seen_TT & self.real_BT[:, None]
        if chunk is not None:
            chunk_BT = self.places_BT() // chunk
            visible_BTT = visible_BTT & (chunk_BT[:, :, None] == chunk_BT[:, None])
        if separates:
            visible_BTT = visible_BTT & (self.documents_BT[:, :, None] == self.documents_BT[:, None])
        return visible_BTT


@dataclass(frozen=True)
class Decoder:
    """A model and what defines its attention.

    Args:
        name: what the page calls it.
        kind: what its classes begin with.
        projections: its queries and keys.
        ways: how it computes attention.
        options: its configuration, beside `SMALL`; without what is ``None`` here.
        windows: of each layer, how many tokens a query sees.
        chunks: of each layer, the length of the pieces that do not see each other.
        scales: of each layer, what products are multiplied with.
        bias: what is added to logits, (B, H, 1, T): of an attention, what its layers gave, its name, and the text.
        is_causal: whether tokens see none after them; a window holds to both sides otherwise.
        soft_cap: ``c`` of ``c * tanh(logit / c)``.
        has_sinks: whether each head has a learned logit that takes weight and gives nothing.
        separates_documents: whether transformers separates documents that are packed into one sequence.
        site: the name of the attention in a layer.
        out: the last layer of the attention.
        note: what a reader of the page should know.
    """

    name: str
    kind: str
    projections: Projections
    ways: tuple[str, ...] = ("eager", "sdpa")
    options: dict[str, Any] = field(default_factory=dict)
    windows: tuple[int | None, ...] = (None, None)
    chunks: tuple[int | None, ...] = (None, None)
    scales: tuple[float, ...] = (WIDTH**-0.5, WIDTH**-0.5)
    bias: Callable[[Any, Tape, str, Text], Tensor] | None = None
    is_causal: bool = True
    soft_cap: float | None = None
    has_sinks: bool = False
    separates_documents: bool = True
    site: str = "model.layers.{}.self_attn"
    out: str = "o_proj"
    note: str = ""

    def make(self, way: str) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        options = {name: value for name, value in {**SMALL, **self.options}.items() if value is not None}
        name = f"{self.kind}TextConfig"  # of models that also see pictures
        config_kind = getattr(transformers, name if hasattr(transformers, name) else f"{self.kind}Config")
        kind = "GPT2LMHeadModel" if self.kind == "GPT2" else f"{self.kind}ForCausalLM"
        model: nn.Module = getattr(transformers, kind)(config_kind(**options, attn_implementation=way))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # biases that are zero and norms that are one would hide a mistake
                    parameter += 0.3 * torch.randn_like(parameter)
                if name.endswith("sinks"):
                    parameter += 1.0
        return model

    def attention(
        self, model: nn.Module, tape: Tape, text: Text, layer: int, queries: range, columns: list[int], prefix: str = ""
    ) -> Attention:
        """One call, without its output.

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
        query_BHTD, key_BKTD = self.projections(tape, site, text.positions_BT)
        logits_BHNM = products(query_BHTD[:, :, list(queries)], key_BKTD[:, :, columns], self.scales[layer])
        if self.soft_cap is not None:
            logits_BHNM = self.soft_cap * torch.tanh(logits_BHNM / self.soft_cap)
        if self.bias is not None:
            bias_BH1T = self.bias(model.get_submodule(site), tape, site, text).double()
            logits_BHNM = logits_BHNM + bias_BH1T[..., columns]
        visible_BTT = text.visible_BTT(
            self.windows[layer], self.chunks[layer], is_causal=self.is_causal, separates=self.separates_documents
        )
        return Attention(
            site,
            logits_BHNM,
            (visible_BTT[:, list(queries)][:, :, columns] & (torch.tensor(columns) >= 0))[:, None],
            sink_logits_H=model.get_submodule(site).sinks.detach() if self.has_sinks else None,
            self_attention=columns == list(queries),
        )


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
        return {"input_ids": IDS[: len(self.text.real_BT), first:last], **{name: told[name] for name in self.gives}}

    def columns(self, window: int | None) -> list[int]:
        """Which tokens the keys of a layer are, of which a query sees those of a window."""
        if self.cache in ("", "plain") or (self.cache == "dynamic" and window is None):
            return list(range(TOKENS))
        if window is None:
            return [*range(TOKENS), -1, -1, -1]
        assert self.cached >= window
        return list(range(self.cached - (window - 1), TOKENS))  # a query sees itself and so many before it

    def truth(self, decoder: Decoder, model: nn.Module, tape: Tape) -> list[Attention]:
        found = []
        for layer, (window, chunk) in enumerate(zip(decoder.windows, decoder.chunks, strict=True)):
            columns = self.columns(window if chunk is None else chunk)
            attention = decoder.attention(model, tape, self.text, layer, range(self.cached, TOKENS), columns)
            out = tape.given_at(f"{attention.site}.{decoder.out}", -1)
            found.append(replace(attention, output_BNX=out))
        return found


def text(
    padding: Literal["", "left", "right"] = "",
    documents: tuple[int, ...] = (TOKENS,),
    from_mask: bool = False,
    sequences: int = SEQUENCES,
) -> Text:
    """Twelve tokens, of which the second sequence may have three or four less.

    Args:
        padding: where.
        documents: the lengths of the documents that are packed into each sequence.
        from_mask: whether positions are counted from the first token that is no padding, as `generate` does.
        sequences: how many.
    """
    real_BT = torch.ones(sequences, TOKENS, dtype=torch.bool)
    if padding:
        real_BT[1, slice(0, 3) if padding == "left" else slice(8, TOKENS)] = False
    positions_T = torch.cat([torch.arange(length) for length in documents])
    positions_BT = (real_BT.cumsum(1) - 1).clamp(min=0) if from_mask else positions_T.expand(sequences, -1)
    return Text(real_BT, positions_BT, (positions_T == 0).cumsum(0).expand(sequences, -1))


NO_PADDING = Run("no padding", text())
RIGHT_PADDING = Run("right padding", text("right"), ("attention_mask",))
LEFT_PADDING = Run("left padding", text("left"), ("attention_mask",))
LEFT_PADDING_WITH_POSITIONS = Run(
    "left padding, positions of the tokens alone", text("left", from_mask=True), ("attention_mask", "position_ids")
)
PACKED = Run("packed documents, told from `position_ids`", text(documents=(3, 7, 2)), ("position_ids",))
ALL_AT_ONCE = (NO_PADDING, RIGHT_PADDING, LEFT_PADDING, LEFT_PADDING_WITH_POSITIONS, PACKED)


def with_a_cache(what: Literal["one token", "some tokens"], cache: Any, padding: Literal["", "left"]) -> Run:
    """A forward pass after others."""
    return Run(
        f"{what} with a {cache} cache, {padding or 'no'} padding",
        text(padding, from_mask=True),
        ("attention_mask", "position_ids") if padding else (),
        TOKENS - {"one token": 1, "some tokens": 4}[what],
        cache,
    )


def cell(family: str, decoder: Decoder, way: str, run: Run, training: bool = False) -> Cell:
    """A decoder that is run in some way."""
    notes = [decoder.note] * bool(decoder.note) + [NOT_SEPARATED] * (
        run.text.is_packed and not decoder.separates_documents
    )
    return Cell(
        family,
        decoder.name,
        way,
        f"{'train' if training else 'eval'}, {run.case}",
        lambda: decoder.make(way),
        run.arguments,
        lambda model, tape, arguments: run.truth(decoder, model, tape),
        (decoder.site.format("*"),),
        Seen("; ".join(notes)),
        training=training,
    )
