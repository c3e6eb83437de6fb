"""Memory that the ranks of a node share: filled by all, then changed by nobody, and gone with the last of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

from ep import PeerFailed, SerriedError
from runtime.weights.node_share import ROW_WIDTH, NodePeers, NodeShare, Ticket
from tests.runtime.peers import run_threads

ROOT = Path(__file__).parents[3]


@pytest.fixture
def share() -> NodeShare:
    return NodeShare.create(1000)


def put(flat_B: Tensor, value: int) -> None:
    flat_B.fill_(value)


# ---- the memory


def test_what_one_fills_the_other_reads(share: NodeShare) -> None:
    other = NodeShare.open(share.ticket, 1000)
    share.fill(lambda flat_B: put(flat_B[:500], 3))
    other.fill(lambda flat_B: put(flat_B[500:], 4))
    share.seal()
    for each in (share, other):
        flat_B = each.read()
        each.close()
        assert flat_B.tolist() == [3] * 500 + [4] * 500
        assert flat_B.data_ptr() % 64 == 0


def test_it_cannot_be_sealed_while_somebody_may_write(share: NodeShare) -> None:
    other = NodeShare.open(share.ticket, 1000)
    with pytest.raises(
        SerriedError, match="memory that a node's ranks share cannot be sealed: Device or resource busy"
    ):
        other.fill(lambda _: share.seal())


def test_a_tensor_kept_from_filling_is_found(share: NodeShare) -> None:
    with pytest.raises(BufferError):
        share.fill(lambda flat_B: flat_B)


def test_sealed_memory_can_be_mapped_for_writing_no_more(share: NodeShare) -> None:
    share.seal()
    with pytest.raises(PermissionError):
        share.fill(lambda flat_B: put(flat_B, 1))


def test_a_write_to_sealed_memory_ends_the_process(share: NodeShare) -> None:
    program = f"""
import resource, torch
from runtime.weights.node_share import NodeShare, Ticket
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
flat_B = NodeShare.open(Ticket(*{tuple(share.ticket)}), 1000).read()
assert flat_B.sum().item() == 0
flat_B[0] = 1
"""
    share.seal()
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGSEGV, done.stderr


def test_memory_that_is_not_there_or_somebody_elses_is_refused(share: NodeShare) -> None:
    pid, descriptor, key = share.ticket
    with pytest.raises(SerriedError, match=r"process \d+ cannot be reached \(/proc/.*/fd/99999: No such file"):
        NodeShare.open(Ticket(pid, 99999, key), 1000)
    with pytest.raises(
        SerriedError, match=r"cannot be reached \(/proc/.* is something else\); the ranks of a node must"
    ):
        NodeShare.open(Ticket(pid, descriptor, key + 1), 1000)


def test_memory_is_gone_when_nobody_holds_it() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    for _ in range(3):
        share = NodeShare.create(100)
        share.seal()
        flat_B = share.read()
        share.close()
        assert flat_B[0] == 0
        del flat_B
        assert open_files() == before


# ---- meeting


def test_what_one_rank_says_all_hear() -> None:
    results = run_threads(3, lambda peers: peers.together("counting", lambda: (-peers.rank, (peers.rank, 7))))
    rows = [[rank, 7, *[0] * (ROW_WIDTH - 3)] for rank in range(3)]
    assert results == [(-rank, rows) for rank in range(3)]


def test_a_rank_that_raises_is_named_by_all_others() -> None:
    def work(peers: NodePeers) -> object:
        return peers.together("working", lambda: (None, (1 // (peers.rank - 1),)))

    first, second, third = run_threads(3, work)
    assert isinstance(second, ZeroDivisionError)
    for error in (first, third):
        assert isinstance(error, PeerFailed)
        assert error.culprit == 1
        assert str(error).endswith("rank 1 failed while working; it says why")


def test_places_on_a_later_node_are_counted_from_its_first_rank() -> None:
    peers = NodePeers(ranks=(8, 9, 10, 11), rank=10, gather=lambda row: [list(row)] * 4)
    assert (peers.place, peers.size) == (2, 4)
