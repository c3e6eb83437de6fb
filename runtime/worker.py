"""One rank's life: propose, agree, commit, launch, read; the same loop for a busy rank, an idle one and a single one.

Knows its scheduler, its cache and its transport; does not know what the other ranks hold, nor who asked for what.
What is in flight is a value (`Launched`); at depth 1 step n + 1 is launched before step n is read:

    depth 0   launch n   read n       launch n+1   read n+1
    depth 1   launch n   launch n+1   read n       launch n+2   read n+1

Shapes: T tokens here, B sampled positions, L MoE layers, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dbo import drive
from ep import Kind, SerriedError, Tag, Transport
from eplb import ExpertLoad, balancedness
from moe import ExpertPlacement

from .batch import StepBatch, TokenTable
from .decoder import Decoder, TrackInput
from .heartbeat import StepPlan, Vote, decide
from .pages import PagePool
from .prefix import PrefixCache
from .request import Request
from .rows import Proposal, Row, Update
from .sampler import Sampled, SamplerBatch, sample
from .samples import read_rows, sample_rows
from .scheduler import Scheduler
from .telemetry import RankStats, StepCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step whose tokens the host has not read yet."""

    plan: StepPlan
    batch: StepBatch
    sampled: Sampled | None
    counts_LE: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """A request that enters this rank."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """A request that is no longer wanted; unknown ids are ignored, so aborting twice is harmless."""

    request_id: str


class Worker:
    """A rank. `inbox` takes Admit and Abort from any thread; `emit` gets every Update, in the rank's own thread."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        scheduler: Scheduler,
        pool: PagePool,
        prefix: PrefixCache,
        table: TokenTable,
        transport: Transport,
        async_depth: int,
        config_hash: int,
        load: ExpertLoad,
        placement: ExpertPlacement | None,
        emit: Callable[[Update], None],
    ) -> None:
        self.decoder = decoder
        self.scheduler = scheduler
        self.pool = pool
        self.prefix = prefix
        self.table = table
        self.transport = transport
        self.async_depth = async_depth
        self.config_hash = config_hash
        self.load = load
        self.placement = placement
        self.emit = emit
        self.inbox: deque[Admit | Abort] = deque()
        self.in_flight: deque[Launched] = deque()
        self.counters = StepCounters()
        self.sequence = 0

    def run_wave(self) -> None:
        """Step until no rank has an unfinished request. Every rank of the group runs this at the same time."""
        with torch.inference_mode():
            while self.step():
                pass

    def step(self) -> bool:
        """One beat; False when the plan says that the wave is over."""
        self._read_inbox()
        proposal = self.scheduler.propose()
        plan = self._agree(proposal)
        if plan.last:
            self._read_down_to(0)
            return False
        if plan.stalled:
            raise SerriedError(
                f"no rank can move in step {plan.step}, and requests are unfinished: {self.scheduler.describe()}",
                rank=self.transport.rank,
                step=plan.step,
            )
        if plan.bucket:
            self.in_flight.append(self._launch(self.scheduler.commit(proposal), plan))
        self._read_down_to(self.async_depth if plan.bucket else 0)
        return True

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
            expert_balance=self._expert_balance(),
        )

    def _expert_balance(self) -> float:
        """How level this rank's tokens load the expert ranks, all layers together."""
        if self.placement is None:
            return 1.0
        counts_E = self.load.counts_YE.sum(dim=0).tolist()
        return balancedness(counts_E, self.placement.slot_experts, self.placement.num_ranks)

    def _read_inbox(self) -> None:
        while self.inbox:
            item = self.inbox.popleft()
            if isinstance(item, Admit):
                self.scheduler.add(item.request)
            else:
                for update in self.scheduler.abort(item.request_id):
                    self.emit(update)

    def _agree(self, proposal: Proposal) -> StepPlan:
        vote = Vote(
            sequence=self.sequence,
            epoch=0,
            config_hash=self.config_hash,
            decode_tokens=proposal.decode_tokens,
            prefill_tokens=proposal.prefill_tokens,
            unfinished=self.scheduler.num_unfinished,
            in_flight=len(self.in_flight),
        )
        tag = Tag(step=self.sequence, layer=-1, track=0, round=0, kind=Kind.VOTE)
        votes = self.transport.all_gather(torch.tensor(vote.row(), dtype=torch.int64), tag=tag).wait()
        self.sequence += 1
        return decide([Vote.from_row(row) for row in votes.tolist()])

    def _launch(self, rows: tuple[Row, ...], plan: StepPlan) -> Launched:
        """Put one step on the device: nothing here reads a result back to the host."""
        self.table.admit(rows)
        tokens = self.table.tokens
        batch = StepBatch.build(rows, page_size=self.pool.page_size, device=tokens.device)
        track = TrackInput(
            tokens_T=tokens[batch.slots_T, batch.positions_T],
            view=batch.view,
            logit_rows_B=batch.logit_rows_B,
            step=plan.step,
            track=0,
            bucket=plan.bucket,
        )
        [out] = drive([self.decoder.stages(track)])
        sampled = self._sample(out.logits_BV, batch) if len(batch.logit_rows_B) else None
        self.counters.launched(rows)
        return Launched(plan=plan, batch=batch, sampled=sampled, counts_LE=out.counts_LE)

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
        rows = launched.batch.rows
        if launched.counts_LE.shape[0]:
            self.load.add(launched.counts_LE, num_tokens=sum(row.num_tokens for row in rows))
        for update in self.scheduler.finish(rows, read_rows(rows, launched.sampled)):
            self.counters.updated(update)
            self.emit(update)
