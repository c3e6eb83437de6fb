"""What a step costs more while experts move, held against what its bytes cost by themselves: on real ranks, in turns.

    still     | step |                              one engine takes all three kinds of step
    moving             | step, bytes |              all its experts go to the next rank, again and again
    bytes                             | step | as many bytes |      which nobody needs, by the same transport

Everything is processor time of all threads of a rank, which must be a process. The bytes by themselves: copied and
check-summed, one all-to-all with the splits of the last step that moved, copied and check-summed. They come where a
step's bytes would, behind its work, when one rank is earlier than another. All ranks begin and end each part together,
so that what is left to the transport's threads counts for the part that left it.

Knows workers, placements and transports; starts no rank and prints nothing.

Legend: R ranks, N rows on the wire, C bytes of such a row.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ep import Kind, Pending, Tag, Transport
from ep.wrapping import Wrapping
from eplb import LayerPlan, RebalancePlan
from eplb.config import EplbConfig
from eplb.goal import Question
from eplb.migration import Pool
from eplb.moves import CELL_BYTES
from eplb.rebalancer import Rebalancer

from ..loop.rebalance import expert_layer
from ..loop.worker import Worker
from ..settings.config import EngineConfig
from .overlap_bench import BARE, Lab, OverlapLoad

Splits = tuple[Sequence[int], Sequence[int]]
"""Rows that come from each rank, and go to each."""

_CHECK = Tag(0, 0, 0, 0, Kind.CHECK)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingLoad:
    """What is measured.

    requests         that decode on each rank
    steps            of each kind, after `warm` that do not count
    bytes_per_step   that a rank sends, and gets, in one step at most
    """

    requests: int = 2
    warm: int = 4
    steps: int = 72
    bytes_per_step: int = 1 << 18


class MovingTimes(NamedTuple):
    """What the ranks measured: means over ranks of medians over steps, milliseconds of processor time.

    still_ms     a step while nothing moves
    rise_ms      what a step that moves bytes costs more
    bytes_ms     what a step costs more that is followed by the same bytes, which nobody needs
    turn_ms      what moving bytes took, timed inside the step: all that such a step does more than others
    plain_ms     what the same bytes took, timed at the same place
    whole_ms     rise of an average step, of those that gather loads, plan and switch layers as well
    most_bytes   that any rank sent or got in a step
    beats        steps that moved bytes
    """

    still_ms: float
    rise_ms: float
    bytes_ms: float
    turn_ms: float
    plain_ms: float
    whole_ms: float
    most_bytes: int
    beats: int

    @property
    def ratio(self) -> float:
        """What moving bytes takes over what they cost by themselves."""
        return self.turn_ms / self.plain_ms

    @property
    def unexplained(self) -> float:
        """What a step rises by beyond what its bytes cost, as a share of a step."""
        return (self.rise_ms - self.bytes_ms) / self.still_ms

    @property
    def loss(self) -> float:
        """Share of the throughput that a step loses while bytes move."""
        return self.rise_ms / (self.still_ms + self.rise_ms)


class NotingTransport(Wrapping):
    """A transport that remembers how the last exchange of experts was split."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.splits: Splits = [0] * transport.size, [0] * transport.size

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        """See `ep.Transport`."""
        if tag.kind is Kind.MIGRATE:
            self.splits = recv_splits, send_splits
        return self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)


class PlainBytes:
    """Bytes that nobody needs, sent as experts are: out of as much memory as experts have, and into as much."""

    def __init__(self, transport: Transport, *, limit: int, memory_bytes: int) -> None:
        self._transport = transport
        rows, most = max(memory_bytes, limit) // CELL_BYTES, limit // CELL_BYTES
        self._here_NC, self._there_NC = torch.randint(0, 256, (2, rows, CELL_BYTES), dtype=torch.uint8)
        self._send_NC, self._recv_NC = torch.zeros(2, most, CELL_BYTES, dtype=torch.uint8)
        self._begin = 0
        self.took_s = 0.0

    def move(self, splits: Splits) -> None:
        """All ranks at the same time, each with its own end of the same splits."""
        began = time.process_time()
        recv_splits, send_splits = splits
        send_NC, recv_NC = self._send_NC[: sum(send_splits)], self._recv_NC[: sum(recv_splits)]
        begin = self._begin if self._begin + len(self._send_NC) <= len(self._here_NC) else 0
        self._begin = begin + len(self._send_NC)
        send_NC.copy_(self._here_NC[begin : begin + len(send_NC)])
        zlib.crc32(send_NC.numpy().data)
        tag = Tag(0, 0, 0, 0, Kind.MIGRATE)
        rows = self._transport.all_to_all(recv_NC, send_NC, recv_splits=recv_splits, send_splits=send_splits, tag=tag)
        rows.wait()
        there_NC = self._there_NC[begin : begin + len(recv_NC)].copy_(recv_NC)
        zlib.crc32(there_NC.numpy().data)
        self.took_s = time.process_time() - began


