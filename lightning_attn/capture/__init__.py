"""Capture: a forward pass becomes attention calls; one file per way in which a model computes attention."""

from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.capture.capture import Capture
from lightning_attn.capture.observe import observe
from lightning_attn.capture.record import Recording, record
from lightning_attn.capture.report import AttentionWarning
from lightning_attn.capture.states import HiddenStates

__all__ = [
    "AttentionCall",
    "AttentionWarning",
    "Capture",
    "HiddenStates",
    "Recording",
    "Visibility",
    "observe",
    "record",
]
