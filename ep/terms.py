"""What all ranks agreed on for the exchanges of one step. A value; nothing here talks to anybody."""

from __future__ import annotations

from dataclasses import dataclass

MOST_LEVEL = 12
"""Capacities are raised so often at most: to four times what they were. Buffers have room for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Equal on all ranks of a step, or the step's exchanges fail.

    bucket   most tokens that any rank has in this micro-batch; fixes rounds and capacities
    exact    counts first, whatever the exchange was built for: how a step that overflowed is run again
    level    how often the capacities were raised since the start
    """

    bucket: int
    exact: bool = False
    level: int = 0
