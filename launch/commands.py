"""From a command's name and words to its flags and back to an exit code.

Flags are the fields of dataclasses; the docstrings under the fields are their help. There is no second list.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from ep import SerriedError

from . import (
    bench,
    bench_compile,
    bench_eplb,
    bench_exchange,
    bench_kernels,
    bench_overlap,
    bench_rank_slice,
    doctor,
    eplb,
    generate,
    plan,
    shard,
    simulate,
)
from .as_rank import Child
from .group import Start
from .refusal import Refusal

FAILED, REFUSED = 1, 2
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RULE = re.compile(r"[╭╮╰╯│─\- ]*")
"""A line that only draws: the parser's boxes, or its rules of hyphens where the output is not UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`flags` is a frozen dataclass (its docstring opens `--help`); `run` takes one and returns an exit code.

    starts_ranks   `run` also takes how this process came to be, since it may be one rank of several
    """

    flags: type[Any]
    run: Callable[..., int]
    about: str
    starts_ranks: bool = False


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
    "bench overlap": Command(
        flags=bench_overlap.OverlapFlags, run=bench_overlap.run, about=bench_overlap.ABOUT, starts_ranks=True
    ),
    "bench rank-slice": Command(
        flags=bench_rank_slice.RankSliceFlags, run=bench_rank_slice.run, about=bench_rank_slice.ABOUT
    ),
    "doctor": Command(flags=doctor.DoctorFlags, run=doctor.run, about=doctor.ABOUT, starts_ranks=True),
    "eplb": Command(flags=eplb.EplbFlags, run=eplb.run, about=eplb.ABOUT),
    "generate": Command(flags=generate.GenerateFlags, run=generate.run, about=generate.ABOUT, starts_ranks=True),
    "plan": Command(flags=plan.PlanFlags, run=plan.run, about=plan.ABOUT),
    "shard": Command(flags=shard.ShardFlags, run=shard.run, about=shard.ABOUT),
    "simulate": Command(flags=simulate.SimulateFlags, run=simulate.run, about=simulate.ABOUT),
}


def run_command(name: str, words: Sequence[str], child: Child | None = None) -> int:
    """Read the flags of command `name` from `words` and run it; returns the exit code."""
    try:
        name, words = _whole_name(name, words)
        command = COMMANDS[name]
        flags = parse_flags(command.flags, words, name=name, about=command.about)
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
    if name in COMMANDS:
        return name, words
    whole = " ".join([name, *words[:1]])
    if whole in COMMANDS:
        return whole, words[1:]
    known = [each for each in COMMANDS if each.startswith(f"{name} ")]
    if words[:1] in (["--help"], ["-h"]):
        print("\n".join(f"serried {each} --help" for each in known))
        sys.exit(0)
    raise Refusal(f"{whole!r} is not a command; there is {', '.join(known)}, e.g. serried {known[0]} --help")


def parse_flags(flags: type[Any], words: Sequence[str], *, name: str, about: str) -> Any:
    """`words` as an instance of `flags`; `--help` prints and exits with 0. Raises Refusal with what is wrong."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                flags,
                prog=f"serried {name}",
                description=about,
                args=list(words),
                config=(tyro.conf.PositionalRequiredArgs, tyro.conf.PositionalMetavarFromFieldName),
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        text = COLOUR.sub("", said.getvalue())  # the parser colours what it says where standard error is a terminal
        raise Refusal(f"{_one_line(text, exit_)} (serried {name} --help)") from exit_


def _one_line(box: str, exit_: SystemExit) -> str:
    """What the parser says in a box of lines, as one line; a config's own words come unwrapped from its error."""
    lines = [line.strip("│ ") for line in box.splitlines()[1:] if not RULE.fullmatch(line)]
    text = re.sub(r"\s+", " ", " ".join(lines)).strip()
    text = re.split(r" ?(?:For full helptext|Argument helptext)", text)[0]
    cause = exit_.__context__ and exit_.__context__.__context__
    place = re.match(r"Error parsing (\S+): ", text)
    if place is None:
        return text[:1].lower() + text[1:]
    words = str(cause) if isinstance(cause, ValueError) else text[place.end() :]
    return f"{place[1]}: {words}" if place[1].startswith("-") else words
