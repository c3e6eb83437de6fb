"""How ranks find each other, for each way of starting them; ranks are threads of the test."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ep import PeerFailed
from launch.groups.invitation import Invitation, invitation_path, publish
from launch.groups.rendezvous import RendezvousConfig, meet, open_gate
from launch.groups.world import World, alone, own_world
from runtime.control.door import open_listener
from runtime.control.frames import WrongKey

FIELDS = (("--seed", "0"),)
SOON = RendezvousConfig(start_timeout=30.0)


def launched(rank: int, *, size: int = 3, nodes: int = 1, master_host: str = "127.0.0.1") -> World:
    return replace(
        own_world(rank, size), source="torchrun", num_nodes=nodes, master_host=master_host, run_id="9c64 29500 0"
    )


def meet_as(world: World, config: RendezvousConfig = SOON, **more):
    return meet(world, config, fields=FIELDS, endpoints=("control",), **more)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path) -> Path:
    """Where invitations lie."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    monkeypatch.setattr("launch.groups.rendezvous.private_folder", lambda: private)
    return private


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def key_file(tmp_path) -> Path:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text("a secret of the test, long enough")
    return path


def keys(futures) -> set[bytes]:
    found = set()
    for future in futures:
        with future.result(20) as meeting:
            found.add(meeting.key)
    return found


def test_one_rank_meets_nobody_and_leaves_nothing(folder):
    with meet_as(alone()) as meeting:
        listener = meeting.endpoint("control")
        assert isinstance(listener, socket.socket)
        listener.close()
    assert list(folder.iterdir()) == []


def test_ranks_of_a_launcher_on_one_node_meet_by_a_file_that_goes_when_they_have_met(pool, folder):
    others = [pool.submit(meet_as, launched(rank)) for rank in (2, 1)]
    assert list(folder.iterdir()) == []
    assert len(keys([pool.submit(meet_as, launched(0)), *others])) == 1
    assert list(folder.iterdir()) == []


def test_a_key_file_takes_the_place_of_the_made_up_key(pool, folder, key_file):
    config = replace(SOON, key_file=key_file)
    futures = [pool.submit(meet_as, launched(rank), config) for rank in range(3)]
    assert len(keys(futures)) == 1


@pytest.mark.parametrize("somebody_answers", [False, True])
def test_what_a_killed_run_left_behind_is_passed_over(pool, folder, somebody_answers):
    old = open_gate(own_world(0, 3), SOON, by_file=False)
    with old if somebody_answers else open_listener("lo"):
        if not somebody_answers:
            old.close()
        stale = replace(old.invitation, key=b"of another run, and long enough")
        publish(stale, invitation_path(folder, launched(0).run_id))
        hosted = pool.submit(meet_as, own_world(0, 3), SOON, gate=old) if somebody_answers else None
        others = [pool.submit(meet_as, launched(rank)) for rank in (1, 2)]
        assert len(keys([pool.submit(meet_as, launched(0)), *others])) == 1
        if hosted is not None:
            assert not hosted.done()
            old_ranks = [pool.submit(meet_as, own_world(rank, 3), SOON, invitation=old.invitation) for rank in (1, 2)]
            assert len(keys([hosted, *old_ranks])) == 1


def test_without_rank_0_the_others_say_that_it_was_not_met():
    with pytest.raises(PeerFailed, match=r"rank 0 was not met \(it left no invitation\)") as error:
        meet_as(launched(1), RendezvousConfig(start_timeout=0.2))
    assert error.value.culprit == 0


def test_our_own_ranks_meet_by_an_invitation_and_leave_no_file(pool, folder):
    with open_gate(own_world(0, 3), SOON, by_file=False) as gate:
        others = [pool.submit(meet_as, own_world(rank, 3), SOON, invitation=gate.invitation) for rank in (1, 2)]
        assert list(folder.iterdir()) == []
        assert len(keys([pool.submit(meet_as, own_world(0, 3), SOON, gate=gate), *others])) == 1


def test_our_own_rank_0_looks_after_those_that_it_started():
    def check() -> None:
        raise PeerFailed(2, "ended while the group was starting: exit code 3")

    with open_gate(own_world(0, 3), SOON, by_file=False) as gate, pytest.raises(PeerFailed, match="rank 2 ended"):
        meet_as(own_world(0, 3), gate=gate, check=check)


