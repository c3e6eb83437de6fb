"""`serried simulate`: what the prefill cadence and overlap do to a group of ranks, drawn and counted, without a device.

The scheduler, the heartbeat, the cadence and the routing are the engine's own; the time that steps take is the cost
model's. Standard output carries all of it; with --json its last line is one JSON object.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from dbo import DboConfig
from runtime.bench.overlap_table import overlap_cells
from runtime.costs.cost_tables import CostTables, read_cost_tables
from runtime.costs.costs import StepCosts
from runtime.costs.measured import MeasuredOperations
from runtime.costs.traffic import RowsPer
from runtime.scheduling.cadence import CadenceConfig, Reason
from runtime.scheduling.overlap import comm_share
from runtime.scheduling.scheduler import SchedulerConfig
from runtime.simulation.scenarios import Scenario, ScenarioName, make_scenario
from runtime.simulation.simulated_faults import Fault, FaultKind, draw_fault
from runtime.simulation.simulation import GroupConfig
from runtime.simulation.simulation_record import Measures, Run, Window
from runtime.weights.hardware import read_hardware

from ..command.models import find_hardware
from ..command.report import request_bar
from ..command.wide_table import print_table
from ..groups.refusal import refusals
from .timeline import Picture

ABOUT = """\
Simulate ranks in lockstep, and show who computes, who decodes and who waits.

Examples:
  serried simulate --scenario one-long-prefill --prefill-schedule-interval 1
  serried simulate --scenario one-long-prefill --prefill-schedule-interval 4
  serried simulate --scenario steady --prefill-schedule-interval auto --json
  serried simulate --scenario burst --ranks 16 --fault slow-rank --seed 7
  serried simulate --scenario steady --ranks 32 --dbo auto
  serried simulate --scenario overlap

