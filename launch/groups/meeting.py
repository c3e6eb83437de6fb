"""All ranks meet once at rank 0 before anything else: they prove the group's key, compare what must be equal, and learn
where everything else is. The sockets for that are bound by rank 0 beforehand, so that no port is guessed.

    rank r                                   rank 0
    greeting (runtime.control.handshake)    <->
    its fields                       ->
                                    <-       addresses and a nonce, or who differs, or who is lost
    words, while the group starts   <->      everybody's words

Everything is sealed with the key. Knows links and fields; does not know launchers (see `rendezvous`) nor what the
addresses are for.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from ep.errors import PeerFailed
from runtime.control.door import Door, open_listener
from runtime.control.frames import Link, LinkClosed, LinkError
from runtime.control.handshake import Address, connect

from .fields import Difference, Fields, RanksDiffer, first_difference
from .mail import Mail, meeting_terms

POLL_S = 0.25
LINGER_S = 1.0
"""How long rank 0 waits until those that it refuses have read why."""
ANSWER_S = 5.0
"""How much longer than rank 0 itself the others wait for its answer."""


class Meeting:
    """One rank's seat, while the group starts. `key` is the group's key of this run alone, for every further link."""

    def __init__(
        self,
        *,
        rank: int,
        mails: Mapping[int, Mail],
        key: bytes,
        listeners: Mapping[str, socket.socket],
        addresses: Mapping[str, Address],
        size: int,
    ) -> None:
        self.rank = rank
        self.size = size
        self.key = key
        self.addresses = addresses
        self._mails = mails
        self._listeners = dict(listeners)

    def endpoint(self, name: str) -> socket.socket | Address:
        """On rank 0 the socket that listens, once, to be closed by who takes it; on the others where to call it."""
        return self._listeners.pop(name) if self.rank == 0 else self.addresses[name]

    def gather(self, word: str, *, timeout_s: float) -> list[str]:
        """Everybody's `word`, in rank order; all ranks call it alike. Raises PeerFailed naming who is gone or late."""
        if self.rank != 0:
            self._mails[0].send(word)
            return _receive(self._mails[0], rank=self.rank, timeout_s=timeout_s)
        found = {0: word} | _collect(self._mails, timeout_s=timeout_s)
        words = [found[rank] for rank in range(self.size)]
        _tell(self._mails, words)
        return words

    def close(self) -> None:
        """Leave; sockets that nobody took are closed. Closing twice is the same as once."""
        for mail in self._mails.values():
            mail.link.close()
        for listener in self._listeners.values():
            listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def host_meeting(
    listener: socket.socket,
    *,
    size: int,
    key: bytes,
    fields: Fields,
    endpoints: Sequence[str],
    interface: str,
    timeout_s: float,
    check: Callable[[], None] | None = None,
) -> Meeting:
    """Rank 0's part. `listener` is used up; `endpoints` names the sockets to be bound on `interface`.

    check   called a few times a second while ranks are missing; may raise

    Raises RanksDiffer, PeerFailed naming a rank that did not come or has ended, or what `check` raises. The others that
    came are told.
    """
    mails: dict[int, Mail] = {}
    try:
        rows = _welcome(listener, mails, size=size, key=key, timeout_s=timeout_s, check=check)
    except PeerFailed as lost:
        _refuse(mails, {"lost": [lost.culprit, lost.cause]}, lost)
    difference = first_difference([fields, *(_fields(rows[rank]) for rank in range(1, size))])
    if difference is not None:
        _refuse(mails, {"differs": [difference.field, difference.values]}, RanksDiffer(difference))
    listeners = {name: open_listener(interface) for name in endpoints}
    addresses: dict[str, Address] = {name: bound.getsockname()[:2] for name, bound in listeners.items()}
    nonce = secrets.token_bytes(16)
    _tell(mails, {"addresses": addresses, "nonce": nonce.hex()})
    return Meeting(
        rank=0, size=size, mails=mails, key=_session_key(key, nonce), listeners=listeners, addresses=addresses
    )


def join_meeting(address: Address, *, rank: int, size: int, key: bytes, fields: Fields, timeout_s: float) -> Meeting:
    """The part of every other rank.

    Raises LinkClosed when nobody answers, WrongKey or WrongPeer when this rank does not belong to that group,
    RanksDiffer, or PeerFailed naming a rank that is missing or gone.
    """
    mail = Mail(connect(address, rank=rank, terms=meeting_terms(size), key=key, timeout_s=timeout_s))
    try:
        mail.send(fields)
        answer = _receive(mail, rank=rank, timeout_s=timeout_s + ANSWER_S)
        _raise_refusal(answer, rank)
    except BaseException:
        mail.link.close()
        raise
    addresses: dict[str, Address] = {name: (host, port) for name, (host, port) in answer["addresses"].items()}
    key = _session_key(key, bytes.fromhex(answer["nonce"]))
    return Meeting(rank=rank, size=size, mails={0: mail}, key=key, listeners={}, addresses=addresses)


