"""MPI under mpirun passes what any transport must, names who failed, and opens no socket on one node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
ROOT = PROGRAMS.parents[2]
FOUND_S = 10.0
"""Half of what a rank is waited for: who takes that long was told nothing."""
MPIRUN = (Path(sys.executable).with_name("mpirun"), "--allow-run-as-root", "--oversubscribe", "--timeout", "95")

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        find_spec("mpi4py") is None or not MPIRUN[0].exists(), reason="needs pip install 'serried[mpi]'"
    ),
]


@pytest.fixture(scope="module", params=[2, 4])
def reports(request, tmp_path_factory):
    """What each rank found: one mpirun a size."""
    return run_ranks(request.param, tmp_path_factory.mktemp("mpi"))


def run_ranks(size: int, folder: Path) -> list[dict]:
    with subprocess.Popen(
        [*MPIRUN, "-n", str(size), sys.executable, PROGRAMS / "mpi_ranks.py", folder],
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
            os.killpg(program.pid, signal.SIGTERM)  # mpirun ends its ranks
            raise
    assert program.returncode == 0, output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        "conformance",
        "exchange_modes",
        "inference_mode",
        "every_length",
        "many_in_flight",
        "at_once_to_the_end",
        "in_two_groups",
    ],
)
def test_mpi_passes_what_any_transport_must(reports, scenario):
    """in_two_groups: two groups in one world, at the same time, do not hear each other."""
    assert [found[scenario] for found in reports] == ["passed"] * len(reports)


def test_ranks_of_one_node_open_no_listening_socket(reports):
    assert [found["sockets"] for found in reports] == [[]] * len(reports)


@pytest.mark.parametrize(
    ("scenario", "error", "words"),
    [
        ("out_of_step", "TagMismatch", "is out of step: expected CHECK(step 1"),
        ("left_one_out", "TagMismatch", "is out of step: expected CHECK(step 1"),
        ("more_rows", "ExchangeMismatch", "sends 480024 bytes to rank 0, which expects 24"),
        (
            "other_dtype",
            "ExchangeMismatch",
            "expected all_to_all of torch.int64 [3], found all_to_all of torch.float64",
        ),
        ("raised_while_others_wait", "PeerFailed", "raised ValueError: planted"),
        ("raised_while_others_compute", "PeerFailed", "raised ValueError: planted"),
        ("raised_with_rows_under_way", "PeerFailed", "raised ValueError: planted"),
        ("ended_early", "PeerFailed", "ended after 1 exchanges"),
    ],
)
def test_the_last_rank_fails_and_is_named_by_all(reports, scenario, error, words):
    """Who meets it last may be told by the others first: then it is a PeerFailed, with the same words."""
    culprit = len(reports) - 1
    for found in (report[scenario] for report in reports):
        if found["error"] not in ("planted", "ended"):
            assert found["error"] in (error, "PeerFailed"), found
            assert found["culprit"] == culprit, found
            assert words in found["words"], found
            assert found["seconds"] < FOUND_S, found
            assert found["next"] in (error, "PeerFailed"), found
