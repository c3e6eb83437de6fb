"""A rank that hands prompts to ranks of other engines and fetches theirs: a thread with an event loop beside it.

The thread answers who comes for a prompt that is kept here, and runs the fetches of this rank; the rank itself only
polls. What differs between `tcp` and `nixl` is how pages come over: see `kv_fetch.Mover`.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ..requests.kv_config import KvConfig
from ..requests.kv_params import KvParams
from .connector import Kept, Want
from .kv_fetch import Fetch, Mover
from .kv_frames import accept_frames
from .kv_lending import HELLO_S, Lending, LentPrompt
from .kv_pages import Kind, PageBytes

SPARE_BYTES = 1 << 16
"""Of a letter beside a page."""
SWEEPS_A_LEASE = 10
LAST_WORDS_S = 1.0
TICK_S = 0.002
MAX_TALKS = 1024
"""Conversations at a time; whoever calls after that is not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTerms:
    """What a rank tells others of itself, and how it speaks to them."""

    protocol: str
    kind: Kind
    config: KvConfig
    rank: int


class PeerConnector:
    """See `connector.Connector`. Raises ValueError for an address that cannot be had."""

    def __init__(self, cache: PageBytes, terms: PeerTerms, *, make_mover: Callable[[PageBytes], Mover]) -> None:
        self._terms = terms
        self._key = terms.config.key()
        self._limit = cache.page_bytes + cache.num_pages * 16 + SPARE_BYTES
        self.engine_id = f"serried-{secrets.token_hex(8)}-{terms.rank}"
        self._mover = make_mover(cache)
        self.lending = Lending(
            cache, terms.kind, engine_id=self.engine_id, lease_s=terms.config.kv_lease_s, place=self._mover.place
        )
        self._loop = asyncio.new_event_loop()
        self._work: set[asyncio.Task[None]] = set()
        self._fetches: dict[Fetch, asyncio.Task[None]] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"kv-{terms.protocol}", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self.port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(HELLO_S)
        except OSError as error:
            self.close()
            raise ValueError(
                f"kv_host {terms.config.kv_host!r} and kv_port {terms.config.kv_port} (+ rank {terms.rank}) cannot be "
                f"listened on: {error.strerror or error}; kv_port 0 takes any free port"
            ) from error

    def find(self, want: Want) -> Fetch | None:
        """For the protocol see `connector.Connector`."""
        params = want.params
        if params is None or params.remote_protocol not in (None, self._terms.protocol):
            return None
        fetch = Fetch(
            want,
            params,
            kind=self._terms.kind,
            key=self._key,
            limit=self._limit,
            mover=self._mover,
            call_soon=self.call_soon,
        )
        self._loop.call_soon_threadsafe(self._start, fetch)
        return fetch

    def save(self, digest: bytes, page: int) -> None:
        """Nothing: only prompts that are asked for are handed over."""

    def lend(self, kept: Kept) -> LentPrompt:
        """For the protocol see `connector.Connector`."""
        config = self._terms.config
        params = KvParams(
            do_remote_prefill=True,
            remote_engine_id=self.engine_id,
            remote_request_id=f"{kept.request_id}-{secrets.token_hex(8)}",
            remote_host=config.kv_host,
            remote_port=self.port,
            remote_protocol=self._terms.protocol,
            remote_block_ids=kept.pages,
        )
        return self.lending.add(kept, params)

    def close(self) -> None:
        """For the protocol see `connector.Connector`."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(HELLO_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._mover.close()

    def call_soon(self, call: Callable[[], None]) -> None:
        """In the event loop's thread. Nothing happens any more once the connector is closed."""
        if not self._closed:
            self._loop.call_soon_threadsafe(call)

    def _start(self, fetch: Fetch) -> None:
        task = self._fetches[fetch] = self._begin(fetch.run())
        task.add_done_callback(lambda _: self._fetches.pop(fetch))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _listen(self) -> int:
        config, rank = self._terms.config, self._terms.rank
        port = config.kv_port + rank if config.kv_port else 0
        self._server = await asyncio.start_server(self._meet, config.kv_host, port)
        self._begin(self._sweep())
        return self._server.sockets[0].getsockname()[1]

    def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._work) > MAX_TALKS:
            writer.close()
            return
        self._begin(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            frames = await asyncio.wait_for(accept_frames(reader, writer, key=self._key, limit=SPARE_BYTES), HELLO_S)
            ticking = self._begin(self._tick())
            try:
                await self.lending.serve(frames)
            finally:
                ticking.cancel()
                await frames.close()
        except (OSError, EOFError, TimeoutError):
            return  # who called is gone; what it held is kept for its lease

    async def _tick(self) -> None:
        while True:
            self._mover.tick()
            await asyncio.sleep(TICK_S)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._terms.config.kv_lease_s / SWEEPS_A_LEASE)
            self.lending.sweep()

    async def _end(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            server.close()
        fetches = dict(self._fetches)
        for fetch in fetches:
            fetch.give_up()
        if fetches:  # they tell those who keep something for them
            await asyncio.wait(fetches.values(), timeout=LAST_WORDS_S)
        work = list(self._work)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        self.lending.end_all()
