"""The requests that are in the house, from the moment they are let in until their rank has said its last word.

    admit    checked, numbered, placed, booked; then a letter to its rank
    news     to the stream of the request, and to the book-keeping of where it is
    let go   the stream ends at once and nothing follows; its rank lets go of it by its next step, and says so

Knows requests, streams and where each is placed; does not know how ranks step, nor whether the group is well.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ep.errors import RequestError
from runtime.loop.ranks import Abort, Admit, Item
from runtime.ranks.intake import Bounds, Intake
from runtime.ranks.letters import NewsLetter
from runtime.ranks.placing import FrontDesk
from runtime.ranks.routing import NoRankLeft, RoutingConfig
from runtime.requests.kv_config import KvConfig
from runtime.requests.kv_params import KvParams
from runtime.requests.outputs import News
from runtime.requests.request import Request
from runtime.requests.sampling_params import SamplingParams

from .front_admission import Gate
from .front_client import Refused
from .front_config import FrontConfig
from .front_stream import OpenStream


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """What the front door is told of the group before it is ready."""

    size: int
    served_model_name: str
    seed: int = 0
    caches_prefixes: bool = True
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    limits: FrontConfig = field(default_factory=FrontConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    slow_reader_s: float = 30.0
    """A token waits so long for who reads slowly, before the reader is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Where and how a request is to be served; see `front_client.GroupClient.admit`."""

    n: int = 1
    rank: int | None = None
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    interval: int | None = None
    kv: KvParams | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Open:
    """A request whose stream is open; `keys` are its answers' names at their ranks."""

    stream: OpenStream
    keys: tuple[str, ...]
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Choice:
    """One answer at its rank."""

    open: _Open
    index: int
    rank: int
    prompt_len: int
    pages: int
    queued: bool = True


