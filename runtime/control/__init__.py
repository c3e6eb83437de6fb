"""The control plane: a star of sealed links over which ranks vote."""
