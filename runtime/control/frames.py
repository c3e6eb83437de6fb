"""Fixed-size frames over one connected socket, each with a keyed seal; what is not sealed right is never looked into.

Knows bytes, counters and keys; does not know how the two ends met (see `handshake`) nor what a payload means.

    frame = | size u32 | counter u64 | seal 16 bytes | payload |        size of the payload is fixed for each direction

The seal is a keyed BLAKE2b (RFC 7693) of size, counter and the payload's BLAKE2b, under a key that belongs to one
direction of one connection: derived by HMAC-SHA256 from the group's key and both ends' nonces. So a frame from another
connection, of the other direction, altered, repeated or left out is refused. The payload is hashed on its own, so that
one payload for many links is hashed once. BLAKE2b, because a vote among 4 ranks waits for 12 seals in a row, and each
costs 5 us less than HMAC-SHA256 when the caches are cold.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from ep.errors import TransportError

SEAL_BYTES = 16
MAX_PAYLOAD = 1 << 20
UNSENT_LIMIT = 1 << 16
"""Bytes that `post` keeps for a peer that does not read before the link counts as closed."""

_HEAD = struct.Struct("<IQ")
OVERHEAD = _HEAD.size + SEAL_BYTES


class LinkError(TransportError):
    """A link between two ranks cannot be used. `peer` is the rank at the other end, None when it is not known yet."""

    def __init__(self, message: str, *, peer: int | None, rank: int | None = None) -> None:
        super().__init__(message, rank=rank)
        self.peer = peer


class LinkClosed(LinkError):
    """The other end is gone, or closed the link."""


class WrongKey(LinkError):
    """The other end does not hold the group's key, or a frame was altered on its way."""


class Replayed(LinkError):
    """A frame came a second time, or one before it is missing."""


class WrongSize(LinkError):
    """A frame says it has another size than this direction of the link has."""


class WrongPeer(LinkError):
    """Both hold the key, but they do not belong together: protocol version, kind of link, group size, rank or sizes."""


def digest_of(payload: bytes) -> bytes:
    """What is sealed in place of the payload."""
    return blake2b(payload, digest_size=32).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealer:
    """One direction of a link: its key and the size of its payloads."""

    key: bytes
    payload_bytes: int

    def __post_init__(self) -> None:
        assert 0 < self.payload_bytes <= MAX_PAYLOAD, self.payload_bytes

    @property
    def frame_bytes(self) -> int:
        return OVERHEAD + self.payload_bytes

    def seal(self, counter: int, payload: bytes, digest: bytes) -> bytes:
        """The frame; `digest` is `digest_of(payload)`."""
        assert len(payload) == self.payload_bytes, (len(payload), self.payload_bytes)
        head = _HEAD.pack(self.payload_bytes, counter)
        return head + blake2b(head + digest, key=self.key, digest_size=SEAL_BYTES).digest() + payload

    def open(self, frame: bytes | bytearray | memoryview, *, counter: int, peer: int | None) -> bytes:
        """The payload of a whole frame whose number should be `counter`."""
        frame = memoryview(frame)
        size, found = _HEAD.unpack_from(frame)
        if size != self.payload_bytes:
            raise WrongSize(f"a frame from rank {peer} says {size} bytes, not {self.payload_bytes}", peer=peer)
        payload = bytes(frame[OVERHEAD:])
        right = blake2b(frame[: _HEAD.size], key=self.key, digest_size=SEAL_BYTES)
        right.update(digest_of(payload))
        if not hmac.compare_digest(right.digest(), frame[_HEAD.size : OVERHEAD]):
            raise WrongKey(f"a frame from rank {peer} is not sealed with this link's key", peer=peer)
        if found != counter:
            raise Replayed(f"frame {found} came from rank {peer} where frame {counter} is due", peer=peer)
        return payload


class Link:
    """Both directions of one connection, to the rank `peer`.

    `send` and `receive` wait; `post` and `receive_ready` never do. Use a link in one of the two ways, in one thread.
    Raises LinkClosed when the other end is gone, other LinkErrors for a frame that must not be believed.
    """

    def __init__(self, connection: socket.socket, *, peer: int, outward: Sealer, inward: Sealer) -> None:
        self.peer = peer
        self.outward = outward
        self.inward = inward
        self._socket = connection
        self._num_sent = 0
        self._num_received = 0
        self._buffer = memoryview(bytearray(inward.frame_bytes))
        self._have = 0  # bytes of the next frame that are in the buffer
        self._unsent = bytearray()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """The other end reads the end of the stream. Closing twice is the same as once."""
        self._socket.close()

    def finish(self, timeout_s: float) -> None:
        """Close, once the other end has read everything and closed too, or after `timeout_s`."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(timeout_s)
            while self._socket.recv(1 << 16):
                pass
        except OSError:  # the other end is gone, or takes too long: either way there is nothing more to say
            pass
        finally:
            self._socket.close()

    def send(self, payload: bytes, digest: bytes | None = None) -> None:
        """Send one frame; returns when the system has taken it. `digest`: `digest_of(payload)` where it is known."""
        try:
            self._socket.sendall(self._next_frame(payload, digest))
        except OSError as error:
            raise self._closed(error) from error

    def receive(self) -> bytes:
        """The payload of the next frame."""
        while self._have < len(self._buffer):
            try:
                count = self._socket.recv_into(self._buffer[self._have :], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise self._closed(error) from error
            self._take(count)
        return self._open()

    def post(self, payload: bytes, digest: bytes | None = None) -> None:
        """Hand one frame to the system, or keep it for the next `flush` as far as the peer does not read."""
        self._unsent += self._next_frame(payload, digest)
        self.flush()

    def flush(self) -> None:
        """Go on with what `post` could not send."""
        try:
            while self._unsent:
                count = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
                del self._unsent[:count]
        except BlockingIOError:
            if len(self._unsent) > UNSENT_LIMIT:
                raise LinkClosed(f"rank {self.peer} does not read its link", peer=self.peer) from None
        except OSError as error:
            raise self._closed(error) from error

    def receive_ready(self) -> list[bytes]:
        """Payloads of the frames that are here in full. Raises LinkClosed only when no whole frame is left."""
        payloads: list[bytes] = []
        while True:
            try:
                count = self._socket.recv_into(self._buffer[self._have :], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return payloads
            except OSError as error:
                if payloads:
                    return payloads
                raise self._closed(error) from error
            if not count and payloads:
                return payloads
            self._take(count)
            if self._have == len(self._buffer):
                payloads.append(self._open())

    def _next_frame(self, payload: bytes, digest: bytes | None) -> bytes:
        frame = self.outward.seal(self._num_sent, payload, digest or digest_of(payload))
        self._num_sent += 1
        return frame

    def _take(self, count: int) -> None:
        if not count:
            raise LinkClosed(f"rank {self.peer} closed its link", peer=self.peer)
        self._have += count

    def _open(self) -> bytes:
        payload = self.inward.open(self._buffer, counter=self._num_received, peer=self.peer)
        self._num_received += 1
        self._have = 0
        return payload

    def _closed(self, error: OSError) -> LinkClosed:
        return LinkClosed(f"the link to rank {self.peer} broke: {error.strerror or error}", peer=self.peer)


def send_all(links: Iterable[Link], payload: bytes) -> None:
    """The same payload on every link, hashed once."""
    digest = digest_of(payload)
    for link in links:
        link.send(payload, digest)
