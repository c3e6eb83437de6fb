"""One rank of a group whose other ranks are not there: what they would send it is put where it would land.

    the others, once, on the host     rank 0 .. R - 1 dispatch through the real exchange, narrow rows; what lands on one
                                      rank is kept                                                       `land`
    that rank, in every step          its own blocks are what it sent; all other blocks are copies of what was kept
                                      (there) or of random rows (back), with this rank's tags            `StandIn`

So that everything a rank does for itself can be run, and timed, on one device. Only bounded exchanges can be stood in
for: the sizes of their blocks depend on nobody. Knows rows and blocks; does not know where routing came from.

Legend: T tokens of a rank, K top-k, R ranks, P places of all blocks, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .blueprint import Blueprint
from .capacity import count_hops
from .exchange import Exchange
from .rows import HEADER_WORDS, RowFormat
from .terms import MOST_LEVEL, Terms
from .threads import ThreadGroup, ThreadTransport
from .transport import Kind, Pending, Tag
from .wrapping import Wrapping

NARROW = 128
"""Columns of the rows that are dispatched on the host: as few as a codec allows, for only their fields are kept."""
THERE = (Kind.DISPATCH, Kind.NODE_DISPATCH)
BACK = (Kind.COMBINE, Kind.NODE_COMBINE)
_TAG_BYTES = 8 * (HEADER_WORDS - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What one rank gets from the others in steps of one size: by layer, and there by kind.

    there    uint8 [P, B] blocks as they land, headers and all; layers past the last begin again with the first
    back     uint8 [P, B] of each kind, the same in all layers
    first    the layer that the first of them is for
    """

    there: Sequence[dict[Kind, Tensor]]
    back: dict[Kind, Tensor]
    first: int = 0

    def rows(self, tag: Tag) -> Tensor:
        """Of one exchange."""
        kind = Kind(tag.kind)
        return self.back[kind] if kind in BACK else self.there[(tag.layer - self.first) % len(self.there)][kind]


class StandIn:
    """A `Transport` of one rank among `size`. The rows of others are copied from `script`, on the device."""

    def __init__(self, rank: int, size: int, *, row: RowFormat, script: Script) -> None:
        self.rank = rank
        self.size = size
        self.script = script
        self._row = row

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        """See `Transport`: blocks of equal size between the members that have any."""
        assert recv_splits == send_splits, (recv_splits, send_splits)
        block = recv_splits[self.rank]
        assert set(recv_splits) <= {0, block}, f"{tag}: {recv_splits} are not blocks of one size"
        rows_PB = self.script.rows(tag)
        assert rows_PB.shape == recv.shape, f"{tag}: {tuple(recv.shape)} rows, the script has {tuple(rows_PB.shape)}"
        recv.copy_(rows_PB)
        begin = sum(recv_splits[: self.rank])
        recv[begin : begin + block].copy_(send[begin : begin + block])
        first = self._row.begins[2] if tag.kind in THERE else 0
        recv[::block, first : first + _TAG_BYTES].copy_(send[::block, first : first + _TAG_BYTES])
        return Pending.ready(recv)

    def all_gather(self, row: Tensor, *, tag: Tag) -> Pending[Tensor]:  # noqa: ARG002  # the protocol's
        """All ranks say what this one says."""
        return Pending.ready(row.expand(self.size, *row.shape).clone())

    def abort(self, cause: BaseException) -> None:
        """Nobody is there to hear it."""

    def close(self) -> None:
        """Nothing is open."""


def least_level(blueprint: Blueprint, exchanges: Sequence[Sequence[Tensor]], *, bucket: int) -> int:
    """How often capacities have to be raised for everything to fit; MOST_LEVEL where it never does.

    exchanges: of each, every rank's int64 slots [T, K].
    """
    slots_per_rank = blueprint.num_slots // blueprint.topology.num_ranks
    hierarchical = blueprint.config.hierarchical == "on"
    counted = [
        count_hops(ranks, blueprint.topology, slots_per_rank=slots_per_rank, hierarchical=hierarchical)
        for ranks in exchanges
    ]
    most = [max(max(hops[hop][0]) for hops in counted) for hop in range(len(counted[0]))]
    for level in range(MOST_LEVEL):
        if all(places.dispatch(bucket, level) >= rows for places, rows in zip(blueprint.places, most, strict=True)):
            return level
    return MOST_LEVEL


