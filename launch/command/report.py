"""What is said beside the answers: a bar while weights load, then speed, a table of ranks, and how many went wrong.

Knows counters and how to lay them out; measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from runtime import EngineStats, RankStats
from runtime.weights.memory import gib

LONG_LOAD = 2**30
"""Bytes from which loading is worth a bar."""


@contextmanager
def request_bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar of requests that have ended, on a terminal; gone when they all have. Elsewhere nothing is written."""
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def loading_bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A callback for bytes done and in all; it draws a bar when there is much to load and a terminal to draw on."""
    columns = TextColumn("loading weights"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("load", total=None, visible=False)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=total >= LONG_LOAD)

        yield show


def speed_line(stats: EngineStats, seconds: float) -> str:
    """Tokens that reached requests, and how many a second that was, all ranks together."""
    tokens, ranks = stats.generated_tokens, len(stats.ranks)
    rate = tokens / seconds if seconds > 0 else 0.0
    return f"{tokens} tokens in {seconds:.2f} s: {rate:.1f} tokens/s on {ranks} {'rank' if ranks == 1 else 'ranks'}"


def error_line(failed: int, total: int) -> str:
    """How many of `total` requests ended in an error, and what that means: the engine has one such error."""
    return (
        f"{failed} of {total} request{'' if total == 1 else 's'} ended in an error: no usable logits, they were NaN or "
        "infinite; the weights or the number format (--dtype) do not fit"
    )


def overflow_line(stats: EngineStats) -> str | None:
    """How often rows did not fit the exchange, and what that cost; None when they always did."""
    found = [(rank.rank, rank.overflow_steps) for rank in stats.ranks if rank.overflow_steps]
    if not found:
        return None
    where = ", ".join(f"{count} on rank {rank}" for rank, count in found)
    again = stats.ranks[0].rerun_steps
    steps = "1 step was" if again == 1 else f"{again} steps were"
    return f"rows did not fit the exchange in some steps ({where}); {steps} run again, exact"


def overlap_line(stats: EngineStats) -> str | None:
    """How many steps ran in several tracks, and why others did not; None where overlap is off."""
    rank = stats.ranks[0]
    if not rank.cut_steps and not rank.uncut_steps:
        return None
    whole = f"; whole: {rank.uncut_steps}" if rank.uncut_steps else ""
    return f"{rank.cut_steps} of {rank.steps} steps ran in several tracks{whole}"


def graph_line(stats: EngineStats) -> str | None:
    """How many of a rank's steps were replayed as graphs, and why others were not; None where nothing is captured."""
    rank = min(stats.ranks, key=lambda rank: rank.replayed_steps)
    if not rank.replayed_steps and not rank.launched_steps:
        return None
    whole = f"; kernel by kernel: {rank.launched_steps}" if rank.launched_steps else ""
    return f"{rank.replayed_steps} of {rank.steps} steps were replayed as graphs{whole}"


def exchange_line(stats: EngineStats) -> str | None:
    """What the exchange sent in a step, the rank that sent most; None where nothing was sent."""
    network, node = (
        max(sent(rank) / max(rank.steps, 1) for rank in stats.ranks)
        for sent in (lambda rank: rank.network_bytes, lambda rank: rank.node_bytes)
    )
    if not network and not node:
        return None
    return f"exchange, a step and rank: {gib(round(network))} to other nodes, {gib(round(node))} inside the node"


COLUMNS = ("rank", "requests", "out", "computed", "steps", "idle", "preempted", "hits", "pages", "level", "slow")
LEGEND = """\
out: tokens that reached requests; computed: through the layers, prompts too
idle: steps without a token; hits: prompt tokens found in the prefix cache
level: mean over max of what this rank sent to each rank's experts; 1.00 is even
slow: steps in which the others waited for it without cause; DEGRADED ranks get no new requests"""


def rank_table(stats: EngineStats) -> Table:
    """One line a rank; `LEGEND` says what the columns are."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for rank in stats.ranks:
        table.add_row(*_cells(rank))
    return table


def _cells(rank: RankStats) -> list[str]:
    return [
        str(rank.rank),
        str(rank.finished),
        str(rank.generated_tokens),
        str(rank.computed_tokens),
        str(rank.steps),
        str(rank.idle_steps),
        str(rank.preemptions),
        str(rank.prefix_hits),
        str(rank.num_pages),
        f"{rank.expert_balance:.2f}",
        f"{rank.slow_steps} DEGRADED" if rank.degraded else str(rank.slow_steps),
    ]
