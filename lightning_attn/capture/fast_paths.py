"""Reading the fused functions that modules of `torch.nn` take in evaluation.

They are given the tokens, the weights of all layers and a mask. As in `lightning_attn.capture.multihead`, queries and
keys are projected anew for the wanted sequences. Nested tensors come here only: `nn.TransformerEncoder` makes them of
padded sequences, and no other way of `nn.MultiheadAttention` knows them. Shape suffixes as in
`lightning_attn.capture.call`, and L: width of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import functional

from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.capture.isolation import FUSED_ATTENTION, FUSED_LAYER
from lightning_attn.capture.nested import first_of, padded
from lightning_attn.capture.reader import Sampling, reads
from lightning_attn.capture.states import HiddenStates


@dataclass(frozen=True)
class _SelfAttention:
    """What a fused function is given for its attention.

    Args:
        tokens_BNL: the wanted sequences, after the norm where it comes first.
        is_token_BN: which of them are no padding, where they came in a nested tensor.
        heads: how many.
        projections: weight and bias of the projections to queries, keys and values.
        output_projection: weight and bias of the one after the attention.
        hidden: true where a key is hidden; broadcasts to (B, H, N, N).
    """

    tokens_BNL: Tensor
    is_token_BN: Tensor | None
    heads: int
    projections: tuple[Tensor, Tensor]
    output_projection: tuple[Tensor, Tensor]
    hidden: Tensor | None

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        heads: int,
        projections: tuple[Tensor, Tensor],
        output_projection: tuple[Tensor, Tensor],
        mask: Tensor | None,
        max_sequences: int | None,
    ) -> _SelfAttention:
        is_token_BN = hidden = None
        if tokens.is_nested:
            sequences = padded(first_of(tokens, max_sequences))
            tokens_BNL, is_token_BN = sequences.tensor[:, 0], sequences.is_token_BN
            hidden = ~is_token_BN[:, None, None]
        else:
            tokens_BNL = tokens[:max_sequences]
            if mask is not None:  # torch takes every number that is not zero for true here, also in a float mask
                hidden = mask[:max_sequences].bool()
                hidden = hidden[:, None, None] if hidden.dim() == 2 else hidden
        return cls(tokens_BNL, is_token_BN, heads, projections, output_projection, hidden)

    def call(self, sampling: Sampling) -> AttentionCall:
        """The attention itself."""
        query, key, value = self._heads()
        return AttentionCall(
            site=sampling.site,
            query=query,
            key=key,
            value=value if sampling.with_values else None,
            scale=1 / math.sqrt(query.shape[-1]),
            visibility=Visibility(
                mask=None if self.hidden is None else ~self.hidden,
                padding=None if self.is_token_BN is None else ~self.is_token_BN,
            ),
            self_attention=True,
        )

    def states(self, sampling: Sampling) -> HiddenStates:
        """The tokens before and after it."""
        attended_BHND = functional.scaled_dot_product_attention(
            *self._heads(), attn_mask=None if self.hidden is None else ~self.hidden
        )
        leaving_BNL = functional.linear(attended_BHND.transpose(1, 2).flatten(2), *self.output_projection)
        real_BN = self.is_token_BN
        if real_BN is None and self.hidden is not None:  # a token that nobody may see as a key is padding
            real_BN = ~self.hidden.all(2).all(1)
        return HiddenStates(sampling.site, self.tokens_BNL, leaving_BNL, real_BN)

    def _heads(self) -> tuple[Tensor, Tensor, Tensor]:
        projected_BNL = functional.linear(self.tokens_BNL, *self.projections)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected_BNL.chunk(3, dim=-1)
        )
        return query, key, value


@reads(FUSED_ATTENTION)
def read_attention(args: tuple[Any, ...], kwargs: dict[str, Any], sampling: Sampling) -> AttentionCall:
    """Read the attention of `nn.MultiheadAttention`, which is one of the same tokens on this path."""
    tokens, _, _, _, heads, weight, bias, output_weight, output_bias, mask, *_ = args
    projections = (weight, bias), (output_weight, output_bias)
    return _SelfAttention.of(tokens, heads, *projections, mask, sampling.max_sequences).call(sampling)


def _states_of_layer(args: tuple[Any, ...], kwargs: dict[str, Any], sampling: Sampling) -> HiddenStates:
    return _attention_of_layer(args, sampling).states(sampling)


@reads(FUSED_LAYER, weight=3, states=_states_of_layer)
def read_layer(args: tuple[Any, ...], kwargs: dict[str, Any], sampling: Sampling) -> AttentionCall:
    """Read the attention of `nn.TransformerEncoderLayer`, which comes after a norm or before it."""
    return _attention_of_layer(args, sampling).call(sampling)


def _attention_of_layer(args: tuple[Any, ...], sampling: Sampling) -> _SelfAttention:
    tokens, _, heads, weight, bias, output_weight, output_bias, _, norm_first, epsilon, scale, shift, *_ = args
    projections, mask = ((weight, bias), (output_weight, output_bias)), args[18]
    attention = _SelfAttention.of(tokens, heads, *projections, mask, sampling.max_sequences)
    if not norm_first:
        return attention
    normalised_BNL = functional.layer_norm(attention.tokens_BNL, attention.tokens_BNL.shape[-1:], scale, shift, epsilon)
    return replace(attention, tokens_BNL=normalised_BNL)
