"""The front door's event loop: events of gRPC that lie ready together take one turn of it, not one each.

gRPC's thread writes a byte into a socket after each event, and its reader in the loop takes one byte and then handles
every event that is there. So after a burst, say a message for each of 64 streams, the loop would turn 64 times: wait,
read a byte, find nothing. Here all bytes but one are taken before that reader is called:

    events   e e e e        bytes   . . . .    ─▶  take 3, call the reader: it takes 1 and handles 4

A byte that comes later is seen in the next turn, for its event was there before it. Knows gRPC's reader by where it
comes from; one that is not known is called as it is.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

MOST_BYTES = 4096


class FrontLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        """See asyncio.AbstractEventLoop."""
        if isinstance(fd, socket.socket) and is_grpcs(callback):
            super().add_reader(fd, after_a_burst, fd, callback)
        else:
            super().add_reader(fd, callback, *args)


def is_grpcs(callback: Any) -> bool:
    """Whether it is a method of gRPC's own, or such a method with an argument."""
    owner = getattr(getattr(callback, "func", callback), "__self__", None)
    return type(owner).__module__.startswith("grpc.")


def after_a_burst(events: socket.socket, callback: Callable[[], object]) -> None:
    """Leave one byte of those that lie in `events`, then call."""
    waiting = len(events.recv(MOST_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    if waiting > 1:
        events.recv(waiting - 1)
    callback()
