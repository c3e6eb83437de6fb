"""The message sockets between a front door and the ranks: a ROUTER there, a DEALER in each rank; ZeroMQ.

    on one node        ipc://FOLDER/ranks in a folder that only this user may enter
    several nodes      tcp:// on the named interface, CURVE both ways: keys that follow from the group's secret, so that
                       whoever has it not is neither heard nor told anything

A rank never waits for the front door: its socket takes what is sent, without a bound of its own, for what a front door
lets in bounds it. Knows addresses and keys; does not know letters.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from .wire import MAX_MESSAGE

HEARTBEAT_MS, SILENCE_MS = 1000, 6000
"""Between nodes: how often a connection shows that it lives, and after how much silence it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireKeys:
    """CURVE keys of one group in one run, 40 letters each; all ranks have the same pair."""

    front_secret: bytes
    front_public: bytes
    rank_secret: bytes
    rank_public: bytes

    @classmethod
    def of(cls, key: bytes) -> WireKeys:
        """Those that follow from a key of this run alone."""
        front, rank = _secret(key, b"serried front door"), _secret(key, b"serried rank")
        return cls(
            front_secret=front,
            front_public=zmq.curve_public(front),
            rank_secret=rank,
            rank_public=zmq.curve_public(rank),
        )


def _secret(key: bytes, name: bytes) -> bytes:
    return z85.encode(hmac.digest(key, name, "sha256"))


def identity_of(rank: int) -> bytes:
    """What a rank's socket is called at the front door."""
    return b"rank-%d" % rank


def rank_of(identity: bytes) -> int | None:
    """The rank of a socket's name; None for one that is no rank's."""
    number = identity.removeprefix(b"rank-")
    return int(number) if number != identity and number.isdigit() and len(number) <= 6 else None


def bind_front(context: zmq.Context[zmq.Socket[bytes]], address: str, keys: WireKeys | None) -> zmq.Socket[bytes]:
    """The front door's socket; `address` may end in ":*" for any port (see LAST_ENDPOINT). Raises zmq.ZMQError.

    With keys, an authenticator that knows `rank_public` must be running in the context (see `zmq.auth`).
    """
    socket = context.socket(zmq.ROUTER)
    _bound(socket, over_network=address.startswith("tcp"))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a letter to a rank that is not there is an error, not silence
    if keys is not None:
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = keys.front_secret, keys.front_public
    socket.bind(address)
    return socket


def call_front_door(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: WireKeys | None, *, rank: int | None
) -> zmq.Socket[bytes]:
    """A rank's socket; with rank None a nameless one, for last words. Returns at once."""
    socket = context.socket(zmq.DEALER)
    _bound(socket, over_network=address.startswith("tcp"))
    if rank is not None:
        socket.setsockopt(zmq.ROUTING_ID, identity_of(rank))
    if keys is not None:
        socket.curve_serverkey = keys.front_public
        socket.curve_secretkey, socket.curve_publickey = keys.rank_secret, keys.rank_public
    socket.connect(address)
    return socket


def _bound(socket: zmq.Socket[bytes], *, over_network: bool) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if over_network:
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether one can be taken now, without waiting."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN))
