"""Where a captured step is cut: attention, which is done anew in each step, by the pages and prompts of that step.

    piece l      .. project | queries into static memory |                      | what it wrote | output projection ..
    outside                                              | attention of the step |

Attention is handed through the switch when the decoder is built. While nothing is recorded, and while whole steps are,
it changes nothing. Knows when attention runs; does not know what else a piece holds.

Letters: T tokens of the piece, H heads, N query size without rope, P rope dim, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_mla import AttentionOps, MlaConfig, PagedView
from attention_mla.reference import Queries

from .graph_device import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceStep:
    """What attention needs of a step: its view, as it is, and what all layers share of it."""

    view: PagedView
    plan: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchMemory:
    """What passes between pieces and attention; all layers, and pieces of all sizes, use the same."""

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

    @contextmanager
    def cutting(self, recording: Recording[Any], memory: SwitchMemory) -> Iterator[None]:
        """Steps that run now are recorded in pieces."""
        self._recording, self._memory = recording, memory
        try:
            yield
        finally:
            self._recording = self._memory = None

    def through(self, name: str, ops: Any) -> Any:
        """Attention through this switch, all else as it is."""
        return SwitchedAttention(ops, self) if name == "attention" else ops

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
        layer, config, cache = where["layer"], where["config"], where["cache"]

        def attend_step(step: PieceStep) -> None:
            real = step.view.num_tokens
            own = {"plan": step.plan, "view": step.view, "config": config, "cache": cache, "layer": layer}
            ops.attend(part.part(slice(0, real)), weights, out_THV=out[:real], **own)

        recording.outside(attend_step)
        out_THV.copy_(out)


class SwitchedAttention:
    """`AttentionOps` with a switch at attention; the others are what they are."""

    def __init__(self, ops: AttentionOps, switch: Switch) -> None:
        self._ops = ops
        self._switch = switch

    def plan(self, view: PagedView, *, config: MlaConfig, dtype: torch.dtype) -> Any:
        """See `AttentionOps`; None while pieces are recorded."""
        return self._switch.plan(lambda: self._ops.plan(view, config=config, dtype=dtype))

    def plan_now(self, view: PagedView, *, config: MlaConfig, dtype: torch.dtype) -> Any:
        """That of a step which replays pieces."""
        return self._ops.plan(view, config=config, dtype=dtype)

    def attend(self, queries: Queries, weights: Any, *, out_THV: Tensor, **where: Any) -> None:
        """See `AttentionOps`."""
        self._switch.attend(self._ops, queries, weights, out_THV, **where)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)
