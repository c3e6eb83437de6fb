"""What a rank writes on a letter to another rank, and what follows when letters of one exchange do not agree. Pure.

    letter    | header, 152 bytes | payload, as far as it fits |
    parcel    | the rest of the payload |                           only if there is a rest

Every rank writes to every other one in every exchange, also when it has no rows for it. So all ranks read the same
tags and forms, find the same fault and blame the same rank.

Legend: R ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache, partial

import torch

from .errors import ExchangeMismatch, PeerFailed, TagMismatch, TransportError
from .posts import Fault, odd_one_out
from .transport import Kind, Tag

_HEADER = struct.Struct("<4s B 3x i 4x q q q 5q 72s")
_MAGIC = b"srd1"

HEADER_BYTES = _HEADER.size
FORM_BYTES = 72
NOBODY = -1
NOWHERE = Tag(0, 0, 0, 0, Kind.CHECK)


class Sort(IntEnum):
    """What a letter is. All but ROWS are the sender's last; their payload says why, in UTF-8."""

    ROWS = 0
    FAILED = 1
    """Rank `culprit` raised, is out of step, or cannot be reached."""
    DISAGREED = 2
    """Rank `culprit` disagrees about the data of an exchange."""
    ENDED = 3
    """The sender makes no more exchanges. No payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Letters of ROWS that fit together have equal headers, but for num_read."""

    sort: Sort
    number: int
    """Which exchange of the sender this is, from 0; in a last letter, how many it made."""
    num_bytes: int
    """Of payload, with that of the parcel."""
    culprit: int = NOBODY
    tag: Tag = NOWHERE
    form: bytes = b""
    """Operation, dtype and shape in words, cut off at FORM_BYTES."""
    num_read: int = field(default=0, compare=False)
    """The sender has all that the others sent it in exchanges before this one: they may forget it."""


def pack(header: Header) -> bytes:
    """HEADER_BYTES bytes."""
    numbers = header.number, header.num_bytes, header.num_read
    return _HEADER.pack(_MAGIC, header.sort, header.culprit, *numbers, *header.tag, header.form)


def unpack(letter: memoryview) -> Header:
    """The header at the beginning of a letter. ValueError if there is none."""
    magic, sort, culprit, number, num_bytes, num_read, *words, form = _HEADER.unpack_from(letter)
    if magic != _MAGIC or sort not in set(Sort):
        raise ValueError(f"a letter begins with {bytes(letter[:8])!r}, which is no header")
    step, layer, track, turn, kind = words
    # A rank at another place may have sent anything: a kind that is none stays a number.
    tag = Tag(step, layer, track, turn, Kind(kind) if kind in set(Kind) else kind)  # type: ignore[arg-type]
    return Header(
        sort=Sort(sort),
        number=number,
        num_bytes=num_bytes,
        culprit=culprit,
        tag=tag,
        form=form.rstrip(b"\0"),
        num_read=num_read,
    )


@lru_cache(maxsize=256)
def form_of(operation: str, dtype: torch.dtype, shape: torch.Size) -> bytes:
    """What must be alike on all ranks besides the tag. shape: of one row for all_to_all, of the row for all_gather."""
    return f"{operation} of {dtype} {list(shape)}".encode()[:FORM_BYTES]


def find_fault(headers: Sequence[Header], expected_bytes: Sequence[int], *, rank: int) -> Fault | None:
    """What makes the exchange impossible, or None. headers: by rank, all of ROWS; expected_bytes: what this rank's
    splits leave room for, by source.

    Counts of rows are seen by their receiver alone: it blames the sender.

    tags A, A, B                                 -> TagMismatch, culprit 2
    rank 0 expects 8, 12, 8 and hears 8, 16, 8   -> ExchangeMismatch, culprit 1
    """
    ranks = range(len(headers))
    odd = odd_one_out([header.tag for header in headers], ranks)
    if odd is not None:
        return partial(TagMismatch, odd[0], odd[1], headers[odd[0]].tag)
    form = odd_one_out([header.form for header in headers], ranks)
    if form is not None:
        culprit, expected = form
        words = f"expected {_text(expected)}, found {_text(headers[culprit].form)}"
        return partial(ExchangeMismatch, culprit, f"{headers[culprit].tag}: {words}")
    for source, (header, expects) in enumerate(zip(headers, expected_bytes, strict=True)):
        if header.num_bytes != expects:
            words = f"rank {source} sends {header.num_bytes} bytes to rank {rank}, which expects {expects}"
            return partial(ExchangeMismatch, source, f"{header.tag}: {words}")
    return None


def last_words(error: TransportError, *, rank: int) -> tuple[Sort, int, str]:
    """(sort, culprit, words) with which this rank tells the others about the error."""
    match error:
        case ExchangeMismatch():
            return Sort.DISAGREED, error.culprit, error.cause
        case PeerFailed():
            return Sort.FAILED, error.culprit, error.cause
        case TagMismatch():
            return Sort.FAILED, error.culprit, f"is out of step: expected {error.expected}, found {error.found}"
        case _:
            return Sort.FAILED, rank, f"failed: {error}"


def fault_of(header: Header, words: str, *, sender: int, reader: int, needs: Tag) -> Fault:
    """What a last letter means to rank `reader`, which needs the sender for the exchange `needs`. words: payload."""
    if header.sort is Sort.ENDED:
        cause = f"ended after {header.number} exchanges; rank {reader} needs it in {needs}"
        return partial(PeerFailed, sender, cause)
    assert header.sort is not Sort.ROWS, header
    return partial(ExchangeMismatch if header.sort is Sort.DISAGREED else PeerFailed, header.culprit, words)


def _text(form: bytes) -> str:
    return form.decode("utf-8", errors="replace")
