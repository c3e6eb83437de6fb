"""A timeline that is switched on for some steps of a rank that runs already, and off again.

Switched off it notes nothing and asks no clock, and exchanges go straight to the transport. Knows timelines and
transports; does not know who asks for a trace, nor where it goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dbo import Span, Timeline
from dbo.timeline import Lane
from ep import Pending, Tag, Transport
from ep.wrapping import Wrapping

from ..forward.tracing import TracedTransport


class SwitchedTimeline(Timeline):
    """The spans of the steps since `start`, of as many as it was told."""

    def __init__(self) -> None:
        super().__init__()
        self._steps_left = 0

    @property
    def is_on(self) -> bool:
        """Whether steps are being traced."""
        return self._steps_left > 0

    def start(self, steps: int) -> None:
        """Forget what there was and trace so many steps from now on."""
        self._spans.clear()
        self._steps_left = steps

    def stop(self) -> tuple[Span, ...]:
        """What was traced, once: a second call finds nothing."""
        self._steps_left = 0
        spans = self.spans
        self._spans.clear()
        return spans

    def now(self) -> int:
        """See `dbo.Untimed`."""
        return super().now() if self._steps_left else 0

    def add(self, lane: Lane, track: int, name: str, begin_ns: int) -> None:
        """See `dbo.Untimed`; what began before the start is left out."""
        if not (self._steps_left and begin_ns):
            return
        super().add(lane, track, name, begin_ns)
        if lane == "step":
            self._steps_left -= 1


class SwitchedTransport(Wrapping):
    """A transport whose exchanges are noted while the timeline is on."""

    def __init__(self, transport: Transport, timeline: SwitchedTimeline) -> None:
        super().__init__(transport)
        self._traced = TracedTransport(transport, timeline)
        self._timeline = timeline

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        """See `ep.Transport`."""
        transport = self._traced if self._timeline.is_on else self._transport
        return transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)

    def all_gather(self, row: Tensor, *, tag: Tag) -> Pending[Tensor]:
        """See `ep.Transport`."""
        return (self._traced if self._timeline.is_on else self._transport).all_gather(row, tag=tag)
