"""The fetcher's side: one prompt's latents from the engine that computed them, in one conversation.

    call --> hello --> hold: a manifest --> (beats, until there are pages for them) --> pull --> done

Whatever goes wrong on the way ends it as a KvLoadError with its cause in words. Runs in an event loop beside the rank,
which polls. Knows the conversation; how pages come over is the `Mover`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from ..requests.kv_params import KvParams
from .connector import KvLoadError, Landed, Want
from .kv_frames import Frames, open_frames
from .kv_letters import BadLetter, Beat, Done, Gone, Hello, Hold, Letter, Manifest
from .kv_pages import Kind

CALL_S = 10.0
"""The lender answers within this."""
BEATS_A_LEASE = 6
L = TypeVar("L", Hello, Manifest)


class Mover(Protocol):
    """How the bytes of pages get from one engine to the other; used in the event loop's thread."""

    @property
    def place(self) -> bytes:
        """What the other side needs to know of this one, so that it can read its pages."""
        ...

    async def pull(self, frames: Frames, manifest: Manifest, *, skip: int, pages: Sequence[int]) -> Tensor | None:
        """Fetch the lender's pages from number `skip` on into these; returns them where they are not there yet.

        Nobody writes to the pages any more when this returns or raises, also when it is cancelled. Raises KvLoadError.
        """
        ...

    def tick(self) -> None:
        """Called every few milliseconds while somebody may read pages here."""
        ...

    def close(self) -> None: ...


class Fetch:
    """See `connector.Load`."""

    def __init__(
        self,
        want: Want,
        params: KvParams,
        *,
        kind: Kind,
        key: bytes,
        limit: int,
        mover: Mover,
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """call_soon: has something called in the event loop's thread, from any thread."""
        self.num_tokens = want.num_tokens
        self._want = want
        self._params = params
        self._kind = kind
        self._key = key
        self._limit = limit
        self._mover = mover
        self._call_soon = call_soon
        self._outcome: Landed | KvLoadError | None = None
        self._given: tuple[int, Sequence[int]] | None = None
        self._cancelled = False
        self._moved = asyncio.Event()
        self._pulling: asyncio.Task[Tensor | None] | None = None

    def begin(self, *, skip: int, pages: Sequence[int]) -> None:
        """For the protocol see `connector.Load`."""
        self._given = skip, tuple(pages)
        self._call_soon(self._moved.set)

    def poll(self) -> Landed | None:
        """For the protocol see `connector.Load`."""
        outcome = self._outcome
        if isinstance(outcome, KvLoadError):
            raise outcome
        return outcome

    def cancel(self) -> None:
        """For the protocol see `connector.Load`."""
        self._call_soon(self.give_up)

    def give_up(self) -> None:
        """End the conversation; in the event loop's thread."""
        self._cancelled = True
        self._moved.set()
        if self._pulling is not None:
            self._pulling.cancel()

    async def run(self) -> None:
        """The conversation."""
        where = f"{self._params.remote_host}:{self._params.remote_port}"
        try:
            self._outcome = await self._fetch()
        except KvLoadError as error:
            self._outcome = error
        except (OSError, EOFError, TimeoutError, BadLetter) as error:
            self._outcome = KvLoadError(f"{where}: {error or type(error).__name__}")
        except asyncio.CancelledError:
            self._outcome = KvLoadError("it was cancelled")
        except BaseException as error:
            self._outcome = KvLoadError(f"{where}: {type(error).__name__}: {error}")
            raise

    async def _fetch(self) -> Landed:
        host, port = str(self._params.remote_host), int(self._params.remote_port or 0)
        frames = await asyncio.wait_for(open_frames(host, port, key=self._key, limit=self._limit), CALL_S)
        try:
            manifest = await asyncio.wait_for(self._meet(frames), CALL_S)
            return await self._bring(frames, manifest)
        finally:
            await frames.close()

    async def _meet(self, frames: Frames) -> Manifest:
        """Find that the other end is who it should be, and has what is wanted."""
        kind, wanted = self._kind, str(self._params.remote_engine_id)
        await frames.say(Hello(kind.version, kind.model, kind.layout, wanted))
        hello = _expect(Hello, await frames.hear())
        if hello.engine_id != wanted:
            raise KvLoadError(f"the engine there is {hello.engine_id}, and {wanted} has the latents: it was restarted")
        difference = kind.differs(Kind(version=hello.version, model=hello.model, layout=hello.layout))
        if difference:
            raise KvLoadError(f"the engine there computes other latents: {difference}")
        await frames.say(Hold(str(self._params.remote_request_id), self._want.num_tokens, self._want.identity))
        return _expect(Manifest, await frames.hear())

    async def _bring(self, frames: Frames, manifest: Manifest) -> Landed:
        while self._given is None and not self._cancelled:
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), manifest.lease_s / BEATS_A_LEASE)
            except TimeoutError:
                await frames.say(Beat())
        if self._cancelled or self._given is None:
            await frames.say(Done())
            raise KvLoadError("it was cancelled")
        skip, pages = self._given
        if len(manifest.sums) - skip != len(pages):
            raise KvLoadError(
                f"the engine there has {len(manifest.sums)} pages of it, {skip + len(pages)} were to come"
            )
        try:
            brought = await self._pull(frames, manifest, skip, pages)
        finally:
            await frames.say(Done())
        return Landed(sums=manifest.sums[skip:], bytes_NLY=brought)

    async def _pull(self, frames: Frames, manifest: Manifest, skip: int, pages: Sequence[int]) -> Tensor | None:
        """Beats beside the pull keep the lease. However this ends, nobody writes to the pages any more."""
        pulling = self._pulling = asyncio.ensure_future(self._mover.pull(frames, manifest, skip=skip, pages=pages))
        try:
            while not (await asyncio.wait([pulling], timeout=manifest.lease_s / BEATS_A_LEASE))[0]:
                await frames.say(Beat())
            return pulling.result()
        except BaseException:
            pulling.cancel()
            await asyncio.wait([pulling])
            raise


def _expect(kind: type[L], letter: Letter) -> L:
    if isinstance(letter, Gone):
        raise KvLoadError(letter.why)
    if not isinstance(letter, kind):
        raise KvLoadError(f"{type(letter).__name__} came where {kind.__name__} was due")
    return letter
