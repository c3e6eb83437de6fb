"""`serried bench exchange --transport nccl`: every way of exchange that GPUs here have, timed as a group does at start.

    each size    bounded, then the back ends that are installed: self-test, then a round replayed from a graph

Prints what `bench exchange` prints around it, a line for each size and way, and a last line of JSON. Knows how it is
said; how it goes is `ep.trial`, what is timed `runtime.graphs.exchange_times`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ep import Exchange, ExchangeConfig, Topology, Transport, exchange_ops
from ep.back_ends import opener, refusal
from ep.blueprint import Blueprint
from ep.config import BACK_ENDS
from ep.exchange_bench import Load
from ep.lanes import LANES
from ep.parts import BackEnd
from ep.trial import Trial, Tried, fastest
from runtime.graphs.exchange_times import round_us

from ..command.wide_table import print_table

QUESTION = "How long do dispatch and combine take on GPUs, by each way there is?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One size and how all ways went, the same on every rank."""

    load: Load
    tried: Sequence[Tried]


def ways(asked: ExchangeConfig) -> list[ExchangeConfig]:
    """What is left open is tried, straight; what was asked for alone."""
    if asked.exchange != "auto":
        return [replace(asked, hierarchical="off" if asked.hierarchical == "auto" else asked.hierarchical)]
    first = replace(asked, exchange="bounded", hierarchical="off")
    return [first, *(replace(first, exchange=mode) for mode in BACK_ENDS if first.combine == "ranks")]


def race(
    transport: Transport,
    loads: Sequence[Load],
    asked: ExchangeConfig,
    *,
    topology: Topology,
    device: torch.device,
    ops: str,
    back_end: Callable[[Blueprint], BackEnd | None] | None = None,
    lacks: Callable[[str], str | None] | None = None,
) -> list[Race]:
    """All ranks together. back_end, lacks: None, those of this machine."""
    open_back_end = back_end or opener(transport, lanes=LANES[device.type](device), device=device)
    lacks = lacks or partial(refusal, device=device)

    def build(load: Load, config: ExchangeConfig) -> Exchange:
        return Exchange(
            transport,
            num_slots=load.num_slots,
            hidden=load.hidden,
            top_k=load.top_k,
            dtype=load.dtype,
            device=device,
            config=config,
            topology=topology,
            ops=exchange_ops(ops),
            back_end=open_back_end,
        )

    races = []
    for load in loads:
        trial = Trial(
            configs=[replace(way, round_tokens=load.tokens) for way in ways(asked)],
            lacks=lambda config: lacks(config.exchange),
            build=partial(build, load),
            time_us=partial(round_us, tokens=load.tokens),
        )
        exchange, tried = fastest(trial, transport, device=device)
        exchange.close()
        races.append(Race(load=load, tried=tried))
    return races


def tell_race(races: Sequence[Race], head: Sequence[str], settings: dict[str, object]) -> None:
    """Print what was asked, where, with which settings, and what came out; `settings` go into the last line, too."""
    out = Console(highlight=False, soft_wrap=True)
    for line in (QUESTION, *head):
        out.print(line, markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("tokens", "hidden", "exchange", "us", "not used, for"):
        table.add_column(name, justify="left" if name in ("exchange", "not used, for") else "right")
    for each in races:
        for tried in each.tried:
            us = "" if tried.us is None else f"{tried.us:.0f}"
            table.add_row(f"{each.load.tokens}", f"{each.load.hidden}", tried.name, us, tried.fault)
    print_table(out, table)
    print(json.dumps(settings | {"lines": [line for each in races for line in _lines(each)]}))


def _lines(each: Race) -> list[dict[str, object]]:
    return [
        {
            "tokens": each.load.tokens,
            "hidden": each.load.hidden,
            "exchange": tried.config.exchange,
            "round_us": tried.us,
            "fault": tried.fault,
        }
        for tried in each.tried
    ]
