"""Helpers of a call: they come where they are wanted, are not missed where they are not, and end with their thread."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from ep.cpu.calls import kernel
from ep.cpu.language import add, claim, load, store
from ep.cpu.team import _INSIDE, Team, team_of_this_thread


@kernel()
def meet(args):
    """Each piece is over when somebody is in every other: done by one thread after the other it would never be."""
    while True:
        piece = claim(args)
        if piece >= args[1]:
            return
        add(args[2], 1)
        while load(args[2]) < args[1]:
            store(args[2] + 8, piece)


@kernel()
def count(args):
    while claim(args) < args[1]:
        add(args[2], 1)


@kernel()
def late_piece(args):
    """Piece 1 is over a while after piece 0, which another thread has by then."""
    while True:
        piece = claim(args)
        if piece >= args[1]:
            return
        add(args[2], 1)
        while load(args[2]) < 2:
            store(args[2] + 16, piece)
        if piece == 1:
            for _ in range(1_000_000):
                store(args[2] + 16, piece)
            store(args[2] + 8, 1)


def words(number: int) -> ctypes.Array:
    return (ctypes.c_int64 * number)()


def in_a_thread(work: Callable[[], None]) -> None:
    """A thread of its own, which is over afterwards; a fault in it is one here."""
    faults: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "still in a call"
    assert not faults, faults


def num_threads() -> int:
    return psutil.Process().num_threads()


@pytest.mark.timeout(30)
def test_as_many_threads_as_torch_has_are_in_a_call_at_once(torch_threads_are: Callable[[int], None]):
    torch_threads_are(3)
    shared = words(3)
    for call in range(1, 4):
        shared[0] = 0
        meet(3, ctypes.addressof(shared))
        assert shared[0] == 3, call


@pytest.mark.timeout(30)
def test_no_more_helpers_come_than_there_are_pieces(torch_threads_are: Callable[[int], None]):
    def alone() -> None:
        before = num_threads()
        meet(1, ctypes.addressof(words(3)))
        assert num_threads() == before

    torch_threads_are(3)
    in_a_thread(alone)


@pytest.mark.timeout(60)
def test_helpers_that_slept_come_when_they_are_called(torch_threads_are: Callable[[int], None]):
    def with_rests() -> None:
        for _ in range(20):
            meet(2, ctypes.addressof(words(3)))
            deadline = time.monotonic() + 10
            while team_of_this_thread().num_sleeping < 1:
                assert time.monotonic() < deadline, "a helper without work does not sleep"
                time.sleep(0.001)

    torch_threads_are(2)
    in_a_thread(with_rests)


@pytest.mark.timeout(30)
def test_helpers_end_with_the_thread_that_they_helped(torch_threads_are: Callable[[int], None]):
    torch_threads_are(3)
    before = num_threads()
    in_a_thread(lambda: meet(3, ctypes.addressof(words(3))))
    deadline = time.monotonic() + 10
    while num_threads() > before:
        assert time.monotonic() < deadline, f"{num_threads() - before} helpers live on"
        time.sleep(0.001)


@pytest.mark.timeout(30)
def test_threads_have_teams_of_their_own(torch_threads_are: Callable[[int], None]):
    torch_threads_are(2)
    teams = [team_of_this_thread()]
    in_a_thread(lambda: teams.append(team_of_this_thread()))
    assert teams[0] is team_of_this_thread()
    assert teams[0] is not teams[1]

    rank_words = [words(3) for _ in range(4)]

    def many_calls(shared: ctypes.Array) -> None:
        for _ in range(200):
            shared[0] = 0
            meet(2, ctypes.addressof(shared))

    threads = [threading.Thread(target=many_calls, args=(shared,), daemon=True) for shared in rank_words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.timeout(30)
def test_helpers_that_never_come_are_not_missed():
    team, done = Team(), words(3)
    team._helpers = 3  # which nobody started
    memory = (ctypes.c_int64 * 3)(0, 5, ctypes.addressof(done))
    team.call(count.address, ctypes.addressof(memory), helpers=3)
    assert done[0] == 5


@pytest.mark.timeout(30)
def test_a_helper_that_has_begun_is_waited_for(torch_threads_are: Callable[[int], None]):
    torch_threads_are(2)
    for _ in range(20):
        shared = words(3)
        late_piece(2, ctypes.addressof(shared))
        assert shared[1] == 1, "the call was over before its pieces"


@pytest.mark.timeout(30)
def test_a_forked_child_does_not_wait_for_helpers_that_only_its_parent_has(torch_threads_are: Callable[[int], None]):
    def fork_and_call() -> None:
        inside = ctypes.c_int64.from_address(team_of_this_thread()._address + _INSIDE)
        inside.value += 1  # a helper that looks for work while the process is copied
        child = os.fork()
        if not child:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)  # ends the child, which is in no position to run a handler
                meet(2, ctypes.addressof(words(3)))
                os._exit(0)
            finally:
                os._exit(1)
        inside.value -= 1
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    torch_threads_are(2)
    in_a_thread(fork_and_call)
