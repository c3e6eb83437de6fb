"""Dual-batch overlap: drive one or more micro-batches through the same layers."""

from .tracks import drive

__all__ = ["drive"]
