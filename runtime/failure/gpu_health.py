"""Why a GPU may be slow, in its driver's words: clocks held down, an error (Xid), a GPU that is lost.

Asks NVML, the library that comes with NVIDIA's driver, through ctypes; nothing needs to be installed. Without library,
driver or GPU there are no reasons, and `missing` says what is not there. Written after NVML's documentation and tested
with a stand-in for the library: it has never run on a GPU. Knows no ranks and does not judge whether a rank is slow
(see `straggler`); NVML is asked only when `reasons` is called, on the caller's thread.
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, Self

LIBRARY = "libnvidia-ml.so.1"

SLOW_CLOCK = 0.9
"""Of the highest clock: from here on down the clock itself is a reason, unless the GPU idles."""

_IDLE = 0x1
_HELD_DOWN = {
    0x2: "application clocks are set",
    0x4: "the power limit is reached",
    0x8: "the hardware slows down",
    0x10: "a GPU of its sync boost group is slow",
    0x20: "it is hot (slowed down by the driver)",
    0x40: "it is too hot (slowed down by the hardware)",
    0x80: "the power supply brakes",
    0x100: "display clocks are set",
}
"""nvmlClocksEventReasons, bit by bit. https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"""

_SUCCESS, _NO_FUNCTION = 0, 13
_CODES = {
    3: "this GPU does not support it",
    4: "no permission",
    6: "no such GPU",
    9: "the driver is not loaded",
    13: "this driver does not have the function",
    15: "the GPU is lost: it fell off the bus",
    16: "the GPU needs a reset",
    18: "driver and library are of different versions",
}
_BAD_CODES = (15, 16)
_SM_CLOCK = 1
_XID_EVENTS = 0x8
_MAX_XIDS = 16
"""Read at one call; more wait for the next one."""


class _Event(ctypes.Structure):
    """nvmlEventData_t; of an Xid event, `data` is its number."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def load_library() -> Any | None:
    """NVML, or None on a machine without NVIDIA's driver."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


class GpuHealth:
    """One GPU, found by its UUID ("GPU-..."): device numbers differ between CUDA and NVML. Use it with `with`.

    missing   what keeps NVML from answering, "" when it answers
    """

    def __init__(self, uuid: str, library: Any | None) -> None:
        self._library = library
        self._started = False
        self._device = ctypes.c_void_p()
        self._events = ctypes.c_void_p()
        self._xids: list[int] = []
        self.missing = self._open(uuid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reasons(self) -> tuple[str, ...]:
        """What holds the GPU down now, and the Xids since it was opened; () when all is well or nobody can say."""
        if self.missing:
            return ()
        held_down = ctypes.c_ulonglong()
        # The name from before driver 535; later drivers have it too.
        code = self._call("nvmlDeviceGetCurrentClocksThrottleReasons", self._device, ctypes.byref(held_down))
        if code in _BAD_CODES:
            return (_CODES[code], *self._xid_reasons())
        bits = [words for bit, words in _HELD_DOWN.items() if held_down.value & bit]
        return (*bits, *self._clock_reasons(idle=bool(held_down.value & _IDLE)), *self._xid_reasons())

    def close(self) -> None:
        """Let go of the library. More than once does no harm."""
        if self._events:
            self._call("nvmlEventSetFree", self._events)
            self._events = ctypes.c_void_p()
        if self._started:
            self._call("nvmlShutdown")
            self._started = False
        self.missing = self.missing or "closed"

    def _open(self, uuid: str) -> str:
        if self._library is None:
            return f"{LIBRARY} is not there; it comes with NVIDIA's driver"
        code = self._call("nvmlInit_v2")
        if code != _SUCCESS:
            return _words(code)
        self._started = True
        code = self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid.encode()), ctypes.byref(self._device))
        if code != _SUCCESS:
            return f"{uuid}: {_words(code)}"
        self._listen()
        return ""

    def _listen(self) -> None:
        """Xids are told to listeners only; a GPU that tells none has clocks all the same."""
        if self._call("nvmlEventSetCreate", ctypes.byref(self._events)) != _SUCCESS:
            self._events = ctypes.c_void_p()
            return
        code = self._call("nvmlDeviceRegisterEvents", self._device, ctypes.c_ulonglong(_XID_EVENTS), self._events)
        if code != _SUCCESS:
            self._call("nvmlEventSetFree", self._events)
            self._events = ctypes.c_void_p()

    def _clock_reasons(self, *, idle: bool) -> tuple[str, ...]:
        now, highest = self._clock_mhz("nvmlDeviceGetClockInfo"), self._clock_mhz("nvmlDeviceGetMaxClockInfo")
        if idle or not now or now > SLOW_CLOCK * highest:
            return ()
        return (f"its clock is {now} MHz of {highest}",)

    def _clock_mhz(self, function: str) -> int:
        """0 when it cannot be said."""
        clock = ctypes.c_uint()
        code = self._call(function, self._device, ctypes.c_uint(_SM_CLOCK), ctypes.byref(clock))
        return clock.value if code == _SUCCESS else 0

    def _xid_reasons(self) -> tuple[str, ...]:
        for _ in range(_MAX_XIDS if self._events else 0):
            event = _Event()
            code = self._call("nvmlEventSetWait_v2", self._events, ctypes.byref(event), ctypes.c_uint(0))
            if code != _SUCCESS:
                break
            if event.data not in self._xids:
                self._xids.append(event.data)
        return tuple(f"it reported Xid {xid}" for xid in self._xids)

    def _call(self, function: str, *arguments: Any) -> int:
        """NVML's code. Arguments are ctypes objects, so that none is cut to an int."""
        entry = getattr(self._library, function, None)
        return _NO_FUNCTION if entry is None else entry(*arguments)


def _words(code: int) -> str:
    return _CODES.get(code, f"NVML answers with code {code}")
