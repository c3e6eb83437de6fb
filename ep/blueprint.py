"""The sizes of an exchange before there is one: its hops, its blocks and its memory. Pure; nobody talks here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .bounded import bounded_bytes
from .capacity import CapacityPlan, HopPlaces, HopShape, hop_shapes, places_of, uniform_plan
from .config import ExchangeConfig
from .hops import HopSpec
from .nccl_ep_hop import nccl_ep_bytes, nccl_ep_landing
from .rows import CODECS, BackFormat, Codec, RowFormat, wide
from .symmetric_hop import row_align, symmetric_bytes, symmetric_landing
from .terms import MOST_LEVEL
from .topology import Topology

BACK_END_BYTES = {"nccl_ep": nccl_ep_bytes, "symmetric": symmetric_bytes}
"""Bytes of `HopBuffers` (out, in) that a back end's hop takes."""
BACK_END_LANDING = {"nccl_ep": nccl_ep_landing, "symmetric": symmetric_landing}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """The sizes of an exchange: what it is built from, and what its memory is told from."""

    topology: Topology
    num_slots: int
    hidden: int
    top_k: int
    dtype: torch.dtype
    config: ExchangeConfig
    plan: CapacityPlan | None = None
    """None: what level routing needs."""

    def __post_init__(self) -> None:
        assert self.config.is_settled, f"{self.config}: what is auto has to be chosen before"
        assert self.num_slots % self.topology.num_ranks == 0, (self.num_slots, self.topology.num_ranks)
        self.config.refuse_narrow(self.dtype)

    @property
    def row(self) -> RowFormat:
        return RowFormat(self.top_k, wide(self.dtype), self.codec.value_bytes, self._align)

    @property
    def _align(self) -> int:
        return row_align(self.topology.num_ranks) if self.config.exchange == "symmetric" else 16

    @property
    def codec(self) -> Codec:
        """What values are on their way to the experts."""
        return CODECS[self.config.dispatch_dtype](self.hidden, self.dtype)

    @property
    def specs(self) -> list[HopSpec]:
        """Of each hop."""
        specs: list[HopSpec] = []
        most_rows = self.config.round_tokens
        for shape in self._shapes:
            fewest = min(self.top_k, shape.num_members)
            spec = HopSpec(
                num_members=shape.num_members,
                slots_per_member=shape.slots_per_member,
                most_rows=most_rows,
                rows_back=fewest if self.config.combine == "ranks" else self.top_k,
                row=self.row,
                back=BackFormat(self.hidden, self.config.wire_dtype(self.dtype), self._align),
            )
            specs.append(spec)
            most_rows = spec.most_landing
        return specs

    @property
    def places(self) -> list[HopPlaces]:
        """Of each hop; empty where nothing is bounded."""
        if self.config.exchange != "bounded":
            return []
        plan = self.plan or uniform_plan(self._shapes, self.topology, top_k=self.top_k, combine=self.config.combine)
        return places_of(plan, self._shapes, top_k=self.top_k)

    def landing(self, tokens: int) -> int:
        """N of `Arrivals` in a round of a step of so many tokens, where the host does not count: places for all rows
        that may land, at the capacities of the start."""
        bucket, mode = min(tokens, self.config.round_tokens), self.config.exchange
        if mode in BACK_END_LANDING:
            return BACK_END_LANDING[mode](self.specs[0], bucket)
        hop = self.places[-1]
        return hop.shape.num_members * (1 + hop.dispatch(bucket, 0))

    @property
    def buffer_bytes(self) -> list[tuple[int, int]]:
        """(bytes out, bytes in) of each hop's buffers on one track."""
        sizes = [spec.exact_bytes for spec in self.specs]
        for hop, places in enumerate(self.places):
            dispatch, combine = (
                size(self.config.round_tokens, MOST_LEVEL) for size in (places.dispatch, places.combine)
            )
            blocks = bounded_bytes(self.specs[hop], dispatch=dispatch, combine=combine)
            sizes[hop] = _larger(sizes[hop], blocks)
        if self.config.exchange in BACK_END_BYTES:
            sizes[0] = _larger(sizes[0], BACK_END_BYTES[self.config.exchange](self.specs[0]))
        return sizes

    @property
    def num_bytes(self) -> int:
        """What an Exchange allocates for one track when it is built. What comes and goes in a round is not in it: sums
        in the wide dtype, a row for each row that arrived and for each token here, and the pairs' rows of `slots`."""
        return sum(out + into for out, into in self.buffer_bytes)

    @property
    def _shapes(self) -> tuple[HopShape, ...]:
        slots_per_rank = self.num_slots // self.topology.num_ranks
        return hop_shapes(self.topology, slots_per_rank=slots_per_rank, hierarchical=self.config.hierarchical == "on")


def _larger(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])
