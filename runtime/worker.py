"""One rank's life: propose, agree, commit, launch, read; the same loop for a busy rank, an idle one and a single one.

Knows its scheduler, its cache and its transport; does not know what the other ranks hold, nor who asked for what.
What is in flight is a value (`Launched`); at depth 1 step n + 1 is launched before step n is read:

    depth 0   launch n   read n       launch n+1   read n+1
    depth 1   launch n   launch n+1   read n       launch n+2   read n+1

Shapes: T tokens here, B sampled positions, L MoE layers, E experts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dbo import drive
from ep import PeerFailed, SerriedError, Terms, Transport
from eplb import ExpertLoad, balancedness
from moe import ExpertPlacement

from .batch import StepBatch, TokenTable
from .control import Control
from .decoder import Decoder, TrackInput
from .heartbeat import HeartbeatState, StepPlan, decide
from .outputs import News, Note
from .pace import Pace
from .pages import PagePool
from .prefix import PrefixCache
from .ranks import Admit, Inbox, Wish
from .recorder import Recorder
from .rows import Proposal, Row, Update
from .sampler import Sampled, SamplerBatch, sample
from .samples import read_rows, sample_rows
from .scheduler import Scheduler
from .straggler import Finding, StragglerState, watch
from .telemetry import RankStats, StepCounters
from .verdict import Phase
from .votes import PrefillWatch, Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step whose tokens the host has not read yet."""

    plan: StepPlan
    batch: StepBatch
    sampled: Sampled | None
    counts_LE: Tensor


class Straggling(SerriedError):
    """This rank keeps the others waiting, and the group was told to end for it (--straggler-action abort)."""


