"""How a rank gets a link to another: a greeting in which both prove that they hold the group's key before either
believes a word. This is the caller's side and what both share; the host's side is `door`.

    caller                                    host
    HELLO      who I am, nonce       ->
                                     <-       CHALLENGE   nonce, proof by the key over both
    PROOF      proof by the key      ->
                                     <-       ANSWER      welcome, or why not, with a proof

The key itself never travels. Every message has one size. Knows sockets and ranks; does not know what the link will
carry.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from .frames import Link, LinkClosed, LinkError, Sealer, WrongKey, WrongPeer

PROTOCOL_VERSION = 1
MAGIC = b"SRRD"
KEY_BYTES = 16
"""A key of the group has at least as many."""

HELLO = struct.Struct("<4sHHiiII16s")
"""Magic, version, kind, rank, size, payload bytes up and down, nonce."""
CHALLENGE = struct.Struct("<4sH16s")
"""Magic, version, nonce."""
ANSWER = struct.Struct("<i120s")
"""The host's rank, or -1 and the reason of a refusal."""
PROOF_BYTES = 32

Address = tuple[str, int]


class LinkKind(IntEnum):
    """What a link is for; both ends must mean the same. The numbers travel: add, never renumber."""

    VOTE = 0
    DIRECTORY = 1
    PULSE = 2
    LEADER = 3
    MEETING = 4
    FRONT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What both ends of a link must agree on."""

    kind: LinkKind
    size: int
    """Ranks of the group."""
    up_bytes: int
    """Payload of a frame from the caller to the host."""
    down_bytes: int
    """Payload of a frame from the host to the caller."""


def connect(address: Address, *, rank: int, terms: Terms, key: bytes, timeout_s: float = 10.0) -> Link:
    """A link to the host that listens at `address`, as `rank`. Waits for the whole greeting, at most `timeout_s`.

    Raises WrongKey or WrongPeer when the two do not belong together, LinkClosed when nobody answers.
    """
    check_key(key)
    place = f"{address[0]}:{address[1]}"
    try:
        connection = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise LinkClosed(f"nobody answers at {place}: {error.strerror or error}", peer=None) from error
    try:
        return _greet(connection, rank, terms, key)
    except OSError as error:
        connection.close()
        raise LinkClosed(f"{place} broke off the greeting: {error.strerror or error}", peer=None) from error
    except LinkError:
        connection.close()
        raise


def proof(key: bytes, who: bytes, transcript: bytes) -> bytes:
    """What only a holder of the key can say about everything that was said before; `who` keeps the uses apart."""
    return hmac.digest(key, b"serried " + who + b"\0" + transcript, "sha256")


def seal_link(
    connection: socket.socket, peer: int, terms: Terms, key: bytes, transcript: bytes, *, calls: bool
) -> Link:
    """The greeting is over: each direction gets its own key, bound to everything that was said."""
    up = Sealer(key=proof(key, b"up", transcript), payload_bytes=terms.up_bytes)
    down = Sealer(key=proof(key, b"down", transcript), payload_bytes=terms.down_bytes)
    return Link(connection, peer=peer, outward=up if calls else down, inward=down if calls else up)


def check_key(key: bytes) -> None:
    """ValueError for a key that is too short to be one."""
    if len(key) < KEY_BYTES:
        raise ValueError(f"key has {len(key)} bytes; it must have at least {KEY_BYTES}, for example 32 random ones")


def _greet(connection: socket.socket, rank: int, terms: Terms, key: bytes) -> Link:
    nonce = os.urandom(16)
    sizes = (terms.size, terms.up_bytes, terms.down_bytes)
    hello = HELLO.pack(MAGIC, PROTOCOL_VERSION, terms.kind, rank, *sizes, nonce)
    connection.sendall(hello)
    challenge = _read(connection, CHALLENGE.size)
    _check_version(challenge)
    transcript = hello + challenge
    _check_proof(connection, key, b"host", transcript)
    connection.sendall(proof(key, b"caller", transcript))
    answer = _read(connection, ANSWER.size)
    _check_proof(connection, key, b"answer", transcript + answer)
    host, reason = ANSWER.unpack(answer)
    if host < 0:
        raise WrongPeer(f"the host refuses rank {rank}: {reason.rstrip(bytes(1)).decode(errors='replace')}", peer=None)
    return seal_link(connection, host, terms, key, transcript, calls=True)


def _check_version(challenge: bytes) -> None:
    magic, version, _ = CHALLENGE.unpack(challenge)
    if magic != MAGIC or version != PROTOCOL_VERSION:
        found = f"version {version}" if magic == MAGIC else "another protocol"
        raise WrongPeer(f"the host speaks {found}, this rank version {PROTOCOL_VERSION}", peer=None)


def _check_proof(connection: socket.socket, key: bytes, who: bytes, transcript: bytes) -> None:
    if not hmac.compare_digest(_read(connection, PROOF_BYTES), proof(key, who, transcript)):
        raise WrongKey("the host does not hold this group's key", peer=None)


def _read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise LinkClosed("the host hung up during the greeting", peer=None)
        found += part
    return found
