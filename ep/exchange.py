"""Tokens to their experts and back: `dispatch` and `combine`, in rounds through fixed buffers.

    dispatch   one packed row per (token, rank); or per (token, node), and from there to the ranks of the node
    combine    the same way back, with what the combine mode returns

What carries the rows is decided when the exchange is built: hops that tell how many rows come before they send them
(exact), hops with blocks of a fixed size (bounded), which may leave rows behind and then say so, or hops of a back end
that needs neither (`back_ends`); one hop among all ranks, or two. A step with `terms.exact` takes exact hops always,
through the same buffers.

Knows slots and ranks, not experts, layers' weights or why a token goes where. All ranks make the same calls: a rank
without tokens too.

Legend: T tokens here, D model, K top-k, R ranks, N rows received, M (row, slot) pairs received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from .blueprint import Blueprint
from .bounded import BoundedHop, Overflow
from .capacity import CapacityPlan
from .clock import StepClock
from .combine import COMBINES, Journey
from .config import BACK_ENDS, ExchangeConfig
from .exact import ExactHop
from .faults import Faults
from .hops import FIRST, INSIDE, Hop, HopBuffers, HopPart, Landed, PairRows, relay
from .layout import LocalPairs, local_pairs
from .ops import ExchangeOps, exchange_ops
from .own import OwnHop
from .parts import BackEnd
from .rows import Codec, Fp8Codec, Rows, wide
from .subgroup import ExchangeBytes, Meter, Subgroup
from .sums import Sums
from .terms import Terms
from .topology import Topology
from .transport import Pending, Tag, Transport


@dataclass(frozen=True, eq=False)  # without slots: the pairs are found when they are first asked for
class Arrivals:
    """What this rank computes in one round. Fields lie in buffers: they are valid until the round's combine.

    A kernel may read x_ND, slots_NK and weights_NK as they are: a row without a slot carries nothing and costs nothing.
    `pairs` and what follows from it leave such rows out; the host waits for the device then.
    """

    codec: Codec
    values_NX: Tensor
    """What the codec made of each row's values."""
    slots_NK: Tensor
    """int64: slots on this rank, 0 .. L - 1; -1 for none."""
    weights_NK: Tensor
    """In the wide dtype."""
    source_N: Tensor
    """int64: the rank that each row came from."""
    handle: Journey
    """For combine only."""

    @cached_property
    def x_ND(self) -> Tensor:
        """Rows in the run dtype, by source; exact and flat: in source-rank order, in each in the source's token order.
        Not contiguous if they travel as they are: other fields lie between rows."""
        return self.codec.decode(self.values_NX)

    @property
    def dtype(self) -> torch.dtype:
        """Of the run."""
        return self.codec.dtype

    @property
    def fp8(self) -> tuple[Tensor, Tensor] | None:
        """(fp8 [N, D], float32 scales [N, D / 128]) as they came, if that is how rows travel."""
        return self.codec.fields(self.values_NX) if isinstance(self.codec, Fp8Codec) else None

    @cached_property
    def pairs(self) -> LocalPairs:
        """Pairs in (row, top-k) order."""
        return local_pairs(self.slots_NK, self.weights_NK)

    def in_pair_order(self, y_MD: Tensor) -> PairRows:
        """Results that lie in the order of `pairs`."""
        is_pair_NK = self.slots_NK >= 0
        number_NK = (is_pair_NK.flatten().cumsum(0) - 1).view(is_pair_NK.shape)
        return PairRows(y_MD, number_NK.where(is_pair_NK, -1), self.pairs)

    @property
    def rows_M(self) -> Tensor:
        """int64: each pair's row in x_ND. Pairs are in (row, top-k) order."""
        return self.pairs.rows_M

    @property
    def slots_M(self) -> Tensor:
        """int64: each pair's slot on this rank, 0 .. L - 1."""
        return self.pairs.slots_M

    @property
    def weights_M(self) -> Tensor:
        """Each pair's weight, in the wide dtype."""
        return self.pairs.weights_M