def _welcome(
    listener: socket.socket,
    mails: dict[int, Mail],
    *,
    size: int,
    key: bytes,
    timeout_s: float,
    check: Callable[[], None] | None,
) -> dict[int, Any]:
    """Everybody's first message. `mails` grows while they come; the listener is closed."""
    missing = set(range(1, size))
    rows: dict[int, Any] = {}
    door = Door(listener, rank=0, terms=meeting_terms(size), key=key, waits_for=missing)
    end = time.monotonic() + timeout_s
    try:
        while len(rows) < size - 1:
            _poll([door, *(mail.link for mail in mails.values())], end)
            for link in door.admit():
                mails[link.peer] = Mail(link)
                missing.discard(link.peer)
            rows |= _read_ready(mails)
            if check is not None:
                check()
            if time.monotonic() > end and len(rows) < size - 1:
                raise _late(sorted(set(range(1, size)) - rows.keys()), timeout_s, door.refusals)
    finally:
        door.close()
    return rows


def _collect(mails: Mapping[int, Mail], *, timeout_s: float) -> dict[int, Any]:
    """One message from each rank."""
    found: dict[int, Any] = {}
    end = time.monotonic() + timeout_s
    while True:
        found |= _read_ready({rank: mail for rank, mail in mails.items() if rank not in found})
        if len(found) == len(mails):
            return found
        if time.monotonic() > end:
            raise _late(sorted(mails.keys() - found.keys()), timeout_s, [])
        _poll([mail.link for rank, mail in mails.items() if rank not in found], end)


def _read_ready(mails: Mapping[int, Mail]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for rank, mail in mails.items():
        try:
            values = mail.ready()
        except LinkError as error:
            raise _gone(rank, error) from error
        if values:
            found[rank] = values[0]
    return found


def _receive(mail: Mail, *, rank: int, timeout_s: float) -> Any:
    """Rank 0's next message."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            for value in mail.ready():
                return value
        except LinkError as error:
            raise _gone(0, error, rank=rank) from error
        _poll([mail.link], end)
    raise PeerFailed(0, f"did not answer within {timeout_s:g} s while the group was starting", rank=rank)


def _poll(readable: Sequence[Door | Link], end: float) -> None:
    """Wait until one of them has something, at most POLL_S."""
    poll = select.poll()
    for item in readable:
        poll.register(item, select.POLLIN)
    poll.poll(1000 * max(0.0, min(POLL_S, end - time.monotonic())))


def _tell(mails: Mapping[int, Mail], value: Any) -> None:
    for rank, mail in mails.items():
        try:
            mail.send(value)
        except LinkClosed as error:
            raise _gone(rank, error) from error


def _refuse(mails: Mapping[int, Mail], answer: Any, error: BaseException) -> NoReturn:
    """Tell all that came, as far as they still listen, and raise `error`."""
    left = dict(mails)
    for rank, mail in mails.items():
        try:
            mail.send(answer)
        except LinkClosed:
            del left[rank]  # it is gone, too; one cause is enough
    # Closing at once, with something of theirs unread, would take the answer back.
    end = time.monotonic() + LINGER_S
    while left and time.monotonic() < end:
        _poll([mail.link for mail in left.values()], end)
        left = {rank: mail for rank, mail in left.items() if not _has_left(mail)}
    for mail in mails.values():
        mail.link.close()
    raise error


def _has_left(mail: Mail) -> bool:
    try:
        mail.ready()
    except LinkError:
        return True
    return False


def _raise_refusal(answer: Any, rank: int) -> None:
    """The inverse of what `host_meeting` refuses with; nothing for a welcome."""
    if "lost" in answer:
        culprit, cause = answer["lost"]
        raise PeerFailed(culprit, cause, rank=rank)
    if "differs" in answer:
        name, values = answer["differs"]
        raise RanksDiffer(Difference(field=name, values=tuple((value, tuple(ranks)) for value, ranks in values)))


def _gone(culprit: int, error: LinkError, *, rank: int = 0) -> PeerFailed:
    return PeerFailed(culprit, f"is gone while the group was starting: {error}", rank=rank)


def _late(ranks: Sequence[int], timeout_s: float, refusals: Sequence[str]) -> PeerFailed:
    others = f"; nor did ranks {', '.join(map(str, ranks[1:]))}" if ranks[1:] else ""
    refused = f"; refused: {', '.join(refusals)}" if refusals else ""
    cause = f"did not come to the meeting of the ranks within {timeout_s:g} s{others}{refused}"
    return PeerFailed(ranks[0], cause, rank=0)


def _session_key(key: bytes, nonce: bytes) -> bytes:
    """A key file may serve many runs; what is sealed in one is worth nothing in another."""
    return hmac.digest(key, b"serried session\0" + nonce, "sha256")


def _fields(row: Any) -> Fields:
    return tuple((name, value) for name, value in row)
