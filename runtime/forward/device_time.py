"""What a step takes on its device, by the device's own clock: a GPU that is throttled shows in it, whoever launches.

    compute lane    | total -= now | attention | waited -= now | wait | waited += now | experts .. | total += now |

The host launches and goes on, or replays a graph, so its clock says nothing of a device. What reads the clock is work
of the device's own, recorded with the rest, and what it found comes to the host with the step's tokens. Waits are
looked at in some layers, and taken to be alike in the others. A CPU's steps are measured by the host, which runs them.
Knows lanes and layers; does not know what the numbers are for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ep import Pending, Tag, Transport
from ep.lanes import Lanes
from ep.wrapping import Wrapping

X = TypeVar("X")

EVERY = 8
"""Of so many layers with experts one is looked at: reading the clock takes a kernel."""


class StepTime(NamedTuple):
    """Microseconds of one rank's own in a step, and those that it waited for others."""

    own_us: int
    waited_us: int


class DeviceClock(Protocol):
    """A device that can read its own clock."""

    def add(self, cell: Tensor, sign: int) -> None:
        """When the device comes to this: add its time, in ns, times `sign` to `cell`, an int64 scalar there."""
        ...


class NoDeviceTime:
    """The host's clock will do."""

    def carry(self, transport: Transport) -> Transport:
        """As it is."""
        return transport

    def carry_lanes(self, lanes: Lanes) -> Lanes:
        """As they are."""
        return lanes

    def begin(self) -> None:
        """Nothing to note."""

    def end(self) -> Tensor | None:
        """None: nothing was noted."""
        return None

    def read(self, cells_2: Tensor) -> StepTime:
        """There is nothing to read."""
        raise AssertionError(f"{cells_2} of a device without a clock")


NO_DEVICE_TIME = NoDeviceTime()


class DeviceTime(NoDeviceTime):
    """One rank's."""

    def __init__(self, clock: DeviceClock, layers: Sequence[int], device: torch.device) -> None:
        """layers: that have experts."""
        self._clock = clock
        self._looked_at = frozenset(layers[::EVERY])
        self._share = len(layers) / max(len(self._looked_at), 1)
        self._cells_2 = torch.zeros(2, dtype=torch.int64, device=device)

    def carry(self, transport: Transport) -> Transport:
        """With a look at the clock around waits."""
        return _Clocked(transport, self)

    def carry_lanes(self, lanes: Lanes) -> Lanes:
        """With the same around what is carried beside the transport."""
        return _ClockedLanes(lanes, self)

    def begin(self) -> None:
        """The first work of a step."""
        self._cells_2.zero_()
        self._clock.add(self._cells_2[0], -1)

    def end(self) -> Tensor:
        """After the last: the cells, to be brought to the host and `read`."""
        self._clock.add(self._cells_2[0], 1)
        return self._cells_2.clone()

    def wait(self, pending: Pending[X], layer: int) -> X:
        """An exchange of that layer."""
        if layer not in self._looked_at:
            return pending.wait()
        self._clock.add(self._cells_2[1], -1)
        value = pending.wait()
        self._clock.add(self._cells_2[1], 1)
        return value

    def read(self, cells_2: Tensor) -> StepTime:
        """What they say, on the host."""
        total_ns, waited_ns = cells_2.tolist()
        waited = min(waited_ns * self._share, total_ns)
        return StepTime(own_us=int(total_ns - waited) // 1000, waited_us=int(waited) // 1000)


class _Clocked(Wrapping):
    """A transport whose waits are looked at; see `ep.Transport`."""

    def __init__(self, transport: Transport, time: DeviceTime) -> None:
        super().__init__(transport)
        self._time = time

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        pending = self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)
        return Pending(lambda: self._time.wait(pending, tag.layer))


class _ClockedLanes:
    """Lanes on which waits are looked at; see `ep.lanes.Lanes`."""

    def __init__(self, lanes: Lanes, time: DeviceTime) -> None:
        self._lanes = lanes
        self._time = time

    def start(self, work: Callable[[], Pending[X]], *uses: Tensor, tag: Tag) -> Pending[X]:
        pending = self._lanes.start(work, *uses, tag=tag)
        return Pending(lambda: self._time.wait(pending, tag.layer))


def _cuda_clock() -> DeviceClock:
    return import_module(".clock_kernels", __package__).CudaClock()  # needs triton, which a CPU may lack


DEVICE_CLOCKS: dict[str, Callable[[], DeviceClock]] = {"cuda": _cuda_clock}
"""By the kind of device."""


def device_time_of(device: torch.device, layers: Sequence[int]) -> NoDeviceTime:
    """One rank's on this device."""
    make_clock = DEVICE_CLOCKS.get(device.type)
    return NO_DEVICE_TIME if make_clock is None else DeviceTime(make_clock(), layers, device)
