"""One pass through the model: rows to tensors, layers, tokens back to the host."""
