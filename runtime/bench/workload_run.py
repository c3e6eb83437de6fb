"""Runs the requests of a benchmark on an engine and notes when each of their tokens came.

Requests are sent between two events of the engine, so to a step exactly; while nothing decodes, it sleeps until the
next arrival. Knows the engine by its public API; makes nothing of the times (see `serving_metrics`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..engine import Engine
from ..requests.outputs import TokenEvent
from ..requests.request import FinishReason
from ..requests.sampling_params import MAX_SEED, SamplingParams
from .workload import Job


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """One request, as whoever asked for it saw it; seconds of a clock that never goes back.

    arrived_s   when it was due; where the limit of concurrency held it back, when it was let in
    tokens_s    when each of its tokens came
    """

    prompt_len: int
    arrived_s: float
    rank: int = 0
    tokens_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def completed(self) -> bool:
        """It got all that it asked for."""
        return self.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)

    @property
    def latency_s(self) -> float:
        """From arrival to the last token."""
        return self.tokens_s[-1] - self.arrived_s

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.tokens_s[0] - self.arrived_s

    @property
    def gaps_s(self) -> list[float]:
        """Between its tokens."""
        return [later - earlier for earlier, later in pairwise(self.tokens_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All requests of a run in the order of their arrival, and when it began and ended."""

    requests: tuple[RequestTimes, ...]
    begin_s: float
    end_s: float


def run_workload(
    engine: Engine,
    jobs: Sequence[Job],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    max_concurrency: int | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Send `jobs` when they are due and take tokens until the last one has ended. Sampled with seeds from `seed`."""
    desk = _Desk(engine, jobs, temperature=temperature, seed=seed, limit=max_concurrency or len(jobs), clock=clock)
    while desk.unfinished:
        desk.send_due()
        if not engine.num_unfinished:
            sleep(max(desk.next_arrival_s - clock(), 0.0))
            continue
        for event in engine.events():
            if desk.take(event):
                on_progress(desk.num_ended, len(jobs))
            desk.send_due()
    return Run(requests=tuple(desk.times), begin_s=desk.begin_s, end_s=clock())


class _Desk:
    """What is sent, and what has come back."""

    def __init__(
        self,
        engine: Engine,
        jobs: Sequence[Job],
        *,
        temperature: float,
        seed: int,
        limit: int,
        clock: Callable[[], float],
    ) -> None:
        self.times: list[RequestTimes] = []
        self.num_ended = 0
        self._engine = engine
        self._jobs = jobs
        self._temperature = temperature
        self._seed = seed
        self._limit = limit
        self._clock = clock
        self._by_id: dict[str, RequestTimes] = {}
        self._held = False  # the next job is due, and the limit does not let it in
        self.begin_s = clock()

    @property
    def unfinished(self) -> bool:
        return self.num_ended < len(self._jobs)

    @property
    def next_arrival_s(self) -> float:
        """When the next job is due that was not sent yet."""
        return self.begin_s + self._jobs[len(self.times)].arrival_s

    def send_due(self) -> None:
        """Send what has arrived, as far as the limit allows."""
        while len(self.times) < len(self._jobs) and self._clock() >= self.next_arrival_s:
            if len(self.times) - self.num_ended >= self._limit:
                self._held = True
                return
            self._send(self._clock() if self._held else self.next_arrival_s)
            self._held = False

    def _send(self, arrived_s: float) -> None:
        number = len(self.times)
        job = self._jobs[number]
        params = SamplingParams(
            temperature=self._temperature,
            max_tokens=job.output_len,
            ignore_eos=True,
            seed=(self._seed + number) % (MAX_SEED + 1),
        )
        request_id = self._engine.submit(job.prompt, params)
        times = RequestTimes(prompt_len=len(job.prompt), arrived_s=arrived_s)
        self._by_id[request_id] = times
        self.times.append(times)

    def take(self, event: TokenEvent) -> bool:
        """Note an event; whether it was its request's last."""
        times = self._by_id[event.request_id]
        times.rank = event.rank
        times.tokens_s += [self._clock()] * len(event.token_ids)
        times.token_ids += event.token_ids
        times.finish_reason = event.finish_reason
        self.num_ended += event.finish_reason is not None
        return event.finish_reason is not None
