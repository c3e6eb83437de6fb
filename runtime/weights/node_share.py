"""Memory that the ranks of one node see together: filled once, by all of them, then read-only for good.

    rank 0 of the node                        the others
    create(bytes)  -- ticket -------------->  open(ticket)
    fill(...)                                 fill(...)          each writes its part, then lets go of it
    --------------------- all have let go ---------------------
    seal()         the kernel refuses every write from here on
    read()                                    read()             the same pages, mapped read-only

It is anonymous (a memfd): it has no name in any file system, does not count against the size of /dev/shm, and is gone
with the last process that maps it, however that ends. The others come to it by the first one's entry in /proc, so they
must run as the same user and see its process. Sealing makes one rank's stray write a crash of that rank, where it would
be wrong tokens on all of them.

Knows bytes and ranks of a node; does not know what is in them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ep import PeerFailed, SerriedError

ROW_WIDTH = 6
"""Integers in every row that the ranks of a node gather here."""
# Begins with the key; as long as the alignment of what follows.
_HEADER_BYTES = 64
_KEY_BYTES = 8

X = TypeVar("X")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePeers:
    """The ranks of this node, and a way to meet.

    ranks    of the expert group, in the order of their places on the node
    rank     this one of them
    gather   takes a row of ROW_WIDTH integers of 63 bits and returns the rows of `ranks`, in their order; every rank
             of the node calls it alike. Raises when one of them is gone.
    """

    ranks: tuple[int, ...]
    rank: int
    gather: Callable[[Sequence[int]], list[list[int]]]

    @classmethod
    def alone(cls, rank: int = 0) -> NodePeers:
        """A node with one rank."""
        return cls(ranks=(rank,), rank=rank, gather=lambda row: [list(row)])

    @property
    def place(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def together(self, what: str, work: Callable[[], tuple[X, Sequence[int]]]) -> tuple[X, list[list[int]]]:
        """Do `work` on every rank: what it gave here, and the integers (at most 5) that each rank had to say.

        When it raises on one rank, that rank raises it, and the others PeerFailed.
        """
        try:
            result, said = work()
        except Exception:
            self.gather(_row([1]))
            raise
        rows = self.gather(_row([0, *said]))
        for rank, row in zip(self.ranks, rows, strict=True):
            if row[0]:
                raise PeerFailed(rank, f"failed while {what}; it says why", rank=self.rank)
        return result, [row[1:] for row in rows]


class Ticket(NamedTuple):
    """How another process of the node finds the memory, and knows that it is the right one."""

    pid: int
    descriptor: int
    key: int


class NodeShare:
    """One rank's hold on the memory. Close it when mapped: what `read` gave stays."""

    def __init__(self, descriptor: int, num_bytes: int, ticket: Ticket) -> None:
        self.ticket = ticket
        self._descriptor = descriptor
        self._num_bytes = num_bytes

    @classmethod
    def create(cls, num_bytes: int) -> NodeShare:
        """New memory, zeros; takes pages only as they are written."""
        descriptor = os.memfd_create("serried", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, _HEADER_BYTES + num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        ticket = Ticket(pid=os.getpid(), descriptor=descriptor, key=secrets.randbits(62))
        os.pwrite(descriptor, ticket.key.to_bytes(_KEY_BYTES, "little"), 0)
        return cls(descriptor, num_bytes, ticket)

    @classmethod
    def open(cls, ticket: Ticket, num_bytes: int) -> NodeShare:
        """The memory that `ticket` was made for. Raises SerriedError when it cannot be reached from here."""
        path = f"/proc/{ticket.pid}/fd/{ticket.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise _unreachable(ticket, f"{path}: {error.strerror}") from error
        if os.pread(descriptor, _KEY_BYTES, 0) != ticket.key.to_bytes(_KEY_BYTES, "little"):
            os.close(descriptor)
            raise _unreachable(ticket, f"{path} is something else")
        return cls(descriptor, num_bytes, ticket)

    def fill(self, work: Callable[[Tensor], X]) -> X:
        """Call `work` with the memory, uint8 [num_bytes], and return what it returns.

        It must keep no tensor on it (BufferError): nobody can seal what somebody may still write.
        """
        mapping = self._map(self._descriptor, mmap.PROT_READ | mmap.PROT_WRITE)
        result = work(_flat(mapping))
        mapping.close()
        return result

    def seal(self) -> None:
        """No write from now on, by any process. SerriedError when one of them still has it mapped for writing."""
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            raise SerriedError(f"memory that a node's ranks share cannot be sealed: {error.strerror}") from error

    def read(self) -> Tensor:
        """The sealed memory, uint8 [num_bytes], for as long as a tensor on it lives. A write to it ends the process."""
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY)
        mapping = self._map(descriptor, mmap.PROT_READ)
        os.close(descriptor)
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns that a write would be undefined; here the kernel defines it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return _flat(mapping)

    def close(self) -> None:
        os.close(self._descriptor)

    def _map(self, descriptor: int, protection: int) -> mmap.mmap:
        return mmap.mmap(descriptor, _HEADER_BYTES + self._num_bytes, mmap.MAP_SHARED, protection)


def _flat(mapping: mmap.mmap) -> Tensor:
    """numpy stands between because it keeps the mapping from being closed under a tensor; torch alone would not."""
    return torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8, offset=_HEADER_BYTES))


def _row(integers: Sequence[int]) -> list[int]:
    assert len(integers) <= ROW_WIDTH, integers
    return [*integers, *[0] * (ROW_WIDTH - len(integers))]


def _unreachable(ticket: Ticket, found: str) -> SerriedError:
    return SerriedError(
        f"memory shared by process {ticket.pid} cannot be reached ({found}); the ranks of a node must run as one user "
        "and see each other's processes, so containers need one process namespace, or one container for a node's ranks"
    )
