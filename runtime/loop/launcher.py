"""Puts a step's rows on the device: the layers, the sampler, and the sampled ids where the next step finds them.

A step's rows and its plan are all that it needs, so that it can be launched again: its inputs come from the token table
and from the rows' requests, its latents go to the same places of the cache, its random numbers follow from seed and
position. Knows the device's side of a step; does not know what was agreed before it or what is made of it afterwards.

Shapes: T tokens here, B sampled positions, D model, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dbo import UNTIMED, DboConfig, Untimed
from ep import Terms

from ..failure.recorder import Recorder
from ..failure.verdict import Phase
from ..forward.batch import RequestTable
from ..forward.decoder import Decoder, DecoderOutput
from ..forward.device_time import NO_DEVICE_TIME, NoDeviceTime, StepTime
from ..forward.readback import Readback, read_back
from ..graphs.runner import EagerRunner, Ran, Runner
from ..graphs.sync_guard import Guard, NoGuard
from ..requests.rows import Rows
from ..sampling.prompt_logprobs import PromptLogprobs, look_up
from ..sampling.sampler import Sampled
from ..sampling.sampler_ops import SamplerOps, sampler_ops
from ..sampling.samples import sample_rows, tokens_of
from ..scheduling.heartbeat import StepPlan


class OnHost(NamedTuple):
    """Tensors of a step on their way to the host, by name."""

    names: tuple[str, ...]
    back: Readback

    def wait(self, name: str) -> Tensor | None:
        """One of them, once all are there; None where the step has no such thing."""
        return self.back.wait()[self.names.index(name)] if name in self.names else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step on the device.

    terms       of each track's exchanges
    host        the sampled tokens, flags of overflow and fault, and the number of pairs, on their way to the host
    rows        in the order in which they were sampled
    sampled     None where no row samples
    counts_LE   see `decoder.DecoderOutput`, as is experts_LTK
    own_us      microseconds by the host's clock that this rank spent on it without waiting for others
    waited_us   those that it waited; see `Launcher.took`
    prompts     what was asked of prompts, None for nothing
    """

    plan: StepPlan
    terms: Terms
    rows: Rows
    sampled: Sampled | None
    counts_LE: Tensor
    host: OnHost
    own_us: int
    waited_us: int
    experts_LTK: Tensor | None = None
    prompts: PromptLogprobs | None = None

    def tokens(self) -> list[int]:
        """What was sampled, see `samples.tokens_of`. Waits for this step, and for none after it."""
        tokens_B = self.host.wait("tokens")
        return [] if tokens_B is None else tokens_B.tolist()

    def overflowed(self) -> bool:
        """Whether rows of this rank were left behind. Waits alike."""
        flag = self.host.wait("overflow")
        return flag is not None and bool(flag)

    def faulty(self) -> bool:
        """Whether a rank was elsewhere in the program in this step or before. Waits alike."""
        flag = self.host.wait("fault")
        return flag is not None and bool(flag)

    def num_pairs(self) -> int:
        """(token, expert) pairs that this rank's own experts computed, all layers together. Waits alike."""
        pairs = self.host.wait("pairs")
        return 0 if pairs is None else int(pairs)


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
        runner: Runner | None = None,
        guard: Guard | None = None,
        device_time: NoDeviceTime = NO_DEVICE_TIME,
    ) -> None:
        """sampler: None, in torch. runner: None, kernel by kernel. guard: None, steps may make the host wait."""
        self._device_time = device_time
        self._decoder = decoder
        self._table = table
        self._recorder = recorder
        self._timeline = timeline
        self._sampler = sampler or sampler_ops("reference")
        self._guard = guard or NoGuard()
        staggered = overlap.dbo_order == "staggered"
        self.runner = runner or EagerRunner(decoder, table, staggered=staggered, timeline=timeline)

    def launch(self, rows: Rows, plan: StepPlan) -> Launched:
        """A step for the first time."""
        self._recorder.stamp(Phase.LAUNCH, plan.step)
        traced = self._timeline.now()
        terms = Terms(bucket=self.runner.bucket(plan), level=plan.capacity_level)
        with self._guard.step():
            launched = self._put(rows, plan, terms, sampling=lambda: self._recorder.stamp(Phase.SAMPLE, plan.step))
        self._timeline.add("step", 0, f"step {plan.step}", traced)
        return launched

    def launch_again(self, step: Launched, terms: Terms) -> Launched:
        """The same rows on other terms; what the first launch left in table and cache is written over.

        Not stamped: where ranks stand is told by the step in which this happens, its exchanges counted one by one.
        """
        return self._put(step.rows, step.plan, terms, sampling=lambda: None)

    def took(self, step: Launched) -> StepTime:
        """By the device's clock where it has one. Waits for this step, and for none after it."""
        cells_2 = step.host.wait("time")
        if cells_2 is None:
            return StepTime(own_us=step.own_us, waited_us=step.waited_us)
        return self._device_time.read(cells_2)

    def _put(self, rows: Rows, plan: StepPlan, terms: Terms, *, sampling: Callable[[], None]) -> Launched:
        """The layers, then the sampler; `sampling` is called between them."""
        begin = self._recorder.waited_ns, time.monotonic_ns()
        self._device_time.begin()
        ran = self.runner.forward(rows, terms, plan)
        sampling()
        sampled = self._sample(ran)
        prompts = None
        if ran.out.prompt_PD is not None:
            prompts = look_up(ran.prompts, ran.out.prompt_PD, head=self._decoder.logits)
        cells_2 = self._device_time.end()
        own_us, waited_us = self._times_us(*begin)
        out = ran.out
        return Launched(
            plan=plan,
            terms=terms,
            rows=ran.rows,
            sampled=sampled,
            counts_LE=out.counts_LE,
            host=_on_host(sampled, out, cells_2),
            experts_LTK=out.experts_LTK,
            prompts=prompts,
            own_us=own_us,
            waited_us=waited_us,
        )

    def _sample(self, ran: Ran) -> Sampled | None:
        """Choose the next tokens and put them where the next step will find them."""
        if not len(ran.out.hidden_BD):
            return None
        logits_BV = self._decoder.logits(ran.out.hidden_BD)
        tokens = self._table.tokens
        sampled = self._sampler.choose(logits_BV, sample_rows(ran.rows), tokens)
        tokens[ran.slots_B, ran.positions_B] = sampled.token_B
        return sampled

    def _times_us(self, waited_ns: int, since_ns: int) -> tuple[int, int]:
        """Microseconds since `since_ns` that this rank did not spend waiting for others, and those that it did."""
        waited = self._recorder.waited_ns - waited_ns
        return max(time.monotonic_ns() - since_ns - waited, 0) // 1000, waited // 1000


def _on_host(sampled: Sampled | None, out: DecoderOutput, cells_2: Tensor | None) -> OnHost:
    """What the host reads of a step; `cells_2` are the device's of time."""
    wanted = {} if sampled is None else {"tokens": tokens_of(sampled)}
    flags = {"overflow": out.overflow, "fault": out.fault, "time": cells_2}
    wanted |= {name: flag for name, flag in flags.items() if flag is not None}
    wanted["pairs"] = torch.as_tensor(out.num_pairs)
    return OnHost(tuple(wanted), read_back(list(wanted.values()), out.hidden_BD.device))
