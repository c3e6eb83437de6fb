"""What users of a run got: throughput and latencies, over the whole run and over its steady part. Pure arithmetic.

    decoding   the number of requests that have their first token and not yet their last
    steady     from the first to the last moment at which at least 90% of the most that ever decode do

The steady window leaves out the ramp and the tail: what is left is what a loaded engine does. Names of the figures are
those of `vllm bench serve`, so that files can be compared: TTFT is from arrival to the first token, ITL between tokens
of a request, TPOT their mean over a request without the first, E2EL the whole request.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .workload_run import RequestTimes, Run

STEADY_SHARE = 0.9
PERCENTILES = tuple(range(0, 101, 4))
"""Of each latency, for pictures."""
SLICES = 10
"""Equal parts of the steady window whose throughputs say how noisy it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The steady part of a run, seconds of the run's clock. `decoding`: the most requests that decoded at once."""

    begin_s: float
    end_s: float
    decoding: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def holds(self, moment_s: float) -> bool:
        """Whether a token of that moment counts; the first one's does not, since its time went before."""
        return self.begin_s < moment_s <= self.end_s


def steady_window(requests: Sequence[RequestTimes]) -> Window | None:
    """The steady part; None when no two tokens of any request are apart in time."""
    changes = Counter[float]()
    for request in requests:
        if len(request.tokens_s) > 1:
            changes[request.tokens_s[0]] += 1
            changes[request.tokens_s[-1]] -= 1
    moments = sorted(changes)
    levels = np.cumsum([changes[moment] for moment in moments]).tolist()
    most = max(levels, default=0)
    full = [place for place, level in enumerate(levels) if level >= STEADY_SHARE * most]
    if most == 0:
        return None
    window = Window(begin_s=moments[full[0]], end_s=moments[full[-1] + 1], decoding=most)
    return window if window.seconds > 0 else None


def serving_figures(run: Run, *, ranks: int) -> dict[str, Any]:
    """The figures of a whole run, with the keys of `vllm bench serve`, and per rank ("gpu")."""
    done = [request for request in run.requests if request.completed]
    seconds = run.end_s - run.begin_s
    inputs = sum([request.prompt_len for request in done])
    outputs = sum([len(request.token_ids) for request in done])
    return {
        "duration": seconds,
        "completed": len(done),
        "failed": len(run.requests) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": _peak(done, run.begin_s),
        "max_concurrent_requests": _most_at_once(done),
        "output_throughput_per_gpu": outputs / seconds / ranks,
        "total_token_throughput_per_gpu": (inputs + outputs) / seconds / ranks,
    } | latency_figures(done)


def latency_figures(done: Sequence[RequestTimes]) -> dict[str, Any]:
    """Milliseconds: mean, median, std, P90 and P99 of each latency, None where there is none to measure; and all of
    PERCENTILES."""
    kinds = latencies_s(done)
    found = {key: value for name, seconds in kinds.items() for key, value in _spread(name, seconds).items()}
    ladder = {
        name: (1000.0 * np.percentile(seconds, PERCENTILES)).tolist() if seconds else []
        for name, seconds in kinds.items()
    }
    return {**found, "percentiles": ladder}


def latencies_s(done: Sequence[RequestTimes]) -> dict[str, list[float]]:
    """Every latency of every request, seconds."""
    several = [request for request in done if len(request.tokens_s) > 1]
    return {
        "ttft": [request.ttft_s for request in done],
        "tpot": [(request.latency_s - request.ttft_s) / (len(request.tokens_s) - 1) for request in several],
        "itl": [gap for request in several for gap in request.gaps_s],
        "e2el": [request.latency_s for request in done],
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p90", "p99")]
    if not seconds:
        return dict.fromkeys(keys)
    values = 1000.0 * np.asarray(seconds)
    found = values.mean(), np.median(values), values.std(), np.percentile(values, 90), np.percentile(values, 99)
    return {key: float(value) for key, value in zip(keys, found, strict=True)}


def _peak(done: Sequence[RequestTimes], begin_s: float) -> float:
    """Tokens in the fullest second; of a run shorter than that, all of them."""
    seconds = Counter(int(moment - begin_s) for request in done for moment in request.tokens_s)
    return float(max(seconds.values(), default=0))


def _most_at_once(done: Sequence[RequestTimes]) -> int:
    """Requests between arrival and last token."""
    changes = Counter[float]()
    for request in done:
        changes[request.arrived_s] += 1
        changes[request.tokens_s[-1]] -= 1
    return max(np.cumsum([changes[moment] for moment in sorted(changes)]).tolist(), default=0)


def steady_figures(run: Run, window: Window | None, *, ranks: int) -> dict[str, Any]:
    """Output tokens a second in the steady window: all ranks, by rank, a user's, and in slices of it."""
    if window is None:
        return {"steady": None}
    moments_s = [[m for r in run.requests if r.rank == rank for m in r.tokens_s] for rank in range(ranks)]
    by_rank = [sum(map(window.holds, moments)) / window.seconds for moments in moments_s]
    total = sum(by_rank)
    waits = [late - early for r in run.requests for early, late in pairwise(r.tokens_s) if window.holds(late)]
    bounds = np.linspace(window.begin_s, window.end_s, SLICES + 1)
    counts, _ = np.histogram([m for moments in moments_s for m in moments if window.holds(m)], bounds)
    return {
        "steady": {
            "begin_s": window.begin_s - run.begin_s,
            "end_s": window.end_s - run.begin_s,
            "seconds": window.seconds,
            "decoding": window.decoding,
            "output_tokens": round(total * window.seconds),
            "output_throughput": total,
            "output_throughput_per_gpu": total / ranks,
            "rank_throughput_min": min(by_rank),
            "rank_throughput_median": float(np.median(by_rank)),
            "rank_throughput_max": max(by_rank),
            "tokens_per_s_per_user": len(waits) / sum(waits) if waits else None,
            "slices": [count * SLICES / window.seconds for count in counts.tolist()],
        }
    }


def token_hash(requests: Sequence[RequestTimes]) -> str:
    """16 hexadecimal digits over all answers, in the order of the requests: equal answers, equal digits."""
    digest = hashlib.sha256()
    for request in requests:
        digest.update(struct.pack(f"<q{len(request.token_ids)}q", len(request.token_ids), *request.token_ids))
    return digest.hexdigest()[:16]