class House:
    """One front door's.

    send        brings an item to a rank
    on_empty    called when the last request has left
    """

    def __init__(
        self,
        settings: GroupSettings,
        bounds: Bounds,
        *,
        send: Callable[[int, Item], None],
        on_empty: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._limits = settings.limits
        self._slow_reader_s = settings.slow_reader_s
        self._send = send
        self._on_empty = on_empty
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, _Open] = {}
        self._choices: dict[str, _Choice] = {}
        self._numbers = itertools.count()
        self._intake = Intake(bounds, seed=settings.seed)
        self._desk = FrontDesk(bounds.capacities, settings.routing, caches_prefixes=settings.caches_prefixes)
        self._gate = Gate(settings.limits, self._desk, clock=clock)

    @property
    def is_empty(self) -> bool:
        """Whether no rank holds anything of a request."""
        return not self._choices

    @property
    def queued_tokens(self) -> tuple[int, ...]:
        """See `placing.FrontDesk`."""
        return self._desk.queued_tokens

    def admit(self, request_id: str, prompt: Sequence[int], params: SamplingParams, ask: Ask) -> OpenStream:
        """Raises RequestError for what can never run, Refused for what cannot now."""
        _check(ask, self._limits.max_open_requests)
        request = self._intake.make(
            prompt,
            params,
            request_id=request_id,
            priority=ask.priority,
            cache_salt=ask.cache_salt,
            taken=self._open,
            kv=ask.kv,
        )
        self._intake.check_fits(request, ask.rank)
        pages, n = self._desk.pages_of(request), ask.n
        tokens = n * len(request.prompt)
        self._gate.check(tokens=tokens, pages=n * pages, requests=n, num_open=len(self._choices))
        return self._let_in(request, ask, pages=pages)

    def abort(self, request_id: str, words: str) -> bool:
        """Whether such a request's stream was open."""
        entry = self._open.get(request_id)
        if entry is not None:
            self._let_go(entry, None, words)
        return entry is not None

    def abort_all(self, words: str) -> None:
        """Nobody waits any more."""
        for entry in list(self._open.values()):
            self._let_go(entry, None, words)

    def fail(self, words: str) -> None:
        """There are no ranks any more: every stream ends with these words."""
        for entry in list(self._open.values()):
            entry.stream.finish("error", words)
            self._close(entry)
        self._choices.clear()
        self._on_empty()

    def avoid(self, rank: int) -> None:
        """Send nothing new to this rank."""
        self._desk.drain(rank)

    def hear(self, letter: NewsLetter) -> None:
        """What a rank says of its requests."""
        for news in letter.items:
            self._hear(news)

    def sweep(self) -> None:
        """Drop who has not read for long."""
        limit = self._clock() - self._slow_reader_s
        for entry in list(self._open.values()):
            since = entry.stream.oldest_wait
            if since is not None and since < limit:
                self._drop(entry, f"it has not read for {self._slow_reader_s:g} s")

    def _let_in(self, request: Request, ask: Ask, *, pages: int) -> OpenStream:
        """Place every answer of a request that is welcome."""
        requests = self._intake.choices(request, [str(next(self._numbers)) for _ in range(ask.n)])
        stream = OpenStream(
            request.id,
            n=ask.n,
            stop_token_ids=frozenset(request.params.stop_token_ids),
            interval=ask.interval or self._limits.stream_interval,
            on_cancel=self._cancel,
            clock=self._clock,
        )
        entry = _Open(stream=stream, keys=tuple([one.id for one in requests]))
        for index, one in enumerate(requests):
            rank = ask.rank if ask.rank is not None else self._choose(one)
            self._desk.book(one, rank)
            self._choices[one.id] = _Choice(open=entry, index=index, rank=rank, prompt_len=len(one.prompt), pages=pages)
            self._send(rank, Admit(request=one))
        self._open[request.id] = entry
        if ask.deadline_s is not None:
            words = f"the deadline of {ask.deadline_s:g} s is over"
            entry.timer = self._loop.call_later(ask.deadline_s, self._let_go, entry, None, words)
        return stream

    def _choose(self, request: Request) -> int:
        try:
            return self._desk.choose(request).rank
        except NoRankLeft as error:  # all answers of a request are alike: the first is refused, or none
            raise Refused("no_rank", str(error)) from error

    def _hear(self, news: News) -> None:
        choice = self._choices[news.request_id]
        entry, stream = choice.open, choice.open.stream
        if choice.queued or news.finish_reason is not None:
            self._desk.hear(news)
        if choice.queued:
            choice.queued = False
            self._gate.moved(tokens=choice.prompt_len, pages=0)
        stream.push(choice.index, news)
        if news.finish_reason is not None:
            self._leave(news.request_id, choice)
        elif stream.num_waiting > self._limits.outbox_tokens and not stream.has_ended:
            self._drop(entry, f"{stream.num_waiting} tokens wait for it")

    def _leave(self, key: str, choice: _Choice) -> None:
        del self._choices[key]
        self._gate.moved(tokens=0, pages=choice.pages)
        if choice.open.stream.has_ended:
            self._close(choice.open)
        if not self._choices:
            self._on_empty()

    def _cancel(self, stream: OpenStream, index: int | None) -> None:
        entry = self._open.get(stream.request_id)
        if entry is not None and entry.stream is stream:
            self._let_go(entry, index, "nobody waits for it any more")

    def _let_go(self, entry: _Open, index: int | None, words: str) -> None:
        """End one answer or all; their ranks are told, and nothing that they still say of them is handed on."""
        for place, key in enumerate(entry.keys):
            choice = self._choices.get(key)
            if choice is not None and index in (None, place) and not entry.stream.index_has_ended(place):
                self._send(choice.rank, Abort(request_id=key))
        entry.stream.finish("abort", words, index=index)
        if entry.stream.has_ended:
            self._close(entry)

    def _drop(self, entry: _Open, why: str) -> None:
        entry.stream.drop_waiting()
        self._let_go(entry, None, f"slow reader: {why}")

    def _close(self, entry: _Open) -> None:
        self._open.pop(entry.stream.request_id, None)
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None


def _check(ask: Ask, most: int) -> None:
    if isinstance(ask.n, bool) or not isinstance(ask.n, int) or not 1 <= ask.n <= most:
        raise RequestError(field="n", value=ask.n, rule=f"must be a whole number from 1 to {most}, e.g. 1")
    if ask.n > 1 and ask.kv is not None:
        raise RequestError(field="n", value=ask.n, rule="must be 1 where kv_transfer_params say who fetches latents")
    if ask.deadline_s is not None and not ask.deadline_s > 0:
        raise RequestError(field="deadline_s", value=ask.deadline_s, rule="must be a number above 0, e.g. 30.0")
