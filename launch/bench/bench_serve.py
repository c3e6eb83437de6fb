"""`serried bench serve`: requests at a rate to a running server, and how soon their tokens came.

The last line is JSON with the keys of `vllm bench serve`. Knows flags and how figures are said; the load is
`serve_load`'s, the calls are `serve_clients`'.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import cast

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from runtime.bench.workload import check_arrivals

from ..command.wide_table import print_table
from ..groups.refusal import Refusal, refusals
from .bench import commit, machine_line
from .serve_load import Ask, Outcome, asks, drive, gaps

ABOUT = """\
Send requests at a rate to a running server, by gRPC or through a gateway, and say how soon their tokens came.

Examples:
  serried bench serve grpc://127.0.0.1:50051 --num-prompts 500 --request-rate 20
  serried bench serve http://127.0.0.1:8000 --num-prompts 500 --max-concurrency 64
  serried bench serve grpc://127.0.0.1:50051 --cpu-of-pid 4711

Prompts are random and share nothing. Every answer is greedy and has --output-len tokens.
"""

DONE, FAILED = 0, 1
QUESTION = "How soon do tokens come from this server, and how many a second, at this rate of requests?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchFlags:
    """What `serried bench serve` is told."""

    url: tyro.conf.Positional[str]
    """The server: grpc://HOST:PORT, or http://HOST:PORT for a gateway that speaks OpenAI's API."""

    model: str | None = None
    """Its name there; unset: what the server says."""

    num_prompts: int = 500
    """Requests to send."""

    request_rate: float = inf
    """Requests a second, on average; inf: all at once."""

    burstiness: float = 1.0
    """1: a Poisson process; less: burstier; more: more regular; inf: equal gaps."""

    max_concurrency: int | None = None
    """Requests under way at a time, at most; unset: no such limit."""

    input_len: int = 64
    """Tokens of a prompt (words, over HTTP)."""

    output_len: int = 64
    """Tokens of an answer."""

    warmup: int = 8
    """Requests before those that count."""

    seed: int = 0
    """Of prompts and arrivals."""

    cpu_of_pid: tuple[int, ...] = ()
    """Processes of this machine whose processor time is counted meanwhile, e.g. the server's front door."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1, e.g. 64")
        check_arrivals(request_rate=self.request_rate, burstiness=self.burstiness)
        if self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup}; it must be at least 0, e.g. 8")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency is {self.max_concurrency}; it must be at least 1, e.g. 64")


def run(flags: ServeBenchFlags) -> int:
    """Send, measure and print; 1 when a request failed. Raises Refusal for what cannot be asked."""
    if find_spec("grpc") is None or find_spec("smg_grpc_proto") is None:
        raise Refusal("gRPC is not installed, and a client needs it: pip install 'serried[serve]'")
    with refusals():
        result = asyncio.run(measure(flags))
    tell(result, flags)
    return FAILED if result["failed"] else DONE


async def measure(flags: ServeBenchFlags) -> dict[str, object]:
    """Connect, warm up, send; the figures. Raises ValueError and OSError for a server that cannot be asked."""
    from .serve_clients import target_of  # optional: it needs the extra `serve`

    async with target_of(flags.url, flags.model) as target:

        def make(count: int, seed: int) -> list[Ask]:
            return asks(
                count,
                prompt_len=flags.input_len,
                max_tokens=flags.output_len,
                vocab_size=target.vocab_size,
                seed=seed,
            )

        if flags.warmup:
            await drive(target.client, make(flags.warmup, -1 - flags.seed), waits=[0.0] * flags.warmup)
        waits = gaps(flags.num_prompts, rate=flags.request_rate, burstiness=flags.burstiness, seed=flags.seed)
        wanted = make(flags.num_prompts, flags.seed)
        cpu_before, began = cpu_seconds(flags.cpu_of_pid), time.perf_counter()
        outcomes = await drive(target.client, wanted, waits=waits, max_concurrency=flags.max_concurrency)
        duration = time.perf_counter() - began
        cpu = cpu_seconds(flags.cpu_of_pid) - cpu_before if flags.cpu_of_pid else None
        return summary(outcomes, flags, model=target.model, duration=duration, cpu_s=cpu)


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time of these processes so far, all threads; Linux counts it in ticks. Raises OSError for one that is
    not there."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def summary(
    outcomes: Sequence[Outcome], flags: ServeBenchFlags, *, model: str, duration: float, cpu_s: float | None
) -> dict[str, object]:
    """The last line. Only requests that came to their end count."""
    good = [outcome for outcome in outcomes if not outcome.error]
    num_in, num_out = sum(one.num_prompt_tokens for one in good), sum(one.num_output_tokens for one in good)
    result: dict[str, object] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai" if flags.url.startswith("http") else "grpc",
        "backend": "serried",
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": flags.num_prompts,
        "request_rate": flags.request_rate if flags.request_rate != inf else "inf",
        "burstiness": flags.burstiness if flags.burstiness != inf else "inf",
        "max_concurrency": flags.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(good) / duration,
        "output_throughput": num_out / duration,
        "total_token_throughput": (num_in + num_out) / duration,
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error})[:5],
        "num_messages": sum(one.num_messages for one in good),
        "commit": commit(),
    }
    for name, seconds in (
        ("ttft", [one.ttft for one in good]),
        ("tpot", [one.tpot for one in good if one.tpot is not None]),
        ("itl", [gap for one in good for gap in one.itls]),
        ("e2el", [one.latency for one in good]),
    ):
        result |= _spread(name, [1000 * value for value in seconds])
    if cpu_s is not None:
        result |= {"cpu_seconds": cpu_s, "cpu_us_per_output_token": 1e6 * cpu_s / num_out if num_out else None}
    return result


def _spread(name: str, values_ms: Sequence[float]) -> dict[str, object]:
    """Mean, median, standard deviation and the value that 99% do not exceed; None where nothing was measured."""
    if not values_ms:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", "p99")}
    return {
        f"mean_{name}_ms": statistics.fmean(values_ms),
        f"median_{name}_ms": statistics.median(values_ms),
        f"std_{name}_ms": statistics.pstdev(values_ms),
        f"p99_{name}_ms": percentile(values_ms, 99.0),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest of the sorted values, linearly, as NumPy does it."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100.0
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def tell(result: dict[str, object], flags: ServeBenchFlags) -> None:
    """Print what was asked, where, with which settings, and what came out."""
    out = Console(highlight=False, soft_wrap=True)
    settings = ", ".join(f"{name} {value}" for name, value in asdict(flags).items())
    for line in (QUESTION, machine_line(), f"commit    {result['commit']}", f"settings  {settings}"):
        out.print(line, markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("ms", "mean", "median", "p99"):
        table.add_column(name, justify="left" if name == "ms" else "right")
    for name in ("ttft", "tpot", "itl", "e2el"):
        values = [result[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p99")]
        table.add_row(name, *["-" if value is None else f"{value:.2f}" for value in values])
    print_table(out, table)
    out.print(
        f"{result['completed']} answered, {result['failed']} failed in {result['duration']:.2f} s: "
        f"{result['request_throughput']:.2f} requests/s, {result['output_throughput']:.0f} tokens/s out"
    )
    for error in cast(list[str], result["errors"]):
        out.print(f"failed: {error}", markup=False)
    print(json.dumps(result))
