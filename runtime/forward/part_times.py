"""Where a step's time goes, by part, measured inside a running rank: chosen at start, and nothing where nobody asks.

    host        everything in Python between the parts below: scheduling, rows to tensors, reading tokens, requests
    beat        waiting for the other ranks' votes
    attention   latent attention, embedding, norms
    dispatch    rows to their experts' ranks: packing, sending, waiting, unpacking
    experts     router, shared and routed experts, MLPs of layers without
    combine     rows back
    head        logits
    sample      from logits to tokens in the table
    move        experts on their way to another rank

A timer has one hand: time belongs to the part that was entered last, whichever track was resumed, so that the parts add
up to the step. Both the wall and the thread's own processor time are kept; on a GPU both are the host's, for kernels
run on behind it. Knows steps and rows; does not know requests, nor what is made of its numbers (see `measures`).

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import time
from collections import deque
from enum import IntEnum
from typing import Any

from torch import Tensor

from ep import Arrivals, Exchange, PairRows, Pending, Tag, Terms

from ..failure.recorder import Recorder
from ..failure.verdict import Phase
from ..requests.measures import RankMeasures, StepMeasure
from ..requests.rows import Rows
from ..sampling.sampler import Sampled
from ..sampling.sampler_ops import SamplerOps

KEPT_STEPS = 4096
"""The latest; a longer run is judged by its end."""


class Part(IntEnum):
    """See the module; the numbers are places in `StepMeasure.wall_ns` and `cpu_ns`."""

    HOST = 0
    BEAT = 1
    ATTENTION = 2
    DISPATCH = 3
    EXPERTS = 4
    COMBINE = 5
    HEAD = 6
    SAMPLE = 7
    MOVE = 8


MODEL_PARTS = (Part.ATTENTION, Part.EXPERTS, Part.HEAD)
"""The model's own mathematics; everything else of a step is the engine's doing."""


class NoParts:
    """Asks no clock and keeps nothing."""

    def enter(self, part: Part) -> None:
        """From now on time belongs to `part`."""

    def ran(self, step: int, rows: Rows | None, *, tracks: int) -> None:
        """The step that is under way puts these rows through the layers; None: older steps once more."""

    def counted(self, counts_LE: Tensor) -> None:
        """A step that is over sent so many pairs to each expert."""

    def measures(self) -> RankMeasures | None:
        """What was measured so far; None where nothing was."""
        return None


NO_PARTS = NoParts()


class PartTimer(NoParts):
    """Measures one rank; every call comes from the thread that steps, except `measures` between waves."""

    def __init__(self, keep: int = KEPT_STEPS) -> None:
        self._steps: deque[StepMeasure] = deque(maxlen=keep)
        self._counts_LE: Tensor | None = None
        self._part = Part.HOST
        self._wall_ns, self._cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        self._forget()

    def _forget(self) -> None:
        """A step begins where the last part ended."""
        self._begin_ns = self._wall_ns
        self._wall = [0] * len(Part)
        self._cpu = [0] * len(Part)
        self._waits_ns = self._exposed_ns = 0
        self._what: tuple[int, int, int, int, int, int] | None = None

    def enter(self, part: Part) -> None:
        wall_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        self._wall[self._part] += wall_ns - self._wall_ns
        self._cpu[self._part] += cpu_ns - self._cpu_ns
        self._part, self._wall_ns, self._cpu_ns = part, wall_ns, cpu_ns

    def wait(self) -> None:
        """What follows, until `go_on`, is waiting for others."""
        self._waits_ns = time.monotonic_ns()

    def go_on(self) -> None:
        """The wait is over."""
        if self._waits_ns and self._part in (Part.DISPATCH, Part.COMBINE):
            self._exposed_ns += time.monotonic_ns() - self._waits_ns
        self._waits_ns = 0

    def begin_step(self) -> None:
        """One beat is over and another begins. A beat that ran no layers is dropped: it was no step."""
        self.enter(Part.HOST)
        if self._what is not None:
            step, decode, prefill, rows, context, tracks = self._what
            self._steps.append(
                StepMeasure(
                    step=step,
                    begin_ns=self._begin_ns,
                    decode_tokens=decode,
                    prefill_tokens=prefill,
                    rows=rows,
                    context_tokens=context,
                    tracks=tracks,
                    exposed_ns=self._exposed_ns,
                    wall_ns=tuple(self._wall),
                    cpu_ns=tuple(self._cpu),
                )
            )
        self._forget()

    def ran(self, step: int, rows: Rows | None, *, tracks: int) -> None:
        if rows is None or not len(rows):
            self._what = (step, 0, 0, 0, 0, tracks)
            return
        prefill = int(rows.num_tokens_B[rows.is_prefill_B].sum())
        context = int(rows.end_B[~rows.is_prefill_B].sum())
        self._what = (step, rows.num_tokens - prefill, prefill, len(rows), context, tracks)

    def counted(self, counts_LE: Tensor) -> None:
        if self._counts_LE is None:
            self._counts_LE = counts_LE.clone()
        else:
            self._counts_LE += counts_LE

    def measures(self) -> RankMeasures:
        counts = [] if self._counts_LE is None else self._counts_LE.tolist()
        return RankMeasures(steps=tuple(self._steps), counts_LE=tuple([tuple(layer) for layer in counts]))


_PART_OF = {
    Phase.VOTE: Part.HOST,
    Phase.COMMIT: Part.HOST,
    Phase.LAUNCH: Part.HOST,
    Phase.SAMPLE: Part.HEAD,
    Phase.READ: Part.HOST,
    Phase.IDLE: Part.HOST,
    Phase.MIGRATE: Part.MOVE,
}


class TimedRecorder:
    """A recorder whose stamps also turn a timer's hand; exchanges turn it themselves (`TimedExchange`)."""

    def __init__(self, recorder: Recorder, timer: PartTimer) -> None:
        self._recorder = recorder
        self._timer = timer
        self._votes = False

    @property
    def waited_ns(self) -> int:
        """See `recorder.Recorder`."""
        return self._recorder.waited_ns

    def stamp(self, phase: Phase, step: int, layer: int = 0) -> None:
        """See `recorder.Recorder`."""
        self._recorder.stamp(phase, step, layer)
        self._votes = phase is Phase.VOTE
        if phase is Phase.PROPOSE:
            self._timer.begin_step()
        elif phase in _PART_OF:
            self._timer.enter(_PART_OF[phase])

    def wait(self) -> None:
        """See `recorder.Recorder`."""
        self._recorder.wait()
        if self._votes:
            self._timer.enter(Part.BEAT)
        self._timer.wait()

    def go_on(self) -> None:
        """See `recorder.Recorder`."""
        self._recorder.go_on()
        self._timer.go_on()
        if self._votes:
            self._timer.enter(Part.HOST)

    def predict(self, seconds: float) -> None:
        """See `recorder.Recorder`."""
        self._recorder.predict(seconds)