Scenarios: steady is a stream of prompts at 80% of what interval 1 just sustains; one-long-prefill a prompt of 32k on
one of the ranks that decode; burst as many prompts of 6k as ranks, at once. The same seed gives the same run.
overlap simulates nothing: it is the table of what cut steps gain, over ranks, batches and contexts, and of what auto
does there. Exchanges are those of kernels that need no multiprocessors, so --comm-sms is 0 here unless you say so.
"""

DONE = 0
FAULT_STEPS = 20, 44
"""Faults strike in one of these steps: everybody decodes by then, and what a scene is about has begun or soon will."""

_LABEL_COLUMNS = 22
_BEFORE_US, _AFTER_US = 0.15e6, 0.1e6
_PICTURE_US = 1.6e6
_STEPS_BEFORE = 5

MAX_RANKS = 320

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateFlags:
    """What `serried simulate` is told."""

    scenario: ScenarioName | Literal["overlap"] = "steady"
    """What comes to the ranks."""

    ranks: int = 8
    """Ranks of the group, up to hundreds."""

    gpu: str = "h200"
    """Device of each rank: a name in profiles/hardware that has cost tables."""

    seed: int = 0
    """Of arrivals and faults."""

    async_depth: Literal[0, 1] = 1
    """Steps launched ahead of reading tokens."""

    rate: float | None = None
    """Scenario steady: requests a second, all ranks together; unset: 3 a rank."""

    seconds: float | None = None
    """Scenario steady: for how long requests come; unset: 60."""

    max_num_batched_tokens: int | None = None
    """Tokens one step computes on a rank, at most; unset: 8192, and 2048 in burst, so that its prompts take several."""

    max_num_seqs: int = 256
    """Requests that run at the same time on a rank, at most."""

    long_prefill_token_threshold: int = 0
    """Tokens of one prompt in one step, at most; 0: no such limit."""

    num_blocks: int = 3285
    """Pages of 64 tokens a rank has; 3285 is what DeepSeek-V3 on 8 H200 leaves."""

    fault: tyro.conf.UseAppendAction[tuple[FaultKind, ...]] = ()
    """Something that goes wrong on a rank and at a step drawn from the seed; give it once for each."""

    rows_per: RowsPer = "ranks"
    """Rows that an exchange sends: for each rank there and back; slots: for each rank there, for each expert back; or
    experts: for each expert both ways, as published kernels do."""

    cadence: tyro.conf.OmitArgPrefixes[CadenceConfig] = field(default_factory=CadenceConfig)
    overlap: tyro.conf.OmitArgPrefixes[DboConfig] = field(default_factory=lambda: DboConfig(comm_sms=0))

    json: Switch = False
    """End with one JSON object."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"ranks is {self.ranks}; it must be from 1 to {MAX_RANKS}, e.g. 8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is simulated, put together from the flags."""

    config: GroupConfig
    tables: CostTables
    device: str
    comm_share: float
    scenario: Scenario
    faults: tuple[Fault, ...]
    seed: int


def run(flags: SimulateFlags) -> int:
    """Simulate and print; returns 0. Raises Refusal for flags that make no sense, SimulationFailed (with the seed) when
    a rule of the group breaks."""
    if flags.scenario == "overlap":
        return show_overlap(flags)
    with refusals():
        setting = make_setting(flags)
        operations = MeasuredOperations(tables=setting.tables, ranks=flags.ranks, rows_per=flags.rows_per)
        costs = StepCosts(operations, comm_share=setting.comm_share)
        played = setting.scenario.play(setting.config, costs, seed=flags.seed, faults=setting.faults)
    with request_bar(Console(stderr=True)) as progress:
        result = played.run(progress)
    measures = setting.scenario.measure(result)
    out = Console(highlight=False, soft_wrap=True)
    for line in headline(setting):
        out.print(line, markup=False)
    picture = Picture.of(result, picture_window(setting, result), columns=max(out.width, 80) - _LABEL_COLUMNS)
    out.print()
    for line in picture.lines(flags.ranks, failed=None if result.verdict is None else result.verdict.culprit):
        out.print(line)
    out.print()
    for line in report(setting, result, measures):
        out.print(line, markup=False)
    if flags.json:
        print(json.dumps(record(flags, measures)))
    return DONE


def make_setting(flags: SimulateFlags) -> Setting:
    """Raises ValueError or OSError for what cannot be read or makes no sense."""
    path = find_hardware(flags.gpu)
    scenario = make_scenario(flags.scenario, ranks=flags.ranks, seed=flags.seed, rate=flags.rate, seconds=flags.seconds)
    step_tokens = scenario.step_tokens if flags.max_num_batched_tokens is None else flags.max_num_batched_tokens
    scheduler = SchedulerConfig(
        max_num_batched_tokens=step_tokens,
        max_num_seqs=flags.max_num_seqs,
        long_prefill_token_threshold=flags.long_prefill_token_threshold,
    )
    first, last = FAULT_STEPS
    hardware = read_hardware(path)
    return Setting(
        config=GroupConfig(
            ranks=flags.ranks,
            async_depth=flags.async_depth,
            num_blocks=flags.num_blocks,
            scheduler=scheduler,
            cadence=flags.cadence,
            overlap=flags.overlap,
        ),
        tables=read_cost_tables(path),
        device=hardware.name,
        comm_share=comm_share(flags.overlap, hardware),
        scenario=scenario,
        faults=tuple(
            [draw_fault(kind, ranks=flags.ranks, first=first, last=last, seed=flags.seed) for kind in flags.fault]
        ),
        seed=flags.seed,
    )


def show_overlap(flags: SimulateFlags) -> int:
    """The table of what cut steps gain; returns 0."""
    with refusals():
        path = find_hardware(flags.gpu)
        tables, hardware = read_cost_tables(path), read_hardware(path)
        share = comm_share(flags.overlap, hardware)
    cells = overlap_cells(tables, flags.overlap, comm_share=share, rows_per=flags.rows_per)
    out = Console(highlight=False, soft_wrap=True)
    out.print(
        f"{tables.model} on {hardware.name}: decode steps whole, and cut in {flags.overlap.dbo_tracks}; exchanges of a "
        f"row for each of a token's {flags.rows_per}, on {flags.overlap.comm_sms} multiprocessors",
        markup=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("ranks", "tokens", "context", "whole ms", "cut ms", "gain", "auto"):
        table.add_column(f" {name}", justify="right")
    for cell in cells:
        times = f"{cell.one_ms:.1f}", f"{cell.cut_ms:.1f}", f"{cell.gain:+.0%}"
        sizes = str(cell.ranks), str(cell.tokens), str(cell.context_len)
        table.add_row(*sizes, *times, "on" if cell.is_cut else "off")
    print_table(out, table)
    if flags.json:
        print(json.dumps([asdict(cell) | {"gain": round(cell.gain, 4)} for cell in cells]))
    return DONE


def headline(setting: Setting) -> list[str]:
    """What is simulated."""
    config, tables = setting.config, setting.tables
    prompts = f"prompts of 1k at {1e6 / tables.prefill_us.at(512):,.0f} tokens/s a rank"
    return [
        f"{setting.scenario.name}: {setting.scenario.about}",
        f"{config.ranks} ranks, interval {config.cadence.prefill_schedule_interval}, async depth {config.async_depth}, "
        f"{config.scheduler.max_num_batched_tokens} tokens a step at most",
        f"step times: tables of {tables.model} on {setting.device}; {prompts}, beyond 4k extrapolated",
        *[f"fault: {fault}" for fault in setting.faults],
    ]


def picture_window(setting: Setting, result: Run) -> Window:
    """From shortly before the event to shortly after the first tokens it is about; with faults, around the first."""
    if setting.faults:
        first_step = min([fault.step for fault in setting.faults]) - _STEPS_BEFORE
        begin_us = next((step.begin_us for step in result.steps if step.number >= first_step), 0.0)
        return Window(begin_us=begin_us, end_us=begin_us + _PICTURE_US)
    scenario = setting.scenario
    begin_us = scenario.waits.begin_us - _BEFORE_US
    if scenario.name == "steady":
        return Window(begin_us=begin_us, end_us=begin_us + _PICTURE_US)
    first = [story.first_us for story in result.stories[slice(*scenario.focus)] if story.first_us is not None]
    return Window(begin_us=begin_us, end_us=max(first, default=result.end_us) + _AFTER_US)


def report(setting: Setting, result: Run, measures: Measures) -> list[str]:
    """What came of it, for a person."""
    reasons = Counter([step.reason for step in result.steps if step.begin_us in setting.scenario.waits])
    deferred = reasons.pop(Reason.DEFERRED, 0)
    reasons.pop(Reason.NO_PROMPTS, None)
    released = ", ".join([f"{reason} {count}" for reason, count in reasons.most_common()]) or "none"
    put_off = f"put off in {deferred} steps, {result.longest_put_off} in a row at most"
    lines = [
        f"output           {measures.output_throughput:,.0f} tokens/s",
        f"between tokens   P50 {_ms(measures.p50_itl_ms)}, P99 {_ms(measures.p99_itl_ms)}",
        f"first token      mean {_ms(measures.mean_ttft_ms)}, P99 {_ms(measures.p99_ttft_ms)}",
        f"balance          {measures.balance_ratio:.2f}: tokens computed in a step, mean over max of the ranks",
        f"prompts          {put_off}; released: {released}",
        f"run              {len(result.steps)} steps, {result.end_us / 1e6:.1f} s; --seed {setting.seed} replays it: "
        f"{result.digest()}",
    ]
    if setting.config.overlap.dbo != "off":
        whole = f"; whole: {result.uncut_steps}" if result.uncut_steps else ""
        lines.insert(-1, f"overlap          {result.cut_steps} steps cut{whole}")
    if result.verdict is not None:
        open_requests = sum([not story.ended for story in result.stories if story.rank is not None])
        lines.append(f"ended            {result.verdict}; {open_requests} requests end with it")
    return lines


def record(flags: SimulateFlags, measures: Measures) -> dict[str, Any]:
    """The result for a program."""
    return {
        "ranks": flags.ranks,
        "interval": flags.cadence.prefill_schedule_interval,
        "output_throughput": _rounded(measures.output_throughput),
        "p50_itl_ms": _rounded(measures.p50_itl_ms),
        "p99_itl_ms": _rounded(measures.p99_itl_ms),
        "mean_ttft_ms": _rounded(measures.mean_ttft_ms),
        "p99_ttft_ms": _rounded(measures.p99_ttft_ms),
        "balance_ratio": _rounded(measures.balance_ratio),
        "deferred_steps": measures.deferred_steps,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"
