"""What autocast makes of the arguments of a function that computes attention as a whole."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall


def as_autocast(call: AttentionCall, dtype: torch.dtype | None) -> AttentionCall:
    """The call that the function computes, of the call that it was given.

    Args:
        call: as it was given.
        dtype: what autocast rounds to, ``None`` outside of it.
    """
    if dtype is None:
        return call
    bias = call.visibility.bias
    return replace(
        call,
        query=_rounded(call.query, dtype),
        key=_rounded(call.key, dtype),
        value=None if call.value is None else _rounded(call.value, dtype),
        visibility=call.visibility if bias is None else replace(call.visibility, bias=_rounded(bias, dtype)),
    )


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast makes of an argument: float64 it leaves alone."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)