class Exchange:
    """dispatch and combine of one group of ranks, for any number of layers; all use the same buffers.

    Slot s of `num_slots` lives on rank s // (num_slots / R). `num_tracks` rounds, of different tag.track, may be in
    flight at the same time. A round is dispatch, wait, combine, wait; the buffers of its track are free again then.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        num_slots: int,
        hidden: int,
        top_k: int,
        dtype: torch.dtype,
        device: torch.device | str,
        config: ExchangeConfig,
        num_tracks: int = 1,
        topology: Topology | None = None,
        plan: CapacityPlan | None = None,
        ops: ExchangeOps | None = None,
        back_end: Callable[[Blueprint], BackEnd | None] | None = None,
    ) -> None:
        """topology: None, all ranks on one node. plan: of bounded blocks; None, what level routing needs. ops: None, in
        torch. back_end: opens what the mode needs beside the transport (`back_ends.opener`), for this one alone."""
        topology = topology or Topology(num_ranks=transport.size, node_size=transport.size)
        assert topology.num_ranks == transport.size, (topology, transport.size)
        self._blueprint = Blueprint(
            topology=topology,
            num_slots=num_slots,
            hidden=hidden,
            top_k=top_k,
            dtype=dtype,
            config=config,
            plan=plan,
        )
        self.slots_per_rank = num_slots // transport.size
        self.config = config
        self._ops = ops or exchange_ops("reference")
        self._back_end = back_end(self._blueprint) if back_end is not None else None
        assert (self._back_end is None) == (config.exchange not in BACK_ENDS), (self._back_end, config.exchange)
        self.rank, self.num_ranks = transport.rank, transport.size
        self.hidden, self.top_k, self.dtype = hidden, top_k, dtype
        self.device = device
        self._codec = self._blueprint.codec
        self._word = self._blueprint.row.word
        self._may_overflow = any(hop.rows.may_overflow for hop in self._blueprint.places)
        self._meter = Meter(topology, transport.rank)
        self._overflow = Overflow(device)
        self._clock = StepClock(device)
        groups = _groups(transport, topology, self._meter, num_hops=len(self._blueprint.specs))
        self._faults = [Faults(group, device) for group in groups]
        self._tracks = [self._build_track(groups) for _ in range(num_tracks)]

    def close(self) -> None:
        """All ranks together, when nothing is under way: what a back end holds is given back."""
        if self._back_end is not None:
            self._back_end.close()

    @property
    def may_overflow(self) -> bool:
        """Whether rows may be left behind, so that a step has to be run again with `terms.exact`."""
        return self._may_overflow

    def take_overflow(self) -> Tensor | None:
        """Bool scalar on the device: something of this rank did not fit since the last call. None: nothing ever can."""
        return self._overflow.take() if self._may_overflow else None

    def set_step(self, step: int) -> None:
        """Before a replay of exchanges that were recorded with the step `clock.ON_DEVICE`: which step it is."""
        self._clock.set(step)

    def fault(self) -> Tensor | None:
        """Bool scalar of its own on the device: a bounded exchange met a rank at another place of the program, at any
        time until now. None: there are only exact ones, which raise by themselves."""
        return torch.stack([faults.found for faults in self._faults]).any() if self._tracks[0][1] else None

    def check_faults(self) -> None:
        """Raise TagMismatch for the first of those, with the rank's name. The host waits for the device."""
        for faults in self._faults:
            faults.check()

    def take_bytes(self) -> ExchangeBytes:
        """What this rank sent since the last call. A back end counts on the device: what it sent is not in it."""
        return self._meter.take()

    def num_rounds(self, bucket: int) -> int:
        """Rounds that every rank makes when the rank with the most tokens has `bucket` of them; at least one."""
        return max(1, -(-bucket // self.config.round_tokens))

    def round_slices(self, num_tokens: int, terms: Terms) -> list[slice]:
        """This rank's tokens of each round; empty slices at the end when it has fewer than the bucket."""
        assert num_tokens <= terms.bucket, (num_tokens, terms.bucket)
        size = self.config.round_tokens
        begins = [min(n * size, num_tokens) for n in range(self.num_rounds(terms.bucket))]
        return [slice(begin, min(begin + size, num_tokens)) for begin in begins]

    def dispatch(
        self, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, *, tag: Tag, terms: Terms
    ) -> Pending[Arrivals]:
        """Send one round, number tag.round: T <= round_tokens tokens of the run dtype, their slots (int64, -1 none),
        wide weights.

        Exact hops wait for a header, no other for anything; a second hop starts when this is waited for. The tag's kind
        is set here. Its step may be `clock.ON_DEVICE` where hops are bounded.
        """
        self._check_input(x_TD, slots_TK, weights_TK)
        exact, bounded = self._tracks[tag.track]
        hops = exact if terms.exact or not bounded else bounded
        terms = replace(terms, bucket=self._round_bucket(terms.bucket, tag.round))
        assert x_TD.shape[0] <= terms.bucket, (x_TD.shape[0], terms.bucket)
        origin_T = torch.full((x_TD.shape[0],), self.rank, dtype=torch.int64, device=x_TD.device)
        rows = Rows(origin_T, slots_TK, weights_TK, self._ops.encode(self._codec, x_TD, self._word))
        trails: list[object] = []

        def leg(hop: Hop) -> Callable[[Rows], Pending[Rows]]:
            def note(landed: Landed) -> Rows:
                trails.append(landed.trail)
                return landed.rows

            return lambda rows: hop.send(rows, tag=tag, terms=terms).then(note)

        def arrive(rows: Rows) -> Arrivals:
            weights_NK = rows.weights_NK.clone()
            journey = Journey(tuple(zip(hops, trails, strict=True)), weights_TK, weights_NK)
            return Arrivals(self._codec, rows.values_NX, rows.slots_NK, weights_NK, rows.origin_N, journey)

        return relay(rows, [leg(hop) for hop in hops]).then(arrive)

    def combine(self, y: Tensor | PairRows, arrivals: Arrivals, *, tag: Tag) -> Pending[Tensor]:
        """Return the experts' outputs, one for each pair of `arrivals`, unweighted, in the run dtype: in pair order, or
        wherever an index says that they lie.

        The value is [T, D] for the tokens that this rank dispatched, in the run dtype, the weighted sum over their
        slots; zeros for a token without any.
        """
        if isinstance(y, Tensor):
            assert y.shape[0] == arrivals.rows_M.shape[0], (y.shape, arrivals.rows_M.shape)
            y = arrivals.in_pair_order(y)
        assert y.rows_MD.shape[1] == self.hidden, (y.rows_MD.shape, self.hidden)
        assert y.rows_MD.dtype is self.dtype, (y.rows_MD.dtype, self.dtype)
        back = COMBINES[self.config.combine](y, arrivals.handle, tag)
        return back.then(self._add_up)

    def _add_up(self, sums: Sums) -> Tensor:
        out_TD = sums.rows_MD.new_empty(sums.index_NJ.shape[0], self.hidden, dtype=self.dtype)
        self._ops.add(sums, out_TD)
        return out_TD

    def _round_bucket(self, bucket: int, number: int) -> int:
        """Most tokens that any rank has in this round."""
        size = self.config.round_tokens
        return min(size, max(bucket - number * size, 0))

    def _check_input(self, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> None:
        num_tokens = x_TD.shape[0]
        assert num_tokens <= self.config.round_tokens, (num_tokens, self.config.round_tokens)
        assert x_TD.shape == (num_tokens, self.hidden), (x_TD.shape, self.hidden)
        assert x_TD.dtype is self.dtype, (x_TD.dtype, self.dtype)
        assert slots_TK.shape == weights_TK.shape == (num_tokens, self.top_k), (slots_TK.shape, weights_TK.shape)
        assert slots_TK.dtype is torch.int64, slots_TK.dtype
        assert weights_TK.dtype is wide(self.dtype), (weights_TK.dtype, self.dtype)

    def _build_track(self, groups: Sequence[Subgroup]) -> tuple[list[Hop], list[Hop]]:
        """(exact hops, hops that the host does not wait for or none) over buffers of their own."""
        kinds = (FIRST, INSIDE)[: len(groups)]
        new = self._back_end.buffers if self._back_end else partial(HopBuffers.new, device=self.device)
        buffers = [new(*sizes) for sizes in self._blueprint.buffer_bytes]
        parts = [
            HopPart(group, spec, memory, names, self._ops, faults, self._clock)
            for group, spec, memory, names, faults in zip(
                groups, self._blueprint.specs, buffers, kinds, self._faults, strict=True
            )
        ]
        exact: list[Hop] = [OwnHop() if part.group.size == 1 else ExactHop(part) for part in parts]
        if self._back_end is not None:
            return exact, [self._back_end.hop(part) for part in parts]
        bounded: list[Hop] = [
            BoundedHop(part, capacities=places, overflow=self._overflow)
            for part, places in zip(parts, self._blueprint.places, strict=False)
        ]
        return exact, bounded


def _groups(transport: Transport, topology: Topology, meter: Meter, *, num_hops: int) -> list[Subgroup]:
    """Whom this rank exchanges rows with in each hop."""
    if num_hops == 1:
        return [Subgroup(transport, range(transport.size), meter)]
    rank = transport.rank
    return [Subgroup(transport, members(rank), meter) for members in (topology.rail_members, topology.node_members)]
