"""Functions of dense attention weights."""
