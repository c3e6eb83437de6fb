"""Frames: what was sent arrives, and nothing else is believed. Both ends of a link are in one thread here."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.control.frames import (
    UNSENT_LIMIT,
    Link,
    LinkClosed,
    LinkError,
    Replayed,
    Sealer,
    WrongKey,
    WrongSize,
    digest_of,
    send_all,
)

UP = Sealer(key=b"u" * 32, payload_bytes=24)
DOWN = Sealer(key=b"d" * 32, payload_bytes=40)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        return caller, listener.accept()[0]


@pytest.fixture
def wires():
    caller, host = tcp_pair()
    yield caller, host
    caller.close()
    host.close()


@pytest.fixture
def links(wires):
    caller, host = wires
    return Link(caller, peer=0, outward=UP, inward=DOWN), Link(host, peer=3, outward=DOWN, inward=UP)


def frame(sealer: Sealer, counter: int, payload: bytes) -> bytes:
    return sealer.seal(counter, payload, digest_of(payload))


def test_payloads_arrive_in_order_and_each_direction_has_its_own_size(links):
    caller, host = links
    for n in range(5):
        caller.send(bytes([n]) * 24)
        host.send(bytes([n]) * 40)
    assert [host.receive() for _ in range(5)] == [bytes([n]) * 24 for n in range(5)]
    assert [caller.receive() for _ in range(5)] == [bytes([n]) * 40 for n in range(5)]


def test_one_payload_for_many_links_arrives_on_each():
    pairs = [tcp_pair() for _ in range(3)]
    hosts = [
        Link(host, peer=n, outward=replace(DOWN, key=bytes([n]) * 32), inward=UP) for n, (_, host) in enumerate(pairs)
    ]
    callers = [
        Link(caller, peer=0, outward=UP, inward=replace(DOWN, key=bytes([n]) * 32))
        for n, (caller, _) in enumerate(pairs)
    ]
    send_all(hosts, b"m" * 40)
    assert [caller.receive() for caller in callers] == [b"m" * 40] * 3
    for link in hosts + callers:
        link.close()


def test_a_frame_under_another_key_is_refused(wires, links):
    wires[0].sendall(frame(replace(UP, key=b"x" * 32), 0, bytes(24)))
    with pytest.raises(WrongKey, match="rank 3"):
        links[1].receive()


def test_a_frame_of_the_other_direction_is_refused(wires):
    both = Link(wires[1], peer=3, outward=replace(DOWN, payload_bytes=24), inward=UP)
    wires[0].sendall(frame(replace(DOWN, payload_bytes=24), 0, bytes(24)))
    with pytest.raises(WrongKey):
        both.receive()


def test_a_frame_that_comes_again_is_refused(wires, links):
    repeated = frame(UP, 0, b"a page for rank 3, once ")
    wires[0].sendall(repeated * 2)
    links[1].receive()
    with pytest.raises(Replayed, match="frame 0 came from rank 3 where frame 1 is due"):
        links[1].receive()


def test_a_missing_frame_is_seen(wires, links):
    wires[0].sendall(frame(UP, 1, bytes(24)))
    with pytest.raises(Replayed, match="frame 1 came"):
        links[1].receive()


@pytest.mark.parametrize("size", [0, 23, 25, 2**31, 2**32 - 1])
def test_a_frame_that_says_another_size_is_refused_and_nothing_is_allocated_for_it(wires, links, size):
    wires[0].sendall(size.to_bytes(4, "little") + frame(UP, 0, bytes(24))[4:])
    with pytest.raises(WrongSize, match=f"says {size} bytes, not 24"):
        links[1].receive()


@given(place=st.integers(0, UP.frame_bytes - 1), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_a_frame_with_any_bit_turned_is_refused(place, bit):
    altered = bytearray(frame(UP, 0, os.urandom(24)))
    altered[place] ^= 1 << bit
    with pytest.raises(LinkError):
        UP.open(altered, counter=0, peer=3)


@given(cuts=st.lists(st.integers(1, 60), max_size=12))
@settings(max_examples=40, deadline=None)
def test_frames_are_the_same_however_the_stream_is_cut(cuts):
    caller, host = tcp_pair()
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link = Link(host, peer=3, outward=DOWN, inward=UP)
    sent = [bytes([n]) * 24 for n in range(6)]
    stream = b"".join(frame(UP, n, payload) for n, payload in enumerate(sent))
    found: list[bytes] = []
    for cut in [*cuts, len(stream)]:
        part, stream = stream[:cut], stream[cut:]
        caller.sendall(part)
        found += link.receive_ready()
    caller.close()
    while len(found) < 6:
        found += link.receive_ready()
    link.close()
    assert found == sent


def test_receive_ready_never_waits(links):
    assert links[1].receive_ready() == []
    links[0].send(bytes(24))
    assert links[1].receive() == bytes(24)
    assert links[1].receive_ready() == []


def test_frames_before_the_end_of_the_stream_are_still_read(links):
    caller, host = links
    caller.send(b"1" * 24)
    caller.send(b"2" * 24)
    caller.close()
    assert host.receive_ready() == [b"1" * 24, b"2" * 24]
    with pytest.raises(LinkClosed, match="rank 3 closed its link") as caught:
        host.receive_ready()
    assert caught.value.peer == 3


def test_the_end_of_the_stream_inside_a_frame_is_the_end_of_the_link(wires, links):
    wires[0].sendall(frame(UP, 0, bytes(24))[:30])
    wires[0].close()
    with pytest.raises(LinkClosed):
        links[1].receive()


def test_a_peer_that_does_not_read_costs_a_bounded_number_of_bytes(wires):
    sealer = Sealer(key=b"k" * 32, payload_bytes=4096)
    wires[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    link = Link(wires[0], peer=3, outward=sealer, inward=UP)

    def flood() -> None:
        for _ in range(10_000):
            link.post(bytes(4096))

    with pytest.raises(LinkClosed, match="rank 3 does not read"):
        flood()
    assert len(link._unsent) <= UNSENT_LIMIT + sealer.frame_bytes


def test_what_post_could_not_send_at_once_arrives_in_order(wires):
    sealer = Sealer(key=b"k" * 32, payload_bytes=30_000)
    wires[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    wires[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sender = Link(wires[0], peer=3, outward=sealer, inward=UP)
    reader = Link(wires[1], peer=0, outward=UP, inward=sealer)
    sender.post(b"1" * 30_000)
    sender.post(b"2" * 30_000)
    found: list[bytes] = []
    while len(found) < 2:
        found += reader.receive_ready()
        sender.flush()
    assert found == [b"1" * 30_000, b"2" * 30_000]


def test_finish_waits_until_the_other_end_has_read_everything_and_closed(links):
    caller, host = links
    caller.send(b"last".ljust(24))
    host.send(bytes(40))  # unread: a plain close would reset the connection
    host.close()
    caller.finish(5.0)
    assert caller.fileno() == -1
