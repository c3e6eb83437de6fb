"""What a step costs the host: a real worker with a full house of requests, around a model that does nothing.

The worker, its scheduler, its sampler and its control plane are the engine's own and unchanged; the recorder that they
stamp is a clock here. The model's logits are fixed, so what is left is the host's share of a step, on one rank:

    propose   which rows would run; the inbox is looked at
    vote      the row of integers, and on a leaf its way up
    gather    work on everybody's rows, without the wait for them
    decide    from the votes to the plan
    commit    the rows are final
    batch     the rows become tensors, token ids are read from the table
    sample    from fixed logits over a small vocabulary to token ids in the table
    finish    read a step: tokens reach requests, full pages the prefix cache, counts the load
    tell      the step's news as bytes for the front

CPU time is this thread's own: neither waits nor other processes count. Knows no processes and prints nothing.

Shapes: B sampled positions, V vocabulary, L MoE layers, E experts.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor

from ep import Pending, ThreadGroup
from eplb import ExpertLoad

from .batch import RequestTable
from .cadence import CadenceConfig
from .control import Control
from .decoder import Decoder, DecoderOutput, TrackInput
from .experts import Experts
from .heartbeat import HeartbeatState
from .letters import NewsLetter, frames_of
from .outputs import News
from .pages import PagePool
from .prefix import PrefixCache
from .ranks import Tray
from .request import Request
from .sampling_params import SamplingParams
from .scheduler import Scheduler, SchedulerConfig
from .straggler import StragglerState
from .verdict import Phase
from .votes import Vote
from .worker import Worker

PARTS = ("propose", "vote", "gather", "decide", "commit", "batch", "sample", "finish", "tell")

_PART_OF = {
    Phase.PROPOSE: "propose",
    Phase.VOTE: "vote",
    Phase.COMMIT: "commit",
    Phase.LAUNCH: "batch",
    Phase.SAMPLE: "sample",
    Phase.READ: "finish",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much there is to do. The model's numbers are DeepSeek-V3's; the vocabulary is small, for its size costs the
    device and not the host."""

    requests: int = 256
    prompt_len: int = 1024
    """On average; prompts differ, so that their pages do not all fill up in the same step."""
    steps: int = 200
    temperature: float = 0.0
    async_depth: int = 1
    page_size: int = 64
    moe_layers: int = 58
    experts: int = 256
    vocab: int = 64

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_len", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1, e.g. 200")
        SamplingParams(temperature=self.temperature)  # it refuses what is out of range


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """One rank's medians in microseconds; of what is called late, 90% are below it.

    parts_us       CPU time of each of PARTS
    step_us        CPU time of a whole step; the median of sums, so not quite the sum of medians
    busy_vote_us   from the beginning of a vote to everybody's rows, on the wall, in the steps above
    idle_vote_us   the same among ranks that do nothing but vote
    """

    parts_us: Mapping[str, float]
    step_us: float
    late_step_us: float
    busy_vote_us: float
    idle_vote_us: float
    late_idle_vote_us: float

    def to_row(self) -> list[int]:
        """Nanoseconds, as wide as a vote, so that they travel like one."""
        votes = self.busy_vote_us, self.idle_vote_us, self.late_idle_vote_us
        parts = [self.parts_us[part] for part in PARTS]
        row = [round(1000 * value) for value in (self.step_us, self.late_step_us, *votes, *parts)]
        return row + [0] * (len(Vote._fields) - len(row))

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Self:
        """The inverse of `to_row`."""
        step, late_step, busy, idle, late_idle, *parts = [value / 1000 for value in row]
        by_part: dict[str, float] = dict(zip(PARTS, parts, strict=False))  # the row is filled up with zeros
        return cls(
            parts_us=by_part,
            step_us=step,
            late_step_us=late_step,
            busy_vote_us=busy,
            idle_vote_us=idle,
            late_idle_vote_us=late_idle,
        )


def measure_group(control: Control, load: Load, *, votes: int) -> list[HostTimes]:
    """Everybody's times, in rank order; called on all ranks of `control` at the same time.

    votes   among idle ranks; their median is taken
    """
    idle_votes_ns = _time_idle_votes(control, votes)
    clock = _time_steps(control, load)
    steps_ns = [step.total() for step in clock.steps_ns]
    times = HostTimes(
        parts_us={part: _median_us([step[part] for step in clock.steps_ns]) for part in PARTS},
        step_us=_median_us(steps_ns),
        late_step_us=_late_us(steps_ns),
        busy_vote_us=_median_us(clock.votes_ns),
        idle_vote_us=_median_us(idle_votes_ns),
        late_idle_vote_us=_late_us(idle_votes_ns),
    )
    rows = control.gather(times.to_row(), sequence=0).wait()
    return [HostTimes.from_row(row) for row in rows]


def _median_us(values_ns: Sequence[int]) -> float:
    return statistics.median(values_ns) / 1000


