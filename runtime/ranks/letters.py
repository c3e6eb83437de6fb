"""What the front and a rank's process say to each other, as bytes on a link.

A letter is a typed value in msgpack, cut into the link's fixed frames:

    frame   | bytes of the letter that follow, this frame's included: u32 | up to PIECE_BYTES of it, filled up |

Whatever does not decode to one of the letters is a LetterError: nothing is guessed, and nothing but numbers, text and
lists can come out. Knows values and frames; does not know what follows from a letter.
"""

from __future__ import annotations

import struct

import msgspec

from ep.errors import SerriedError

from ..control.frames import Link
from ..loop.ranks import Abort, Admit, Item, Wish
from ..requests.kv_params import KvParams
from ..requests.outputs import News, Note
from ..requests.request import Request
from ..requests.sampling_params import SamplingParams
from ..requests.telemetry import RankStats

FRAME_BYTES = 4096
_COUNT = struct.Struct("<I")
PIECE_BYTES = FRAME_BYTES - _COUNT.size
MAX_LETTER = 1 << 28
"""Bytes of one letter, at most: a prompt of a few million tokens."""


class LetterError(SerriedError):
    """What came over a link is no letter."""


class AdmitLetter(msgspec.Struct, tag="admit", frozen=True):
    """A request, as far as it is decided when it enters a rank."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int
    priority: int
    choice_index: int
    seed: int
    cache_salt: str
    stop_ids: frozenset[int]
    kv: KvParams | None = None


class AbortLetter(msgspec.Struct, tag="abort", frozen=True):
    request_id: str


class WishLetter(msgspec.Struct, tag="wish", frozen=True):
    pause: bool
    drain: bool


class WaveLetter(msgspec.Struct, tag="wave", frozen=True):
    """Start stepping."""


class EndLetter(msgspec.Struct, tag="end", frozen=True):
    """End in order; no wave is running."""


ToRank = AdmitLetter | AbortLetter | WishLetter | WaveLetter | EndLetter


class ReadyLetter(msgspec.Struct, tag="ready", frozen=True):
    """The rank has loaded: the longest request it can hold follows from its pages."""

    num_pages: int
    page_size: int
    max_model_len: int


class NewsLetter(msgspec.Struct, tag="news", frozen=True):
    """All that one step brought."""

    items: tuple[News, ...]


class NoteLetter(msgspec.Struct, tag="note", frozen=True):
    """Something about the group."""

    note: Note


class WaveEndLetter(msgspec.Struct, tag="wave-end", frozen=True):
    """The rank has left the wave."""

    stats: RankStats


ToFront = ReadyLetter | NewsLetter | NoteLetter | WaveEndLetter

_encode = msgspec.msgpack.Encoder().encode
_to_rank = msgspec.msgpack.Decoder(ToRank)
_to_front = msgspec.msgpack.Decoder(ToFront)


def letter_of(item: Item) -> ToRank:
    """An inbox item as a letter."""
    if isinstance(item, Abort):
        return AbortLetter(item.request_id)
    if isinstance(item, Wish):
        return WishLetter(pause=item.pause, drain=item.drain)
    request = item.request
    return AdmitLetter(
        id=request.id,
        prompt=request.prompt,
        params=request.params,
        arrival=request.arrival,
        priority=request.priority,
        choice_index=request.choice_index,
        seed=request.seed,
        cache_salt=request.cache_salt,
        stop_ids=request.stop_ids,
        kv=request.kv,
    )


def item_of(letter: AdmitLetter | AbortLetter | WishLetter) -> Item:
    """The inverse of `letter_of`."""
    if isinstance(letter, AbortLetter):
        return Abort(request_id=letter.request_id)
    if isinstance(letter, WishLetter):
        return Wish(pause=letter.pause, drain=letter.drain)
    return Admit(request=Request(**{name: getattr(letter, name) for name in letter.__struct_fields__}))


def frames_of(letter: ToRank | ToFront) -> list[bytes]:
    """The letter as payloads of frames."""
    encoded = _encode(letter)
    if len(encoded) > MAX_LETTER:
        raise LetterError(f"a letter of {len(encoded)} bytes; at most {MAX_LETTER} go over a link")
    return [
        (_COUNT.pack(len(encoded) - at) + encoded[at : at + PIECE_BYTES]).ljust(FRAME_BYTES, b"\0")
        for at in range(0, len(encoded), PIECE_BYTES)
    ]


class LetterReader:
    """Puts frames together to letters of one kind."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[ToRank] | msgspec.msgpack.Decoder[ToFront]) -> None:
        self._decode = decoder.decode
        self._pieces = bytearray()
        self._left = 0

    @classmethod
    def at_rank(cls) -> LetterReader:
        """Reads what a front writes."""
        return cls(_to_rank)

    @classmethod
    def at_front(cls) -> LetterReader:
        """Reads what a rank writes."""
        return cls(_to_front)

    def take(self, frame: bytes) -> ToRank | ToFront | None:
        """One more frame; the letter that it completes, or None."""
        (left,) = _COUNT.unpack_from(frame)
        if not 0 < left <= MAX_LETTER or (self._pieces and left != self._left):
            raise LetterError(f"a frame says that {left} bytes follow where {self._left or 'a new letter'} were due")
        self._pieces += frame[_COUNT.size : _COUNT.size + min(left, PIECE_BYTES)]
        self._left = left - min(left, PIECE_BYTES)
        if self._left:
            return None
        encoded, self._pieces = bytes(self._pieces), bytearray()
        try:
            return self._decode(encoded)
        except (msgspec.DecodeError, ValueError) as error:
            raise LetterError(f"{len(encoded)} bytes came that are no letter: {error}") from error


def send_letter(link: Link, letter: ToRank | ToFront) -> None:
    """Write one letter; waits until the system has taken it."""
    for frame in frames_of(letter):
        link.send(frame)
