"""Numbers of whole matrices, of which statistics are made: singular values, eigenvalues, chains, scalings."""
