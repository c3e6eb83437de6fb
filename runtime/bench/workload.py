"""The requests of a benchmark: what is asked, how long it gets, and when it arrives. Pure, and the same for a seed.

    fixed    every prompt and every output as long as said
    drawn    uniformly from (1 - r) x length to (1 + r) x length
    trace    a file of JSON lines: {"timestamp": ms, "input_length": tokens, "output_length": tokens}, as published
             traces of serving have them; other keys are left alone

Requests arrive by a gamma process: the gaps have mean 1 / rate and shape `burstiness`; 1 is a Poisson process, less
comes in bursts, more comes evenly; an infinite rate is all at once. Knows no engine and no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..model.json_file import parse_json

LEAST_RATE, LEAST_BURSTINESS = 1e-6, 1e-3
"""Below them gaps are longer than anybody waits, or no numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request. `arrival_s` counts from the start of the run."""

    arrival_s: float
    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a benchmark asks for."""

    input_len: int = 32
    """Tokens of a prompt."""

    output_len: int = 64
    """Tokens that a request gets; it does not stop before."""

    range_ratio: float = 0.0
    """Lengths are drawn from (1 - this) to (1 + this) times those above; 0: all alike."""

    num_prompts: int = 64
    """Requests in all."""

    request_rate: float = math.inf
    """Requests that arrive a second; inf: all at the start."""

    burstiness: float = 1.0
    """Shape of the gaps between arrivals: 1 is a Poisson process, below 1 comes in bursts, above 1 more evenly, inf in
    equal gaps."""

    max_concurrency: int | None = None
    """Requests under way at once, over all ranks; those that arrive while as many are wait. Unset: no limit."""

    skew: float = 0.0
    """The n-th most frequent token of the prompts comes 1 / n ** skew as often, which heats experts; 0: all alike."""

    trace_file: Path | None = None
    """JSON lines with timestamp (ms), input_length and output_length, instead of lengths and rate; the first
    --num-prompts of them."""

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "num_prompts", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, e.g. 64")
        if not 0.0 <= self.range_ratio < 1.0:
            raise ValueError(f"range_ratio is {self.range_ratio}; it must be from 0 to below 1, e.g. 0.5")
        if not 0.0 <= self.skew <= 10.0:
            raise ValueError(f"skew is {self.skew}; it must be from 0 to 10, e.g. 1.0")
        check_arrivals(request_rate=self.request_rate, burstiness=self.burstiness)

    def jobs(self, *, vocab: int, seed: int) -> list[Job]:
        """In order of arrival. ValueError for a trace that is none."""
        rng = np.random.default_rng(seed)
        if self.trace_file is not None:
            arrivals, sizes = read_trace(self.trace_file, limit=self.num_prompts)
        else:
            arrivals = self._arrivals(rng)
            sizes = [(self._drawn(rng, self.input_len), self._drawn(rng, self.output_len)) for _ in arrivals]
        often = (np.arange(1, vocab + 1, dtype=np.float64) ** -self.skew)[rng.permutation(vocab)]
        often /= often.sum()
        return [
            Job(arrival_s=arrival, prompt=tuple(rng.choice(vocab, inputs, p=often).tolist()), output_len=outputs)
            for arrival, (inputs, outputs) in zip(arrivals, sizes, strict=True)
        ]

    @property
    def longest(self) -> int:
        """Prompt and output of the longest request that can be drawn; of a trace, that is in it."""
        if self.trace_file is not None:
            return max([sum(size) for size in read_trace(self.trace_file, limit=self.num_prompts)[1]])
        return sum([math.floor(length * (1 + self.range_ratio)) for length in (self.input_len, self.output_len)])

    def _arrivals(self, rng: np.random.Generator) -> list[float]:
        if math.isinf(self.request_rate):
            return [0.0] * self.num_prompts
        if math.isinf(self.burstiness):
            return [number / self.request_rate for number in range(self.num_prompts)]
        gaps = rng.gamma(self.burstiness, 1.0 / (self.request_rate * self.burstiness), self.num_prompts)
        gaps[0] = 0.0
        return np.cumsum(gaps).tolist()

    def _drawn(self, rng: np.random.Generator, length: int) -> int:
        if not self.range_ratio:
            return length
        low, high = math.ceil(length * (1 - self.range_ratio)), math.floor(length * (1 + self.range_ratio))
        return max(1, int(rng.integers(low, high + 1)))


def check_arrivals(*, request_rate: float, burstiness: float) -> None:
    """ValueError for a rate or a shape of which no gaps between arrivals can be drawn."""
    for name, value, least in (
        ("request_rate", request_rate, LEAST_RATE),
        ("burstiness", burstiness, LEAST_BURSTINESS),
    ):
        if not value >= least:
            raise ValueError(f"{name} is {value}; it must be at least {least:g}, e.g. 1.0")


def read_trace(path: Path, *, limit: int) -> tuple[list[float], list[tuple[int, int]]]:
    """Arrivals in seconds from the first, and (prompt, output) lengths, of the first `limit` lines that say something.

    ValueError names file and line.
    """
    arrivals: list[float] = []
    sizes: list[tuple[int, int]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if len(sizes) == limit:
                break
            if line.strip():
                entry = _entry(line, f"{path}, line {number}")
                arrivals.append(entry[0] / 1000.0)
                sizes.append(entry[1:])
    if not sizes:
        raise ValueError(f"{path} has no line; it must have one for each request, e.g. {_EXAMPLE}")
    first = arrivals[0]
    if any(later < earlier for earlier, later in pairwise(arrivals)):
        raise ValueError(f"{path}: timestamp goes back; lines must be in the order of arrival")
    return [arrival - first for arrival in arrivals], sizes


_EXAMPLE = '{"timestamp": 0, "input_length": 512, "output_length": 64}'


def _entry(line: bytes, place: str) -> tuple[float, int, int]:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON: {error}; it must be like {_EXAMPLE}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{place} is no JSON object; it must be like {_EXAMPLE}")  # noqa: TRY004  # it is the user's
    found = [_number(entry, name, least, place) for name, least in (("timestamp", 0), *_LENGTHS)]
    return found[0], int(found[1]), int(found[2])


_LENGTHS = (("input_length", 1), ("output_length", 1))


def _number(entry: dict[str, Any], name: str, least: int, place: str) -> float:
    value: Any = entry.get(name)
    kinds = (int, float) if name == "timestamp" else int
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < 2**53:
        raise ValueError(f"{place}: {name} is {value!r}; it must be a number of at least {least}, e.g. {_EXAMPLE}")
    return value
