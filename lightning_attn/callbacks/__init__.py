"""Callbacks: the glue between Lightning's Trainer and the observer. Nothing else here imports Lightning."""

from lightning_attn.callbacks.adaptive_temperature import AdaptiveTemperature
from lightning_attn.callbacks.attention_early_warning import AttentionEarlyWarning
from lightning_attn.callbacks.attention_monitor import AttentionMonitor
from lightning_attn.callbacks.qk_clip import QKClip
from lightning_attn.callbacks.warning_actions import EarlyWarningError

__all__ = ["AdaptiveTemperature", "AttentionEarlyWarning", "AttentionMonitor", "EarlyWarningError", "QKClip"]
