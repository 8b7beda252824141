"""The attention calls whose statistics are timed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from table import counted
from torch import Tensor
from torch.nn import functional

from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.statistics import measure, resolve
from lightning_attn.statistics.measure import Sums

HEADS, WIDTH = 8, 64


def random_call(sequences: int, tokens: int, is_causal: bool, logit_std: float = 1.0) -> AttentionCall:
    """A call whose logits have a given standard deviation: 1 at the start of training, 50 in a run that is lost."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sequences, HEADS, tokens, WIDTH, generator=generator) for _ in range(3))
    return AttentionCall(
        site="attention",
        query=query * logit_std,
        key=key,
        value=value,
        scale=1 / math.sqrt(WIDTH),
        visibility=Visibility(causal_offset=0 if is_causal else None),
        self_attention=True,
    )


def is_causal(call: AttentionCall) -> bool:
    return call.visibility.causal_offset is not None


def described(call: AttentionCall) -> str:
    kind = "causal" if is_causal(call) else "full"
    return f"{kind}, n = {call.queries}, {call.heads} heads, {counted(call.sequences, 'sequence')}"


def fused_forward(call: AttentionCall) -> Tensor:
    return functional.scaled_dot_product_attention(
        call.query, call.key, call.value, is_causal=is_causal(call), scale=call.scale
    )


def statistics_of(call: AttentionCall, names: Sequence[str]) -> Sums:
    """The package's own way."""
    return measure(call, resolve(names), spectral_sequences=1)
