"""Where ranks knock: a listening socket on one interface, and the host's side of the greeting (see `handshake`).

A caller that does not hold the key, or stalls, costs nobody else anything: greetings go on side by side, never waited
for. Knows sockets and ranks; does not know what a link will carry.
"""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import os
import selectors
import socket
import struct
import time
from collections.abc import Container

from .frames import Link
from .handshake import (
    ANSWER,
    CHALLENGE,
    HELLO,
    MAGIC,
    PROOF_BYTES,
    PROTOCOL_VERSION,
    Terms,
    check_key,
    proof,
    seal_link,
)

GREETING_S = 5.0
"""How long a connection may take over its greeting."""

MAX_GREETINGS = 512
"""Connections that may be in their greeting at once; the oldest makes room."""

_SIOCGIFADDR = 0x8915


def host_of(interface: str) -> str:
    """The IPv4 address of an interface ("lo", "eth0"), or `interface` itself where it is an address of one.

    Raises ValueError for a name that does not exist and for an address that means every interface.
    """
    try:
        address = ipaddress.ip_address(interface)
    except ValueError:
        return _address_of_name(interface)
    if address.is_unspecified:
        raise ValueError(f"interface = {interface!r}: means every interface; name one, for example lo or 127.0.0.1")
    return interface


def _address_of_name(name: str) -> str:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            known = ", ".join(sorted(name for _, name in socket.if_nameindex()))
            raise ValueError(f"interface = {name!r}: has no IPv4 address; this machine has {known}") from error
    return socket.inet_ntoa(answer[20:24])


def open_listener(interface: str = "lo", *, port: int = 0, backlog: int = 512) -> socket.socket:
    """A socket that listens on one interface; port 0 takes a free one, and getsockname() says which."""
    host = host_of(interface)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


class _Greeting:
    """One greeting, and what has arrived of its next message."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.since = time.monotonic()
        self.found = b""
        self.transcript = b""  # HELLO and CHALLENGE, once both were said


class Door:
    """All greetings at one listening socket, which belongs to the door.

    Pollable: readable when `admit` has something to do. `waits_for` holds the ranks that are still welcome; the door
    looks at it anew for every caller, so whoever owns it takes a rank out once it is there.
    """

    def __init__(
        self, listener: socket.socket, *, rank: int, terms: Terms, key: bytes, waits_for: Container[int]
    ) -> None:
        check_key(key)
        self.rank = rank
        self.terms = terms
        self.refusals: list[str] = []  # the last few, in words
        self._key = key
        self._waits_for = waits_for
        self._listener = listener
        self._greetings: dict[int, _Greeting] = {}
        self._selector = selectors.EpollSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        return self._selector.fileno()

    def close(self) -> None:
        """Stop listening and drop whoever is still in the greeting."""
        for greeting in list(self._greetings.values()):
            self._forget(greeting).close()
        self._selector.close()
        self._listener.close()

    def admit(self, timeout_s: float = 0.0) -> list[Link]:
        """Go on with every greeting as far as it can; the links that are complete now. Waits for something to do."""
        for greeting in [g for g in self._greetings.values() if time.monotonic() - g.since > GREETING_S]:
            self._refuse(greeting, "took too long over its greeting")
        links = []
        for item, _ in self._selector.select(timeout_s):
            if item.fileobj is self._listener:
                self._accept()
            elif item.fd in self._greetings:  # else it was pushed out in this very call
                link = self._advance(self._greetings[item.fd])
                links += [link] if link is not None else []
        return links

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it hung up again before it was accepted
            return
        if len(self._greetings) >= MAX_GREETINGS:
            self._refuse(next(iter(self._greetings.values())), "was pushed out by others")
        connection.setblocking(False)
        self._greetings[connection.fileno()] = _Greeting(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _advance(self, greeting: _Greeting) -> Link | None:
        due = PROOF_BYTES if greeting.transcript else HELLO.size
        try:
            part = greeting.connection.recv(due - len(greeting.found))
            if not part:
                self._refuse(greeting, "hung up during the greeting")
                return None
            greeting.found += part
            if len(greeting.found) < due:
                return None
            message, greeting.found = greeting.found, b""
            return self._answer(greeting, message) if greeting.transcript else self._challenge(greeting, message)
        except BlockingIOError:  # woken for nothing; its next bytes wake the door again
            return None
        except OSError as error:
            self._refuse(greeting, f"broke off the greeting: {error.strerror or error}")
            return None

    def _challenge(self, greeting: _Greeting, hello: bytes) -> None:
        magic, version = HELLO.unpack(hello)[:2]
        if magic != MAGIC:
            self._refuse(greeting, "speaks another protocol")
            return
        challenge = CHALLENGE.pack(MAGIC, PROTOCOL_VERSION, os.urandom(16))
        greeting.transcript = hello + challenge
        greeting.connection.send(challenge + proof(self._key, b"host", greeting.transcript))
        if version != PROTOCOL_VERSION:  # it has read ours by now, and says so
            self._refuse(greeting, f"speaks version {version}, not {PROTOCOL_VERSION}")

    def _answer(self, greeting: _Greeting, said: bytes) -> Link | None:
        if not hmac.compare_digest(said, proof(self._key, b"caller", greeting.transcript)):
            self._refuse(greeting, "does not hold this group's key")
            return None
        _, _, kind, rank, size, up_bytes, down_bytes, _ = HELLO.unpack_from(greeting.transcript)
        fault = self._fault(rank, kind, size, up_bytes, down_bytes)
        answer = ANSWER.pack(-1 if fault else self.rank, fault.encode())
        greeting.connection.send(answer + proof(self._key, b"answer", greeting.transcript + answer))
        if fault:
            self._refuse(greeting, f"says it is rank {rank}: {fault}")
            return None
        return seal_link(self._forget(greeting), rank, self.terms, self._key, greeting.transcript, calls=False)

    def _fault(self, rank: int, kind: int, size: int, up_bytes: int, down_bytes: int) -> str:
        """Why an honest caller does not belong here; empty if it does."""
        terms = self.terms
        if kind != terms.kind:
            return f"its link is of kind {kind}, this one of kind {terms.kind.value} ({terms.kind.name})"
        if size != terms.size:
            return f"its group has {size} ranks, this one {terms.size}"
        if (up_bytes, down_bytes) != (terms.up_bytes, terms.down_bytes):
            return f"its frames hold {up_bytes} and {down_bytes} bytes, here {terms.up_bytes} and {terms.down_bytes}"
        if rank not in self._waits_for:
            return f"rank {rank} is not expected here, or came before"
        return ""

    def _refuse(self, greeting: _Greeting, why: str) -> None:
        self.refusals = [*self.refusals[-7:], f"a caller {why}"]
        self._forget(greeting).close()

    def _forget(self, greeting: _Greeting) -> socket.socket:
        del self._greetings[greeting.connection.fileno()]
        self._selector.unregister(greeting.connection)
        return greeting.connection
