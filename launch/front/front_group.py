"""The group of ranks as the front door runs it: whether it is well, what it says, and when it steps.

A wave is started when somebody is in the house and no wave runs; ranks leave it together when nobody has anything left
to do. Everything happens in the thread of one event loop. Knows letters and states; does not know sockets or gRPC, and
what becomes of a single request is `front_house`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from runtime.loop.ranks import Item
from runtime.ranks.intake import Bounds
from runtime.ranks.letters import NewsLetter, NoteLetter, ReadyLetter, ToRank, WaveEndLetter, WaveLetter, letter_of
from runtime.ranks.wire import FactsLetter, FailedLetter, FlushedLetter, ReportLetter, TraceLetter, WireToFront
from runtime.requests.admission import Capacity
from runtime.requests.kv_log import KvLetter
from runtime.requests.kv_params import parse_params
from runtime.requests.sampling_params import SamplingParams
from runtime.requests.telemetry import RankStats

from .front_client import GroupInfo, GroupState, Health, RankLoad, RankState, Refused
from .front_errands import Errands
from .front_house import Ask, GroupSettings, House
from .front_link import RankLink, RanksOutOfReach
from .front_stream import OpenStream
from .front_view import CacheFeed, CacheMirror, RankReports

SWEEP_S = 1.0
GATEWAYS_NAME = "NixlConnector"
"""Under this name a gateway hands `kv_transfer_params` from prefill to decode; it does not look into them."""
VERDICT_S = 2.5
"""So long a failure waits for the ranks' own word of who failed."""
LAST_WORDS_S = 5.0
"""Ranks have so long to let go of what was aborted at the end of a drain."""


