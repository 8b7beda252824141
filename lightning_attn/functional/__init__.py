"""Everything that is read off an attention matrix, as functions of tensors."""
