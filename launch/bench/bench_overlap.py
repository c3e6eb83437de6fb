"""`serried bench overlap`: how much of the exchange several tracks hide, on real ranks behind a link made slow.

Prints the question, the machine, the commit, the settings, then a table, then one last line of JSON. Ranks are
processes, started and met like those of `generate`. Knows how it is said; `runtime.bench.overlap_bench` measures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from ep import Transport
from runtime.bench.overlap_bench import EngineTimes, OverlapLoad, OverlapTimes, bench_config, measure_overlap
from runtime.forward.tracing import summary, trace_path, write_trace

from ..command.models import find_model
from ..command.wide_table import print_table
from ..groups.as_rank import hush
from ..groups.group import Start, meet_ranks
from ..groups.place import cpu_transport, open_transport
from ..groups.refusal import refusals
from ..groups.rendezvous import RendezvousConfig
from ..groups.trace import check_path, picture
from ..groups.world import World, check_ranks, detect, own_world
from .bench import commit, machine_line

ABOUT = """\
Measure how much of the exchange a second track hides, behind a link that is made slow.

Examples:
  serried bench overlap --ranks 2
  serried bench overlap --ranks 2 --share 0.5 --order staggered --trace overlap.json
  serried bench overlap --ranks 2 --tracks 3 --requests 96
  serried bench overlap --ranks 2 --clock core

Random weights of the model decode on every rank, in one track and in several, with the transport as it is and with its
rows delayed; the link is chosen so that a step's rows are under way for --share times what a rank computes in it. Ranks
want a core each: where they share cores, waiting for one another is in all columns, unless --clock core.
"""

DONE = 0
DEFAULT_RANKS = 2
QUESTION = "How much of the exchange do several tracks hide, and what does a step in several tracks cost?"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFlags:
    """What `serried bench overlap` is told."""

    model: str = "profiles/models/tiny-v3"
    """Folder, config.json or name of the model; its weights are random."""

    ranks: int | None = None
    """Ranks, each a process; unset: 2, or as many as the launcher started."""

    requests: int = 128
    """Requests that decode on each rank."""

    rounds: int = 6
    """Turns of each engine, of 4 steps; lower quartiles are told."""

    share: float = 1.0
    """How long a step's rows are under way on the slow link, over what a rank computes in it."""

    link_latency_us: float = 0.0
    """Latency of the slow link besides, microseconds."""

    tracks: int = 2
    """Tracks of a cut step."""

    order: Literal["abreast", "staggered"] = "abreast"
    """How tracks take turns, see --dbo-order of generate."""

    exchange: Literal["exact", "bounded"] = "bounded"
    """How rows are sent: exact waits for counts first, which no track hides."""

    transport: Literal["auto", "gloo", "mpi"] = "auto"
    """What carries rows: auto takes mpi under mpirun and gloo otherwise."""

    clock: Literal["wall", "core"] = "wall"
    """core: one that runs as if each rank had a core to itself, whatever else the machine does: its processor time, and
    what the link makes it wait."""

    trace: Path | None = None
    """File for a trace of the cut steps on the slow link, for ui.perfetto.dev; rank 1 writes one with .rank1 before its
    ending, and so on."""

    meeting: tyro.conf.OmitArgPrefixes[RendezvousConfig] = field(default_factory=RendezvousConfig)

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 2:
            raise ValueError(f"ranks is {self.ranks}; a rank alone exchanges nothing, so at least 2, e.g. 2")
        check_path(self.trace)
        self.load  # noqa: B018  # it refuses what makes no sense

    @property
    def load(self) -> OverlapLoad:
        """What is measured."""
        return OverlapLoad(
            requests=self.requests,
            rounds=self.rounds,
            share=self.share,
            link_latency_us=self.link_latency_us,
            tracks=self.tracks,
            order=self.order,
            exchange=self.exchange,
            clock=self.clock,
        )


