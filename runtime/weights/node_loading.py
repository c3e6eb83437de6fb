"""The weights of one rank where the ranks of a node are processes: what all hold alike is read and kept once.

    file      | what all ranks hold alike       | experts ...
    reads       rank 0 | rank 1 | rank 2 | ...     each its own
    memory    | one piece, mapped by all        | each its own

On a CPU the shared weights stay in that one piece, read-only; a GPU's ranks copy it to their devices in one go and let
it go. Every rank makes the same three gathers, whatever it holds. Knows who reads what; does not know files.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ep import PeerFailed

from ..model.model_config import ModelConfig
from .checkpoint import TensorSource, Wanted
from .node_share import NodePeers, NodeShare, Ticket
from .progress import OnProgress, counted
from .startup import KernelReads, LoadReport
from .weight_layout import Arena, Places, lay_out_shared, none_kept, own_memory
from .weights import DecoderWeights, Placements, bytes_to_read, lay_out_banks, verify_held

_MICRO = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    """What one rank decodes with, and what it took to get it."""

    weights: DecoderWeights
    report: LoadReport


def load_rank(
    source: TensorSource,
    model: ModelConfig,
    placement: Placements,
    *,
    peers: NodePeers,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keep_fp8: bool = False,
    keep_shared_fp8: bool = False,
    on_progress: OnProgress | None = None,
) -> LoadedRank:
    """Load what rank `peers.rank` holds; all ranks of the node call this alike.

    keep_fp8 is of experts (`load_banks`), keep_shared_fp8 of all else (`load_shared`).

    Raises CheckpointError before anything is read, PeerFailed when another rank of the node cannot go on.
    """
    lay_out = partial(lay_out_shared, model=model, dtype=dtype, is_kept=source.is_fp8 if keep_shared_fp8 else none_kept)
    share = _meet(peers, lay_out, verify=lambda: verify_held(source, model, placement, ranks=[peers.rank]))
    places = Places(own_memory(device))
    banks = lay_out_banks(places, source, model, placement, rank=peers.rank, dtype=dtype, keep_fp8=keep_fp8)

    def read(flat_B: Tensor) -> None:
        shared = Places(Arena(flat_B).empty)
        lay_out(shared)
        wanted = [*part_of(shared.wanted, place=peers.place, size=peers.size), *places.wanted]
        total = bytes_to_read(source, {each.name for each in wanted})
        source.read(wanted, progress=counted(on_progress, total=total))

    report = _read(peers, source, lambda: share.fill(read))
    flat_B = _seal(peers, share).to(device)
    shared = lay_out(Places(Arena(flat_B).empty))
    return LoadedRank(weights=DecoderWeights.join(shared, banks), report=report)


def part_of(wanted: Sequence[Wanted], *, place: int, size: int) -> list[Wanted]:
    """The part that one of `size` readers reads: neighbours, about as many bytes as the others, every name once."""
    by_name: dict[str, list[Wanted]] = {}
    for each in wanted:
        by_name.setdefault(each.name, []).append(each)
    total = max(sum(each.out.nbytes for each in wanted), 1)
    part: list[Wanted] = []
    done = 0
    for places in by_name.values():
        if done * size // total == place:
            part += places
        done += sum(each.out.nbytes for each in places)
    return part


def _meet(peers: NodePeers, lay_out: Callable[[Places], object], *, verify: Callable[[], None]) -> NodeShare:
    """The node's memory, once every rank has found its weights in order and lays them out like the others."""

    def prepare() -> tuple[tuple[NodeShare | None, int], Sequence[int]]:
        verify()
        num_bytes, digest = _layout(lay_out)
        created = NodeShare.create(num_bytes) if peers.place == 0 else None
        return (created, num_bytes), (num_bytes, digest, *(created.ticket if created is not None else ()))

    (created, num_bytes), rows = peers.together("checking its weights", prepare)
    for rank, (found_bytes, found_digest, *_) in zip(peers.ranks, rows, strict=True):
        if (found_bytes, found_digest) != (rows[0][0], rows[0][1]):
            cause = f"lays out shared weights otherwise ({found_bytes} bytes) than rank {peers.ranks[0]} ({rows[0][0]})"
            raise PeerFailed(rank, f"{cause}: another model, or another dtype", rank=peers.rank)

    def attach() -> tuple[NodeShare, Sequence[int]]:
        return created if created is not None else NodeShare.open(Ticket(*rows[0][2:]), num_bytes), ()

    return peers.together("reaching the node's memory", attach)[0]


def _layout(lay_out: Callable[[Places], object]) -> tuple[int, int]:
    """Bytes that the shared weights take, and 62 bits over what goes where: equal, or ranks would write over others."""
    arena = Arena.measuring()
    places = Places(arena.empty)
    lay_out(places)
    text = repr([(each.name, each.out.storage_offset(), each.out.shape, each.out.dtype) for each in places.wanted])
    return arena.num_bytes, int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2


def _read(peers: NodePeers, source: TensorSource, work: Callable[[], None]) -> LoadReport:
    """Read on every rank at the same time, and count."""
    kernel, bytes_before = KernelReads.now(), source.bytes_read
    began = time.perf_counter()

    def count() -> tuple[float, Sequence[int]]:
        work()
        seconds = time.perf_counter() - began
        return seconds, (source.bytes_read - bytes_before, int(seconds * _MICRO))

    seconds, rows = peers.together("reading its weights", count)
    after = KernelReads.now()
    return LoadReport(
        bytes_read=source.bytes_read - bytes_before,
        seconds=seconds,
        kernel=after.since(kernel) if after is not None and kernel is not None else None,
        num_ranks=peers.size,
        node_bytes=sum(row[0] for row in rows),
        node_seconds=max(row[1] for row in rows) / _MICRO,
    )


def _seal(peers: NodePeers, share: NodeShare) -> Tensor:
    """The filled memory, which no rank can change any more."""

    def seal() -> tuple[None, Sequence[int]]:
        if peers.place == 0:
            share.seal()
        return None, ()

    peers.together("sealing the node's memory", seal)
    flat_B = share.read()
    share.close()
    return flat_B
