"""Ranks that are threads of the test meet over real sockets."""

import select
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from ep import PeerFailed
from launch.groups.fields import RanksDiffer
from launch.groups.mail import FRAME_BYTES, MAX_MESSAGE, Mail, meeting_terms
from launch.groups.meeting import Meeting, host_meeting, join_meeting
from runtime.control.door import open_listener
from runtime.control.frames import Link, LinkClosed, WrongKey, WrongPeer, WrongSize
from runtime.control.handshake import connect

KEY = b"k" * 32
SAME = (("--seed", "0"),)


class Party:
    """Ranks of one group, each in a thread; `listener` is rank 0's."""

    def __init__(self, size: int, *, timeout_s: float = 30.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.listener = open_listener("lo")
        self.address = self.listener.getsockname()[:2]
        self._pool = ThreadPoolExecutor(max_workers=size + 1)
        self.meetings: list[Meeting] = []
        self.let_in = {rank: threading.Event() for rank in range(size)}
        """Set when rank 0 has accepted the rank's link."""
        self.held: dict[int, threading.Event] = {}
        """Ranks that wait, once they have their link, before they say anything on it."""

    def host(self, fields=SAME, check: Callable[[], None] | None = None) -> "Future[Meeting]":
        return self._start(
            lambda: host_meeting(
                self.listener, size=self.size, key=KEY, fields=fields, endpoints=("control", "store"), interface="lo",
                timeout_s=self.timeout_s, check=check,
            )
        )  # fmt: skip

    def join(self, rank: int, fields=SAME, *, key: bytes = KEY, size: int | None = None) -> "Future[Meeting]":
        return self._start(
            lambda: join_meeting(
                self.address, rank=rank, size=size or self.size, key=key, fields=fields, timeout_s=self.timeout_s
            )
        )

    def _start(self, fn: Callable[[], Meeting]) -> "Future[Meeting]":
        def run() -> Meeting:
            self.meetings.append(fn())
            return self.meetings[-1]

        return self._pool.submit(run)

    def close(self) -> None:
        self.listener.close()
        self._pool.shutdown()
        for meeting in self.meetings:
            meeting.close()


@pytest.fixture
def party(monkeypatch):
    """party(size) -> Party"""
    parties: list[Party] = []

    def connect_and_say(address, *, rank: int, **rest) -> Link:
        link = connect(address, rank=rank, **rest)
        group = next(one for one in parties if one.address == address)
        group.let_in[rank].set()
        assert rank not in group.held or group.held[rank].wait(30)
        return link

    monkeypatch.setattr("launch.groups.meeting.connect", connect_and_say)

    def make(size: int, **settings) -> Party:
        parties.append(Party(size, **settings))
        return parties[-1]

    yield make
    for one in parties:
        one.close()


def meet_all(group: Party) -> list[Meeting]:
    futures = [group.host(), *(group.join(rank) for rank in range(1, group.size))]
    return [future.result(60) for future in futures]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_one_key_and_the_same_addresses(party, size):
    meetings = meet_all(party(size))
    assert [meeting.rank for meeting in meetings] == list(range(size))
    assert len({meeting.key for meeting in meetings}) == 1
    assert meetings[0].key != KEY
    assert all(dict(meeting.addresses) == dict(meetings[0].addresses) for meeting in meetings)


def test_the_key_of_a_run_is_worth_nothing_in_the_next(party):
    assert meet_all(party(2))[0].key != meet_all(party(2))[0].key


def test_endpoints_listen_on_rank_0_on_the_interface_alone_before_anybody_calls(party):
    first, second = meet_all(party(2))
    listener = first.endpoint("control")
    assert isinstance(listener, socket.socket)
    address = second.endpoint("control")
    assert (address, address[0]) == (listener.getsockname(), "127.0.0.1")
    with socket.create_connection(address, timeout=30) as caller, listener, listener.accept()[0] as accepted:
        caller.sendall(b"x")
        assert accepted.recv(1) == b"x"
    store = second.endpoint("store")
    first.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(store, timeout=30)


def test_a_difference_is_named_on_every_rank(party):
    group = party(4)
    futures = [group.host(), *(group.join(rank, (("--seed", str(rank // 3)),)) for rank in (1, 2, 3))]
    for future in futures:
        with pytest.raises(RanksDiffer, match="ranks differ in --seed: 0 on ranks 0-2, 1 on rank 3") as refusal:
            future.result(60)
        assert refusal.value.difference.values == (("0", (0, 1, 2)), ("1", (3,)))


def test_long_fields_take_several_frames(party):
    fields = tuple((f"--flag-{number}", "x" * number) for number in range(200))
    assert len(str(fields)) > 10 * FRAME_BYTES
    group = party(2)
    host, other = group.host(fields), group.join(1, fields)
    assert host.result(60).key == other.result(60).key


def test_a_rank_that_does_not_come_is_named_to_all_that_did(party):
    group = party(4, timeout_s=1.5)
    for future in [group.host(), group.join(1)]:
        with pytest.raises(PeerFailed, match=r"rank 2 did not come .* within 1.5 s; nor did ranks 3") as error:
            future.result(60)
        assert error.value.culprit == 2


def test_a_rank_that_still_speaks_when_all_are_refused_hears_why(party):
    group = party(4, timeout_s=1.5)
    group.held[1] = threading.Event()
    host, slow, fast = group.host(), group.join(1, SAME * 1000), group.join(3)
    with pytest.raises(PeerFailed, match="rank 1 did not come"):
        fast.result(60)
    group.held[1].set()
    for future in (slow, host):
        with pytest.raises(PeerFailed, match="rank 1 did not come"):
            future.result(60)


def test_a_rank_that_ends_while_others_are_missing_is_named(party):
    group = party(3)
    host, other = group.host(), group.join(1)
    assert group.let_in[1].wait(30)
    connect(group.address, rank=2, terms=meeting_terms(3), key=KEY, timeout_s=30.0).close()
    for future in (host, other):
        with pytest.raises(PeerFailed, match="rank 2 is gone while the group was starting") as error:
            future.result(60)
        assert error.value.culprit == 2


def test_what_the_check_raises_is_told_to_all(party):
    group = party(3)
    ended = threading.Event()

    def check() -> None:
        if ended.is_set():
            raise PeerFailed(2, "ended while the group was starting: exit code 3")

    host, other = group.host(check=check), group.join(1)
    assert group.let_in[1].wait(30)
    ended.set()
    for future in (host, other):
        with pytest.raises(PeerFailed, match="rank 2 ended while the group was starting: exit code 3"):
            future.result(60)


def test_a_stranger_is_turned_away_and_disturbs_nobody(party):
    group = party(2)
    host = group.host()
    with pytest.raises(WrongKey):
        group.join(1, key=b"x" * 32).result(60)
    with socket.create_connection(group.address, timeout=30) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        other = group.join(1)
        assert other.result(60).key == host.result(60).key


def test_a_rank_of_another_group_or_a_second_one_is_refused_in_words(party):
    group = party(3)
    host, first = group.host(), group.join(1)
    assert group.let_in[1].wait(30)
    with pytest.raises(WrongPeer, match="its group has 4 ranks, this one 3"):
        group.join(3, size=4).result(60)
    with pytest.raises(WrongPeer, match="rank 1 is not expected here, or came before"):
        group.join(1).result(60)
    group.join(2).result(60)
    host.result(60)
    first.result(60)


def test_without_a_host_nobody_answers(party):
    group = party(2)
    group.listener.close()
    with pytest.raises(LinkClosed, match="nobody answers"):
        group.join(1).result(60)


def test_words_are_gathered_in_rank_order_as_often_as_wanted(party):
    meetings = meet_all(party(4))
    with ThreadPoolExecutor(4) as pool:
        for number in range(3):
            words = [pool.submit(one.gather, f"{number}:{one.rank}", timeout_s=30.0) for one in meetings]
            assert [word.result(60) for word in words] == [[f"{number}:{rank}" for rank in range(4)]] * 4


def test_a_rank_that_leaves_is_named_by_rank_0_and_rank_0_by_the_others(party):
    meetings = meet_all(party(3))
    with ThreadPoolExecutor(3) as pool:
        words = [pool.submit(one.gather, "", timeout_s=30.0) for one in meetings[:2]]
        meetings[2].close()
        with pytest.raises(PeerFailed, match="rank 2 is gone"):
            words[0].result(60)
        meetings[0].close()
        with pytest.raises(PeerFailed, match="rank 0 is gone"):
            words[1].result(60)


def test_a_rank_that_gathers_late_is_named(party):
    meetings = meet_all(party(3))
    with ThreadPoolExecutor(3) as pool:
        words = [pool.submit(one.gather, "", timeout_s=0.3) for one in meetings[:2]]
        with pytest.raises(PeerFailed, match="rank 2 did not come") as error:
            words[0].result(60)
        assert error.value.culprit == 2
        with pytest.raises(PeerFailed, match=r"rank 0 did not answer within 0\.3 s"):
            words[1].result(60)


def test_a_length_that_nobody_would_send_is_refused_before_memory_is_taken(party):
    first, second = meet_all(party(2))
    link = second._mails[0].link
    link.send((MAX_MESSAGE + 1).to_bytes(4, "little").ljust(FRAME_BYTES, b"\0"))
    mail: Mail = first._mails[1]
    assert select.select([mail.link], [], [], 10)[0]
    with pytest.raises(WrongSize, match=f"says that {MAX_MESSAGE + 1} bytes follow"):
        mail.ready()
