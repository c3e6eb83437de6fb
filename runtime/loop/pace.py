"""How long a step should take, from the steps before it: what the pulse holds against a rank that does not move.

The slowest seconds a token seen lately, times the step's tokens. A decode step costs more a token than a prompt does,
so a long prompt is allowed too much rather than too little. Knows durations; does not know clocks or models.
"""

from __future__ import annotations

FORGET = 0.99
"""Share of the slowest pace that is left after a step."""


class Pace:
    """Of one rank; the bucket is the group's, so all ranks predict much alike."""

    def __init__(self) -> None:
        self._seconds_per_token = 0.0

    def predict(self, bucket: int) -> float:
        """Seconds for a step of `bucket` tokens; 0 before the first."""
        return self._seconds_per_token * bucket

    def took(self, bucket: int, seconds: float) -> None:
        """A step of `bucket` >= 1 tokens has taken this long here, waits included."""
        self._seconds_per_token = max(self._seconds_per_token * FORGET, seconds / bucket)
