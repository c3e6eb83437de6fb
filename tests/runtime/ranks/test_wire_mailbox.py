"""A rank's end of the wire: never waits in a wave, tells what a service wants, and ends when the front door is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator

from launch.service.front_door import Members
from runtime.loop.ranks import Abort
from runtime.ranks.letters import AbortLetter, EndLetter, LetterError, NewsLetter, WaveLetter
from runtime.ranks.wire import FlushedLetter, FlushLetter, WireError, pack, unpack_at_front
from runtime.ranks.wire_mailbox import WireMailbox
from runtime.ranks.wire_sockets import WireKeys, bind_front, call_front_door, identity_of, rank_of
from runtime.requests.outputs import News

pytestmark = pytest.mark.timeout(120)


class FakeServant:
    """Holds a request, and answers a flush."""

    def __init__(self, mailbox: WireMailbox) -> None:
        self.mailbox, self.turns = mailbox, 0

    def turn(self) -> None:
        self.turns += 1

    def idle_ms(self) -> int | None:
        return None

    def tell_cache(self) -> None:
        pass

    def obey(self, command) -> None:
        assert command == FlushLetter()
        self.mailbox.say(FlushedLetter())

    def unfinished_ids(self) -> tuple[str, ...]:
        return ("held",)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def pair(context: zmq.Context, tmp_path: Path) -> Iterator[tuple[zmq.Socket, WireMailbox]]:
    """A front door's bare socket, and the mailbox of rank 3 that has said something there."""
    address = f"ipc://{tmp_path}/w"
    front = bind_front(context, address, None)
    front.setsockopt(zmq.RCVTIMEO, 10_000)
    mailbox = WireMailbox(call_front_door(context, address, None, rank=3))
    mailbox.attach(FakeServant(mailbox))
    mailbox.say(FlushedLetter())
    assert front.recv_multipart() == [b"rank-3", bytes(pack(FlushedLetter()))]
    yield front, mailbox
    front.close()
    mailbox.close()


def send(front: zmq.Socket, letter) -> None:
    front.send_multipart([identity_of(3), bytes(pack(letter))])


def wait_for(is_so, limit_s: float = 25.0) -> None:
    until = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_letters_wait_for_the_rank_and_it_never_waits_for_them(pair):
    front, mailbox = pair
    assert mailbox.take() == []
    send(front, WaveLetter())
    send(front, AbortLetter("a"))
    send(front, AbortLetter("b"))
    assert mailbox.receive() == WaveLetter()
    found: list = []
    wait_for(lambda: found.extend(mailbox.take()) or len(found) == 2)
    assert found == [Abort(request_id="a"), Abort(request_id="b")]


def test_a_step_s_tokens_are_one_message(pair):
    front, mailbox = pair
    news = NewsLetter(tuple([News(str(n), (n,), None, None, 0, 0) for n in range(64)]))
    mailbox.say(news)
    [name, message] = front.recv_multipart()
    assert (name, unpack_at_front(message)) == (b"rank-3", news)


def test_what_a_service_asks_is_done_between_steps_and_while_idle(pair):
    front, mailbox = pair
    send(front, FlushLetter())
    wait_for(lambda: mailbox.take() == [] and front.poll(5))
    assert unpack_at_front(front.recv_multipart()[1]) == FlushedLetter()
    send(front, FlushLetter())
    send(front, EndLetter())
    assert mailbox.receive() == EndLetter()
    assert unpack_at_front(front.recv_multipart()[1]) == FlushedLetter()


def test_a_wave_in_a_wave_is_an_error_of_the_front_door_s(pair):
    front, mailbox = pair
    send(front, WaveLetter())
    with pytest.raises(LetterError, match="WaveLetter came while a wave runs"):
        wait_for(lambda: mailbox.take() and False)


def test_bytes_that_are_no_letter_end_the_rank_in_words(pair):
    front, mailbox = pair
    front.send_multipart([identity_of(3), b"\x01\xff"])
    with pytest.raises(WireError, match="no letter"):
        mailbox.receive()


def test_when_the_front_door_is_gone_the_rank_aborts_what_it_holds_and_ends(pair):
    front, mailbox = pair
    front.close()
    wait_for(lambda: mailbox.take() == [Abort(request_id="held")])
    assert mailbox.receive() == EndLetter()
    assert mailbox.is_orphaned
    mailbox.say(FlushedLetter())  # lost, and no reason to wait


def test_an_end_that_was_said_is_no_loss(pair):
    front, mailbox = pair
    send(front, EndLetter())
    front.close(1000)
    wait_for(lambda: mailbox._events.poll(10))  # the news that it left is here, too
    assert mailbox.receive() == EndLetter()
    assert not mailbox.is_orphaned


def test_an_idle_rank_wakes_up_when_the_front_door_goes(pair):
    front, mailbox = pair
    found: list = []
    thread = threading.Thread(target=lambda: found.append(mailbox.receive()))
    thread.start()
    front.close()
    thread.join(20.0)
    assert found == [EndLetter()]


@pytest.mark.parametrize(
    ("name", "rank"), [(b"rank-0", 0), (b"rank-12", 12), (b"rank-", None), (b"x", None), (b"rank--1", None)]
)
def test_a_socket_s_name_tells_its_rank(name: bytes, rank: int | None):
    assert rank_of(name) == rank


@pytest.mark.parametrize("stranger", ["same key", "other key", "no key"])
def test_between_nodes_only_who_has_the_group_s_key_is_heard(context: zmq.Context, stranger: str):
    keys = WireKeys.of(b"k" * 32)
    assert keys == WireKeys.of(b"k" * 32)
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(credentials_provider=Members(keys))
    front = bind_front(context, "tcp://127.0.0.1:*", keys)
    address = front.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    others = WireKeys.of(b"x" * 32)
    theirs = {"same key": keys, "no key": None}.get(stranger, WireKeys(
        front_secret=keys.front_secret, front_public=keys.front_public, rank_secret=others.rank_secret,
        rank_public=others.rank_public))  # fmt: skip
    rank = call_front_door(context, address, theirs, rank=1)
    try:
        rank.send(pack(FlushedLetter()))
        heard = front.poll(20_000 if stranger == "same key" else 300)
        assert bool(heard) is (stranger == "same key")
    finally:
        rank.close()
        front.close()
        guard.stop()


def test_a_message_past_the_limit_ends_the_connection_that_brings_it(context: zmq.Context, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("runtime.ranks.wire_sockets.MAX_MESSAGE", 1000)
    address = f"ipc://{tmp_path}/w"
    front = bind_front(context, address, None)
    rank = call_front_door(context, address, None, rank=1)
    rank.send(bytes(1001))
    assert not front.poll(200)
    other = call_front_door(context, address, None, rank=2)
    other.send(bytes(1000))
    assert front.poll(20_000)
    for socket in (front, rank, other):
        socket.close()
