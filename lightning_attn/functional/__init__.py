"""Functions of attention weights, for those who have them at hand."""
