"""Where a captured step is cut: attention, which is done anew in each step, by the pages and prompts of that step.

    piece l      .. project | queries into static memory |                      | what it wrote | output projection ..
    outside                                              | attention of the step |

Where tracks take turns, one track's rows are under way while another attends, and a graph must hold both ends of what
it begins. So exchanges are cut out as well: begun and waited for between pieces, on the same buffers in every step.

Attention, the transport and the lanes of whatever carries rows beside it are handed through the switch when the decoder
is built. While nothing is recorded, and
while whole steps are, it changes nothing. Knows when attention runs; does not know what else a piece holds.

Letters: T tokens of the piece, H heads, N query size without rope, P rope dim, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from attention_mla import AttentionOps, MlaConfig, PagedView
from attention_mla.reference import Queries
from ep import Pending, Tag, Transport
from ep.lanes import Lanes
from ep.wrapping import Wrapping

from .graph_device import Recording
from .graph_inputs import StaticView

X = TypeVar("X")


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceStep:
    """What is done outside of pieces needs of a step: its number, and of each track the view, as it is, and what all
    layers share of it."""

    number: int
    views: Sequence[PagedView]
    plans: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchMemory:
    """What passes between pieces and attention; all layers, tracks and pieces of all sizes use the same."""

    queries: Queries
    out_THV: Tensor

    @classmethod
    def room_for(cls, most_tokens: int, config: MlaConfig, *, dtype: torch.dtype, device: torch.device) -> SwitchMemory:
        """For pieces of at most so many tokens."""
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim

        def room(width: int) -> Tensor:
            return torch.zeros(most_tokens, config.num_heads, width, dtype=dtype, device=device)

        return cls(queries=Queries(nope_THN=room(nope), rope_THP=room(rope)), out_THV=room(value))

    @staticmethod
    def num_bytes(most_tokens: int, config: MlaConfig, dtype: torch.dtype) -> int:
        """What `room_for` allocates."""
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        return most_tokens * config.num_heads * widths * dtype.itemsize


class Switch:
    """One rank's. `through` is for the decoder, see `decoder.Through`."""

    def __init__(self) -> None:
        self._recording: Recording[Any] | None = None
        self._memory: SwitchMemory | None = None
        self._cuts_exchanges = False

    @contextmanager
    def cutting(self, recording: Recording[Any], memory: SwitchMemory, *, exchanges: bool) -> Iterator[None]:
        """Steps that run now are recorded in pieces, between which exchanges are left out as well where it says so."""
        self._recording, self._memory, self._cuts_exchanges = recording, memory, exchanges
        try:
            yield
        finally:
            self._recording = self._memory = None
            self._cuts_exchanges = False

    def through(self, name: str, ops: Any) -> Any:
        """Attention through this switch, all else as it is."""
        return SwitchedAttention(ops, self) if name == "attention" else ops

    def carry(self, transport: Transport) -> Transport:
        """Exchanges through this switch."""
        return SwitchedTransport(transport, self)

    def carry_lanes(self, lanes: Lanes) -> Lanes:
        """What is started by whoever carries rows beside the transport, through this switch."""
        return SwitchedLanes(lanes, self)

    def plan(self, make: Callable[[], Any]) -> Any:
        """In pieces each step makes its own."""
        return make() if self._recording is None else None

    def attend(self, ops: AttentionOps, queries: Queries, weights: Any, out_THV: Tensor, **where: Any) -> None:
        """Now, or a switch point that does it in every step."""
        recording, memory = self._recording, self._memory
        if recording is None or memory is None:
            ops.attend(queries, weights, out_THV=out_THV, **where)
            return
        num_tokens = out_THV.shape[0]
        part, out = memory.queries.part(slice(0, num_tokens)), memory.out_THV[:num_tokens]
        part.nope_THN.copy_(queries.nope_THN)
        part.rope_THP.copy_(queries.rope_THP)
        layer, config, cache, static = where["layer"], where["config"], where["cache"], where["view"]
        assert isinstance(static, StaticView), f"{type(static).__name__} in a piece"
        track = static.track

        def attend_step(step: PieceStep) -> None:
            view, plan = step.views[track], step.plans[track]
            real = view.num_tokens
            own = {"plan": plan, "view": view, "config": config, "cache": cache, "layer": layer}
            ops.attend(part.part(slice(0, real)), weights, out_THV=out[:real], **own)

        recording.outside(attend_step)
        out_THV.copy_(out)

    def exchange(self, start: Callable[[Tag], Pending[X]], tag: Tag) -> Pending[X]:
        """Now, or two switch points that begin it and wait for it in every step."""
        recording = self._recording
        if recording is None or not self._cuts_exchanges:
            return start(tag)
        under_way: list[Pending[X]] = []
        arrived: list[X] = []

        def begin(step: PieceStep) -> None:
            under_way.append(start(tag._replace(step=step.number)))

        def finish(_: PieceStep) -> None:
            arrived[:] = [under_way.pop().wait()]

        def wait() -> X:
            recording.outside(finish)
            return arrived[0]

        recording.outside(begin)
        return Pending(wait)


class SwitchedAttention:
    """`AttentionOps` with a switch at attention; the others are what they are."""

    def __init__(self, ops: AttentionOps, switch: Switch) -> None:
        self._ops = ops
        self._switch = switch

    def plan(self, view: PagedView, *, config: MlaConfig, dtype: torch.dtype) -> Any:
        """See `AttentionOps`; None while pieces are recorded."""
        return self._switch.plan(lambda: self._ops.plan(view, config=config, dtype=dtype))

    def attend(self, queries: Queries, weights: Any, *, out_THV: Tensor, **where: Any) -> None:
        """See `AttentionOps`."""
        self._switch.attend(self._ops, queries, weights, out_THV, **where)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


class SwitchedTransport(Wrapping):
    """A transport with a switch at rows that travel; see `ep.Transport`. No step gathers."""

    def __init__(self, transport: Transport, switch: Switch) -> None:
        super().__init__(transport)
        self._switch = switch

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        """Into the same memory in every step."""

        def start(tag: Tag) -> Pending[Tensor]:
            return self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)

        return self._switch.exchange(start, tag)


class SwitchedLanes:
    """Lanes with a switch at what is started on them; see `ep.lanes.Lanes`. It uses the same memory in every step."""

    def __init__(self, lanes: Lanes, switch: Switch) -> None:
        self._lanes = lanes
        self._switch = switch

    def start(self, work: Callable[[], Pending[X]], *uses: Tensor, tag: Tag) -> Pending[X]:
        """See `ep.lanes.Lanes`."""
        return self._switch.exchange(lambda tag: self._lanes.start(work, *uses, tag=tag), tag)
