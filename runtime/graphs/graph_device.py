"""Work that is recorded once and replayed on the same memory: a device's graphs, and programs cut at switch points.

    record      begin | kernels of piece 0 | end, the attention of this step, begin | kernels of piece 1 | end
    replay      piece 0 | the attention of that step | piece 1

A graph holds addresses, shapes and the host's numbers as they were; only what lies in memory may differ from one replay
to the next. Nothing of it may be read by the host while it is recorded. Knows no model; what is captured, and which
memory is static, is `graphs`'.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

X = TypeVar("X")
Outside = Callable[[Any], None]
"""Work between two pieces, done anew in every step; it is given what the step brings."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do it again, in the device's own time."""
        ...


class GraphDevice(Protocol):
    """What records."""

    def begin(self) -> None:
        """From now on work is recorded, and not done."""
        ...

    def end(self) -> Graph:
        """What was recorded since."""
        ...

    def lane(self) -> AbstractContextManager[Any]:
        """Where recording happens: around begin and end, and around warming up."""
        ...


class CudaGraphs:
    """CUDA graphs that share one pool of memory: no two of them are ever replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def lane(self) -> Any:
        """A stream of its own, after all that was launched and before all that will be."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        assert self._graph is None, "a graph is being recorded already"
        self._graph = torch.cuda.CUDAGraph()
        # Other threads (a pulse, a front end) may go on allocating: what they do is no part of the graph.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Graph:
        assert self._graph is not None, "no graph is being recorded"
        graph, self._graph = self._graph, None
        graph.capture_end()
        return graph


@dataclass(slots=True)
class Program(Generic[X]):
    """Pieces and what is done between them, in order; `value` is what the recorded work returned, in static memory."""

    parts: list[Graph | Outside] = field(default_factory=list)
    value: X | None = None

    def replay(self, step: Any) -> X:
        """Everything once more; `step` is handed to what is done outside of graphs."""
        for part in self.parts:
            if callable(part):
                part(step)
            else:
                part.replay()
        assert self.value is not None, "a program is replayed after it was recorded"
        return self.value


class Recording(Generic[X]):
    """One program as it comes about."""

    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self._program: Program[X] = Program()
        self._step: Any = None
        self._records = False

    def rehearse(self, work: Callable[[], X], step: Any) -> None:
        """Run `work` once as it will be recorded, switch points with it: what it asks for first is there afterwards."""
        self._step = step
        work()

    def record(self, work: Callable[[], X], step: Any) -> Program[X]:
        """Run `work` once in recording; `step` is that of the work that is done outside of graphs meanwhile."""
        self._step, self._records = step, True
        self._device.begin()
        try:
            self._program.value = work()
        finally:
            last = self._device.end()
            self._records = False
        self._program.parts.append(last)
        return self._program

    def outside(self, work: Outside) -> None:
        """A switch point: end the piece, do `work` now and in every replay, begin the next piece. In a rehearsal, do it
        now."""
        if not self._records:
            work(self._step)
            return
        self._program.parts.append(self._device.end())
        work(self._step)
        self._program.parts.append(work)
        self._device.begin()


GRAPH_DEVICES: dict[str, Callable[[torch.device], GraphDevice]] = {"cuda": CudaGraphs}
