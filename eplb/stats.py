"""What a rank counts of its rebalances: values that travel to the front door, so there is no tensor library here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceStats:
    """What a rank can say of its group's placement. Balance: mean over max of the ranks' loads, by MoE layer."""

    rebalances: int = 0
    """Migrations that came to their end."""
    dropped: int = 0
    """Migrations that were given up."""
    experts_moved: int = 0
    bytes_moved: int = 0
    """Between ranks, or from the checkpoint, over the whole group."""
    beats: int = 0
    """Steps in which anything moved."""
    most_bytes: int = 0
    """That this rank sent or got in one of them."""
    beat_cpu_s: float = 0.0
    """Processor time of this rank's thread in all of them, for what moved."""
    balance: tuple[float, ...] = ()
    """Of the last loads gathered, as experts sat then."""
    balance_before: tuple[float, ...] = ()
    """Of the loads that the last migration was planned for, without it."""
    balance_after: tuple[float, ...] = ()
    """And as the plan expected them with it."""
