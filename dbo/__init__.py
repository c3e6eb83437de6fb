"""Dual-batch overlap: cut a step into micro-batches, and let one compute while the other's rows travel."""

from .policy import Choice, DboConfig, Decision, Need, OverlapModel, OverlapState, Taken, choose, halted
from .split import most_tokens, split
from .timeline import UNTIMED, Span, Timeline, Untimed, compute_intervals, exposed_ns
from .tracks import drive

__all__ = [
    "UNTIMED",
    "Choice",
    "DboConfig",
    "Decision",
    "Need",
    "OverlapModel",
    "OverlapState",
    "Span",
    "Taken",
    "Timeline",
    "Untimed",
    "choose",
    "compute_intervals",
    "drive",
    "exposed_ns",
    "halted",
    "most_tokens",
    "split",
]
