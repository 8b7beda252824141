"""What a capture has to say to the owner of the model."""

from __future__ import annotations

import traceback
import warnings

from torch import nn

from lightning_attn.capture.reader import UnreadableError
from lightning_attn.capture.sites import SitePatterns


class AttentionWarning(UserWarning):
    """Something about the attention of a model, or about watching it, that its owner should know."""


def describe_fault(site: str, error: Exception) -> str:
    """Why a site is no longer watched."""
    if isinstance(error, UnreadableError):
        return f"The attention at {site!r} is not watched: {error}."
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"Watching the attention at {site!r} failed and is given up for this site; training goes on. "
        f"Cause: {type(error).__name__}: {error} (in {frame.name}, line {frame.lineno} of {frame.filename}). "
        "`strict=True` raises instead."
    )


def warn_of_nothing(model: nn.Module, sites: SitePatterns) -> None:
    """Say aloud that no attention was seen, and what was looked for."""
    warnings.warn(
        "No attention was seen. Looked for calls of `torch.nn.functional.scaled_dot_product_attention` and of "
        "`torch.nn.functional.multi_head_attention_forward` (`torch.nn.MultiheadAttention`, "
        f"`torch.nn.TransformerEncoderLayer`) made by {type(model).__name__} at the sites {list(sites.patterns)}. "
        "Not seen: attention written out with softmax, and other kernels (flash-attn, xformers, flex_attention).",
        AttentionWarning,
        stacklevel=3,
    )
