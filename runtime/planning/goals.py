"""What a deployment is for, and the arithmetic between rates, latencies and requests in flight. Plain numbers.

Little's law: whatever flows through a system, in flight = rate x time inside. A request is inside for as long as its
tokens take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Prefill = Literal["here", "elsewhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """What is wanted.

    context        prompt and output of one request, in tokens; output_len of them are decoded
    tpot_ms        between two tokens of a request, on average; None: whatever is best for throughput
    ttft_ms        until its first token; None: no limit
    request_rate   requests a second, all GPUs together; None: as many as they sustain
    prefill        whether the same ranks compute prompts
    """

    gpus: int
    context: int
    output_len: int
    node_size: int = 8
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    request_rate: float | None = None
    prefill: Prefill = "here"

    def __post_init__(self) -> None:
        for name, legal in (("gpus", 8), ("node_size", 8), ("context", 4096), ("output_len", 1)):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1, e.g. {legal}")
        if self.output_len >= self.context:
            raise ValueError(
                f"output_len is {self.output_len}; it must leave room for a prompt in a context of {self.context}, "
                f"e.g. {max(self.context // 2, 1)}"
            )
        for name, legal in (("tpot_ms", 50), ("ttft_ms", 1000), ("request_rate", 50)):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be a number above 0, e.g. {legal}")

    @property
    def input_len(self) -> int:
        """Tokens of a prompt."""
        return self.context - self.output_len

    @property
    def mean_context(self) -> float:
        """Tokens that a token of the output attends to, on average."""
        return self.input_len + self.output_len / 2


def requests_in_flight(*, request_rate: float, output_len: float, tpot_ms: float) -> float:
    """Little's law: 50 requests/s x 500 tokens x 40 ms are 1,000 in flight."""
    return request_rate * output_len * tpot_ms / 1e3


def sustained_rate(*, in_flight: float, output_len: float, tpot_ms: float) -> float:
    """The same the other way: requests a second."""
    return in_flight / (output_len * tpot_ms / 1e3)


def fullest_prompts(*, per_rank: float, ranks: int) -> float:
    """Prompts that the fullest rank computes in a step to which each rank brings `per_rank` on average.

    Requests go to the rank with the least to do, so no rank gets a second one before all have their first.
    """
    return min(1.0, per_rank * ranks) if per_rank <= 1.0 else math.ceil(per_rank)
