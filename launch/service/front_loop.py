"""What the front door runs on, so that a token costs it little: its event loop, and how eager gRPC's thread is.

    loop     libuv's where it is installed (package `uvloop`), else asyncio's own
    thread   by a thread of its own gRPC brings word of every message that has left

Left to itself that thread is woken for each message of a burst and takes the loop's place on its core, to say what the
loop needs to know at that stream's next message only. A thread that waits for its turn brings word of many at once.

Knows the platform; does not know what is served.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

PATIENCE = 10
"""Steps of niceness: still a tenth of a core where everybody else computes."""

T = TypeVar("T")


def new_loop() -> asyncio.AbstractEventLoop:
    """The quickest that there is here."""
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop  # optional: not for every platform

    return uvloop.new_event_loop()


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, on such a loop."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


@contextmanager
def patient_threads() -> Iterator[None]:
    """Threads that Python starts in here wait for their turn when they are woken, where the system can do so."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.native_id is not None and hasattr(os, "SCHED_BATCH"):
            _let_wait(thread.native_id)


def _let_wait(thread: int) -> None:
    """SCHED_BATCH takes no core from others by waking up, and loses no share. Linux sees a thread as a process here."""
    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + PATIENCE)
