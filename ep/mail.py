"""A transport over anything that carries bytes between two processes in order: gloo's and MPI's point to point.

    start     a letter to every other rank; a parcel with what does not fit into it. Nothing is waited for
    wait      the letters of every other rank, those of earlier exchanges first; compare; then the parcels

What is sent is a copy, and nobody waits until it has gone: a peer that failed may never take it. The peers' letters
tell what they have, and that is forgotten.

Receives of letters are posted ahead. So a small message takes one way, not a handshake, and a rank that fails can tell
everybody before it goes; who hears it passes it on, and all name the same culprit. A peer that vanishes without a word
is noticed only if the wire notices: gloo's does, MPI's over shared memory does not. Nothing is received for a parcel
before the letters have been compared, so what does not fit together never meets.

Knows no tokens and no sockets. One thread at a time may use a transport.

Legend: R ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from .envelope import HEADER_BYTES, NOWHERE, Header, Sort, fault_of, find_fault, form_of, last_words, pack, unpack
from .errors import PeerFailed
from .posts import Fault
from .transport import Pending, Tag, assert_fit
from .wire import Bytes, Channel, Inbox, Lost, Outbox, Wire

WINDOW = 4
"""Letters that every peer may send before this rank reads any."""
LETTER_BYTES = 64 * 1024
"""The longest letter. Memory is touched only as far as letters are long."""
WORDS_BYTES = 2000
"""Most bytes of an explanation."""
LINGER_S = 2.0
"""How long an end waits at most for the ends of the others: what is on its way to them must not be cut off."""
LAST_WORDS_S = 0.5
"""How long a failing rank waits at most until its explanation has gone."""


@dataclass(slots=True, eq=False)
class _Exchange:
    """One exchange from start to wait. `outgoing` and `incoming` are parts of the caller's tensors, by rank."""

    number: int
    tag: Tag
    form: bytes
    value: Tensor
    outgoing: list[Bytes]
    incoming: list[Bytes]

    def header(self, payload: Bytes, num_read: int = 0) -> Header:
        """Of a letter with (the beginning of) this payload, sent or expected."""
        return Header(
            sort=Sort.ROWS,
            number=self.number,
            num_bytes=payload.size,
            tag=self.tag,
            form=self.form,
            num_read=num_read,
        )


