"""Puts a step's rows on the device: the layers, the sampler, and the sampled ids where the next step finds them.

A step's rows and its plan are all that it needs, so that it can be launched again: its inputs come from the token table
and from the rows' requests, its latents go to the same places of the cache, its random numbers follow from seed and
position. Knows the device's side of a step; does not know what was agreed before it or what is made of it afterwards.

Shapes: T tokens here, B sampled positions, D model, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dbo import UNTIMED, DboConfig, Untimed, drive
from ep import Terms

from .batch import RequestTable, StepBatch
from .decoder import Decoder, DecoderOutput, TrackInput
from .heartbeat import StepPlan
from .prompt_logprobs import PromptLogprobs, look_up
from .recorder import Recorder
from .rows import Rows
from .sampler import Sampled
from .sampler_ops import SamplerOps, sampler_ops
from .samples import sample_rows
from .tracks import cut_rows, join_outputs
from .verdict import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step on the device.

    terms       of each track's exchanges
    rows        in the order in which they were sampled
    sampled     None where no row samples
    counts_LE   see `decoder.DecoderOutput`, as are num_pairs, overflow, experts_LTK and fault
    own_us      microseconds that this rank spent on it without waiting for others
    waited_us   those that it waited
    prompts     what was asked of prompts, None for nothing
    """

    plan: StepPlan
    terms: Terms
    rows: Rows
    sampled: Sampled | None
    counts_LE: Tensor
    num_pairs: int
    overflow: Tensor | None
    own_us: int
    waited_us: int
    experts_LTK: Tensor | None = None
    fault: Tensor | None = None
    prompts: PromptLogprobs | None = None


class Launcher:
    """One rank's device. Nothing here waits for it; the exchange's counts and rows are waited for.

    `overlap` says how the tracks of a step take turns; `timeline` is told when each launch began and ended.
    """

    def __init__(
        self,
        decoder: Decoder,
        table: RequestTable,
        *,
        recorder: Recorder,
        overlap: DboConfig,
        timeline: Untimed = UNTIMED,
        sampler: SamplerOps | None = None,
    ) -> None:
        """sampler: None, in torch."""
        self._decoder = decoder
        self._table = table
        self._recorder = recorder
        self._staggered = overlap.dbo_order == "staggered"
        self._timeline = timeline
        self._sampler = sampler or sampler_ops("reference")

    def launch(self, rows: Rows, plan: StepPlan) -> Launched:
        """A step for the first time."""
        self._recorder.stamp(Phase.LAUNCH, plan.step)
        traced = self._timeline.now()
        terms = Terms(bucket=plan.track_tokens, level=plan.capacity_level)
        launched = self._put(rows, plan, terms, sampling=lambda: self._recorder.stamp(Phase.SAMPLE, plan.step))
        self._timeline.add("step", 0, f"step {plan.step}", traced)
        return launched

    def launch_again(self, step: Launched, terms: Terms) -> Launched:
        """The same rows on other terms; what the first launch left in table and cache is written over.

        Not stamped: where ranks stand is told by the step in which this happens, its exchanges counted one by one.
        """
        return self._put(step.rows, step.plan, terms, sampling=lambda: None)

    def _put(self, rows: Rows, plan: StepPlan, terms: Terms, *, sampling: Callable[[], None]) -> Launched:
        """The layers, then the sampler; `sampling` is called between them."""
        begin = self._recorder.waited_ns, time.monotonic_ns()
        batches, out = self._forward(rows, terms, plan)
        sampling()
        sampled = self._sample(out.hidden_BD, batches)
        prompts = None
        if out.prompt_PD is not None:
            parts = [part for batch in batches for part in batch.prompts]
            prompts = look_up(parts, out.prompt_PD, head=self._decoder.logits)
        own_us, waited_us = self._times_us(*begin)
        return Launched(
            plan=plan,
            terms=terms,
            rows=_rows_of(batches),
            sampled=sampled,
            counts_LE=out.counts_LE,
            num_pairs=out.num_pairs,
            overflow=out.overflow,
            experts_LTK=out.experts_LTK,
            fault=out.fault,
            prompts=prompts,
            own_us=own_us,
            waited_us=waited_us,
        )

    def _forward(self, rows: Rows, terms: Terms, plan: StepPlan) -> tuple[list[StepBatch], DecoderOutput]:
        """The layers over all rows, in as many tracks as the plan says; a batch a track, which are sampled in order."""
        cut = plan.tracks > 1
        batches = [StepBatch.build(part, self._table) for part in cut_rows(rows, plan.tracks)]
        tracks = [
            self._decoder.stages(self._track_input(batch, terms, step=plan.step, track=track, cut=cut))
            for track, batch in enumerate(batches)
        ]
        outputs = drive(tracks, lead=int(cut and self._staggered), timeline=self._timeline)
        return batches, join_outputs(outputs)

    def _track_input(self, batch: StepBatch, terms: Terms, *, step: int, track: int, cut: bool) -> TrackInput:
        return TrackInput(
            tokens_T=self._table.tokens[batch.view.slots_T, batch.view.positions_T],
            view=batch.view,
            logit_rows_B=batch.logit_rows_B,
            step=step,
            track=track,
            terms=terms,
            halves=cut and self._staggered,
            cut=cut,
            prompt_rows_P=batch.prompt_rows_P,
        )

    def _sample(self, hidden_BD: Tensor, batches: Sequence[StepBatch]) -> Sampled | None:
        """Choose the next tokens and put them where the next step will find them."""
        if not len(hidden_BD):
            return None
        logits_BV = self._decoder.logits(hidden_BD)
        tokens = self._table.tokens
        sampled = self._sampler.choose(logits_BV, sample_rows(_rows_of(batches)), tokens)
        for batch, token_B in zip(
            batches, sampled.token_B.split([len(batch.slots_B) for batch in batches]), strict=True
        ):
            tokens[batch.slots_B, batch.positions_B] = token_B
        return sampled

    def _times_us(self, waited_ns: int, since_ns: int) -> tuple[int, int]:
        """Microseconds since `since_ns` that this rank did not spend waiting for others, and those that it did."""
        waited = self._recorder.waited_ns - waited_ns
        return max(time.monotonic_ns() - since_ns - waited, 0) // 1000, waited // 1000


def _rows_of(batches: Sequence[StepBatch]) -> Rows:
    return Rows.joined([batch.rows for batch in batches])
