"""`serried bench latency`: how long one batch of requests takes from the first prompt to the last token. Measured.

The same batch again and again, each time with prompts of its own. Prints the question, the machine, the commit, the
settings, tables, then one last line of JSON, with the keys of `vllm bench latency` beside those of `throughput`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.bench.workload import Workload

from ..groups.group import Start
from .bench_result import figures
from .bench_run import BenchFlags, Measured, bench_of
from .bench_throughput import DONE, conclude, earlier_result

ABOUT = """\
Measure how long a batch of requests takes, from the first prompt to the last token.

Examples:
  serried bench latency profiles/models/tiny-v3 --batch-size 1 --input-len 32 --output-len 128
  serried bench latency MODEL --ranks 4 --batch-size 64 --num-iters 20 --report report.html

All requests of a batch are sent at once, spread over the ranks; the iteration of median length is shown in full.
"""

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFlags(BenchFlags):
    """What `serried bench latency` is told."""

    batch_size: int = 8
    """Requests of a batch, over all ranks."""

    input_len: int = 32
    """Tokens of a prompt."""

    output_len: int = 128
    """Tokens that a request gets."""

    num_iters: int = 10
    """Batches measured, one after the other."""

    def __post_init__(self) -> None:
        BenchFlags.__post_init__(self)
        for name in ("batch_size", "num_iters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1, e.g. 8")
        self.load  # noqa: B018  # it refuses lengths that make no sense

    @property
    def load(self) -> Workload:
        """A batch."""
        return Workload(num_prompts=self.batch_size, input_len=self.input_len, output_len=self.output_len)


def run(flags: LatencyFlags, start: Start) -> int:
    """Measure and print on rank 0; returns 0, or 1 when a request failed. Raises Refusal for what cannot run."""
    earlier = earlier_result(flags)
    with bench_of(flags, [flags.load], start) as bench:
        if bench is None:
            return DONE
        bench.warm_up(flags.load)
        batches = [bench.measure(flags.load, number=number) for number in range(flags.num_iters)]
        found = figures(bench, batches)
    return conclude(found | batch_latencies(batches), flags, earlier)


def batch_latencies(batches: Sequence[Measured]) -> dict[str, Any]:
    """Seconds that each batch took, with the keys of `vllm bench latency`; and the standard error of their mean."""
    latencies = [batch.run.end_s - batch.run.begin_s for batch in batches]
    return {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles_latency": {str(each): float(np.percentile(latencies, each)) for each in PERCENTILES},
        "latency_error": float(np.std(latencies, ddof=1) / math.sqrt(len(latencies))) if len(latencies) > 1 else None,
    }
