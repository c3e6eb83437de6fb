"""Weights from checkpoint files to one rank's memory, and the plan of bytes they are part of."""
