"""torch's symmetric memory as a back end of the exchange: NVSHMEM's heap, and `symm_mem.all_to_all_vdev`.

What travels is `symmetric_hop`'s. NOBODY HAS RUN IT on GPUs: it was written from torch's sources, and passes the checks
over an operation that pretends.

    opened     the group's name and store are told to torch where NCCL is opened; the heap comes up at the first buffer
    fetched    the call's first kernel tells lengths and meets everybody, its second one reads the others' buffers

Buffers are not given back: torch keeps what it has registered, so an exchange is built as seldom as can be.

Legend: R ranks, P places to send, Q places that land, B bytes of a row.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .blueprint import Blueprint
from .hops import Hop, HopBuffers, HopPart
from .lanes import Lanes
from .symmetric_hop import Lengths, SymmetricHop
from .transport import Transport

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

GROUP = "0"
"""What torch calls the group of all ranks; its allocator for NVSHMEM asks for this one."""
HEAP = "NVSHMEM"


class SymmetricMemory(Protocol):
    """What is asked of torch."""

    def empty(self, num_bytes: int) -> Tensor:
        """uint8, at the same place of everybody's heap. All ranks call it together, with the same size."""
        ...

    def all_to_all(self, out_PB: Tensor, into_QB: Tensor, leaving_R: Tensor, landed_2R: Tensor) -> None:
        """Rows of everybody's `out`, in source order, into `into`; see torch's all_to_all_vdev."""
        ...


class TorchMemory:
    """torch's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = import_module("torch.distributed._symmetric_memory")
        self._module.set_backend(HEAP)

    def empty(self, num_bytes: int) -> Tensor:
        tensor = self._module.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._module.rendezvous(tensor, GROUP)
        return tensor

    def all_to_all(self, out_PB: Tensor, into_QB: Tensor, leaving_R: Tensor, landed_2R: Tensor) -> None:
        torch.ops.symm_mem.all_to_all_vdev(out_PB, into_QB, leaving_R, landed_2R, GROUP)


def name_group(rank: int, size: int, store: Store) -> None:
    """Tell torch who the ranks are, before the first buffer, where it can make use of that. Nobody is connected yet.

    store: for this alone.
    """
    if lacks() is not None:
        return
    module: Any = import_module("torch._C._distributed_c10d")
    module._SymmetricMemory.set_group_info(GROUP, rank, size, store)


def lacks() -> str | None:
    """Why this torch cannot do it here, None where it can."""
    try:
        module: Any = import_module("torch.distributed._symmetric_memory")
        torch.ops.symm_mem.all_to_all_vdev  # noqa: B018  # it is looked up when it is asked for
        found = module.is_nvshmem_available()
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} has no symmetric memory with lengths on the device ({error})"
    if not found:
        return f"torch {torch.__version__} finds no NVSHMEM here: libnvshmem_host.so.3 comes with its CUDA wheels"
    return None


def refuses(blueprint: Blueprint) -> str | None:  # noqa: ARG001  # it serves every format
    """The rule that an exchange of this build breaks; None: it would be served."""
    return None


def library_bytes(blueprint: Blueprint) -> int:  # noqa: ARG001  # its buffers are all there is
    """Device memory beside the buffers of the hops."""
    return 0


class Symmetric:
    """One rank's symmetric memory, of one exchange; see `parts.BackEnd`."""

    def __init__(
        self,
        transport: Transport,  # noqa: ARG002  # ranks meet in the store
        blueprint: Blueprint,
        *,
        lanes: Lanes,
        device: torch.device,
        comm_sms: int = 0,  # noqa: ARG002  # the call takes what it likes
        memory: SymmetricMemory | None = None,
    ) -> None:
        """All ranks together."""
        self._ranks = blueprint.topology.num_ranks
        self._lanes = lanes
        self._memory = memory or TorchMemory(device)

    def buffers(self, out_bytes: int, in_bytes: int) -> HopBuffers:
        return HopBuffers(self._memory.empty(out_bytes), self._memory.empty(in_bytes))

    def hop(self, part: HopPart) -> Hop:
        return SymmetricHop(part, reach=self, lanes=self._lanes)

    def lengths(self) -> Lengths:
        """See `symmetric_hop.Reach`."""
        leaving, landed = self._memory.empty(8 * self._ranks), self._memory.empty(16 * self._ranks)
        return Lengths(leaving.view(torch.int64), landed.view(torch.int64).view(2, self._ranks))

    def fetch(self, into_QB: Tensor, out_PB: Tensor, lengths: Lengths) -> None:
        """See `symmetric_hop.Reach`."""
        self._memory.all_to_all(out_PB, into_QB, lengths.leaving_R, lengths.landed_2R)

    def close(self) -> None:
        """Nothing to give back."""
