"""Capture: a forward pass becomes attention calls; one file per way in which a model computes attention.

- The ways: `scaled_dot_product` (`nested`), `multihead` (`fast_paths`), `flex`, `hugging_face` (`folded`,
  `token_order`), `softmax` for what is written out, `observe` (`told`) for what a model tells of.
- What they make and say: `call`, `reader`, `refusals`, `report`.
- Who computes: `sites` (`wrappers`, `module_tree`), `call_stack`, `running`, `passes`.
- What the axes of tensors mean: `contraction`, `axes`, `channels` (`making`, `composition`).
- Watching itself: `capture`, `isolation`, `opaque`; `record` (`description`) keeps calls, `states` sees hidden states.
"""

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
