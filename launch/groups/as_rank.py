"""The beginning of a process that `serried --ranks` started: which rank it is, whom to meet, when it must not live on.

    python -m launch --as-rank 2/4 DESCRIPTOR generate ...

The descriptor is one end of a socket pair. The invitation comes over it, and then nothing: it is the lifeline, whose
end is read when rank 0's process is gone, however that ended. While the process starts, the system kills it together
with rank 0. Once its pulse watches, it may outlive rank 0 by GRACE_S, to say who failed and to leave its record.

Knows descriptors, signals and words; imports nothing of the engine, because it runs before all of that.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from .invitation import Invitation
from .world import World, own_world

FLAG = "--as-rank"
GRACE_S = 3.0
_PR_SET_PDEATHSIG = 1


class Child:
    """This process as a rank of somebody else's group."""

    def __init__(self, world: World, invitation: Invitation, lifeline: socket.socket) -> None:
        self.world = world
        self.invitation = invitation
        self._lifeline = lifeline
        self._guard = threading.Thread(target=self._end_after_parent, name="lifeline", daemon=True)
        self._guard.start()

    def trust_pulse(self) -> None:
        """The pulse watches now. A rank that is stopped is woken when rank 0 goes, so that it, too, ends in time."""
        on_parent_death(signal.SIGCONT)

    def _end_after_parent(self) -> NoReturn:
        while self._lifeline.recv(1):
            continue
        time.sleep(GRACE_S)  # the pulse usually ends this process before, with a name and a record
        os.write(2, f"[rank {self.world.rank}] ends: the process of rank 0 is gone\n".encode())
        os._exit(1)


def words_for_child(rank: int, size: int, descriptor: int, words: Sequence[str]) -> list[str]:
    """The command line's words that make a process rank `rank`; the inverse of `take_child`."""
    return [FLAG, f"{rank}/{size}", str(descriptor), *words]


def letter(invitation: Invitation) -> bytes:
    """What goes over the descriptor: four bytes of length, and as many bytes."""
    text = json.dumps({"parent": os.getpid(), "invitation": invitation.to_bytes().decode()}).encode()
    return len(text).to_bytes(4, "little") + text


def take_child(words: Sequence[str]) -> tuple[Child | None, list[str]]:
    """This process as a child, or None if it was started by a person; and the words that are left."""
    if not words or words[0] != FLAG:
        return None, list(words)
    rank, size = map(int, words[1].split("/"))
    lifeline = socket.socket(fileno=int(words[2]))
    lifeline.set_inheritable(False)
    on_parent_death(signal.SIGKILL)
    head = lifeline.recv(4, socket.MSG_WAITALL)
    text = lifeline.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
    if not text or json.loads(text)["parent"] != os.getppid():
        sys.exit(f"[rank {rank}] rank 0 ended before this rank began")
    return Child(own_world(rank, size), Invitation.from_bytes(json.loads(text)["invitation"]), lifeline), list(
        words[3:]
    )


def hush(rank: int) -> None:
    """For ranks that do not speak: nothing on standard output, and a mark on each line of standard error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    stream = MarkedLines(f"[rank {rank}] ")
    atexit.register(stream.close)
    sys.stderr = stream


class MarkedLines(io.TextIOBase):
    """Standard error with a mark before each line; a line is written whole, so that those of several ranks do not mix.

    In the rank itself rather than in whoever started it: that one may be gone when there is most to say.
    """

    def __init__(self, mark: str, descriptor: int = 2) -> None:
        self._mark = mark
        self._descriptor = descriptor
        self._begun = ""
        self._lock = threading.Lock()

    encoding = "utf-8"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str, /) -> int:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            self._put(lines)
        return len(text)

    def close(self) -> None:
        """A last line without an end gets one."""
        with self._lock:
            self._put([self._begun] if self._begun else [])
            self._begun = ""

    def _put(self, lines: Sequence[str]) -> None:
        whole = "".join(f"{self._mark}{line}\n" for line in lines).encode(errors="backslashreplace")
        while whole:
            whole = whole[os.write(self._descriptor, whole) :]


def on_parent_death(number: signal.Signals) -> None:
    """The signal that this process gets when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
