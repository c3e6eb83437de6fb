"""Where requests of a simulated group come from and how they reach a rank: arrivals, routing, messages on their way.

    arrival -> routed to a rank -> on its way (at once, unless messages are delayed) -> admitted between two steps

Knows times of the virtual clock and what ranks say of themselves; does not know steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from ..ranks.routing import RoutingConfig, route
from ..requests.request import Request
from ..requests.sampling_params import SamplingParams
from .simulated_rank import SimulatedRank


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that comes at `at_us`: to `rank`, or to where the routing sends it."""

    at_us: float
    prompt_len: int
    max_tokens: int
    rank: int | None = None

    @property
    def total_len(self) -> int:
        """Prompt and output."""
        return self.prompt_len + self.max_tokens


class Front:
    """All arrivals (index = request id), and the messages that carry them to their ranks."""

    def __init__(self, arrivals: Sequence[Arrival], ranks: Sequence[SimulatedRank], config: RoutingConfig) -> None:
        self._arrivals = arrivals
        self._ranks = ranks
        self._config = config
        self._coming = deque(sorted(range(len(arrivals)), key=lambda index: (arrivals[index].at_us, index)))
        self._messages: list[tuple[float, int, int, int]] = []  # delivery, number, arrival, rank
        self._tokens_on_the_way: Counter[int] = Counter()
        self._num_placed = 0

    def next_us(self) -> float | None:
        """When something comes next; None when nothing will."""
        times = [self._messages[0][0]] if self._messages else []
        times += [self._arrivals[self._coming[0]].at_us] if self._coming else []
        return min(times, default=None)

    def deliver(self, now_us: float, delay_us: Callable[[], float]) -> list[tuple[int, int]]:
        """Route what has arrived by now, and hand over what has reached its rank: (arrival, rank) of each of those."""
        while self._coming and self._arrivals[self._coming[0]].at_us <= now_us:
            self._send(self._coming.popleft(), now_us + delay_us())
        delivered = []
        while self._messages and self._messages[0][0] <= now_us:
            _, _, index, rank = heappop(self._messages)
            self._tokens_on_the_way[rank] -= self._arrivals[index].prompt_len
            self._ranks[rank].admit(_request(index, self._arrivals[index]))
            delivered.append((index, rank))
        return delivered

    def _send(self, index: int, delivery_us: float) -> None:
        rank = self._place(self._arrivals[index])
        self._tokens_on_the_way[rank] += self._arrivals[index].prompt_len
        heappush(self._messages, (delivery_us, self._num_placed, index, rank))
        self._num_placed += 1

    def _place(self, arrival: Arrival) -> int:
        if arrival.rank is not None:
            return arrival.rank
        views = [rank.view() for rank in self._ranks]
        for rank, tokens in self._tokens_on_the_way.items():
            if tokens:
                views[rank] = replace(views[rank], queued_tokens=views[rank].queued_tokens + tokens)
        pages = self._ranks[0].pool.pages_for(arrival.total_len)
        choice = route(
            views, prompt_len=arrival.prompt_len, pages_needed=pages, turn=self._num_placed, config=self._config
        )
        return choice.rank


def _request(index: int, arrival: Arrival) -> Request:
    """Prompts share no prefix: each has its own number in front."""
    return Request(
        id=str(index),
        prompt=(index, *range(arrival.prompt_len - 1)),
        params=SamplingParams(max_tokens=arrival.max_tokens),
        arrival=index,
    )
