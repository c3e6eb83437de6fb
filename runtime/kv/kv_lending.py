"""The lender's side of handing prompts over: what is kept for others, for how long, and answers to who comes for it.

A prompt is kept for a lease, which every word of its fetcher extends, but not for longer than MAX_LEASES of them: two
engines that wait for each other's pages get theirs back. It is over when it was fetched, given up, or not asked for in
time; only this module's thread ends it, so pages are never given back while it reads them.

Knows prompts and letters; does not know the pool that the pages come from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from ..requests.kv_params import KvParams
from .connector import Kept
from .kv_frames import Frames
from .kv_letters import BadLetter, Beat, Done, Fetch, Gone, Hello, Hold, Letter, Manifest, Page
from .kv_pages import Kind, PageBytes

L = TypeVar("L", Hello, Hold)
MAX_LEASES = 16
HELLO_S = 10.0
"""Whoever calls says what it wants within this."""


class LentPrompt:
    """See `connector.Lent`."""

    def __init__(self, kept: Kept, params: KvParams, *, until: float, last: float) -> None:
        self.kept = kept
        self.params = params
        self.until = until
        self.last = last
        self.over = False
        self.expired = False

    def is_over(self) -> bool:
        """For the protocol see `connector.Lent`."""
        return self.over

    def extend(self, until: float) -> None:
        self.until = max(self.until, min(until, self.last))


class Lending:
    """One rank's prompts for others. `add` from the rank's thread, everything else in the event loop's.

    place   what a manifest says of where the pages lie, for whoever reads them there
    """

    def __init__(
        self,
        cache: PageBytes,
        kind: Kind,
        *,
        engine_id: str,
        lease_s: float,
        place: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._kind = kind
        self._engine_id = engine_id
        self._lease_s = lease_s
        self._place = place
        self._clock = clock
        self._lent: dict[str, LentPrompt] = {}

    def add(self, kept: Kept, params: KvParams) -> LentPrompt:
        """Keep a prompt for whoever has these params."""
        now = self._clock()
        lent = LentPrompt(kept, params, until=now + self._lease_s, last=now + MAX_LEASES * self._lease_s)
        self._lent[str(params.remote_request_id)] = lent
        return lent

    def sweep(self) -> None:
        """End what nobody asked for in time."""
        now = self._clock()
        for name, lent in list(self._lent.items()):
            if now > lent.until:
                lent.expired = True
                self._end(name)

    def end_all(self) -> None:
        """Nobody can come any more."""
        for name in list(self._lent):
            self._end(name)

    async def serve(self, frames: Frames) -> None:
        """One conversation, to its end."""
        try:
            await self._converse(frames)
        except (BadLetter, TimeoutError) as error:
            await frames.say(Gone(str(error) or "it took too long"))

    async def _converse(self, frames: Frames) -> None:
        hello = _expect(Hello, await asyncio.wait_for(frames.hear(), HELLO_S))
        kind = self._kind
        await frames.say(Hello(kind.version, kind.model, kind.layout, self._engine_id))
        theirs = Kind(version=hello.version, model=hello.model, layout=hello.layout)
        if hello.engine_id != self._engine_id or kind.differs(theirs):
            return  # who called finds the same by what it was told
        hold = _expect(Hold, await asyncio.wait_for(frames.hear(), HELLO_S))
        lent = self._lent.get(hold.request_id)
        why = self._refusal(hold, lent)
        if lent is None or why:
            await frames.say(Gone(why))
            return
        try:
            await self._hand_out(frames, lent)
        finally:  # who was cut off does not come again
            self._end(hold.request_id)

    def _refusal(self, hold: Hold, lent: LentPrompt | None) -> str:
        if lent is None:
            return "the prompt is not here: its lease is over, it was fetched, or it never was"
        if (hold.num_tokens, hold.identity) != (lent.kept.num_tokens, lent.kept.identity):
            return "the prompt of that name has other tokens"
        return ""

    async def _hand_out(self, frames: Frames, lent: LentPrompt) -> None:
        kept = lent.kept
        self._extend(lent)
        await frames.say(Manifest(sums=kept.sums, pages=kept.pages, lease_s=self._lease_s, place=self._place))
        while True:
            letter = await frames.hear()
            if isinstance(letter, Done):
                return
            if lent.over:
                raise BadLetter("its lease is over")
            self._extend(lent)
            if isinstance(letter, Fetch):
                await self._send_pages(frames, lent, letter.skip)
            elif not isinstance(letter, Beat):
                raise BadLetter(f"{type(letter).__name__} came out of turn")

    async def _send_pages(self, frames: Frames, lent: LentPrompt, skip: int) -> None:
        pages = lent.kept.pages
        for index in range(max(skip, 0), len(pages)):
            if lent.over:
                raise BadLetter("its lease is over")
            await frames.say(Page(index, self._cache.take([pages[index]]).numpy().tobytes()))
            self._extend(lent)

    def _extend(self, lent: LentPrompt) -> None:
        lent.extend(self._clock() + self._lease_s)

    def _end(self, name: str) -> None:
        lent = self._lent.pop(name, None)
        if lent is not None:
            lent.over = True


def _expect(kind: type[L], letter: Letter) -> L:
    if not isinstance(letter, kind):
        raise BadLetter(f"{type(letter).__name__} came where {kind.__name__} was due")
    return letter