class TimedExchange(Exchange):
    """An exchange whose two ways turn a timer's hand; what runs between them is the experts'."""

    def __init__(self, *args: Any, timer: NoParts, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._timer = timer

    def dispatch(
        self, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, *, tag: Tag, terms: Terms
    ) -> Pending[Arrivals]:
        """See `ep.Exchange`."""
        self._timer.enter(Part.DISPATCH)
        pending = super().dispatch(x_TD, slots_TK, weights_TK, tag=tag, terms=terms)
        self._timer.enter(Part.EXPERTS)
        return Pending(lambda: self._wait(pending, Part.DISPATCH))

    def combine(self, y: Tensor | PairRows, arrivals: Arrivals, *, tag: Tag) -> Pending[Tensor]:
        """See `ep.Exchange`."""
        self._timer.enter(Part.COMBINE)
        pending = super().combine(y, arrivals, tag=tag)
        self._timer.enter(Part.EXPERTS)
        return Pending(lambda: self._wait(pending, Part.COMBINE))

    def _wait(self, pending: Pending[Any], part: Part) -> Any:
        self._timer.enter(part)
        value = pending.wait()
        self._timer.enter(Part.EXPERTS)
        return value


class TimedSampler:
    """A sampler that turns a timer's hand."""

    def __init__(self, sampler: SamplerOps, timer: NoParts) -> None:
        self._sampler = sampler
        self._timer = timer

    def choose(self, logits_BV: Tensor, rows: Any, tokens_SH: Tensor) -> Sampled:
        """See `sampler_ops.SamplerOps`."""
        self._timer.enter(Part.SAMPLE)
        return self._sampler.choose(logits_BV, rows, tokens_SH)
