"""Memory that pretends to be NVSHMEM's heap between ranks that are threads, with `symm_mem.all_to_all_vdev` over it.

What it follows, read in torch's nvshmem_extension.cu and NVSHMEMSymmetricMemory.cu:

    allocation    collective, of one size on all ranks
    arguments     all four tensors lie in symmetric memory, lengths in int64: in_splits [R], out_splits_offsets [2, R]
    first kernel  a rank writes its lengths and source offsets into everybody's out_splits_offsets, then all meet
    second one    every rank reads its rows out of the others' input, for as long as it takes: nobody meets again after
                  it, so a send buffer may be read while its owner goes on; output offsets replace the source offsets
    blocks        64, or 16 beyond the reach of loads, for a large input: each takes an equal part of a member's bytes,
                  and the device asserts that there is one

Ranks meet over the transport that a test gave it. Whoever reads may do so until it begins its next call: there it
looks again, and a send buffer that its owner has written since is TooEarly; so are lengths that are told to a rank
whose call before, of the same lengths, may still be under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ep import Kind, Tag

TAG = Tag(0, 0, 0, 0, Kind.CHECK)


class TooEarly(AssertionError):
    """Memory was written while another rank may have been reading it."""


@dataclass
class Heap:
    """One rank's memory of a group, and the same places of all others'."""

    transport: Any
    shared: dict[int, list[Tensor]]
    """By rank, in the order of allocation; of all ranks."""
    entered: dict[int, tuple[int, int]]
    """By rank: the number of its newest call, and the lengths that it was made with; of all ranks."""
    byte: int = 0xFF
    """What new memory holds."""
    spoil: Any = None
    before: Any = None
    reads: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)
    """Of the newest call: the others' rows, where they lie and as they were."""
    calls: int = field(default=0, init=False)

    def empty(self, num_bytes: int) -> Tensor:
        heard = self.transport.all_gather(torch.tensor([num_bytes]), tag=TAG).wait()
        assert (heard == num_bytes).all(), "symmetric memory is of one size everywhere"
        tensor = torch.full((num_bytes,), self.byte, dtype=torch.uint8)
        self.shared.setdefault(self.transport.rank, []).append(tensor)
        return tensor

    def all_to_all(self, out_PB: Tensor, into_QB: Tensor, leaving_R: Tensor, landed_2R: Tensor) -> None:
        with _disable_current_modes():
            if self.before is not None:
                self.before(self.transport.rank, "all_to_all_vdev")
            self._all_to_all(out_PB, into_QB, leaving_R, landed_2R)

    def _all_to_all(self, out_PB: Tensor, into_QB: Tensor, leaving_R: Tensor, landed_2R: Tensor) -> None:
        rank, size = self.transport.rank, self.transport.size
        for tensor in (out_PB, into_QB, leaving_R, landed_2R):
            assert self._number(tensor) is not None, "not in symmetric memory"
            assert tensor.is_contiguous()
        assert leaving_R.dtype is landed_2R.dtype is torch.int64
        assert (leaving_R.shape, landed_2R.shape) == ((size,), (2, size))
        width = out_PB.shape[1]
        assert width == into_QB.shape[1]
        assert out_PB.numel() >= 4 << 20, "a small input takes a number of blocks that may not divide a row"
        for blocks in (64, 16):
            assert width % max(blocks // size, 1) == 0, "blocks cannot share a row evenly"
        if any(not torch.equal(there, then) for there, then in self.reads):
            raise TooEarly(f"call {self.calls}: rows for rank {rank} were written while it may have read them")
        number, lengths = self._number(out_PB), self._number(landed_2R)
        self.calls += 1
        self.entered[rank] = self.calls, lengths
        begins = (leaving_R.cumsum(0) - leaving_R).tolist()
        for peer in range(size):
            if self.entered.get(peer, (0, -1))[1] == lengths and self.entered[peer][0] < self.calls:
                raise TooEarly(f"call {self.calls}: lengths of rank {peer} are told while its call before uses them")
            theirs = self.shared[peer][lengths].view(torch.int64).view(2, size)
            theirs[0, rank], theirs[1, rank] = leaving_R[rank if peer == rank else peer], begins[peer]
        self._meet()
        at, self.reads = 0, []
        for source, (count, begin) in enumerate(landed_2R.t().tolist()):
            rows = self.shared[source][number][: out_PB.numel()].view(-1, width)
            there = rows[begin : begin + count]
            if source != rank:
                self.reads.append((there, there.clone()))
            into_QB[at : at + count] = there
            landed_2R[1, source] = at
            at += count
        if self.spoil is not None:
            self.spoil(rank, into_QB)

    def _number(self, tensor: Tensor) -> int | None:
        """Which of this rank's allocations it lies in."""
        mine = enumerate(self.shared[self.transport.rank])
        return next((n for n, each in mine if each.data_ptr() == tensor.data_ptr()), None)

    def _meet(self) -> None:
        self.transport.all_gather(torch.zeros(1), tag=TAG).wait()
