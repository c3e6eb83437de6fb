"""overlap_ranks.py REPORT MODEL JOB...: two ranks over gloo, or four, processes forked here, measure steps in one track
and in several, or with experts that move. Writes {job: [value by rank], ...} to the file REPORT. Jobs:

    pass ORDER ATTENTION    layers that compute nothing: time passes, by a clock of the rank's own
    hide CLOCK              the engine, of random weights
    choose                  the engine on the bare transport, with overlap off and on auto
    move                    four ranks: what moving experts costs
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from dbo import DboConfig, Timeline, drive, exposed_ns
from ep import Kind, Tag
from ep.slow import CoreClock, LinkConfig, SlowTransport
from ep.torch_dist import listen, open_store, open_torch_dist
from runtime.bench.overlap_bench import OverlapLoad, bench_config, compare_cpu, measure_overlap
from runtime.bench.rebalance_bench import MovingLoad, measure_moving
from runtime.forward.tracing import TracedTransport

SIZE, LIMIT_S = 2, 30.0
STAGE_S, LAYERS, ROW_BYTES = 0.04, 6, 400_000


def passing_layers(transport, clock, *, step, track, num_tracks, attention, halves):
    """Every stage and every exchange of a whole step takes STAGE_S, attention `attention` times as long."""

    def exchange(layer, kind):
        send = torch.zeros(SIZE, ROW_BYTES // num_tracks, dtype=torch.uint8)
        tag = Tag(step, layer, track, 0, kind)
        return transport.all_to_all(torch.empty_like(send), send, recv_splits=[1, 1], send_splits=[1, 1], tag=tag)

    def spend(seconds):
        clock.wait_until(clock.now() + round(seconds * 1e9))

    stage_s = STAGE_S / num_tracks
    for layer in range(LAYERS):
        spend(attention * stage_s / 2)
        if halves:
            yield
        spend(attention * stage_s / 2)
        yield exchange(layer, Kind.DISPATCH)
        spend(stage_s)
        yield exchange(layer, Kind.COMBINE)


def let_pass(transport, _model, order, attention):
    """Seconds and exposed seconds of a step in one track and in two."""
    clock = CoreClock()
    timeline = Timeline(now=clock.now)
    link = LinkConfig(link_bytes_per_s=ROW_BYTES / STAGE_S)
    slow = TracedTransport(SlowTransport(transport, link, clock=clock), timeline)
    found = {}
    for step, num_tracks in enumerate((1, 1, 2)):  # the first one warms up
        staggered = order == "staggered" and num_tracks > 1
        tracks = [
            passing_layers(
                slow, clock, step=step, track=track, num_tracks=num_tracks, attention=float(attention), halves=staggered
            )
            for track in range(num_tracks)
        ]
        seen = len(timeline.spans)
        begin = clock.now()
        drive(tracks, lead=int(staggered), timeline=timeline)
        found[num_tracks] = (clock.now() - begin) / 1e9, exposed_ns(timeline.spans[seen:]) / 1e9
    return found


def hide(transport, model, clock):
    load = OverlapLoad(rounds=4, clock=clock)
    times, _ = measure_overlap(transport, bench_config(model, ranks=SIZE, load=load), load)
    return times._asdict() | {"by_wall": times.hidden_by_wall, "by_trace": times.hidden_by_trace}


def choose(transport, model):
    load = OverlapLoad(requests=32, rounds=20)
    choices = [DboConfig(dbo=name) for name in ("off", "auto")]
    return compare_cpu(transport, bench_config(model, ranks=SIZE, load=load), load, choices)


def move(transport, model):
    config = bench_config(model, ranks=transport.size, load=OverlapLoad(requests=2))
    times = measure_moving(transport, config, MovingLoad())
    return times._asdict() | {name: getattr(times, name) for name in ("ratio", "unexplained", "loss")}


JOBS = {"pass": let_pass, "hide": hide, "choose": choose, "move": move}


def run_group(model, job):
    name, *words = job.split()
    size = 4 if name == "move" else SIZE
    with tempfile.TemporaryDirectory() as folder, listen("lo") as listener:
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                be_rank(rank, size, listener, Path(folder), lambda transport: JOBS[name](transport, model, *words))
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert codes == [0] * size, codes
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]


def be_rank(rank, size, listener, folder, work):
    try:
        port = listener.getsockname()[1]
        store = open_store("127.0.0.1", port, rank=rank, size=size, listener=listener if rank == 0 else None)
        transport = open_torch_dist(rank=rank, size=size, backend="gloo", store=store, timeout_s=LIMIT_S)
        (folder / f"{rank}.json").write_text(json.dumps(work(transport)))
        transport.close()  # what the others have not read yet is on its way
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(report, model, *jobs):
    torch.set_num_threads(1)
    Path(report).write_text(json.dumps({job: run_group(model, job) for job in jobs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
