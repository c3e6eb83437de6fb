"""What a rank measured of its steps, as values that travel to whoever asks; see `part_times` for where they come from.

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class StepMeasure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step of one rank.

    step             its number, the same on all ranks
    begin_ns         time.monotonic_ns() of its machine when it began
    decode_tokens    of rows that only decode, drafts included
    prefill_tokens   of all other rows
    rows             requests in it
    context_tokens   positions that the decoding rows attend to, summed
    tracks           micro-batches
    exposed_ns       waiting for rows of other ranks, while nothing was computed
    wall_ns, cpu_ns  by `part_times.Part`: on the wall, and of the thread's processor time
    """

    step: int
    begin_ns: int
    decode_tokens: int
    prefill_tokens: int
    rows: int
    context_tokens: int
    tracks: int
    exposed_ns: int
    wall_ns: tuple[int, ...]
    cpu_ns: tuple[int, ...]

    @property
    def total_ns(self) -> int:
        """From its begin to the next one's, on the wall."""
        return sum(self.wall_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasures:
    """The latest steps of one rank, oldest first, and the pairs that its own tokens sent to each expert since start."""

    steps: tuple[StepMeasure, ...]
    counts_LE: tuple[tuple[int, ...], ...]
