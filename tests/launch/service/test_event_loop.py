"""A burst of gRPC's events takes one turn of the front door's loop, and none is missed."""

import asyncio
import socket

import pytest

from launch.service import event_loop
from launch.service.event_loop import FrontLoop, after_a_burst
from tests.launch.grpc_rig import generate, served

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("waiting", [1, 2, 64, 4096, 5000])
def test_the_reader_is_called_once_and_finds_one_byte_of_a_burst(waiting: int):
    read, write = socket.socketpair()
    with read, write:
        read.setblocking(False)
        write.sendall(b"1" * waiting)
        found: list[bytes] = []
        after_a_burst(read, lambda: found.append(read.recv(1)))
        assert found == [b"1"]
        assert len(what_is_left(read)) == max(0, waiting - event_loop.MOST_BYTES)


def what_is_left(events: socket.socket) -> bytes:
    try:
        return events.recv(1 << 16)
    except BlockingIOError:
        return b""


def test_grpcs_reader_is_known_and_a_call_is_answered(tiny, monkeypatch: pytest.MonkeyPatch):
    bursts = 0

    def counted(events, callback):
        nonlocal bursts
        bursts += 1
        after_a_burst(events, callback)

    async def life() -> None:
        async with served(tiny) as one:
            answers = await asyncio.gather(*[one.ask(generate(max_tokens=8)) for _ in range(40)])
        assert all(len(answer[-1].output_ids) == 8 for answer in answers)

    monkeypatch.setattr(event_loop, "after_a_burst", counted)
    with asyncio.Runner(loop_factory=FrontLoop) as runner:
        runner.run(life())
    assert bursts


def test_other_readers_are_called_as_they_are():
    read, write = socket.socketpair()

    async def life() -> list[object]:
        loop = asyncio.get_running_loop()
        heard = loop.create_future()
        loop.add_reader(read, lambda *words: heard.done() or heard.set_result(list(words)), 1, 2)
        write.send(b"abc")
        try:
            return await heard
        finally:
            loop.remove_reader(read)

    with read, write, asyncio.Runner(loop_factory=FrontLoop) as runner:
        assert runner.run(life()) == [1, 2]
        assert read.recv(9) == b"abc"
