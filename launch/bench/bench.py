"""`serried bench host`: what a step costs the host on each of N ranks, and how long they take to agree on it.

Prints the question, the machine, the commit, the settings, then a table, then one last line of JSON. The ranks are
processes, started and met like those of `generate`; what they measure comes back over the control plane itself. Knows
how it is said; what is measured is `runtime.bench.host_bench`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from runtime.bench.host_bench import PARTS, HostTimes, Load, measure_group
from runtime.control.stars import open_control
from runtime.scheduling.votes import Vote

from ..command.wide_table import print_table
from ..groups.as_rank import hush
from ..groups.group import Start, meet_ranks
from ..groups.house import home
from ..groups.refusal import refusals
from ..groups.rendezvous import RendezvousConfig
from ..groups.world import World, check_ranks, detect, own_world

ABOUT = """\
Measure what a step costs the host, part by part, and what the vote before it takes.

Examples:
  serried bench host --ranks 4
  serried bench host --ranks 4 --temperature 0.7
  serried bench host --ranks 1 --requests 64 --steps 500

The engine's own step loop runs on every rank, with a model that does nothing; CPU time leaves out waits and what else
the machine does, so the step holds on a busy machine too. The votes are on the wall and want an idle one.
"""

DONE = 0
DEFAULT_RANKS = 4
TARGET_STEP_MS, TARGET_VOTE_MS = 1.5, 0.2
QUESTION = "What does a step cost the host (CPU time of one rank's thread), and how long do ranks take to agree on it?"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFlags:
    """What `serried bench host` is told."""

    ranks: int | None = None
    """Ranks that vote, each a process; unset: 4, or as many as the launcher started."""

    requests: int = 256
    """Requests that decode on each rank."""

    prompt_len: int = 1024
    """Tokens of their prompts, on average."""

    temperature: float = 0.0
    """Of every request; 0 is greedy."""

    steps: int = 200
    """Steps measured, after the prompts are computed."""

    votes: int = 2000
    """Votes measured among ranks that do nothing else."""

    meeting: tyro.conf.OmitArgPrefixes[RendezvousConfig] = field(default_factory=RendezvousConfig)

    def __post_init__(self) -> None:
        for name in ("ranks", "votes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, e.g. 4")
        self.load  # noqa: B018  # it refuses what makes no sense

    @property
    def load(self) -> Load:
        """What each rank has to do."""
        return Load(requests=self.requests, prompt_len=self.prompt_len, steps=self.steps, temperature=self.temperature)


def run(flags: HostFlags, start: Start) -> int:
    """Measure on all ranks and print on rank 0; returns 0. Raises Refusal for ranks that cannot be started."""
    with refusals():
        world = start.child.world if start.child else detect(os.environ)
        check_ranks(world, flags.ranks)
        if world.size == 1:
            world = own_world(0, flags.ranks or DEFAULT_RANKS)
    torch.set_num_threads(1)
    if not world.is_primary:
        hush(world.rank)
    times = measure(flags, start, world)
    if world.is_primary:
        tell(times, flags)
    return DONE


def measure(flags: HostFlags, start: Start, world: World) -> list[HostTimes]:
    """Meet the other ranks of `world` and measure together; all ranks' times, in rank order."""
    with ExitStack() as stack:
        with refusals():
            meeting, _ = meet_ranks(
                flags.meeting, start, world, stack, fields=load_fields(flags), endpoints=("control",)
            )
        control = open_control(
            rank=world.rank,
            size=world.size,
            hub=meeting.endpoint("control"),
            key=meeting.key,
            width=len(Vote._fields),
            interface=flags.meeting.interface,
        )
        stack.enter_context(closing(control))
        return measure_group(control, flags.load, votes=flags.votes)


def load_fields(flags: HostFlags) -> tuple[tuple[str, str], ...]:
    """What must be the same on every rank, or they would vote unequally often."""
    wanted = asdict(flags.load) | {"votes": flags.votes}
    return tuple((name, str(value)) for name, value in wanted.items())


def tell(times: Sequence[HostTimes], flags: HostFlags) -> None:
    """Print what was asked, where, with which settings, and what came out."""
    out = Console(highlight=False, soft_wrap=True)
    load = flags.load
    for line in (
        QUESTION,
        machine_line(),
        f"commit    {commit()}",
        f"settings  {len(times)} ranks, {load.requests} requests decode on each, prompts of {load.prompt_len} tokens, "
        f"temperature {load.temperature:g}, pages of {load.page_size}, async depth {load.async_depth}; "
        f"medians of {load.steps} steps and of {flags.votes} votes",
    ):
        out.print(line, markup=False)
    print_table(out, host_table(times))
    print(json.dumps(summary(times, flags)))


def host_table(times: Sequence[HostTimes]) -> Table:
    """Microseconds: a line a part, then the step, then the votes."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("us, median", "rank 0", "ranks' median", "slowest rank", "target"):
        table.add_column(name, justify="left" if name == "us, median" else "right")
    for part in PARTS:
        table.add_row(part, *_cells([each.parts_us[part] for each in times]), "")
    step_target, vote_target = f"{1000 * TARGET_STEP_MS:.0f}", f"{1000 * TARGET_VOTE_MS:.0f}"
    table.add_section()
    table.add_row("step, CPU time", *_cells([each.step_us for each in times]), step_target)
    table.add_row("  90% are below", *_cells([each.late_step_us for each in times]), "")
    table.add_row("vote among idle ranks", *_cells([each.idle_vote_us for each in times]), vote_target)
    table.add_row("  90% are below", *_cells([each.late_idle_vote_us for each in times]), "")
    table.add_row("vote in the steps above", *_cells([each.busy_vote_us for each in times]), "")
    return table


def _cells(values: Sequence[float]) -> list[str]:
    return [f"{value:.0f}" for value in (values[0], statistics.median(values), max(values))]


def summary(times: Sequence[HostTimes], flags: HostFlags) -> dict[str, object]:
    """The last line: of each figure the slowest rank's, since the others wait for it."""
    return {
        "ranks": len(times),
        "requests": flags.requests,
        "prompt_len": flags.prompt_len,
        "temperature": flags.temperature,
        "steps": flags.steps,
        "votes": flags.votes,
        "commit": commit(),
        "step_cpu_ms": round(max(each.step_us for each in times) / 1000, 4),
        "step_cpu_p90_ms": round(max(each.late_step_us for each in times) / 1000, 4),
        "parts_cpu_us": {part: round(max(each.parts_us[part] for each in times), 2) for part in PARTS},
        "vote_idle_ms": round(max(each.idle_vote_us for each in times) / 1000, 4),
        "vote_idle_p90_ms": round(max(each.late_idle_vote_us for each in times) / 1000, 4),
        "vote_busy_ms": round(max(each.busy_vote_us for each in times) / 1000, 4),
        "target_step_cpu_ms": TARGET_STEP_MS,
        "target_vote_idle_ms": TARGET_VOTE_MS,
    }


def machine_line() -> str:
    """Processor, cores and how busy they were when this was printed."""
    load = os.getloadavg()[0]
    return (
        f"machine   {processor()}, {os.cpu_count()} cores, load {load:.1f} in the last minute; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit of this working tree, with a plus where files differ from it; what is installed has none."""
    command = ["git", "-C", str(home()), "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"
