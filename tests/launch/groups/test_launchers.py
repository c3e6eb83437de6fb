"""The launchers themselves: what they set is what `launch.groups.world` understands, and their ranks meet."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.control.door import open_listener

PROGRAM = str(Path(__file__).parents[1] / "programs" / "ranks.py")
BIN = Path(sys.executable).parent


def start(*command: str) -> "subprocess.Popen[str]":
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "OMPI_", "PMI", "SLURM_", "MASTER_", "TORCHELASTIC")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def found(process: "subprocess.Popen[str]") -> list[str]:
    """What each rank says that it is, as rank 0 prints it once they have met; [] from a node without rank 0."""
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("[{")]
    assert len({rank["key"] for line in lines for rank in line}) <= 1
    return [rank["says"] for line in lines for rank in line]


def free_port() -> int:
    with open_listener("lo") as listener:
        return listener.getsockname()[1]


@pytest.mark.slow
def test_ranks_of_torchrun_meet_on_one_node_and_on_two(tmp_path):
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("a secret of the test, long enough")
    flags = json.dumps({"rendezvous": f":{free_port()}", "key_file": str(key)})
    two = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    torchrun = str(BIN / "torchrun")
    nodes = [start(torchrun, *two, f"--node-rank={node}", PROGRAM, flags, "finish") for node in (0, 1)]
    one = start(torchrun, "--standalone", "--nproc-per-node=2", PROGRAM, "{}", "finish")
    assert found(one) == [f"torchrun: rank {rank} of 2, local rank {rank} of 2, node 0 of 1" for rank in range(2)]
    assert [found(node) for node in nodes] == [
        [f"torchrun: rank {rank} of 4, local rank {rank % 2} of 2, node {rank // 2} of 2" for rank in range(4)], []
    ]  # fmt: skip


@pytest.mark.mpi
@pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="no mpirun here; pip install -e '.[mpi]'")
def test_ranks_of_mpirun_meet():
    mpirun = (str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "4")
    ranks = found(start(*mpirun, sys.executable, PROGRAM, "{}", "finish"))
    assert [rank.split(", ")[::2] for rank in ranks] == [
        [f"mpirun: rank {rank} of 4", "node 0 of 1"] for rank in range(4)
    ]
    assert sorted(rank.split(", ")[1] for rank in ranks) == [f"local rank {rank} of 4" for rank in range(4)]
