"""Walking over the hidden states of tokens, and what is gathered on the way for several statistics."""