class FrontGroup:
    """See `front_client.GroupClient`. To be made and used in the thread of a running event loop.

    say   takes lines for the log
    """

    def __init__(
        self,
        link: RankLink,
        settings: GroupSettings,
        *,
        say: Callable[[str], object] = len,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._link = link
        self._say = say
        self._clock = clock
        self._state: GroupState = "starting"
        self._culprit: str | None = None
        self._facts: FactsLetter | None = None
        self._ready: dict[int, ReadyLetter] = {}
        self._house: House | None = None
        self._degraded: set[int] = set()
        self._in_wave: set[int] = set()
        self._busy_since: float | None = None
        self._changed = asyncio.Event()
        self._reports = RankReports(settings.size, clock)
        self._mirror = CacheMirror(settings.size)
        self._errands = Errands(link, settings.size)
        self._hearers: dict[type, Callable[[int, Any], None]] = {
            NewsLetter: self._hear_news,
            NoteLetter: self._hear_note,
            WaveEndLetter: self._hear_wave_end,
            ReportLetter: lambda rank, letter: self._reports.hear(rank, letter.stats),
            KvLetter: self._mirror.hear,
            ReadyLetter: self._hear_ready,
            FactsLetter: self._hear_facts,
            FlushedLetter: self._errands.hear,
            TraceLetter: self._errands.hear,
        }
        self._loop = asyncio.get_running_loop()
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        link.start(self._hear, self.suspect)

    async def info(self) -> GroupInfo:
        """For the protocol see `front_client.GroupClient`. Raises Refused for a group that failed."""
        await self._until(lambda: self._state != "starting")
        if self._state == "failed" or self._facts is None:
            raise Refused("group_failed", self._culprit or "the group has failed")
        return _info(self.settings, self._facts, [self._ready[rank] for rank in range(self.settings.size)])

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the model's files and of the start, a line each."""
        return self._facts.notes if self._facts is not None else ()

    def admit(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        n: int = 1,
        rank: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        interval: int | None = None,
    ) -> OpenStream:
        """For the protocol see `front_client.GroupClient`."""
        house = self._open_house()
        ask = Ask(
            n=n,
            rank=rank,
            priority=priority,
            cache_salt=cache_salt,
            deadline_s=deadline_s,
            interval=interval,
            kv=parse_params(kv_transfer_params, self.settings.kv),
        )
        stream = house.admit(request_id, prompt, params, ask)
        self._start_wave()
        return stream

    def abort(self, request_id: str, *, why: str) -> bool:
        """For the protocol see `front_client.GroupClient`."""
        return self._house is not None and self._house.abort(request_id, why)

    def loads(self) -> tuple[RankLoad, ...]:
        """For the protocol see `front_client.GroupClient`."""
        queued = self._house.queued_tokens if self._house is not None else (0,) * self.settings.size
        return self._reports.loads([self._rank_state(rank) for rank in range(self.settings.size)], queued)

    def health(self) -> Health:
        """For the protocol see `front_client.GroupClient`."""
        age = self._reports.last_step_age(busy_since=self._busy_since)
        return Health(state=self._state, culprit=self._culprit, last_step_age_s=age)

    def stats(self) -> tuple[RankStats, ...]:
        """For the protocol see `front_client.GroupClient`; as last reported."""
        return self._reports.stats

    def subscribe(self) -> CacheFeed:
        """For the protocol see `front_client.GroupClient`."""
        return self._mirror.subscribe()

    async def flush_cache(self) -> bool:
        """For the protocol see `front_client.GroupClient`."""
        return self._open_house().is_empty and await self._errands.flush()

    async def profile(self, steps: int, path: str) -> None:
        """For the protocol see `front_client.GroupClient`. Raises ValueError for what cannot be traced."""
        self._open_house()
        self._errands.start_trace(steps, path)

    async def stop_profile(self) -> str:
        """For the protocol see `front_client.GroupClient`. Raises ValueError when nothing is traced."""
        return await self._errands.stop_trace()

    async def drain(self, timeout_s: float) -> bool:
        """Let nothing in any more; True when all that was open has come to its end by itself, in time."""
        if self._state in ("starting", "ready"):
            self._state = "draining"
            self._changed.set()
        house = self._house
        if house is None:
            return self._state != "failed"
        finished = await self._until(lambda: house.is_empty, timeout_s)
        house.abort_all(f"the server ends, and its {timeout_s:g} s for that are over")
        await self._until(lambda: house.is_empty and not self._in_wave, LAST_WORDS_S)
        return finished and self._state != "failed"

    async def close(self) -> None:
        """Leave the ranks; twice is once. What ends them is whoever started them."""
        self._sweeper.cancel()
        self._mirror.end()
        self._link.close()

    async def until_failed(self) -> None:
        """Returns when the group has failed."""
        await self._until(lambda: self._state == "failed")

    def suspect(self, words: str) -> None:
        """Something is wrong with the group; the ranks may yet say who is the cause."""
        self._loop.call_later(VERDICT_S, self.fail, words)

    def fail(self, words: str) -> None:
        """The group has failed: every stream ends, with these words. The first cause stays."""
        if self._state == "failed":
            return
        self._state, self._culprit = "failed", words
        self._say(words)
        self._in_wave.clear()
        if self._house is not None:
            self._house.fail(words)
        self._mirror.end()
        self._changed.set()

    def _open_house(self) -> House:
        """Where requests go; raises Refused when it is closed."""
        if self._state == "failed":
            raise Refused("group_failed", self._culprit or "the group has failed")
        if self._state == "draining":
            raise Refused("draining", "the server ends and takes nothing new", retry_after_s=5.0)
        if self._house is None:
            raise Refused("not_ready", "the ranks are still loading", retry_after_s=5.0)
        return self._house

    def _send(self, rank: int, letter: ToRank) -> None:
        try:
            self._link.send(rank, letter)
        except RanksOutOfReach as error:
            self.suspect(str(error))

    def _send_item(self, rank: int, item: Item) -> None:
        self._send(rank, letter_of(item))

    def _start_wave(self) -> None:
        """All ranks step while there is something to do; each tells when it has left the wave."""
        if self._in_wave or self._house is None or self._house.is_empty:
            return
        self._busy_since = self._clock()
        self._in_wave = set(range(self.settings.size))
        for rank in range(self.settings.size):
            self._send(rank, WaveLetter())

    def _hear(self, rank: int | None, letter: WireToFront) -> None:
        if isinstance(letter, FailedLetter):
            self.fail(f"rank {letter.culprit} failed: {letter.cause}")
        elif self._state != "failed" and rank is not None:
            self._hearers[type(letter)](rank, letter)

    def _hear_news(self, rank: int, letter: NewsLetter) -> None:
        assert self._house is not None, "news before the ranks are ready"
        self._reports.stepped(rank)
        self._house.hear(letter)

    def _hear_note(self, rank: int, letter: NoteLetter) -> None:  # noqa: ARG002  # every hearer gets one
        self._degraded.update(letter.note.degraded)
        for degraded in letter.note.degraded:
            if self._house is not None:
                self._house.avoid(degraded)
        self._say(letter.note.text)

    def _hear_wave_end(self, rank: int, letter: WaveEndLetter) -> None:
        self._reports.hear(rank, letter.stats)
        self._in_wave.discard(rank)
        if not self._in_wave:
            self._busy_since = None
            self._reports.idle()
            self._start_wave()
            self._changed.set()

    def _hear_facts(self, rank: int, letter: FactsLetter) -> None:  # noqa: ARG002  # every hearer gets one
        self._facts = letter

    def _hear_ready(self, rank: int, letter: ReadyLetter) -> None:
        self._ready[rank] = letter
        facts = self._facts
        if len(self._ready) < self.settings.size or facts is None:
            return
        capacities = tuple([_capacity(self._ready[one]) for one in range(self.settings.size)])
        self._house = House(
            self.settings,
            Bounds(vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids, capacities=capacities),
            send=self._send_item,
            on_empty=self._changed.set,
            clock=self._clock,
        )
        if self._state == "starting":
            self._state = "ready"
        self._changed.set()

    def _rank_state(self, rank: int) -> RankState:
        if self._state in ("failed", "draining"):
            return self._state
        if rank not in self._ready:
            return "live"
        return "degraded" if rank in self._degraded else "ready"

    def _sweep(self) -> None:
        if self._house is not None:
            self._house.sweep()
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    async def _until(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until something is so; False when the time was over before."""
        until = None if timeout_s is None else self._loop.time() + timeout_s
        while not is_so():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), None if until is None else until - self._loop.time())
            except TimeoutError:
                return is_so()
        return True


def _capacity(ready: ReadyLetter) -> Capacity:
    return Capacity(max_model_len=ready.max_model_len, num_pages=ready.num_pages, page_size=ready.page_size)


def _info(settings: GroupSettings, facts: FactsLetter, ready: Sequence[ReadyLetter]) -> GroupInfo:
    return GroupInfo(
        model_path=facts.model_path,
        served_model_name=settings.served_model_name,
        model_type=facts.model_type,
        vocab_size=facts.vocab_size,
        max_model_len=min([one.max_model_len for one in ready]),
        eos_token_ids=facts.eos_token_ids,
        bos_token_id=facts.bos_token_id,
        ranks=settings.size,
        block_size=ready[0].page_size,
        pages_per_rank=tuple([one.num_pages for one in ready]),
        max_num_seqs=facts.max_num_seqs,
        model_dtype=facts.model_dtype,
        kv_cache_dtype=facts.kv_cache_dtype,
        config_hash=facts.config_hash,
        kv_connector=GATEWAYS_NAME if settings.kv.peers else "",
        kv_engine_id=f"serried-{facts.config_hash}" if settings.kv.peers else "",
        startup_s=facts.startup_s,
        version=facts.version,
        commit=facts.commit,
    )
