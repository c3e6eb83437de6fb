"""With a stand-in for NVML that fills in what it is told to and counts what is open."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest

from runtime.failure.gpu_health import LIBRARY, GpuHealth, load_library

UUID = "GPU-0a1b"
DEVICE, EVENTS = 0x7F00_0000_1000, 0x7F00_0000_2000
"""Wider than 32 bits, as pointers are."""


@dataclass
class FakeNvml:
    """What a GPU reports; `codes` are the answers of functions that fail."""

    held_down: int = 0
    clock: int = 1980
    highest: int = 1980
    xids: list[int] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    open_things: int = 0

    def nvmlInit_v2(self) -> int:
        return self._answer("nvmlInit_v2", opens=1)

    def nvmlShutdown(self) -> int:
        return self._answer("nvmlShutdown", opens=-1)

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> int:
        if uuid.value != UUID.encode():
            return 6
        return self._answer("nvmlDeviceGetHandleByUUID", device, DEVICE)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Any, reasons: Any) -> int:
        assert device.value == DEVICE
        return self._answer("nvmlDeviceGetCurrentClocksThrottleReasons", reasons, self.held_down)

    def nvmlDeviceGetClockInfo(self, device: Any, kind: Any, clock: Any) -> int:
        assert (device.value, kind.value) == (DEVICE, 1)
        return self._answer("nvmlDeviceGetClockInfo", clock, self.clock)

    def nvmlDeviceGetMaxClockInfo(self, device: Any, kind: Any, clock: Any) -> int:
        assert (device.value, kind.value) == (DEVICE, 1)
        return self._answer("nvmlDeviceGetMaxClockInfo", clock, self.highest)

    def nvmlEventSetCreate(self, events: Any) -> int:
        return self._answer("nvmlEventSetCreate", events, EVENTS, opens=1)

    def nvmlEventSetFree(self, events: Any) -> int:
        assert events.value == EVENTS
        return self._answer("nvmlEventSetFree", opens=-1)

    def nvmlDeviceRegisterEvents(self, device: Any, kinds: Any, events: Any) -> int:
        assert (device.value, kinds.value, events.value) == (DEVICE, 8, EVENTS)
        return self._answer("nvmlDeviceRegisterEvents")

    def nvmlEventSetWait_v2(self, events: Any, event: Any, timeout_ms: Any) -> int:
        assert (events.value, timeout_ms.value) == (EVENTS, 0)
        if not self.xids:
            return 10
        event._obj.type, event._obj.data = 8, self.xids.pop(0)
        return 0

    def _answer(self, name: str, target: Any = None, value: int = 0, *, opens: int = 0) -> int:
        code = self.codes.get(name, 0)
        if code == 0:
            self.open_things += opens
            if target is not None:
                target._obj.value = value
        return code


def reasons(nvml: FakeNvml) -> tuple[str, ...]:
    with GpuHealth(UUID, nvml) as health:
        assert not health.missing
        return health.reasons()


def test_a_healthy_gpu_has_no_reasons():
    assert reasons(FakeNvml()) == ()
    assert reasons(FakeNvml(clock=1800)) == ()


def test_what_holds_the_clocks_down_is_said_with_the_clock():
    assert reasons(FakeNvml(held_down=0x4 | 0x40, clock=1200)) == (
        "the power limit is reached",
        "it is too hot (slowed down by the hardware)",
        "its clock is 1200 MHz of 1980",
    )


def test_an_idle_gpu_may_have_a_low_clock():
    assert reasons(FakeNvml(held_down=0x1, clock=345)) == ()


def test_xids_are_kept_and_said_once_each():
    nvml = FakeNvml(xids=[79, 31, 79])
    with GpuHealth(UUID, nvml) as health:
        assert health.reasons() == ("it reported Xid 79", "it reported Xid 31")
        nvml.xids.append(48)
        assert health.reasons()[-1] == "it reported Xid 48"
        assert len(health.reasons()) == 3


def test_a_lost_gpu_is_a_reason_and_so_are_its_xids():
    nvml = FakeNvml(codes={"nvmlDeviceGetCurrentClocksThrottleReasons": 15}, xids=[79])
    assert reasons(nvml) == ("the GPU is lost: it fell off the bus", "it reported Xid 79")


@pytest.mark.parametrize("function", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents"])
def test_a_gpu_that_tells_no_xids_has_clocks_all_the_same(function: str):
    nvml = FakeNvml(held_down=0x80, codes={function: 3}, xids=[79])
    assert reasons(nvml) == ("the power supply brakes",)
    assert nvml.open_things == 0


def test_what_a_gpu_cannot_say_is_no_reason():
    unsupported = {"nvmlDeviceGetCurrentClocksThrottleReasons": 3, "nvmlDeviceGetClockInfo": 3}
    assert reasons(FakeNvml(held_down=0x4, clock=100, codes=unsupported)) == ()


def test_everything_is_let_go_once():
    nvml = FakeNvml()
    health = GpuHealth(UUID, nvml)
    assert nvml.open_things == 2
    health.close()
    health.close()
    assert nvml.open_things == 0
    assert (health.missing, health.reasons()) == ("closed", ())


@pytest.mark.parametrize(
    ("library", "uuid", "message"),
    [
        (None, UUID, f"{LIBRARY} is not there"),
        (FakeNvml(codes={"nvmlInit_v2": 9}), UUID, "the driver is not loaded"),
        (FakeNvml(codes={"nvmlInit_v2": 999}), UUID, "NVML answers with code 999"),
        (FakeNvml(), "GPU-other", "GPU-other: no such GPU"),
        (object(), UUID, "this driver does not have the function"),
    ],
)
def test_without_library_driver_or_gpu_there_are_no_reasons(library: Any, uuid: str, message: str):
    with GpuHealth(uuid, library) as health:
        assert health.reasons() == ()
        assert message in health.missing
    assert getattr(library, "open_things", 0) == 0


def test_the_library_is_loaded_or_absent_but_never_an_error():
    assert load_library() is None or isinstance(load_library(), ctypes.CDLL)
