"""What a model is, read from its config.json: numbers, families, shapes of tensors."""
