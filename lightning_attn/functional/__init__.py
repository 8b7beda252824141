"""Functions of attention weights, logits and states."""
