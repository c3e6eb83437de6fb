"""What rank 0's process and the front door tell each other when they start, over a pair of sockets that one of them
inherited; then it is a lifeline, whose end is read when the other is gone.

    rank 0 -> front door     papers: what the front door needs to know
    front door -> rank 0     the address where ranks find it

    | length u32 | JSON |

Knows values and a socket; imports nothing of the engine.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..front.front_house import GroupSettings
from .serve_config import ServeConfig

MAX_BYTES = 1 << 20

T = TypeVar("T")


class Papers(msgspec.Struct, frozen=True, kw_only=True):
    """A front door's.

    host   address to listen on for ranks of several nodes; "" where all are on this one
    key    hex, the group's key of this run
    """

    group: GroupSettings
    serve: ServeConfig
    host: str
    key: str


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the front door listens for ranks."""

    wire: str


def write(lifeline: socket.socket, value: Papers | Address) -> None:
    """Hand it over. Raises OSError when the other end is gone."""
    text = msgspec.json.encode(value, enc_hook=_to_text)
    assert len(text) <= MAX_BYTES, len(text)
    lifeline.sendall(len(text).to_bytes(4, "little") + text)


def read(lifeline: socket.socket, kind: type[T]) -> T | None:
    """What the other end hands over; None when it is gone."""
    length = int.from_bytes(lifeline.recv(4, socket.MSG_WAITALL), "little")
    text = lifeline.recv(length, socket.MSG_WAITALL) if 0 < length <= MAX_BYTES else b""
    if not text or len(text) != length:
        return None
    return msgspec.json.decode(text, type=kind, dec_hook=_from_text)


def _to_text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def _from_text(kind: type[Any], value: Any) -> Any:
    if issubclass(kind, Path):
        return kind(value)
    raise NotImplementedError(kind.__name__)
