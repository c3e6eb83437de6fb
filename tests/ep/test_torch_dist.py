"""gloo between processes passes what any transport must, names who failed, and listens on loopback alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ep import TransportError, torch_dist
from ep.torch_dist import TorchDistTransport, address_of, listen, num_communicators, open_store, open_torch_dist

PROGRAMS = Path(__file__).parent / "programs"
ROOT = PROGRAMS.parents[2]
FOUND_S = 10.0
"""Half of what a rank is waited for: who takes that long was told nothing."""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the ranks of every group found: one run of all groups."""
    file = tmp_path_factory.mktemp("gloo") / "report.json"
    with subprocess.Popen(
        [sys.executable, PROGRAMS / "gloo_ranks.py", file],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            output, _ = program.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            raise
    assert program.returncode == 0, output
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "scenario",
    ["conformance", "exchange_modes", "inference_mode", "every_length", "many_in_flight", "at_once_to_the_end"],
)
def test_gloo_passes_what_any_transport_must(report, scenario, size):
    assert report[f"{scenario} of {size}"] == ["passed"] * size


@pytest.mark.parametrize("size", [2, 4])
def test_what_nccl_gets_passes_over_the_collectives_of_gloo(report, size):
    assert report[f"conformance of {size} by collectives"] == ["passed"] * size


def test_every_listening_socket_is_on_loopback(report):
    for size in (2, 4):
        store_and_gloo, *gloo = report[f"sockets of {size}"]
        assert store_and_gloo == ["127.0.0.1"] * 2
        assert gloo == [["127.0.0.1"]] * (size - 1)


def names(found: dict, *, errors: tuple[str, ...], words: str, next_one: bool = True) -> None:
    """One rank's report of a failure of rank 3."""
    assert found["error"] in errors, found
    assert found["culprit"] == 3, found
    assert words in found["words"], found
    assert found["seconds"] < FOUND_S, found
    assert (found["next"] != "nothing") is next_one, found


@pytest.mark.parametrize("scenario", ["out_of_step", "left_one_out"])
def test_a_rank_out_of_step_is_named_by_all_and_ends_no_process(report, scenario):
    """However much more the rank sends than the others expect. Who meets it last may be told by the others first."""
    for found in report[f"{scenario} of 4"]:
        names(found, errors=("TagMismatch", "PeerFailed"), words="rank 3 is out of step: expected CHECK(step 1")


def test_a_rank_that_sends_more_rows_than_expected_is_named_by_all(report):
    for found in report["more_rows of 4"]:
        names(found, errors=("ExchangeMismatch",), words="rank 3 sends 480024 bytes to rank 0, which expects 24")


def test_a_rank_with_another_dtype_is_named_by_all(report):
    words = "expected all_to_all of torch.int64 [3], found all_to_all of torch.float64 [3]"
    for found in report["other_dtype of 4"]:
        names(found, errors=("ExchangeMismatch",), words=words)


@pytest.mark.parametrize(
    "scenario", ["raised_while_others_wait", "raised_while_others_compute", "raised_with_rows_under_way"]
)
def test_a_rank_that_raises_is_named_by_all_others_with_its_error(report, scenario):
    *others, culprit = report[f"{scenario} of 4"]
    assert culprit == {"error": "planted"}
    for found in others:
        names(found, errors=("PeerFailed",), words="rank 3 raised ValueError: planted")


def test_a_rank_that_ended_early_is_named_by_all_others(report):
    *others, culprit = report["ended_early of 4"]
    assert culprit == {"error": "ended"}
    for found in others:
        names(found, errors=("PeerFailed",), words="rank 3 ended after 1 exchanges")


def test_a_rank_that_is_killed_is_named_by_all_others(report):
    *others, code = report["killed of 4"]
    assert code == -signal.SIGKILL
    for found in others:
        names(found, errors=("PeerFailed",), words="rank 3 does not answer: ")


