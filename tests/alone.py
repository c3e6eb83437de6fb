"""Whose turn it is among processes that run tests of one checkout side by side."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def floor(file: Path, how: int) -> Iterator[None]:
    """Hold `file`, which exists: with others (fcntl.LOCK_SH) or alone (fcntl.LOCK_EX).

    Its folder is held by whoever waits for it, so that those who come later do not pass one that wants to be alone.
    """
    door, room = os.open(file.parent, os.O_RDONLY), os.open(file, os.O_RDONLY)
    try:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, how)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
    finally:
        os.close(door)
        fcntl.flock(room, fcntl.LOCK_UN)  # also where a program that a test left behind has a copy of it
        os.close(room)
