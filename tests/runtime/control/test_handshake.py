"""Greetings: who holds the key and belongs here gets a link, everybody else a reason, and nobody is held up."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace

import pytest

from runtime.control.door import Door, host_of, open_listener
from runtime.control.frames import Link, LinkClosed, LinkError, WrongKey, WrongPeer
from runtime.control.handshake import HELLO, MAGIC, PROTOCOL_VERSION, LinkKind, Terms, connect

KEY = bytes(range(32))
TERMS = Terms(kind=LinkKind.VOTE, size=4, up_bytes=16, down_bytes=64)


@pytest.fixture
def door():
    door = Door(open_listener("lo"), rank=0, terms=TERMS, key=KEY, waits_for={1, 2, 3})
    door.address = door._listener.getsockname()
    yield door
    door.close()


def call(address, *, rank=3, terms=TERMS, key=KEY) -> tuple[threading.Thread, list]:
    """Connect in a thread; its link or its error arrives in the list."""
    found: list = []

    def run() -> None:
        try:
            found.append(connect(address, rank=rank, terms=terms, key=key, timeout_s=30))
        except LinkError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def serve(door: Door, *threads: threading.Thread) -> list[Link]:
    links: list[Link] = []
    while any(thread.is_alive() for thread in threads):
        links += door.admit(0.01)
    return links


def meet(door: Door, **caller) -> tuple[list[Link], Link | LinkError]:
    thread, found = call(door.address, **caller)
    return serve(door, thread), found[0]


def test_both_get_a_link_and_know_each_other(door):
    [hosts_link], callers_link = meet(door)
    assert (hosts_link.peer, callers_link.peer) == (3, 0)
    callers_link.send(b"u" * 16)
    hosts_link.send(b"d" * 64)
    assert (hosts_link.receive(), callers_link.receive()) == (b"u" * 16, b"d" * 64)
    hosts_link.close()
    callers_link.close()


def test_a_caller_with_another_key_is_refused_and_says_so(door):
    links, error = meet(door, key=b"k" * 32)
    assert links == []
    assert isinstance(error, WrongKey)
    assert "does not hold this group's key" in str(error)


def test_a_caller_without_the_key_cannot_answer_for_one_who_has_it(door):
    """It repeats what a host once said to somebody else; the nonces differ."""
    stranger = socket.create_connection(door.address)
    stranger.sendall(HELLO.pack(MAGIC, PROTOCOL_VERSION, 0, 3, 4, 16, 64, bytes(16)))
    wait_for(door, lambda: any(greeting.transcript for greeting in door._greetings.values()))
    heard = stranger.recv(1024, socket.MSG_PEEK)
    stranger.sendall(heard[-32:])
    assert wait_for(door, lambda: door.refusals) == ["a caller does not hold this group's key"]
    assert stranger.recv(1024)
    assert stranger.recv(1) == b""
    stranger.close()


def wait_for(door: Door, ready):
    end = time.monotonic() + 30
    while not ready() and time.monotonic() < end:
        assert door.admit(0.01) == []
    return ready()


@pytest.mark.parametrize(
    ("caller", "reason"),
    [
        ({"rank": 4}, "rank 4 is not expected here"),
        ({"rank": 0}, "rank 0 is not expected here"),
        ({"terms": replace(TERMS, size=8)}, "its group has 8 ranks, this one 4"),
        ({"terms": replace(TERMS, up_bytes=24)}, "its frames hold 24 and 64 bytes, here 16 and 64"),
        ({"terms": replace(TERMS, kind=LinkKind.PULSE)}, "its link is of kind 2, this one of kind 0"),
    ],
)
def test_a_holder_of_the_key_who_does_not_belong_here_is_told_why(door, caller, reason):
    links, error = meet(door, **caller)
    assert links == []
    assert isinstance(error, WrongPeer)
    assert reason in str(error)
    assert reason in door.refusals[0]


def test_a_rank_that_comes_twice_is_refused_the_second_time(door):
    [link], first = meet(door)
    door._waits_for.discard(3)
    _, error = meet(door)
    assert isinstance(error, WrongPeer)
    assert "came before" in str(error)
    link.close()
    first.close()


def test_another_version_is_refused_in_words_on_both_sides(door):
    caller = socket.create_connection(door.address)
    caller.sendall(HELLO.pack(MAGIC, 9, 0, 3, 4, 16, 64, bytes(16)))
    assert wait_for(door, lambda: door.refusals) == [f"a caller speaks version 9, not {PROTOCOL_VERSION}"]
    assert caller.recv(6) == MAGIC + PROTOCOL_VERSION.to_bytes(2, "little")
    caller.close()


def test_a_host_of_another_version_is_refused_in_words():
    with open_listener("lo") as listener:
        thread, found = call(listener.getsockname())
        host = listener.accept()[0]
        host.sendall(MAGIC + (7).to_bytes(2, "little") + bytes(48))
        thread.join()
        host.close()
    assert "the host speaks version 7" in str(found[0])


def test_a_host_without_the_key_is_refused():
    with open_listener("lo") as listener:
        thread, found = call(listener.getsockname())
        host = listener.accept()[0]
        host.sendall(MAGIC + PROTOCOL_VERSION.to_bytes(2, "little") + os.urandom(48))
        thread.join()
        host.close()
    assert isinstance(found[0], WrongKey)


def test_noise_from_strangers_costs_nobody_the_greeting(door):
    strangers = [socket.create_connection(door.address) for _ in range(20)]
    for number, stranger in enumerate(strangers):
        stranger.sendall(os.urandom(number * 7))  # some stall, some talk nonsense
    [link], mine = meet(door)
    assert link.peer == 3
    link.close()
    mine.close()
    for stranger in strangers:
        stranger.close()


def test_a_caller_that_stalls_is_dropped(door, monkeypatch):
    monkeypatch.setattr("runtime.control.door.GREETING_S", 0.05)
    staller = socket.create_connection(door.address)
    staller.sendall(MAGIC)
    assert wait_for(door, lambda: door.refusals) == ["a caller took too long over its greeting"]
    staller.close()


def test_when_too_many_knock_the_oldest_makes_room(door, monkeypatch):
    monkeypatch.setattr("runtime.control.door.MAX_GREETINGS", 3)
    strangers = [socket.create_connection(door.address) for _ in range(5)]
    assert len(wait_for(door, lambda: door.refusals if len(door.refusals) == 2 else [])) == 2
    [link], mine = meet(door)
    link.close()
    mine.close()
    for stranger in strangers:
        stranger.close()


def test_nobody_at_the_address_is_said_at_once():
    with open_listener("lo") as listener:
        address = listener.getsockname()
    with pytest.raises(LinkClosed, match=f"nobody answers at 127.0.0.1:{address[1]}"):
        connect(address, rank=1, terms=TERMS, key=KEY)


def test_a_host_that_never_answers_is_given_up():
    with open_listener("lo") as listener, pytest.raises(LinkClosed, match="broke off the greeting"):
        connect(listener.getsockname(), rank=1, terms=TERMS, key=KEY, timeout_s=0.1)


def test_a_short_key_is_refused():
    with pytest.raises(ValueError, match="key has 3 bytes; it must have at least 16"):
        connect(("127.0.0.1", 1), rank=1, terms=TERMS, key=b"abc")


def test_listeners_stand_on_one_interface():
    with open_listener("lo") as named, open_listener("127.0.0.1") as by_address:
        assert named.getsockname()[0] == by_address.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_an_address_that_means_every_interface_is_refused(everywhere):
    with pytest.raises(ValueError, match="every interface"):
        open_listener(everywhere)


def test_an_interface_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ValueError, match=r"interface = 'eth77'.*this machine has .*lo"):
        host_of("eth77")
