"""Functions of attention matrices, logits, queries and keys."""
