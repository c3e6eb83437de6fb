"""The commands by name: from words to flags, from flags to an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ep import SerriedError

from .bench import (
    bench,
    bench_compile,
    bench_eplb,
    bench_exchange,
    bench_kernels,
    bench_latency,
    bench_overlap,
    bench_rank_slice,
    bench_serve,
    bench_sweep,
    bench_throughput,
)
from .command import config_show, generate, shard
from .command.config_profile import ABOUT as PROFILE_ABOUT
from .command.config_profile import Origins, expand_profile, takes_profile
from .command.parsing import parse_flags
from .groups.as_rank import Child
from .groups.group import Start
from .groups.refusal import Refusal, refusals
from .lab import eplb, simulate, simulate_launch, simulate_route
from .observe import doctor, top
from .plan import plan, plan_vllm
from .service import serve

FAILED, REFUSED = 1, 2

__all__ = ["COMMANDS", "Command", "parse_flags", "run_command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`flags` is a frozen dataclass (its docstring opens `--help`); `run` takes one and returns an exit code.

    starts_ranks    `run` also takes how this process came to be, since it may be one rank of several
    wants_origins   `run` also takes which settings come from flags, and which from a profile
    """

    flags: type[Any]
    run: Callable[..., int]
    about: str
    starts_ranks: bool = False
    wants_origins: bool = False


COMMANDS = {
    "bench compile": Command(flags=bench_compile.CompileFlags, run=bench_compile.run, about=bench_compile.ABOUT),
    "bench eplb": Command(
        flags=bench_eplb.EplbBenchFlags, run=bench_eplb.run, about=bench_eplb.ABOUT, starts_ranks=True
    ),
    "bench exchange": Command(
        flags=bench_exchange.ExchangeFlags, run=bench_exchange.run, about=bench_exchange.ABOUT, starts_ranks=True
    ),
    "bench host": Command(flags=bench.HostFlags, run=bench.run, about=bench.ABOUT, starts_ranks=True),
    "bench kernels": Command(flags=bench_kernels.KernelFlags, run=bench_kernels.run, about=bench_kernels.ABOUT),
    "bench latency": Command(
        flags=bench_latency.LatencyFlags, run=bench_latency.run, about=bench_latency.ABOUT, starts_ranks=True
    ),
    "bench overlap": Command(
        flags=bench_overlap.OverlapFlags, run=bench_overlap.run, about=bench_overlap.ABOUT, starts_ranks=True
    ),
    "bench rank-slice": Command(
        flags=bench_rank_slice.RankSliceFlags, run=bench_rank_slice.run, about=bench_rank_slice.ABOUT
    ),
    "bench serve": Command(flags=bench_serve.ServeBenchFlags, run=bench_serve.run, about=bench_serve.ABOUT),
    "bench sweep": Command(
        flags=bench_sweep.SweepFlags, run=bench_sweep.run, about=bench_sweep.ABOUT, starts_ranks=True
    ),
    "bench throughput": Command(
        flags=bench_throughput.ThroughputFlags,
        run=bench_throughput.run,
        about=bench_throughput.ABOUT,
        starts_ranks=True,
    ),
    "config": Command(flags=config_show.ConfigFlags, run=config_show.run, about=config_show.ABOUT, wants_origins=True),
    "doctor": Command(flags=doctor.DoctorFlags, run=doctor.run, about=doctor.ABOUT, starts_ranks=True),
    "eplb": Command(flags=eplb.EplbFlags, run=eplb.run, about=eplb.ABOUT),
    "generate": Command(flags=generate.GenerateFlags, run=generate.run, about=generate.ABOUT, starts_ranks=True),
    "plan": Command(flags=plan.PlanFlags, run=plan.run, about=plan.ABOUT),
    "plan --from-vllm": Command(flags=plan_vllm.VllmFlags, run=plan_vllm.run, about=plan_vllm.ABOUT),
    "serve": Command(flags=serve.ServeFlags, run=serve.run, about=serve.ABOUT, starts_ranks=True),
    "shard": Command(flags=shard.ShardFlags, run=shard.run, about=shard.ABOUT),
    "simulate": Command(flags=simulate.SimulateFlags, run=simulate.run, about=simulate.ABOUT),
    "top": Command(flags=top.TopFlags, run=top.run, about=top.ABOUT),
    "simulate launch": Command(flags=simulate_launch.LaunchFlags, run=simulate_launch.run, about=simulate_launch.ABOUT),
    "simulate route": Command(flags=simulate_route.RouteFlags, run=simulate_route.run, about=simulate_route.ABOUT),
}


def run_command(name: str, words: Sequence[str], child: Child | None = None) -> int:
    """Read the flags of command `name` from `words` and run it; returns the exit code."""
    try:
        name, words = _whole_name(name, words)
        command = COMMANDS[name]
        about, origins = command.about, Origins()
        if takes_profile(command.flags):
            about += PROFILE_ABOUT
            with refusals():
                words, origins = expand_profile(words, command.flags)
        flags = parse_flags(command.flags, words, name=name, about=about)
        if command.wants_origins:
            return command.run(flags, origins)
        if command.starts_ranks:
            return command.run(flags, Start(words=[*name.split(), *words], child=child))
        return command.run(flags)
    except Refusal as refusal:
        print(f"serried: {refusal}", file=sys.stderr)
        return REFUSED
    except SerriedError as error:
        print(f"serried: {error}", file=sys.stderr)
        return FAILED


def _whole_name(name: str, words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Some commands have two words, `bench host`: the name as in COMMANDS, and the words that are left."""
    whole = " ".join([name, *words[:1]])
    if words and whole in COMMANDS:
        return whole, words[1:]
    if name in COMMANDS:
        return name, words
    known = {each: command for each, command in COMMANDS.items() if each.startswith(f"{name} ")}
    if words[:1] in (["--help"], ["-h"]):
        print(_list_of(name, known), end="")
        sys.exit(0)
    parts = ", ".join(each.removeprefix(f"{name} ") for each in known)
    what = f"{whole!r} is not a command" if words else f"{name} what"
    raise Refusal(f"{what}; there is {parts}, e.g. serried {next(iter(known))} --help")


def _list_of(name: str, known: Mapping[str, Command]) -> str:
    """The commands that begin with `name`, a line each: the first sentence of their help."""
    lines = [f"  {each.removeprefix(f'{name} '):<12} {_first_line(command.about)}" for each, command in known.items()]
    head = f"usage: serried {name} WHAT ...\n\n"
    return head + "\n".join([*lines, "", f"`serried {name} WHAT --help` lists the flags of one.", ""])


def _first_line(about: str) -> str:
    return about.split("\n\n")[0].replace("\n", " ")