class Worker:
    """A rank. `inbox` is emptied before each step; `emit` gets the News of each, in the rank's own thread.

    `notify` gets what concerns the whole group; all ranks find the same, so only rank 0 says it.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        scheduler: Scheduler,
        pool: PagePool,
        prefix: PrefixCache,
        table: TokenTable,
        transport: Transport,
        control: Control,
        recorder: Recorder,
        state: HeartbeatState,
        stragglers: StragglerState,
        async_depth: int,
        config_hash: int,
        load: ExpertLoad,
        placement: ExpertPlacement | None,
        emit: Callable[[Sequence[News]], None],
        notify: Callable[[Note], None],
        inbox: Inbox,
    ) -> None:
        self.decoder = decoder
        self.scheduler = scheduler
        self.pool = pool
        self.prefix = prefix
        self.table = table
        self.transport = transport
        self.control = control
        self.recorder = recorder
        self.state = state
        self.stragglers = stragglers
        self.watch = PrefillWatch()
        self.pace = Pace()
        self.wish = Wish()
        self.compute_us = 0
        self.expert_pairs = 0
        self.async_depth = async_depth
        self.config_hash = config_hash
        self.load = load
        self.placement = placement
        self.emit = emit
        self.notify = notify
        self.inbox = inbox
        self.in_flight: deque[Launched] = deque()
        self.counters = StepCounters()
        self.sequence = 0

    def run_wave(self) -> None:
        """Step until no rank has an unfinished request. Every rank of the group runs this at the same time."""
        with torch.inference_mode():
            while self.step():
                pass

    def step(self) -> bool:
        """One beat; False when the plan says that the wave is over, or paused with nothing in flight."""
        self.recorder.stamp(Phase.PROPOSE, self.sequence)
        self._read_inbox()
        proposal = self.scheduler.propose()
        plan = self._agree(proposal)
        self._check(plan)
        if plan.last or plan.paused:
            self._read_down_to(0)
            return False
        if plan.bucket:
            self._run(proposal, plan)
        self._read_down_to(self.async_depth if plan.bucket else 0)
        return True

    def _run(self, proposal: Proposal, plan: StepPlan) -> None:
        """Commit to the plan's share of the proposal and launch it."""
        begin = time.monotonic()
        self.recorder.predict(self.pace.predict(plan.bucket))
        self.recorder.stamp(Phase.COMMIT, plan.step)
        rows = self.scheduler.commit(proposal, prefill_allowed=plan.prefill_allowed)
        self.watch.committed(rows)
        self.in_flight.append(self._launch(rows, plan))
        self.pace.took(plan.bucket, time.monotonic() - begin)

    def _check(self, plan: StepPlan) -> None:
        """Raise where the plan says that the group cannot go on."""
        rank, step = self.transport.rank, plan.step
        if plan.failed is not None:
            raise PeerFailed(plan.failed, "voted that it cannot go on", rank=rank, step=step)
        if plan.stalled:
            raise SerriedError(
                f"no rank can move in step {step}, and requests are unfinished: {self.scheduler.describe()}",
                rank=rank,
                step=step,
            )

    def stats(self) -> RankStats:
        """This rank's counters now."""
        counters = self.counters
        return RankStats(
            rank=self.transport.rank,
            steps=counters.steps,
            idle_steps=counters.idle_steps,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            finished=counters.finished,
            preemptions=self.scheduler.num_preemptions,
            prefix_queries=self.prefix.num_queried,
            prefix_hits=self.prefix.num_hit,
            num_pages=self.pool.num_pages,
            free_pages=self.pool.num_free,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            slow_steps=self.stragglers.slow_steps_of(self.transport.rank),
            degraded=self.transport.rank in self.stragglers.degraded,
            expert_balance=self._expert_balance(),
        )

    def _expert_balance(self) -> float:
        """How level this rank's tokens load the expert ranks, all layers together."""
        if self.placement is None:
            return 1.0
        counts_E = self.load.counts_YE.sum(dim=0).tolist()
        return balancedness(counts_E, self.placement.slot_experts, self.placement.num_ranks)

    def _read_inbox(self) -> None:
        for item in self.inbox.take():
            if isinstance(item, Admit):
                self.scheduler.add(item.request)
            elif isinstance(item, Wish):
                self.wish = item
            else:
                self._say(self.scheduler.abort(item.request_id))

    def _agree(self, proposal: Proposal) -> StepPlan:
        self.recorder.stamp(Phase.VOTE, self.sequence)
        gathering = self.control.gather(self._vote(proposal).row(), sequence=self.sequence)
        self.recorder.wait()
        votes = [Vote.from_row(row) for row in gathering.wait()]
        self.recorder.go_on()
        self.sequence += 1
        plan, self.state = decide(votes, self.state)
        findings, self.stragglers = watch(votes, plan, self.stragglers)
        for finding in findings:
            self._heed(finding, step=plan.step)
        return plan

    def _heed(self, finding: Finding, *, step: int) -> None:
        """Say it, or end by it: on every rank, in the same step."""
        rank = self.transport.rank
        if finding.slow and finding.action == "abort":
            if rank == finding.rank:
                raise Straggling(str(finding), rank=rank, step=step)
            raise PeerFailed(finding.rank, f"is given up: {finding}", rank=rank, step=step)
        if rank == 0:
            self.notify(Note(text=f"{finding} [step {step}]", degraded=self.stragglers.degraded))

    def _vote(self, proposal: Proposal) -> Vote:
        scheduler = self.scheduler
        spare = scheduler.config.max_num_batched_tokens - proposal.decode_tokens - proposal.prefill_tokens
        return Vote(
            sequence=self.sequence,
            epoch=0,
            config_hash=self.config_hash,
            decode_tokens=proposal.decode_tokens,
            prefill_tokens=proposal.prefill_tokens,
            unfinished=scheduler.num_unfinished,
            in_flight=len(self.in_flight),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            free_pages=self.pool.num_free,
            free_slots=scheduler.num_free_slots,
            spare_tokens=spare,
            pause=int(self.wish.pause),
            drain=int(self.wish.drain),
            compute_us=self.compute_us,
            expert_pairs=self.expert_pairs,
            **self.watch.vote(proposal, spare_tokens=spare, now_ns=time.monotonic_ns())._asdict(),
        )

    def _launch(self, rows: tuple[Row, ...], plan: StepPlan) -> Launched:
        """Put one step on the device. Its tokens are not waited for; the exchange's counts and rows are."""
        self.recorder.stamp(Phase.LAUNCH, plan.step)
        begin = self.recorder.waited_ns, time.monotonic_ns()
        self.table.admit(rows)
        tokens = self.table.tokens
        batch = StepBatch.build(rows, page_size=self.pool.page_size, device=tokens.device)
        track = TrackInput(
            tokens_T=tokens[batch.slots_T, batch.positions_T],
            view=batch.view,
            logit_rows_B=batch.logit_rows_B,
            step=plan.step,
            track=0,
            terms=Terms(bucket=plan.bucket),
        )
        [out] = drive([self.decoder.stages(track)])
        self.recorder.stamp(Phase.SAMPLE, plan.step)
        sampled = self._sample(out.logits_BV, batch) if len(batch.logit_rows_B) else None
        self.compute_us = self._own_us(*begin)
        self.expert_pairs = out.num_pairs
        self.counters.launched(rows)
        return Launched(plan=plan, batch=batch, sampled=sampled, counts_LE=out.counts_LE)

    def _own_us(self, waited_ns: int, since_ns: int) -> int:
        """Microseconds since `since_ns` that this rank did not spend waiting for others."""
        waited = self.recorder.waited_ns - waited_ns
        return max(time.monotonic_ns() - since_ns - waited, 0) // 1000

    def _sample(self, logits_BV: Tensor, batch: StepBatch) -> Sampled:
        """Choose the next tokens and put them where the next step will find them."""
        tokens = self.table.tokens
        rows = sample_rows(batch.rows)
        sampled = sample(logits_BV, SamplerBatch.build(rows, device=tokens.device), tokens)
        slots_B = torch.tensor([row.slot for row in rows], device=tokens.device)
        positions_B = torch.tensor([row.position for row in rows], device=tokens.device)
        tokens[slots_B, positions_B] = sampled.token_B
        return sampled

    def _read_down_to(self, depth: int) -> None:
        while len(self.in_flight) > depth:
            self._finish(self.in_flight.popleft())

    def _finish(self, launched: Launched) -> None:
        """Read a step: its tokens reach the requests, its expert counts reach the load, ended requests leave."""
        self.recorder.stamp(Phase.READ, self.sequence)
        rows = launched.batch.rows
        if launched.counts_LE.shape[0]:
            self.load.add(launched.counts_LE, num_tokens=sum(row.num_tokens for row in rows))
        self._say(self.scheduler.finish(rows, read_rows(rows, launched.sampled)))

    def _say(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self.counters.updated(update)
        if updates:
            self.emit([_news(update) for update in updates])


def _news(update: Update) -> News:
    request = update.request
    return News(
        request_id=request.id,
        token_ids=update.new_tokens,
        logprobs=update.logprobs,
        finish_reason=update.finish_reason,
        num_cached=request.num_cached,
        num_preemptions=request.num_preemptions,
    )
