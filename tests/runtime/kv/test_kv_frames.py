"""What engines say to each other: only who knows the key is heard, and only as it was said."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable

import pytest

from runtime.kv.kv_frames import BadFrame, Frames, accept_frames, open_frames
from runtime.kv.kv_letters import BadLetter, Beat, Done, Fetch, Page, decode, encode

pytestmark = pytest.mark.timeout(120)

Middle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def talk(
    said: Callable[[Frames], Awaitable[None]],
    heard: Callable[[Frames], Awaitable[None]],
    *,
    keys: tuple[bytes, bytes] = (b"k", b"k"),
    change: Callable[[int, bytes], bytes] = lambda number, content: content,
) -> None:
    """A fetcher says, a lender hears; `change` is somebody in between, who gets the fetcher's writes one by one."""
    over = asyncio.get_running_loop().create_future()

    async def lender(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = await accept_frames(reader, writer, key=keys[1], limit=1000)
        try:
            await heard(frames)
        except BaseException as error:
            over.set_exception(error)
        else:
            over.set_result(None)
        finally:
            await frames.close()

    server = await asyncio.start_server(lender, "127.0.0.1", 0)
    frames = await open_frames("127.0.0.1", server.sockets[0].getsockname()[1], key=keys[0], limit=1000)
    plain, count = frames._writer.write, 0

    def write(content: bytes) -> None:
        nonlocal count
        plain(change(count, content))
        count += 1

    frames._writer.write = write
    try:
        await said(frames)
        await over
    finally:
        await frames.close()
        server.close()


def test_letters_come_as_they_were_said():
    letters = [Beat(), Fetch(3), Page(1, bytes(range(200))), Done()]

    async def said(frames: Frames) -> None:
        for letter in letters:
            await frames.say(letter)

    async def heard(frames: Frames) -> None:
        assert [await frames.hear() for _ in letters] == letters
        with pytest.raises(EOFError):
            await frames.hear()

    async def both() -> None:
        async def said_and_closed(frames: Frames) -> None:
            await said(frames)
            frames._writer.write_eof()

        await talk(said_and_closed, heard)

    asyncio.run(both())


async def say_two(frames: Frames) -> None:
    await frames.say(Fetch(1))
    await frames.say(Fetch(1))


async def hear_two(frames: Frames) -> None:
    assert await frames.hear() == Fetch(1)
    assert await frames.hear() == Fetch(1)


def flipped(at: int) -> Callable[[int, bytes], bytes]:
    return lambda number, content: bytes((content[0] ^ 1, *content[1:])) if number == at else content


@pytest.mark.parametrize("place", [1, 2, 4, 5])
def test_a_frame_that_was_changed_on_its_way_is_refused(place: int):
    with pytest.raises(BadFrame, match="is not proven"):
        asyncio.run(talk(say_two, hear_two, change=flipped(place)))


def test_a_stranger_is_not_heard():
    with pytest.raises(BadFrame, match="another key"):
        asyncio.run(talk(say_two, hear_two, keys=(b"mine", b"theirs")))


def test_what_was_said_once_cannot_be_said_again_by_somebody_else():
    kept: list[bytes] = []

    def replay(number: int, content: bytes) -> bytes:
        kept.append(content)
        return content if number < 3 else kept[number - 3]  # the first frame in place of the second

    with pytest.raises(BadFrame, match="is not proven"):
        asyncio.run(talk(say_two, hear_two, change=replay))


def test_a_length_is_refused_before_anything_is_read_by_it():
    huge = struct.pack("<I", 1 << 31)
    with pytest.raises(BadFrame, match="2147483648 bytes; at most 1000"):
        asyncio.run(talk(say_two, hear_two, change=lambda number, content: huge if number == 0 else content))


def test_what_is_no_letter_is_told_so():
    for content in (b"", b"\xc1", encode([1, 2]), b"\x81\xa4type\xa5hello", b"\x91" * 5000):
        with pytest.raises(BadLetter, match="are no letter"):
            decode(content)