def test_a_rank_that_cuts_its_connections_is_noticed_while_it_lives(report):
    """gloo has no call for that: its wire makes a wait fail on purpose, which closes them."""
    *others, culprit = report["severed of 4"]
    assert culprit == {"error": "severed"}
    for found in others:
        names(found, errors=("PeerFailed",), words="rank 3 does not answer: ")


def test_collectives_find_a_rank_out_of_step_in_a_gather(report):
    for found in report["out_of_step of 4 by collectives"]:
        names(found, errors=("TagMismatch",), words="rank 3 is out of step: expected CHECK(step 1")


def test_the_address_of_loopback_is_known():
    assert address_of("lo") == "127.0.0.1"


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"interface = 'nowhere0': must be .*lo.*, for example lo"):
        listen("nowhere0")


def test_a_store_takes_a_free_port_and_tells_it():
    store = open_store("127.0.0.1", None, rank=0, size=2)
    other = open_store("127.0.0.1", store.port, rank=1, size=2)
    other.set("here", "yes")
    assert store.get("here") == b"yes"
    with socket.socket() as elsewhere, pytest.raises(OSError, match="refused"):
        elsewhere.connect(("127.0.0.2", store.port))


def test_a_port_that_is_taken_is_refused():
    with listen("lo") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port = {port}: is taken on 127.0.0.1; 0 takes a free one"):
            listen("lo", port)


def test_a_store_that_is_not_there_is_an_error_that_says_where_it_was_looked_for(capfd):
    with listen("lo") as unused:
        port = unused.getsockname()[1]
    with pytest.raises(TransportError, match=rf"rank 1: no store at 127.0.0.1:{port} within 0.1 s"):
        open_store("127.0.0.1", port, rank=1, size=2, timeout_s=0.1)
    capfd.readouterr()  # torch's own words about it


def test_a_group_that_is_not_complete_in_time_is_an_error():
    store = open_store("127.0.0.1", None, rank=0, size=2, timeout_s=0.2)
    with pytest.raises(TransportError, match="rank 0: gloo does not connect 2 ranks"):
        open_torch_dist(rank=0, size=2, backend="gloo", store=store, timeout_s=0.2)


def test_a_backend_that_is_none_is_refused():
    with pytest.raises(ValueError, match="backend = 'mpi': must be one of gloo, nccl, for example gloo"):
        open_torch_dist(rank=0, size=1, backend="mpi", store=None)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_says_what_it_lacks():
    store = open_store("127.0.0.1", None, rank=0, size=1)
    with pytest.raises(ValueError, match=r"backend = 'nccl': torch .* here lacks NCCL, which .*; gloo runs on CPUs"):
        open_torch_dist(rank=0, size=1, backend="nccl", store=store, device="cuda:0")


@pytest.mark.parametrize(("comm_sms", "max_ctas"), [(0, None), (1, 1), (16, 16), (20, 16), (131, 128)])
def test_nccl_is_held_to_channels_that_fit_the_multiprocessors_left_to_it(comm_sms: int, max_ctas: int | None):
    options = SimpleNamespace(config=SimpleNamespace(max_ctas=None))
    torch_dist._nccl_options(options, comm_sms=comm_sms, limit=timedelta(seconds=3))
    assert options.config.max_ctas == max_ctas
    assert (options.is_high_priority_stream, options._timeout) == (True, timedelta(seconds=3))


def test_communicators_that_are_opened_later_are_counted():
    splits = [0]
    nccl = SimpleNamespace(rank=lambda: 0, size=lambda: 2, comm_split_count=lambda: splits[0])
    transport = TorchDistTransport(nccl, device="cpu")
    assert num_communicators(transport) == 1
    splits[0] = 2
    assert num_communicators(transport) == 3
    gloo = TorchDistTransport(SimpleNamespace(rank=lambda: 0, size=lambda: 2), device="cpu")
    assert num_communicators(gloo) == 1
