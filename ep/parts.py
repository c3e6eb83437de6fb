"""What may carry rows instead of the transport."""

from __future__ import annotations

from typing import Protocol

from .hops import Hop, HopBuffers, HopPart


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
