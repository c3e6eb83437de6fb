"""Exchanges with too little room, to see what becomes of steps in which rows are left behind.

A *tight* one is exact, except that of the tokens that a rank sends to one rank in one dispatch only the first few reach
their experts there: what a bounded exchange does, without its buffers. *Cramped* ones are bounded ones themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import runtime.loop.instruments
from ep import Arrivals, Exchange, ExchangeConfig, Pending, Tag, Terms, Topology, Transport
from ep.capacity import CapacityPlan

Room = Callable[[int, Terms], int]
"""How many tokens fit, by step and terms."""


class Watched(Exchange):
    """`steps`: those of the launches in which something was left behind here, in order."""

    steps: list[int]
    _step: int

    def dispatch(
        self, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, *, tag: Tag, terms: Terms
    ) -> Pending[Arrivals]:
        self._step = tag.step
        return super().dispatch(x_TD, slots_TK, weights_TK, tag=tag, terms=terms)

    def take_overflow(self) -> Tensor | None:
        taken = super().take_overflow()
        if taken:
            self.steps.append(self._step)
        return taken


class RoomFor(Exchange):
    """The exact exchange, with room for few."""

    room: Room
    left_behind = False

    @property
    def may_overflow(self) -> bool:
        return True

    def dispatch(
        self, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, *, tag: Tag, terms: Terms
    ) -> Pending[Arrivals]:
        if not terms.exact:
            fits_TK = within(self.room(tag.step, terms), slots_TK // self.slots_per_rank)
            self.left_behind |= not fits_TK.all()
            slots_TK = slots_TK.where(fits_TK, -1)
        return super().dispatch(x_TD, slots_TK, weights_TK, tag=tag, terms=terms)

    def take_overflow(self) -> Tensor:
        taken, self.left_behind = torch.tensor(self.left_behind), False
        return taken


def within(capacity: int, ranks_TK: Tensor) -> Tensor:
    """[T, K]: whether the token is among the first `capacity` that go to that rank; a loop."""
    counts: dict[int, int] = {}
    fits = []
    for row in ranks_TK.tolist():
        for rank in {rank for rank in row if rank >= 0}:
            counts[rank] = counts.get(rank, 0) + 1
        fits.append([rank < 0 or counts[rank] <= capacity for rank in row])
    return torch.tensor(fits, dtype=torch.bool).reshape(ranks_TK.shape)


def be_tight(monkeypatch: pytest.MonkeyPatch, chosen: Room) -> list[Watched]:
    """From now on engines are built with tight exchanges, which are in the list that is returned, by rank."""

    class Tight(Watched, RoomFor):
        room = staticmethod(chosen)

    return _build(monkeypatch, Tight)


def be_cramped(monkeypatch: pytest.MonkeyPatch, number: int, *, node_size: int | None = None) -> list[Watched]:
    """The same with bounded exchanges whose blocks have `number` places; hierarchical if `node_size` is given."""
    hops = 1 if node_size is None else 2

    class Cramped(Watched):
        def __init__(self, transport: Transport, *, config: ExchangeConfig, **words: Any) -> None:
            super().__init__(
                transport,
                config=ExchangeConfig(exchange="bounded", hierarchical="off" if hops == 1 else "on"),
                topology=Topology(num_ranks=transport.size, node_size=node_size or transport.size),
                plan=CapacityPlan.fixed(number, num_hops=hops),
                **{name: word for name, word in words.items() if name not in ("topology", "plan")},
            )

    return _build(monkeypatch, Cramped)


def _build(monkeypatch: pytest.MonkeyPatch, kind: type[Watched]) -> list[Watched]:
    built: list[Watched] = []

    def build(*args: Any, **words: Any) -> Watched:
        exchange = kind(*args, **words)
        exchange.steps = []
        built.append(exchange)
        return exchange

    monkeypatch.setattr(runtime.loop.instruments, "Exchange", build)
    return built
