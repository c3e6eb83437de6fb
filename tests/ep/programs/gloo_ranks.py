"""gloo_ranks.py REPORT: scenarios over processes that this one forks, group after group. Writes {"SCENARIO of SIZE":
[value by rank], ...} to the file REPORT. torch is imported once."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import scenarios
import torch

from ep.torch_dist import TorchDistTransport, gloo_group, listen, open_store, open_torch_dist


def open_mail(rank, size, store):
    return open_torch_dist(rank=rank, size=size, backend="gloo", store=store, timeout_s=scenarios.LIMIT_S)


def open_collectives(rank, size, store):
    """The class that NCCL gets, over gloo."""
    limit = timedelta(seconds=scenarios.LIMIT_S)
    return TorchDistTransport(gloo_group(rank, size, store, "lo", torch.device("cpu"), limit), device="cpu")


def run_group(size, scenario, open_transport=open_mail):
    """[value by rank]; the number of the signal for a rank that was killed."""
    with tempfile.TemporaryDirectory() as name, listen("lo") as listener:
        folder = Path(name)
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                be_rank(rank, size, scenario, open_transport, listener, folder)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        return [
            json.loads((folder / f"{rank}.json").read_text()) if code == 0 else code for rank, code in enumerate(codes)
        ]


def be_rank(rank, size, scenario, open_transport, listener, folder):
    try:
        port = listener.getsockname()[1]
        store = open_store("127.0.0.1", port, rank=rank, size=size, listener=listener if rank == 0 else None)
        if rank != 0:
            listener.close()
        value = scenarios.run(scenario, open_transport(rank, size, store), folder)
        (folder / f"{rank}.json").write_text(json.dumps(value))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(report):
    torch.set_num_threads(1)
    found = {}
    for size in (2, 4):
        for scenario in scenarios.PASSES:
            found[f"{scenario.__name__} of {size}"] = run_group(size, scenario)
        name = f"{scenarios.conformance.__name__} of {size} by collectives"
        found[name] = run_group(size, scenarios.conformance, open_collectives)
    for scenario in (*scenarios.FAILS, scenarios.killed, scenarios.severed):
        found[f"{scenario.__name__} of 4"] = run_group(4, scenario)
    found["out_of_step of 4 by collectives"] = run_group(4, scenarios.out_of_step, open_collectives)
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