def measure_moving(transport: Transport, config: EngineConfig, load: MovingLoad) -> MovingTimes:
    """On all ranks of `transport` at the same time, each a process; the same on all of them."""
    noting = NotingTransport(transport)
    lab = _lab(noting, config, load)
    experts, mover = lab.worker.experts, _rebalancer(lab.worker, noting, limit=load.bytes_per_step)
    banks = [moe.bank for layer in lab.worker.decoder.weights.layers if (moe := layer.moe) is not None]
    memory_bytes = sum([bank.num_slots * bank.blob_bytes for bank in banks])
    plain = PlainBytes(transport, limit=load.bytes_per_step, memory_bytes=memory_bytes)
    parts = _Parts(transport)

    def still() -> None:
        experts.rebalancer = None
        lab.steps(1, keep=False)

    def moving() -> None:
        experts.rebalancer = mover
        lab.steps(1, keep=False)

    def with_bytes() -> None:
        still()
        plain.move(noting.splits)

    kinds = [still, moving, with_bytes]
    rows: list[list[float]] = []
    for number in range(load.warm + load.steps):
        beats = mover.stats.beats
        took = {kind: parts.time(kind) for kind in kinds[number % 3 :] + kinds[: number % 3]}  # none is always first
        if number >= load.warm:
            rows.append([*[took[kind] for kind in kinds], mover.took_s, plain.took_s, mover.stats.beats - beats])
    return _sum_up(transport, torch.tensor(rows, dtype=torch.float64), most_bytes=mover.stats.most_bytes)


class _Mover(Rebalancer):
    """Knows what its last turn took."""

    took_s = 0.0

    def turn(self, ready: Sequence[int], *, step: int) -> str | None:
        began = time.process_time()
        line = super().turn(ready, step=step)
        self.took_s = time.process_time() - began
        return line


class _Parts:
    """Times parts of what all ranks do, each begun together."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._number = 0

    def time(self, part: Callable[[], None]) -> float:
        """Processor seconds of all threads."""
        self._meet()
        began = time.process_time()
        part()
        self._meet()
        return time.process_time() - began

    def _meet(self) -> None:
        self._number += 1
        tag = Tag(self._number, 0, 0, 0, Kind.CHECK)
        self._transport.all_gather(torch.zeros(1, dtype=torch.int64), tag=tag).wait()


def _sum_up(transport: Transport, times_S6: Tensor, *, most_bytes: int) -> MovingTimes:
    still, moving, with_bytes, turn, plain = [1e3 * part for part in times_S6[times_S6[:, 5] > 0][:, :5].unbind(1)]
    mine = [_median(part) for part in (still, moving - still, with_bytes - still, turn, plain)]
    whole_ms = 1e3 * float((times_S6[:, 1] - times_S6[:, 0]).mean())
    row = torch.tensor([*mine, whole_ms, float(most_bytes)], dtype=torch.float64)
    all_R7 = transport.all_gather(row, tag=_CHECK).wait()
    return MovingTimes(*all_R7[:, :6].mean(0).tolist(), most_bytes=int(all_R7[:, 6].max()), beats=len(still))


def _median(values: Tensor) -> float:
    return statistics.median(values.tolist())


def _lab(transport: Transport, config: EngineConfig, load: MovingLoad) -> Lab:
    """An engine that can move experts; whether it does is left to whoever takes its steps."""
    window = 4 * (load.warm + load.steps)
    eplb = EplbConfig(enable_eplb=True, eplb_window=window, eplb_bytes_per_step=load.bytes_per_step)
    return Lab(replace(config, eplb=eplb), OverlapLoad(requests=load.requests), transport, link=BARE)


def _rebalancer(worker: Worker, transport: Transport, *, limit: int) -> _Mover:
    """Moves all the worker's experts to the next rank, again and again."""
    experts, decoder = worker.experts, worker.decoder
    banks = {layer: each.moe.bank for layer, each in enumerate(decoder.weights.layers) if each.moe is not None}
    pool = Pool(
        places=experts.placements[0].slots_per_rank,
        blob_bytes=max(bank.blob_bytes for bank in banks.values()),
        limit=limit,
    )
    return _Mover(
        [
            expert_layer(bank, decoder.tables[layer], rank=transport.rank, node_size=transport.size)
            for layer, bank in banks.items()
        ],
        experts.placements,
        load=experts.load,
        planner=go_round,
        pool=pool,
        transport=transport,
        window=1,
        interval=1,
        min_gain=0.0,
    )


def go_round(question: Question) -> RebalancePlan:
    """A `Planner`: every rank gets what the rank before it has."""
    new = []
    for old in question.old:
        last = old.num_slots - old.slots_per_rank
        new.append(replace(old, slot_experts=old.slot_experts[last:] + old.slot_experts[:last]))
    better = LayerPlan(before=0.5, after=1.0, moves=1, changed=True)
    return RebalancePlan(placements=tuple(new), layers=(better,) * len(new), expert_bytes=0)
