"""What a back end builds one hop of an exchange from."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .bounded import Faults
from .clock import StepClock
from .hops import Hop, HopBuffers, HopKinds, HopSpec
from .ops import ExchangeOps
from .subgroup import Subgroup


class HopPart(NamedTuple):
    """One hop on one track: who exchanges what, in which memory, and whom it tells of ranks out of step."""

    group: Subgroup
    spec: HopSpec
    buffers: HopBuffers
    kinds: HopKinds
    ops: ExchangeOps
    faults: Faults
    clock: StepClock


class BackEnd(Protocol):
    """One rank's end of what carries the rows of one exchange, instead of the transport. Every implementation passes
    `conformance.check_exchange` and `selftest.self_test`. All ranks make all calls together."""

    def buffers(self, out_bytes: int, in_bytes: int) -> HopBuffers:
        """A track's memory, where the back end can reach it."""
        ...

    def hop(self, part: HopPart) -> Hop:
        """A track's hop. The host reads nothing between its dispatch and its combine."""
        ...

    def close(self) -> None:
        """Give back what the back end holds, when nothing is under way."""
        ...
