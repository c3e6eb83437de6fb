"""A warm step that allocates, or that torch finds waiting, ends the run; one that is not warm may do both."""

from __future__ import annotations

import pytest
import torch

from runtime.graphs.sync_guard import WARM_AFTER, CudaGuard, NoGuard, guard_of


class Device:
    """What torch would say."""

    def __init__(self) -> None:
        self.pieces = 7
        self.modes: list[str] = []

    def guard(self) -> CudaGuard:
        return CudaGuard(set_mode=self.modes.append, pieces=lambda: self.pieces)


def test_the_first_steps_may_allocate_and_wait():
    device = Device()
    guard = device.guard()
    for _ in range(WARM_AFTER):
        with guard.step():
            device.pieces += 1
    assert device.modes == []


def test_a_warm_step_is_run_in_the_mode_that_raises_and_left_in_the_usual_one():
    device = Device()
    guard = device.guard()
    for _ in range(WARM_AFTER + 1):
        with guard.step():
            pass
    assert device.modes == ["error", "default"]
    with pytest.raises(ZeroDivisionError), guard.step():
        _ = 1 / 0
    assert device.modes[-1] == "default"


def test_a_warm_step_that_takes_memory_is_named():
    device = Device()
    guard = device.guard()
    for _ in range(WARM_AFTER):
        with guard.step():
            pass
    with pytest.raises(RuntimeError, match=f"launch {WARM_AFTER + 1} took 2 new pieces"), guard.step():
        device.pieces += 2


def test_a_cpu_is_not_guarded():
    assert isinstance(guard_of(torch.device("cpu"), debug_sync=True), NoGuard)
    assert isinstance(guard_of(torch.device("cuda"), debug_sync=False), NoGuard)
