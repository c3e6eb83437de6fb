"""The control plane: stars of one and two levels whose ranks are threads here, each with sockets of its own."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ep import PeerFailed, run_ranks
from runtime.control.conformance import check_control
from runtime.control.control import SocketControl
from runtime.control.door import open_listener
from runtime.control.frames import WrongKey, WrongPeer
from runtime.control.stars import open_control
from runtime.control.thread_control import ThreadControl
from runtime.failure.bare import bare_script

KEY = bytes(range(32))
WIDTH = 18


def run_star(size: int, fn: Callable[[SocketControl], Any], *, group_size: int = 64) -> list[Any]:
    """fn(control) on each rank of a star; its values, or the errors that it raised, in rank order."""
    listener = open_listener("lo")
    address = listener.getsockname()
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            hub = listener if rank == 0 else address
            control = open_control(
                rank=rank, size=size, hub=hub, key=KEY, width=WIDTH, group_size=group_size, timeout_s=20
            )
            try:
                found[rank] = fn(control)
            finally:
                control.close()
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return found


def raise_any(found: list[Any]) -> list[Any]:
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_one_level_passes_the_checks(size):
    raise_any(run_star(size, lambda control: check_control(control, width=WIDTH)))


@pytest.mark.parametrize(("size", "group_size"), [(3, 2), (4, 2), (7, 3), (9, 3), (11, 4), (5, 1)])
def test_two_levels_pass_the_checks(size, group_size):
    raise_any(run_star(size, lambda control: check_control(control, width=WIDTH), group_size=group_size))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_threads_pass_the_checks(size):
    run_ranks(size, lambda transport: check_control(ThreadControl(transport), width=WIDTH), timeout_s=20)


def test_past_a_group_the_hub_talks_to_its_own_members_and_to_leaders_only():
    links = raise_any(run_star(9, lambda control: (len(control._branches), control._up is not None), group_size=3))
    leaf = (0, True)
    assert links == [(4, False), leaf, leaf, (2, True), leaf, leaf, (2, True), leaf, leaf]


def test_a_leaf_sends_its_row_at_once_and_does_not_wait_for_the_others():
    began = threading.Event()

    def late_hub(control: SocketControl) -> list[list[int]]:
        if control.rank == 0:
            assert began.wait(10)
        rows = control.gather([control.rank] * WIDTH, sequence=0)
        if control.rank == 1:
            began.set()
        return rows.wait()

    expected = [[0] * WIDTH, [1] * WIDTH]
    assert run_star(2, late_hub) == [expected, expected]


@pytest.mark.parametrize(("size", "group_size"), [(4, 64), (7, 3)])
@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_a_rank_that_leaves_is_named_by_all_others(size, group_size, culprit):
    def leave(control: SocketControl) -> None:
        control.gather([0] * WIDTH, sequence=0).wait()
        if control.rank != culprit:
            for sequence in range(1, 10):
                control.gather([0] * WIDTH, sequence=sequence).wait()

    found = run_star(size, leave, group_size=group_size)
    assert found.pop(culprit) is None
    for error in found:
        assert isinstance(error, PeerFailed)
        assert error.culprit == culprit


@pytest.mark.parametrize(("size", "group_size"), [(3, 64), (7, 3)])
def test_a_rank_out_of_step_is_named_by_all_ranks(size, group_size):
    found = run_star(
        size,
        lambda control: control.gather([0] * WIDTH, sequence=7 if control.rank == 2 else 6).wait(),
        group_size=group_size,
    )
    for error in found:
        assert isinstance(error, PeerFailed)
        assert error.culprit == 2
        assert "out of step: it gathers for step 7, rank 0 for step 6" in str(error)


def test_after_a_failure_every_call_fails_with_the_same_cause():
    def go_on(control: SocketControl) -> list[str]:
        if control.rank == 1:
            return []
        errors = []
        for sequence in range(3):
            with pytest.raises(PeerFailed) as caught:
                control.gather([0] * WIDTH, sequence=sequence).wait()
            errors.append(str(caught.value))
        return errors

    errors = run_star(2, go_on)[0]
    assert len(set(errors)) == 1


def test_closing_twice_is_the_same_as_once_and_nothing_is_gathered_after_it():
    def close(control: SocketControl) -> None:
        control.close()
        control.close()
        with pytest.raises(PeerFailed, match="closed its control plane"):
            control.gather([0] * WIDTH, sequence=0)

    assert run_star(1, close) == [None]


def test_a_rank_with_another_row_width_is_told_so():
    listener = open_listener("lo")
    address = listener.getsockname()
    found: list[Exception] = []

    def stranger() -> None:
        for key, width, kind in ((KEY, WIDTH + 1, WrongPeer), (b"x" * 32, WIDTH, WrongKey)):
            with pytest.raises(kind) as caught:
                open_control(rank=1, size=2, hub=address, key=key, width=width)
            found.append(caught.value)

    thread = threading.Thread(target=stranger)
    thread.start()
    with pytest.raises(PeerFailed, match=r"rank 1 did not come to the control plane within 1 s; refused: .*hold"):
        open_control(rank=0, size=2, hub=listener, key=KEY, width=WIDTH, timeout_s=1)
    thread.join(10)
    assert "its frames hold 168 and 328 bytes, here 160 and 312" in str(found[0])


def test_only_rank_0_may_listen():
    with open_listener("lo") as listener, pytest.raises(ValueError, match="only rank 0 listens"):
        open_control(rank=2, size=4, hub=listener, key=KEY, width=WIDTH)


def listening_sockets() -> set[str]:
    """Inodes of this process's sockets that listen."""
    tables = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{columns[9]}]" for columns in tables if columns[3] == "0A"}
    own = {path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    return listening & own


def test_no_socket_of_a_star_listens_once_it_stands_and_all_are_on_loopback():
    before = listening_sockets()  # other tests' stores are not this one's

    def own_sockets(control: SocketControl) -> set[str]:
        links = control._links()
        return {link._socket.getsockname()[0] for link in links} | {link._socket.getpeername()[0] for link in links}

    assert run_star(5, own_sockets, group_size=2) == [{"127.0.0.1"}] * 5
    assert not listening_sockets() - before


def test_the_vote_among_four_processes_takes_microseconds(tmp_path):
    """Not a measurement: only that nothing in it waits for a timer. `run_star` would measure the interpreter's lock."""
    program = tmp_path / "gather.py"
    program.write_text(GATHER)
    listener = open_listener("lo")
    port = listener.getsockname()[1]
    processes = []
    for rank in range(4):
        hub = listener.fileno() if rank == 0 else port
        processes.append(
            subprocess.Popen(
                bare_script(program, str(rank), str(hub)),
                pass_fds=[listener.fileno()] if rank == 0 else [],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    listener.close()
    firsts = [float(process.communicate(timeout=100)[0]) for process in processes]
    assert max(firsts) < 5e-3, "whoever waits for a timer always does"


GATHER = """\
import socket, statistics, sys, time
from runtime.control.stars import open_control
rank, hub = int(sys.argv[1]), int(sys.argv[2])
hub = socket.socket(fileno=hub) if rank == 0 else ("127.0.0.1", hub)
control = open_control(rank=rank, size=4, hub=hub, key=bytes(range(32)), width=18)
took = []
for sequence in range(300):
    began = time.perf_counter()
    control.gather([rank] * 18, sequence=sequence).wait()
    took.append(time.perf_counter() - began)
control.close()
print(statistics.quantiles(took, n=10)[0])
assert "torch" not in sys.modules
"""


def test_a_socket_that_is_not_read_does_not_stop_the_others():
    """The hub sends the matrix to rank 1, which does not read it; rank 2 gets its own all the same."""

    def slow_reader(control: SocketControl) -> int:
        pending = [control.gather([sequence] * WIDTH, sequence=sequence) for sequence in range(20)]
        for rows in pending[::-1] if control.rank == 1 else pending:
            rows.wait()
        return len(pending)

    assert run_star(3, slow_reader) == [20, 20, 20]
