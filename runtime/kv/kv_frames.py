"""Letters between two engines over a stream of bytes: cut into frames, each proven with a key that both know.

    fetcher     nonce: 32 B  -->
                             <--  nonce: 32 B                                     lender
    then both   | length: u32 | letter | HMAC-SHA256 over counter, length and letter: 32 B |

The key of each direction follows from the common key and both nonces, and frames are counted, so that nothing can be
said twice, in another order, or by anybody else; a frame that was changed on its way is refused. Without a key the
proof still finds what was changed by accident. A length is checked before anything is read by it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import struct

from .kv_letters import BadLetter, Letter, decode, encode

_LENGTH = struct.Struct("<I")
_COUNTED = struct.Struct("<QI")
_PROOF_BYTES = 32


class BadFrame(BadLetter):
    """What came is no frame of somebody who knows the key."""


class Frames:
    """One end of a conversation; see `open_frames` and `accept_frames`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, keys: tuple[bytes, bytes], limit: int
    ) -> None:
        """keys: of what is said here, and of what is heard; limit: bytes of a letter, at most."""
        self._reader = reader
        self._writer = writer
        self._say_key, self._hear_key = keys
        self._limit = limit
        self._said = self._heard = 0

    async def say(self, letter: Letter) -> None:
        """Returns when the system has taken most of it."""
        content = encode(letter)
        self._writer.write(_LENGTH.pack(len(content)))
        self._writer.write(content)
        self._writer.write(_proof(self._say_key, self._said, content))
        self._said += 1
        await self._writer.drain()

    async def hear(self) -> Letter:
        """The next letter. Raises BadFrame, BadLetter, or EOFError when the other end is gone."""
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if length > self._limit:
            raise BadFrame(f"a frame of {length} bytes; at most {self._limit} are taken")
        content = await self._reader.readexactly(length)
        proof = await self._reader.readexactly(_PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(self._hear_key, self._heard, content)):
            raise BadFrame("a frame is not proven: another key (--kv-key-file), or it was changed on its way")
        self._heard += 1
        return decode(content)

    async def close(self) -> None:
        """Twice is once."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # the other end was faster


async def open_frames(host: str, port: int, *, key: bytes, limit: int) -> Frames:
    """To a lender. Raises OSError, or EOFError."""
    reader, writer = await asyncio.open_connection(host, port)
    mine = secrets.token_bytes(32)
    writer.write(mine)
    theirs = await _nonce(reader, writer)
    return Frames(reader, writer, keys=_keys(key, mine + theirs), limit=limit)


async def accept_frames(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, key: bytes, limit: int
) -> Frames:
    """From a fetcher. Raises OSError, or EOFError."""
    mine = secrets.token_bytes(32)
    writer.write(mine)
    theirs = await _nonce(reader, writer)
    say, hear = _keys(key, theirs + mine)
    return Frames(reader, writer, keys=(hear, say), limit=limit)


async def _nonce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    try:
        return await reader.readexactly(32)
    except BaseException:
        writer.close()
        raise


def _keys(key: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Of what the fetcher says, and of what the lender says."""
    return tuple(hmac.digest(key, name + nonces, "sha256") for name in (b"fetcher", b"lender"))  # type: ignore[return-value]


def _proof(key: bytes, number: int, content: bytes) -> bytes:
    proof = hmac.new(key, _COUNTED.pack(number, len(content)), hashlib.sha256)
    proof.update(content)
    return proof.digest()
