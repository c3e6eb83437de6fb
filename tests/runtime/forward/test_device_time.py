"""A device's own clock says what was work and what was waiting, from the layers that are looked at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep import Kind, Pending, Tag
from runtime.forward.device_time import EVERY, DeviceTime, StepTime


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now_ns = 5_000
        self.looks = 0

    def add(self, cell: Tensor, sign: int) -> None:
        cell.add_(sign * self.now_ns)
        self.looks += 1


class Wire:
    """A transport whose exchanges take so long."""

    rank, size = 0, 1

    def __init__(self, clock: Clock, wait_ns: int) -> None:
        self._clock = clock
        self._wait_ns = wait_ns

    def all_to_all(self, recv, send, *, recv_splits, send_splits, tag) -> Pending[Tensor]:
        def wait() -> Tensor:
            self._clock.now_ns += self._wait_ns
            return recv

        return Pending(wait)


def run_step(layers: list[int], *, work_ns: int, wait_ns: int) -> tuple[StepTime, int]:
    """Work and one exchange in each layer; what is read, and how often the clock was looked at."""
    clock = Clock()
    time = DeviceTime(clock, layers, torch.device("cpu"))
    wire = time.carry(Wire(clock, wait_ns))  # type: ignore[arg-type]
    rows = torch.zeros(1, 1)
    for _ in range(2):  # a step begins anew
        time.begin()
        for layer in layers:
            clock.now_ns += work_ns
            tag = Tag(0, layer, 0, 0, Kind.COMBINE)
            assert wire.all_to_all(rows, rows, recv_splits=(1,), send_splits=(1,), tag=tag).wait() is rows
        cells_2 = time.end()
        clock.now_ns += 99_000  # between steps
    return time.read(cells_2), clock.looks // 2


@pytest.mark.parametrize("num_layers", [1, EVERY, 2 * EVERY, 58])
def test_work_and_waiting_are_told_apart_from_a_few_of_the_layers(num_layers: int):
    layers = list(range(3, 3 + num_layers))
    found, looks = run_step(layers, work_ns=3_000, wait_ns=2_000)
    assert found == StepTime(own_us=3 * num_layers, waited_us=2 * num_layers)
    assert looks == 2 + 2 * -(-num_layers // EVERY)


def test_a_model_without_experts_only_works():
    clock = Clock()
    time = DeviceTime(clock, [], torch.device("cpu"))
    time.begin()
    clock.now_ns += 7_000
    assert time.read(time.end()) == StepTime(own_us=7, waited_us=0)


def test_no_more_is_taken_for_waiting_than_the_step_took():
    time = DeviceTime(Clock(), list(range(EVERY)), torch.device("cpu"))
    assert time.read(torch.tensor([10_000, 9_000])) == StepTime(own_us=0, waited_us=10)