def test_a_rank_of_our_own_whose_rank_0_is_gone_asks_once():
    gate = open_gate(own_world(0, 3), SOON, by_file=False)
    gate.close()
    with pytest.raises(PeerFailed, match=r"rank 0 was not met \(nobody answers .*; if it says something itself"):
        meet_as(own_world(1, 3), invitation=gate.invitation)


def free_port() -> int:
    with open_listener("lo") as listener:
        return listener.getsockname()[1]


def test_ranks_on_several_nodes_meet_where_they_are_told_whoever_is_there_first(pool, key_file):
    config = replace(SOON, rendezvous=f"localhost:{free_port()}", key_file=key_file)
    others = [pool.submit(meet_as, launched(rank, nodes=2), config) for rank in (1, 2)]
    assert len(keys([pool.submit(meet_as, launched(0, nodes=2), config), *others])) == 1


def test_a_launcher_that_knows_the_host_needs_a_port_only(pool, key_file):
    config = replace(SOON, rendezvous=f":{free_port()}", key_file=key_file)
    assert len(keys([pool.submit(meet_as, launched(rank, size=2, nodes=2), config) for rank in range(2)])) == 1


def test_a_node_with_another_key_file_is_told_at_once(pool, key_file, tmp_path):
    config = replace(SOON, rendezvous=f":{free_port()}", key_file=key_file)
    wrong = tmp_path / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text("something else of sufficient length")
    gate = open_gate(launched(0, size=2, nodes=2), config, by_file=True)
    hosted = pool.submit(meet_as, launched(0, size=2, nodes=2), config, gate=gate)
    with pytest.raises(WrongKey):
        meet_as(launched(1, size=2, nodes=2), replace(config, key_file=wrong))
    other = pool.submit(meet_as, launched(1, size=2, nodes=2), config)
    assert len(keys([hosted, other])) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "2 nodes: --rendezvous and --key-file must be given, the same on every node"),
        ({"rendezvous": ":29600"}, "2 nodes: --key-file must be given"),
        ({"key_file": Path("key")}, "2 nodes: --rendezvous must be given"),
        ({"rendezvous": "29600", "key_file": Path("key")}, "--rendezvous 29600 must be HOST:PORT or :PORT"),
        ({"rendezvous": "host0:http", "key_file": Path("key")}, "must be HOST:PORT"),
        ({"rendezvous": "host0:99999", "key_file": Path("key")}, "must be HOST:PORT"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_flags_that_do_not_do_for_several_nodes_are_refused_on_every_rank(rank, given, words):
    with pytest.raises(ValueError, match=words):
        meet_as(launched(rank, nodes=2), replace(SOON, **given))


def test_a_launcher_that_does_not_know_the_host_needs_it_told(key_file):
    config = replace(SOON, rendezvous=":29600", key_file=key_file)
    with pytest.raises(ValueError, match="torchrun does not say where rank 0 runs, so HOST is needed"):
        meet_as(launched(1, nodes=2, master_host=""), config)


def test_a_port_that_is_taken_is_refused_in_words(key_file):
    with open_listener("lo") as taken:
        port = taken.getsockname()[1]
        config = replace(SOON, rendezvous=f":{port}", key_file=key_file)
        with pytest.raises(ValueError, match=rf"cannot listen on port {port} of lo \(.*in use.*\); give another port"):
            meet_as(launched(0, nodes=2), config)


def test_rank_0_on_loopback_is_not_for_other_machines(key_file):
    config = replace(SOON, rendezvous="192.0.2.1:29600", key_file=key_file)
    with pytest.raises(ValueError, match=r"rank 0 is to be met at 192.0.2.1; give the interface of that address"):
        meet_as(launched(0, nodes=2), config)


@pytest.mark.parametrize("interface", ["0.0.0.0", "::"])
def test_no_rank_listens_everywhere(interface):
    with pytest.raises(ValueError, match="means every interface"):
        meet_as(alone(), replace(SOON, interface=interface))


def test_the_invitation_is_complete():
    with open_gate(alone(), SOON, by_file=False) as gate:
        assert gate.invitation == Invitation(
            host="127.0.0.1", port=gate.listener.getsockname()[1], key=gate.invitation.key
        )
        assert len(gate.invitation.key) == 32
