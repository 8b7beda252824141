"""Callbacks: the glue between Lightning's Trainer and the observer. Nothing else here imports Lightning."""

from lightning_attn.callbacks.attention_monitor import AttentionMonitor

__all__ = ["AttentionMonitor"]