def _late_us(values_ns: Sequence[int]) -> float:
    return sorted(values_ns)[len(values_ns) * 9 // 10] / 1000


def _time_idle_votes(control: Control, votes: int) -> list[int]:
    took_ns = []
    row = [control.rank] * len(Vote._fields)
    for sequence in range(votes):
        begin = time.perf_counter_ns()
        control.gather(row, sequence=sequence).wait()
        took_ns.append(time.perf_counter_ns() - begin)
    return took_ns


def _time_steps(control: Control, load: Load) -> PartClock:
    """`load.steps` steps in which all requests decode."""
    clock = PartClock()
    worker = full_house(control, load, clock)
    clock.forget()
    with torch.inference_mode():
        for _ in range(load.steps):
            worker.step()
            clock.end_step()
    rows = len(worker.in_flight.unread[-1].rows) if worker.in_flight else load.requests
    assert rows == load.requests, f"{rows} rows in the last step; all {load.requests} requests should decode"
    return clock


def full_house(control: Control, load: Load, clock: PartClock) -> Worker:
    """A worker whose requests all decode from its next step on; called on all ranks at the same time."""
    requests = _requests(load)
    worker = _worker(control, load, clock)
    for request in requests:
        worker.scheduler.add(request)
    with torch.inference_mode():
        while any(request.num_output < 2 for request in requests):
            worker.step()
    return worker


class PartClock:
    """A `recorder.Recorder` that measures: the thread's CPU time by part of a step, and each vote on the wall."""

    waited_ns = 0

    def __init__(self) -> None:
        self.steps_ns: list[Counter[str]] = []
        self.votes_ns: list[int] = []
        self._step_ns: Counter[str] = Counter()
        self._part = "propose"
        self._since_ns = time.thread_time_ns()
        self._vote_since_ns = 0

    def forget(self) -> None:
        """What was measured so far was for warming up."""
        self.steps_ns.clear()
        self.votes_ns.clear()
        self._step_ns.clear()
        self.enter("propose")

    def end_step(self) -> None:
        """The step is over; what follows belongs to the next one."""
        self.enter("propose")
        self.steps_ns.append(self._step_ns)
        self._step_ns = Counter()

    def enter(self, part: str) -> None:
        """From now on time belongs to `part`."""
        now = time.thread_time_ns()
        self._step_ns[self._part] += now - self._since_ns
        self._part, self._since_ns = part, now

    def stamp(self, phase: Phase, step: int, layer: int = 0) -> None:  # noqa: ARG002  # the protocol's
        """See `recorder.Recorder`."""
        self.enter(_PART_OF[phase])
        if phase is Phase.VOTE:
            self._vote_since_ns = time.perf_counter_ns()

    def wait(self) -> None:
        """See `recorder.Recorder`."""
        self.enter("gather")

    def predict(self, seconds: float) -> None:
        """Nobody waits for it."""

    def go_on(self) -> None:
        """See `recorder.Recorder`."""
        self.votes_ns.append(time.perf_counter_ns() - self._vote_since_ns)
        self.enter("decide")


class _FixedModel:
    """Stands where the decoder stands: the same logits in every step, and every expert gets its share."""

    def __init__(self, load: Load) -> None:
        generator = torch.Generator().manual_seed(0)
        self._logits_BV = torch.randn(load.requests, load.vocab, generator=generator)
        self._counts_LE = torch.ones(load.moe_layers, load.experts, dtype=torch.int64)

    def stages(self, batch: TrackInput) -> Generator[Pending[Any] | None, Any, DecoderOutput]:
        """See `Decoder.stages`."""
        yield from ()
        return DecoderOutput(hidden_BD=self._logits_BV[: len(batch.logit_rows_B)], counts_LE=self._counts_LE)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        return hidden_BD

    def check_faults(self) -> None:
        """Nothing is exchanged."""


def _requests(load: Load) -> list[Request]:
    """The same on every rank, so that all ranks fill up in the same steps; none ends while it is measured."""
    numbers = random.Random(0)
    params = SamplingParams(temperature=load.temperature, max_tokens=_longest_output(load))
    low = load.prompt_len - load.prompt_len // 8
    return [
        Request(
            id=f"request-{index}",
            prompt=tuple(numbers.choices(range(load.vocab), k=numbers.randint(low, 2 * load.prompt_len - low))),
            params=params,
            arrival=index,
            seed=index,
        )
        for index in range(load.requests)
    ]


def _longest_output(load: Load) -> int:
    # The first request decodes while the last one's prompt waits; each step of that time computes at least one request.
    return load.steps + 2 * load.requests + 16


def _worker(control: Control, load: Load, clock: PartClock) -> Worker:
    longest = 2 * load.prompt_len + _longest_output(load)
    config = SchedulerConfig(
        max_num_seqs=load.requests, max_model_len=longest, max_num_batched_tokens=load.requests + 8192
    )
    # One more than the longest request needs: the scheduler admits nobody into the last pages.
    pool = PagePool(load.requests * (2 + longest // load.page_size), load.page_size)
    prefix = PrefixCache(pool)

    def tell(items: Sequence[News]) -> None:
        clock.enter("tell")
        frames_of(NewsLetter(tuple(items)))

    device = torch.device("cpu")
    return Worker(
        decoder=cast(Decoder, _FixedModel(load)),  # the worker asks for stages() and logits() only
        scheduler=Scheduler(config, pool, prefix),
        pool=pool,
        prefix=prefix,
        table=RequestTable(load.requests, longest, page_size=load.page_size, device=device),
        transport=ThreadGroup(control.size).transports[control.rank],  # to say who this is: nothing is exchanged
        control=control,
        recorder=clock,
        state=HeartbeatState.start(CadenceConfig()),
        stragglers=StragglerState(),
        async_depth=load.async_depth,
        config_hash=0,
        experts=Experts(ExpertLoad(load.moe_layers, load.experts, device=device)),
        emit=tell,
        notify=lambda _: None,
        inbox=Tray(),
    )
