"""A small HTTP port for probes and scrapes: GET and HEAD of a few fixed paths, no bodies, nothing to configure.

    /live      200 while this process answers: restart it when it does not
    /started   200 once the ranks have been ready; before that, wait
    /ready     200 while requests are let in: send them elsewhere when not
    /health    200 while steps get done: 503 when they stall, or when the group has failed, with the culprit's name
    /metrics   Prometheus text

Knows how to speak HTTP/1.1 as far as that; what is answered is told to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Self

MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 64
READ_TIMEOUT_S = 5.0
TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """An answer."""

    status: int = 200
    body: bytes = b""
    content_type: str = TEXT


Pages = Mapping[str, Callable[[], Page]]
"""Path -> what it shows now."""


class HttpPort:
    """Listens from `open` to `close`; one request a connection."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._num_open = 0

    async def open(self, host: str, port: int) -> int:
        """Returns the port it has, which is another one for 0. Raises OSError when it cannot be had."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Nobody is answered any more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_open >= MAX_CONNECTIONS:
            writer.transport.abort()  # before it costs anything
            return
        self._num_open += 1
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                page, with_body = await self._answer(reader)
                writer.write(_response(page, with_body=with_body))
                await writer.drain()
        except (TimeoutError, OSError):  # who does not ask, or does not read, gets nothing
            pass
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[Page, bool]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return Page(status=400, body=b"not a whole request\n"), True
        except asyncio.LimitOverrunError:
            return Page(status=431, body=b"the head is too long\n"), True
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return Page(status=400, body=b"not HTTP/1\n"), True
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return Page(status=405, body=b"only GET and HEAD\n"), True
        show = self._pages.get(target.partition("?")[0])
        if show is None:
            known = ", ".join(self._pages)
            return Page(status=404, body=f"there is {known}\n".encode()), method == "GET"
        return show(), method == "GET"


def _response(page: Page, *, with_body: bool) -> bytes:
    lines = (
        f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    )
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    return head + page.body if with_body else head