def run(flags: OverlapFlags, start: Start) -> int:
    """Measure on all ranks and print on rank 0; returns 0. Raises Refusal for what cannot be measured."""
    with refusals():
        world = start.child.world if start.child else detect(os.environ)
        check_ranks(world, flags.ranks)
        if world.size == 1:
            world = own_world(0, flags.ranks or DEFAULT_RANKS)
        name = cpu_transport(flags.transport, world)
        config = bench_config(str(find_model(flags.model)), ranks=world.size, load=flags.load)
    torch.set_num_threads(1)
    if not world.is_primary:
        hush(world.rank)
    with connected(name, flags, start, world) as transport:
        times, timeline = measure_overlap(transport, config, flags.load)
    if flags.trace is not None:
        write_trace(trace_path(flags.trace, world.rank), timeline.spans, rank=world.rank)
    if world.is_primary:
        out = Console(highlight=False, soft_wrap=True)
        tell(out, times, flags, world, name)
        for line in (summary(timeline.spans), *picture(timeline.spans, rank=0, columns=max(out.width, 80))):
            out.print(line, markup=False)
        print(json.dumps(record(times, flags, world)))
    return DONE


@contextmanager
def connected(name: str, flags: OverlapFlags, start: Start, world: World) -> Iterator[Transport]:
    """Start the other ranks if nobody did, meet them, and connect."""
    with ExitStack() as stack:
        with refusals():
            meeting, _ = meet_ranks(
                flags.meeting,
                start,
                world,
                stack,
                fields=(("model", flags.model), ("load", str(flags.load))),
                endpoints=("store",),
            )
        yield stack.enter_context(closing(open_transport(name, world, meeting, interface=flags.meeting.interface)))


def tell(out: Console, times: OverlapTimes, flags: OverlapFlags, world: World, transport: str) -> None:
    """Print what was asked, where, with which settings, and what came out on rank 0."""
    load = flags.load
    link = f"{times.link_bytes_per_s / 1e6:.3g} MB/s a rank, latency {load.link_latency_us:g} us"
    for line in (
        QUESTION,
        machine_line(),
        f"commit    {commit()}",
        f"settings  {world.size} ranks over {transport}, {load.requests} requests each, {load.tracks} tracks "
        f"{load.order}, {load.exchange} exchange; slow link {link}: {load.share:g} x compute; lower "
        f"quartiles of {4 * load.rounds} steps by the {load.clock} clock, rank 0",
    ):
        out.print(line, markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("step", "ms", "CPU ms", "exposed ms"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for name, engine in engines(times).items():
        table.add_row(name, *[f"{value:.2f}" for value in engine])
    print_table(out, table)
    hidden = (
        f"{times.hidden_by_wall:.0%} of what the slow link costs by the clock, {times.hidden_by_trace:.0%} by trace"
    )
    gain = times.one_slow.wall_ms / times.cut_slow.wall_ms
    out.print(f"hidden    {hidden}; throughput behind it x {gain:.2f}", markup=False)


def engines(times: OverlapTimes) -> dict[str, EngineTimes]:
    """By the names in the table."""
    return {
        "one track": times.one,
        "one track, slow link": times.one_slow,
        "several tracks": times.cut,
        "several tracks, slow link": times.cut_slow,
    }


def record(times: OverlapTimes, flags: OverlapFlags, world: World) -> dict[str, object]:
    """For the last line."""
    return {
        "ranks": world.size,
        "requests": flags.requests,
        "tracks": flags.tracks,
        "order": flags.order,
        "clock": flags.clock,
        "share": flags.share,
        "link_bytes_per_s": round(times.link_bytes_per_s),
        "hidden_by_wall": round(times.hidden_by_wall, 3),
        "hidden_by_trace": round(times.hidden_by_trace, 3),
        **{name: [round(value, 3) for value in engine] for name, engine in engines(times).items()},
    }