def land(
    blueprint: Blueprint,
    exchanges: Sequence[Sequence[Tensor]],
    *,
    rank: int,
    terms: Terms,
    device: torch.device | str,
    first: int = 0,
    seed: int = 0,
) -> Script:
    """What `rank` gets when every rank's tokens go to these slots; `exchanges` as in `least_level`, one a layer from
    layer `first` on.

    Random values, weights that add up to one. ValueError for more ranks than one process holds.
    """
    narrow = replace(blueprint, hidden=NARROW)
    dice = torch.Generator(device=device).manual_seed(seed)
    there = [
        {heard.kind: _widen(heard, blueprint, narrow, dice) for heard in _dispatch(narrow, slots, rank, terms)}
        for slots in exchanges
    ]
    back = {
        kind: _random_back(blueprint, hop, terms, dice)
        for hop, kind in zip(range(len(blueprint.specs)), BACK, strict=False)
    }
    return Script(there=there, back=back, first=first)


class _Heard(NamedTuple):
    """What landed in one hop: blocks of `block` rows, the first of each a header."""

    kind: Kind
    rows_PB: Tensor
    block: int


def _dispatch(narrow: Blueprint, slots_by_rank: Sequence[Tensor], rank: int, terms: Terms) -> list[_Heard]:
    """What lands on `rank` in each hop of one exchange, among ranks as threads."""
    heard: list[_Heard] = []

    def dispatch(transport: ThreadTransport) -> None:
        ears = _Ears(transport, heard) if transport.rank == rank else transport
        exchange = Exchange(
            ears,
            num_slots=narrow.num_slots,
            hidden=NARROW,
            top_k=narrow.top_k,
            dtype=narrow.dtype,
            device="cpu",
            config=narrow.config,
            topology=narrow.topology,
            plan=narrow.plan,
        )
        slots_TK = slots_by_rank[transport.rank]
        x_TD = torch.zeros(slots_TK.shape[0], NARROW, dtype=narrow.dtype)
        weights_TK = torch.full(slots_TK.shape, 1 / narrow.top_k, dtype=narrow.row.weight_dtype)
        tag = Tag(step=0, layer=0, track=0, round=0, kind=Kind.DISPATCH)
        exchange.dispatch(x_TD, slots_TK, weights_TK, tag=tag, terms=terms).wait()

    group: ThreadGroup[None] = ThreadGroup(narrow.topology.num_ranks)
    group.start(dispatch)
    group.join()
    return heard


class _Ears(Wrapping):
    """A transport that keeps what its rank gets."""

    def __init__(self, transport: ThreadTransport, heard: list[_Heard]) -> None:
        super().__init__(transport)
        self._heard = heard

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        def keep(rows: Tensor) -> Tensor:
            self._heard.append(_Heard(Kind(tag.kind), rows.clone(), recv_splits[self.rank]))
            return rows

        rows = self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)
        return rows.then(keep)


def _widen(heard: _Heard, blueprint: Blueprint, narrow: Blueprint, dice: torch.Generator) -> Tensor:
    """The same blocks with rows as wide as the run's: values first, over them the fields and headers that were kept."""
    row, device, num_rows = blueprint.row, dice.device, heard.rows_PB.shape[0]
    wide_PB = torch.zeros(num_rows, row.num_bytes, dtype=torch.uint8, device=device)
    x_PD = torch.randn(num_rows, blueprint.hidden, generator=dice, device=device).to(blueprint.dtype)
    fields, kept_PB = row.fields(wide_PB), heard.rows_PB.to(device)
    fields.values_NX.copy_(blueprint.codec.encode(x_PD, row.word))
    for field, kept in zip(fields[:3], narrow.row.fields(kept_PB)[:3], strict=True):
        field.copy_(kept)
    row.header(wide_PB)[:: heard.block] = narrow.row.header(kept_PB)[:: heard.block]
    return wide_PB


def _random_back(blueprint: Blueprint, hop: int, terms: Terms, dice: torch.Generator) -> Tensor:
    back, places = blueprint.specs[hop].back, blueprint.places[hop]
    capacity = places.dispatch if blueprint.config.combine == "ranks" else places.combine
    num_places = blueprint.specs[hop].num_members * (1 + capacity(terms.bucket, terms.level))
    rows_PB = torch.zeros(num_places, back.block_row_bytes, dtype=torch.uint8, device=dice.device)
    values = torch.randn(num_places, back.hidden, generator=dice, device=dice.device)
    back.values(rows_PB).copy_(values.to(back.dtype))
    return rows_PB
