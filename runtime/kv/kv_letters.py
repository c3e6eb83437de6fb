"""What two engines say to each other about one prompt's latents, as typed values in msgpack.

    fetcher                                   lender
    Hello(kind, engine_id)            -->
                                      <--     Hello
    Hold(request, identity)           -->
                                      <--     Manifest(sums, ...)      or Gone(why)
    Beat                              -->                              as long as it has no pages for them
    Fetch(skip)                       -->
                                      <--     Page, Page, ...          where pages travel here
    Done                              -->

Knows values; does not know sockets (see `kv_frames`).
"""

from __future__ import annotations

import msgspec


class BadLetter(Exception):
    """What came is no letter, or not one that was due."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Who speaks: see `kv_pages.Kind`. `engine_id`: whom the fetcher means to speak to; the lender's is its own."""

    version: int
    model: str
    layout: str
    engine_id: str


class Hold(msgspec.Struct, tag="hold", frozen=True):
    """The prompt that is to be fetched, and what stands for its tokens."""

    request_id: str
    num_tokens: int
    identity: bytes


class Manifest(msgspec.Struct, tag="manifest", frozen=True):
    """The prompt is here: the sum of each of its pages, and where they lie for whoever can read them there.

    lease_s   so long it is kept after each word
    """

    sums: tuple[int, ...]
    pages: tuple[int, ...]
    lease_s: float
    place: bytes


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """It is still wanted."""


class Fetch(msgspec.Struct, tag="fetch", frozen=True):
    """Send its pages from number `skip` on."""

    skip: int


class Page(msgspec.Struct, tag="page", frozen=True):
    """One page."""

    index: int
    content: bytes


class Done(msgspec.Struct, tag="done", frozen=True):
    """It is not wanted any more: fetched, or given up."""


class Gone(msgspec.Struct, tag="gone", frozen=True):
    """There is nothing to fetch, or nothing more; why."""

    why: str


Letter = Hello | Hold | Manifest | Beat | Fetch | Page | Done | Gone

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Letter] = msgspec.msgpack.Decoder(Letter)


def decode(content: bytes) -> Letter:
    """Raises BadLetter."""
    try:
        return _decoder.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadLetter(f"{len(content)} bytes came that are no letter: {error}") from error
