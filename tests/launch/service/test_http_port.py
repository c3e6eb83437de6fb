import asyncio

import pytest

from launch.service.http_port import HttpPort, Page
from tests.launch.grpc_rig import get

pytestmark = pytest.mark.timeout(120)


async def with_port(body):
    async with HttpPort({"/a": lambda: Page(body=b"A\n"), "/no": lambda: Page(status=503, body=b"no\n")}) as port:
        await body(await port.open("127.0.0.1", 0))


def ask(*requests: bytes | str):
    """Status and body of each."""
    answers = []

    async def body(port):
        for request in requests:
            words = request if isinstance(request, bytes) else None
            answers.append(await get(port, str(request), words=words))

    asyncio.run(with_port(body))
    return answers


def test_pages_are_shown_by_path_whatever_the_query():
    assert ask("/a", "/a?x=1", "/no") == [(200, "A\n"), (200, "A\n"), (503, "no\n")]


def test_the_rest_is_refused_in_words():
    status, body = ask("/b")[0]
    assert (status, body) == (404, "there is /a, /no\n")
    answers = ask(
        b"POST /a HTTP/1.1\r\n\r\n",
        b"\xff\xfe\x00\r\n\r\n",
        b"GET /a SPDY/9\r\n\r\n",
        b"GET /a HTTP/1.1\r\nX: " + b"y" * 9000 + b"\r\n\r\n",
        b"HEAD /a HTTP/1.1\r\n\r\n",
    )
    assert [status for status, _ in answers] == [405, 400, 400, 431, 200]
    assert answers[-1][1] == ""


def test_who_asks_nothing_is_let_go_and_holds_up_nobody(monkeypatch):
    monkeypatch.setattr("launch.service.http_port.READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr("launch.service.http_port.MAX_CONNECTIONS", 3)

    async def body(port):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert await get(port, "/a") == (200, "A\n")
        idle.append(await asyncio.open_connection("127.0.0.1", port))
        with pytest.raises((ConnectionError, IndexError)):  # full
            await get(port, "/a")
        for reader, _ in idle:
            assert await reader.read() == b""
        assert await get(port, "/a") == (200, "A\n")
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()

    asyncio.run(with_port(body))
