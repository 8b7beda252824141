"""Clipping: making the weights of a head's queries and keys smaller when its logits have become too large."""

from __future__ import annotations

from lightning_attn.clipping.attention_clip import AttentionClip
from lightning_attn.clipping.head_clip import HeadClip

__all__ = ["AttentionClip", "HeadClip"]
