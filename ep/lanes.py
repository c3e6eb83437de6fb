"""Two lanes of one device: `compute` for the layers, `comm` for exchanges. The only place where they are ordered.

    compute   layers, packing | event                          | wait | experts
    comm                      | wait | all-to-all ...... event |

A transport on lanes starts its exchanges on the comm lane, after what the compute lane was given so far; only
Pending.wait() makes the compute lane wait for them. A CPU has no lanes: there the transport's own threads carry rows.
Knows streams and events; does not know who overlaps what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from .transport import Pending, Tag, Transport
from .wrapping import Wrapping

X = TypeVar("X")


class Lanes(Protocol):
    """What orders the two."""

    def start(self, work: Callable[[], Pending[X]], *uses: Tensor, tag: Tag) -> Pending[X]:
        """Begin `work`, which uses these tensors, on the comm lane. tag: the exchange that it is."""
        ...


class NoLanes:
    """A CPU: what is started has started."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu", device

    def start(self, work: Callable[[], Pending[X]], *uses: Tensor, tag: Tag) -> Pending[X]:  # noqa: ARG002  # the protocol's
        return work()


class CudaLanes:
    """Streams of a CUDA device. The comm lane has priority: what it runs is short, and others wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._comm = torch.cuda.Stream(device, priority=-1)

    def start(self, work: Callable[[], Pending[X]], *uses: Tensor, tag: Tag) -> Pending[X]:  # noqa: ARG002  # the protocol's
        self._comm.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in uses:  # or its memory may be given away while the comm lane still reads it
            tensor.record_stream(self._comm)
        with torch.cuda.stream(self._comm):
            pending = work()
            sent = torch.cuda.Event()
            sent.record(self._comm)  # not later: what is started after it is not waited for
        return Pending(lambda: self._join(sent, pending))

    def _join(self, sent: torch.cuda.Event, pending: Pending[X]) -> X:
        torch.cuda.current_stream(self._device).wait_event(sent)
        return pending.wait()


LANES: dict[str, Callable[[torch.device], Lanes]] = {"cpu": NoLanes, "cuda": CudaLanes}


class LanedTransport(Wrapping):
    """A transport whose exchanges run on the comm lane; see `Transport`."""

    def __init__(self, transport: Transport, lanes: Lanes) -> None:
        super().__init__(transport)
        self._lanes = lanes

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        def work() -> Pending[Tensor]:
            return self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)

        return self._lanes.start(work, recv, send, tag=tag)

    def all_gather(self, row: Tensor, *, tag: Tag) -> Pending[Tensor]:
        return self._lanes.start(lambda: self._transport.all_gather(row, tag=tag), row, tag=tag)