class MailTransport:
    """One rank's end of a group that is connected by `wire`; see `transport.Transport`. Tensors of the CPU only."""

    def __init__(self, wire: Wire, *, letter_bytes: int = LETTER_BYTES) -> None:
        assert letter_bytes >= HEADER_BYTES + WORDS_BYTES, (letter_bytes, HEADER_BYTES, WORDS_BYTES)
        self.rank = wire.rank
        self.size = wire.size
        self._wire = wire
        self._room = letter_bytes - HEADER_BYTES
        self._peers = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        self._outboxes = {peer: Outbox(wire, peer) for peer in self._peers}
        self._inboxes = {peer: Inbox(wire, peer) for peer in reversed(self._peers)}  # first who writes to us first
        for inbox in self._inboxes.values():
            for letter in np.empty((WINDOW, letter_bytes), np.uint8):
                inbox.post(letter)
        self._open: dict[int, _Exchange] = {}
        self._num_started = 0
        self._num_received = 0
        self._fault: Fault | None = None
        self._closed = False

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        assert_fit(recv, send, recv_splits=recv_splits, send_splits=send_splits, size=self.size)
        form = form_of("all_to_all", send.dtype, send.shape[1:])
        return self._start(tag, form, recv, _parts(send, send_splits), _parts(recv, recv_splits))

    def all_gather(self, row: Tensor, *, tag: Tag) -> Pending[Tensor]:
        with torch.inference_mode(False):
            rows = torch.empty(self.size, *row.shape, dtype=row.dtype)
        form = form_of("all_gather", row.dtype, row.shape)
        return self._start(tag, form, rows, [_bytes(row)] * self.size, _parts(rows, (1,) * self.size))

    def abort(self, cause: BaseException) -> None:
        if not self._closed:
            self._break(partial(PeerFailed, self.rank, f"raised {type(cause).__name__}: {cause}"))
            self._sever()

    def close(self) -> None:
        if not self._closed:
            if self._fault is None:
                self._tell(Sort.ENDED, self.rank, "")
                self._await_the_ends()
            self._sever()

    def _start(
        self, tag: Tag, form: bytes, value: Tensor, outgoing: list[Bytes], incoming: list[Bytes]
    ) -> Pending[Tensor]:
        self._raise_if_broken(tag)
        assert not self._closed, f"rank {self.rank} starts {tag} after close()"
        exchange = _Exchange(self._num_started, tag, form, value, outgoing, incoming)
        self._open[exchange.number] = exchange
        self._num_started += 1
        incoming[self.rank][:] = outgoing[self.rank]
        try:
            self._send(exchange)
        except Lost as lost:
            self._give_up(lost, tag)
        return Pending(partial(self._finish, exchange))

    def _finish(self, exchange: _Exchange) -> Tensor:
        self._raise_if_broken(exchange.tag)
        try:
            while self._num_received <= exchange.number:
                self._receive(self._open.pop(self._num_received))
                self._num_received += 1
        except Lost as lost:
            self._give_up(lost, exchange.tag)
        return exchange.value

    # Rows.

    def _send(self, exchange: _Exchange) -> None:
        """Letters to all, then parcels."""
        for peer, outbox in self._outboxes.items():
            payload = exchange.outgoing[peer]
            letter = _letter(exchange.header(payload, self._num_received), payload[: self._room])
            outbox.send(exchange.number, letter, Channel.LETTERS)
        for peer, outbox in self._outboxes.items():
            rest = exchange.outgoing[peer][self._room :]
            if rest.size:
                outbox.send(exchange.number, rest.copy(), Channel.PARCELS)

    def _receive(self, exchange: _Exchange) -> None:
        expected = [exchange.header(part) for part in exchange.incoming]
        heard = list(expected)
        for peer, inbox in self._inboxes.items():
            letter = inbox.take()
            heard[peer] = self._read(peer, letter, exchange.tag)
            if heard[peer] == expected[peer]:
                part = exchange.incoming[peer][: self._room]
                part[:] = letter[HEADER_BYTES : HEADER_BYTES + part.size]
            inbox.post(letter)
            self._outboxes[peer].forget(heard[peer].num_read)
        fault = find_fault(heard, [part.size for part in exchange.incoming], rank=self.rank)
        if fault is not None:
            self._break_and_raise(fault, exchange.tag)
        assert heard == expected, (heard, expected)
        self._receive_parcels(exchange)

    def _receive_parcels(self, exchange: _Exchange) -> None:
        rests = {peer: exchange.incoming[peer][self._room :] for peer in self._inboxes}
        works = [self._wire.receive(peer, rest, Channel.PARCELS) for peer, rest in rests.items() if rest.size]
        for work in works:
            work.wait()

    def _read(self, peer: int, letter: Bytes, needs: Tag) -> Header:
        """The header of a letter of rows; any other letter ends this rank."""
        try:
            header = unpack(letter.data)
        except ValueError as error:
            self._break_and_raise(partial(PeerFailed, peer, f"sends what is no letter: {error}"), needs)
        if header.sort is not Sort.ROWS:
            self._break_and_raise(self._meaning(header, letter, sender=peer, needs=needs), needs)
        return header

    # Ends.

    def _raise_if_broken(self, tag: Tag) -> None:
        if self._fault is not None:
            raise self._fault(rank=self.rank, step=tag.step)

    def _break_and_raise(self, fault: Fault, tag: Tag) -> NoReturn:
        self._break(fault)
        raise fault(rank=self.rank, step=tag.step)

    def _break(self, fault: Fault) -> None:
        """The first cause counts; everybody is told."""
        if self._fault is None:
            self._fault = fault
            self._tell(*last_words(fault(), rank=self.rank))

    def _give_up(self, lost: Lost, tag: Tag) -> NoReturn:
        """The peer is gone. If it said why, that counts."""
        said = self._find_last_letter(lost.peer, tag)
        self._break_and_raise(said or partial(PeerFailed, lost.peer, f"does not answer: {lost}"), tag)

    def _find_last_letter(self, peer: int, needs: Tag, *, until: float = 0.0) -> Fault | None:
        """What the peer's last letter means, if it is among the letters that are there or come until then."""
        inbox = self._inboxes[peer]
        with suppress(Lost):  # it said nothing
            while inbox.posted:
                letter = inbox.take(max(0.0, until - time.monotonic()))
                header = unpack(letter.data)
                if header.sort is not Sort.ROWS:
                    return self._meaning(header, letter, sender=peer, needs=needs)
        return None

    def _meaning(self, header: Header, letter: Bytes, *, sender: int, needs: Tag) -> Fault:
        words = bytes(letter[HEADER_BYTES : HEADER_BYTES + header.num_bytes]).decode("utf-8", errors="replace")
        return fault_of(header, words, sender=sender, reader=self.rank, needs=needs)

    def _tell(self, sort: Sort, culprit: int, words: str) -> None:
        """To all, in this rank's last letter."""
        payload = np.frombuffer(words.encode()[:WORDS_BYTES], np.uint8)
        header = Header(sort=sort, culprit=culprit, number=self._num_started, num_bytes=payload.size)
        for outbox in self._outboxes.values():
            with suppress(Lost):  # who is gone needs no telling
                outbox.send(self._num_started, _letter(header, payload), Channel.LETTERS)

    def _await_the_ends(self) -> None:
        deadline = time.monotonic() + LINGER_S
        for peer in self._inboxes:
            self._find_last_letter(peer, NOWHERE, until=deadline)

    def _sever(self) -> None:
        self._closed = True
        deadline = time.monotonic() + LAST_WORDS_S
        for outbox in self._outboxes.values():
            with suppress(Lost):  # who is gone needs no telling
                outbox.flush(max(0.0, deadline - time.monotonic()))
        self._wire.sever()


def _bytes(rows: Tensor) -> Bytes:
    """The tensor's own memory, flat."""
    assert rows.device.type == "cpu", rows.device
    assert rows.is_contiguous(), rows.stride()
    return rows.detach().reshape(-1).view(torch.uint8).numpy()


def _parts(rows: Tensor, splits: Sequence[int]) -> list[Bytes]:
    """rows' memory cut by counts of rows: splits [2, 0, 1] -> rows 0-1, nothing, row 2."""
    flat = _bytes(rows)
    width = rows.dtype.itemsize * rows.shape[1:].numel()
    return [flat[width * (end - count) : width * end] for count, end in zip(splits, accumulate(splits), strict=True)]


def _letter(header: Header, payload: Bytes) -> Bytes:
    letter = np.empty(HEADER_BYTES + payload.size, np.uint8)
    letter[:HEADER_BYTES] = np.frombuffer(pack(header), np.uint8)
    letter[HEADER_BYTES:] = payload
    return letter
