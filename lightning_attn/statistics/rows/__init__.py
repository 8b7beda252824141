"""Walking over attention matrices in blocks of rows, and what is gathered on the way for several statistics."""
