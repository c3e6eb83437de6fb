"""What a front door and the ranks say to each other over message sockets: letters, each a message of its own.

    message   | version: 1 byte | a letter in msgpack, typed |

The letters of `letters`, and those that only a service needs: to empty the prefix cache, to trace steps, to tell what a
rank holds and does. Whatever does not decode to a letter of the right direction is a WireError: nothing is guessed, and
nothing but numbers, text and lists can come out; what a message claims to hold is never made room for before it is
there. Knows values; does not know sockets (see `wire_sockets`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from ep.errors import SerriedError

from ..requests.kv_log import KvLetter
from ..requests.telemetry import RankStats
from .letters import (
    AbortLetter,
    AdmitLetter,
    EndLetter,
    LetterError,
    NewsLetter,
    NoteLetter,
    ReadyLetter,
    ToFront,
    ToRank,
    WaveEndLetter,
    WaveLetter,
    WishLetter,
)

VERSION = 1
MAX_MESSAGE = 1 << 28
"""Bytes of one message, at most: the sockets end a connection that brings more."""


class WireError(LetterError):
    """A message that is no letter, or of another version."""


class FlushLetter(msgspec.Struct, tag="flush", frozen=True):
    """Forget every cached prefix."""


class ProfileLetter(msgspec.Struct, tag="profile", frozen=True):
    """Trace the next steps into a file of the rank's own (see `tracing.trace_path`)."""

    steps: int
    path: str

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1, e.g. 100")


class StopProfileLetter(msgspec.Struct, tag="stop-profile", frozen=True):
    """Write what was traced so far."""


Command = FlushLetter | ProfileLetter | StopProfileLetter
WireToRank = (
    AdmitLetter | AbortLetter | WishLetter | WaveLetter | EndLetter | FlushLetter | ProfileLetter | StopProfileLetter
)


class FactsLetter(msgspec.Struct, tag="facts", frozen=True):
    """What rank 0 knows of the group and its model, before it is ready."""

    model_path: str
    model_type: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    model_dtype: str
    kv_cache_dtype: str
    max_num_seqs: int
    config_hash: str
    startup_s: dict[str, float]
    notes: tuple[str, ...]
    version: str
    commit: str


class ReportLetter(msgspec.Struct, tag="report", frozen=True):
    """How a rank is; now and then while it steps."""

    stats: RankStats


class FlushedLetter(msgspec.Struct, tag="flushed", frozen=True):
    """The prefix cache was emptied."""


class TraceLetter(msgspec.Struct, tag="trace", frozen=True):
    """A trace was written: where, and what it says in a line; or why it was not."""

    path: str
    line: str
    failed: bool = False


class FailedLetter(msgspec.Struct, tag="failed", frozen=True):
    """The group has failed: rank `culprit`, in words. Any rank says it, over a socket of its own."""

    culprit: int
    cause: str


WireToFront = (
    ReadyLetter
    | NewsLetter
    | NoteLetter
    | WaveEndLetter
    | FactsLetter
    | KvLetter
    | ReportLetter
    | FlushedLetter
    | TraceLetter
    | FailedLetter
)

_encode_into = msgspec.msgpack.Encoder().encode_into
_to_rank: msgspec.msgpack.Decoder[WireToRank] = msgspec.msgpack.Decoder(WireToRank)
_to_front: msgspec.msgpack.Decoder[WireToFront] = msgspec.msgpack.Decoder(WireToFront)


def pack(letter: ToRank | ToFront | WireToRank | WireToFront) -> bytearray:
    """The letter as a message. Raises WireError when it is larger than any socket takes."""
    message = bytearray((VERSION,))
    _encode_into(letter, message, 1)
    if len(message) > MAX_MESSAGE:
        raise WireError(f"a letter of {len(message)} bytes; at most {MAX_MESSAGE} go over the wire")
    return message


def unpack_at_rank(message: bytes) -> WireToRank:
    """The letter of a front door. Raises WireError."""
    return _unpack(_to_rank, message)


def unpack_at_front(message: bytes) -> WireToFront:
    """The letter of a rank. Raises WireError."""
    return _unpack(_to_front, message)


def _unpack(decoder: Any, message: bytes) -> Any:
    if not message or message[0] != VERSION:
        said = f"version {message[0]}" if message else "nothing"
        raise WireError(f"a message of {said} came; this is version {VERSION}: run one version of serried everywhere")
    if len(message) > MAX_MESSAGE:
        raise WireError(f"a message of {len(message)} bytes came; at most {MAX_MESSAGE} go over the wire")
    try:
        return decoder.decode(memoryview(message)[1:])
    except (msgspec.DecodeError, ValueError, SerriedError, RecursionError) as error:
        raise WireError(f"{len(message)} bytes came that are no letter: {error}") from error
