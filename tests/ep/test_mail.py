"""Letters and parcels over a wire of this process's memory, which is as strict as gloo and as silent as MPI."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ep import ExchangeMismatch, Kind, PeerFailed, Tag, TagMismatch, TransportError, mail
from ep.conformance import check_transport
from ep.envelope import HEADER_BYTES, Header, Sort, pack
from ep.mail import WORDS_BYTES, MailTransport
from ep.wire import Channel, Lost

LIMIT_S = 20.0
SHORTEST = HEADER_BYTES + WORDS_BYTES


class Item:
    """A send or a receive until both have met."""

    def __init__(self, office, peer, data):
        self.office, self.peer, self.data = office, peer, data
        self.done = self.lost = False

    def wait(self, limit_s=None):
        limit_s = LIMIT_S if limit_s is None else limit_s
        with self.office.changed:
            if not self.office.changed.wait_for(lambda: self.done or self.lost, limit_s) or not self.done:
                raise Lost(self.peer, "cut" if self.lost else f"nothing within {limit_s} s")


class Office:
    """All wires of a group. notices: a rank that severs its wires is noticed by the others, as with sockets. What is
    sent from a to b while (a, b) is in `drop` does not arrive."""

    def __init__(self, size, *, notices=False):
        self.size, self.notices, self.drop = size, notices, set()
        self.changed = threading.Condition()
        self.sends = defaultdict(deque)
        self.receives = defaultdict(deque)
        self.too_long = []

    def put(self, item, mine, theirs, key, meet):
        with self.changed:
            if theirs[key]:
                meet(item, theirs[key].popleft())
                self.changed.notify_all()
            else:
                mine[key].append(item)
        return item

    def meet(self, send, receive):
        if len(send.data) > len(receive.data):
            self.too_long.append((send.peer, len(send.data), len(receive.data)))
        receive.data[: len(send.data)] = send.data[: len(receive.data)]
        send.done = receive.done = True

    def cut(self, rank):
        with self.changed:
            for (source, destination, _), items in (*self.sends.items(), *self.receives.items()):
                if rank in (source, destination):
                    for item in items:
                        item.lost = self.notices or item.peer != rank
                    items.clear()
            self.changed.notify_all()


class MemoryWire:
    def __init__(self, office, rank):
        self.office, self.rank, self.size = office, rank, office.size

    def send(self, peer, data, channel):
        item = Item(self.office, peer, data)
        if (self.rank, peer) in self.office.drop:
            return item
        key = (self.rank, peer, channel)
        return self.office.put(item, self.office.sends, self.office.receives, key, self.office.meet)

    def receive(self, peer, into, channel):
        item = Item(self.office, peer, into)
        key = (peer, self.rank, channel)
        return self.office.put(
            item, self.office.receives, self.office.sends, key, lambda receive, send: self.office.meet(send, receive)
        )

    def sever(self):
        self.office.cut(self.rank)


def run_group(office, fn, *, letter_bytes=SHORTEST):
    """[what fn(transport) returns or raises] by rank; transports are closed or aborted. No receive was too short."""

    def be(rank):
        transport = MailTransport(MemoryWire(office, rank), letter_bytes=letter_bytes)
        try:
            value = fn(transport)
        except Exception as error:
            transport.abort(error)
            return error
        transport.close()
        return value

    with ThreadPoolExecutor(office.size) as pool:
        found = list(pool.map(be, range(office.size), timeout=LIMIT_S))
    assert office.too_long == []
    return found


def gather(transport, step, *, length=3):
    row = torch.full((length,), transport.rank + step)
    return transport.all_gather(row, tag=Tag(step, 0, 0, 0, Kind.CHECK))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(mail, "LINGER_S", 0.3)
    monkeypatch.setattr(mail, "LAST_WORDS_S", 0.1)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("letter_bytes", [SHORTEST, 64 * 1024])
def test_mail_passes_what_any_transport_must(size, letter_bytes):
    """With the shortest letters some rows go in parcels."""
    assert run_group(Office(size), check_transport, letter_bytes=letter_bytes) == [None] * size


def test_more_exchanges_than_the_window_may_be_in_flight():
    def check(transport):
        started = [gather(transport, step, length=1000 * (step % 2) + 1) for step in range(3 * mail.WINDOW)]
        for step, pending in reversed(list(enumerate(started))):
            assert pending.wait()[:, 0].tolist() == [step, step + 1, step + 2]

    assert run_group(Office(3), check) == [None] * 3


def test_what_was_sent_may_change_as_soon_as_its_owner_has_waited():
    """Also when the peer reads it much later."""
    late = threading.Event()

    def check(transport):
        row = torch.full((1000,), transport.rank)
        pending = transport.all_gather(row, tag=Tag(0, 0, 0, 0, Kind.CHECK))
        if transport.rank == 1:
            late.wait(LIMIT_S)
        found = pending.wait()
        row.fill_(-1)
        late.set()
        return found[:, -1].tolist()

    assert run_group(Office(2), check) == [[0, 1]] * 2


def test_what_the_others_have_is_forgotten():
    def check(transport):
        for step in range(50):
            gather(transport, step, length=1000).wait()
        return max(len(outbox.sent) for outbox in transport._outboxes.values())

    assert max(run_group(Office(3), check)) <= 2 * 2, "a letter and a parcel of this exchange and of the one before"


def culprits(found):
    return [getattr(error, "culprit", None) for error in found]


def test_a_rank_out_of_step_is_named_by_all_even_when_it_sends_far_more():
    def check(transport):
        gather(transport, 5 if transport.rank == 1 else 0, length=100_000 if transport.rank == 1 else 1).wait()

    found = run_group(Office(3), check)
    assert culprits(found) == [1, 1, 1]
    assert {type(error) for error in found} <= {TagMismatch, PeerFailed}


def test_a_parcel_of_another_length_never_meets_a_receive():
    def check(transport):
        counts = [1000, 1000] if transport.rank == 0 else [1000 + 500, 1000]
        send, recv = torch.zeros(sum(counts), 1), torch.zeros(2000, 1)
        splits = {"recv_splits": [1000, 1000], "send_splits": counts}
        transport.all_to_all(recv, send, tag=Tag(0, 0, 0, 0, Kind.CHECK), **splits).wait()
        gather(transport, 1).wait()

    found = run_group(Office(2), check)
    assert culprits(found) == [1, 1]
    assert {type(error) for error in found} == {ExchangeMismatch}


@pytest.mark.parametrize("notices", [False, True])
def test_the_first_to_raise_is_named_by_all_others(notices):
    def check(transport):
        gather(transport, 0).wait()
        if transport.rank == 2:
            raise ValueError("planted")
        gather(transport, 1).wait()

    *others, culprit = run_group(Office(3, notices=notices), check)
    assert isinstance(culprit, ValueError)
    for rank, error in enumerate(others):
        assert isinstance(error, PeerFailed)
        assert str(error) == f"rank {rank}, step 1: rank 2 raised ValueError: planted"


def test_who_hears_of_a_failure_passes_it_on():
    """Rank 1 hears nothing of rank 2; it waits for rank 0, which does."""
    office = Office(3)

    def check(transport):
        gather(transport, 0).wait()
        if transport.rank == 2:
            office.drop.add((2, 1))
            raise ValueError("planted")
        if transport.rank == 0:
            transport._read(2, transport._inboxes[2].take(), Tag(1, 0, 0, 0, Kind.CHECK))
        gather(transport, 1).wait()

    for rank, error in enumerate(run_group(office, check)[:2]):
        assert str(error) == f"rank {rank}, step 1: rank 2 raised ValueError: planted"


def test_a_broken_transport_stays_broken_and_hands_nothing_out():
    def check(transport):
        complete = gather(transport, 0)
        later = gather(transport, 1)
        if transport.rank == 1:
            raise ValueError("planted")
        with pytest.raises(PeerFailed):
            gather(transport, 2).wait()
        for call in (complete.wait, later.wait, lambda: gather(transport, 3)):
            with pytest.raises(PeerFailed, match="rank 1 raised"):
                call()
        return "seen"

    assert run_group(Office(2), check)[0] == "seen"


def test_a_peer_that_is_gone_without_a_word_is_named():
    def check(transport):
        if transport.rank == 1:
            transport._wire.sever()
            return
        gather(transport, 0).wait()

    found, _ = run_group(Office(2, notices=True), check)
    assert isinstance(found, PeerFailed)
    assert "rank 1 does not answer: cut" in str(found)


def test_what_is_no_letter_ends_the_rank_and_is_shown():
    def check(transport):
        if transport.rank == 1:
            transport._wire.send(0, np.frombuffer(b"GET /".ljust(HEADER_BYTES), np.uint8), Channel.LETTERS)
            return
        gather(transport, 0).wait()

    found, _ = run_group(Office(2), check)
    assert isinstance(found, PeerFailed)
    assert "rank 1 sends what is no letter: a letter begins with b'GET /" in str(found)


def test_an_explanation_that_is_too_long_is_cut():
    def check(transport):
        if transport.rank == 1:
            raise ValueError("\u00e4" * 3 * WORDS_BYTES)
        gather(transport, 0).wait()

    found, _ = run_group(Office(2), check)
    assert found.cause.startswith("raised ValueError: \u00e4\u00e4")
    assert len(found.cause.encode()) <= WORDS_BYTES + 2


def test_an_end_waits_for_the_others_but_not_for_ever():
    closed = threading.Event()

    def check(transport):
        gather(transport, 0).wait()
        if transport.rank == 1:
            return closed.wait(LIMIT_S / 2)
        begin = time.monotonic()
        transport.close()
        took_s = time.monotonic() - begin
        closed.set()
        transport.close()
        return took_s

    took_s, was_closed = run_group(Office(2), check)
    assert was_closed, "rank 0 waits for a rank that waits for it"
    assert took_s > 0.25


def test_a_rank_that_ended_is_named_by_who_needs_it():
    def check(transport):
        gather(transport, 0).wait()
        if transport.rank == 0:
            gather(transport, 1).wait()

    found, _ = run_group(Office(2), check)
    assert "rank 1 ended after 1 exchanges; rank 0 needs it in CHECK(step 1" in str(found)


def test_a_call_after_the_end_is_our_own_mistake():
    def check(transport):
        transport.close()
        with pytest.raises(AssertionError, match=r"rank 0 starts .* after close"):
            gather(transport, 0)

    assert run_group(Office(1), check) == [None]


def test_tensors_elsewhere_are_our_own_mistake():
    def check(transport):
        with pytest.raises(AssertionError, match="meta"):
            transport.all_gather(torch.empty(3, device="meta"), tag=Tag(0, 0, 0, 0, Kind.CHECK))

    assert run_group(Office(1), check) == [None]


def test_the_wire_of_these_tests_sees_a_receive_that_is_too_short():
    office = Office(2)
    MemoryWire(office, 0).receive(1, np.empty(3, np.uint8), Channel.PARCELS)
    MemoryWire(office, 1).send(0, np.empty(4, np.uint8), Channel.PARCELS)
    assert office.too_long == [(0, 4, 3)]


def test_a_header_alone_is_a_letter():
    header = Header(sort=Sort.ENDED, number=0, num_bytes=0)
    assert len(pack(header)) == HEADER_BYTES < SHORTEST
    assert issubclass(PeerFailed, TransportError)
