"""One rank's life: propose, agree, commit, launch, read; the same loop for a busy rank, an idle one and a single one.

Knows its scheduler, its cache and its transport; does not know what the other ranks hold, nor who asked for what.
What is in flight is a value (`Launched`); at depth 1 step n + 1 is launched before step n is read:

    depth 0   launch n   read n       launch n+1   read n+1
    depth 1   launch n   launch n+1   read n       launch n+2   read n+1

To read a step is not yet to finish it. Where the exchange may leave rows behind, a step is finished - tokens to their
requests, pages back, counts counted - when a plan says that it is clean on all ranks, just before the next rows are
committed; and where a plan says that one is not, all steps in flight are run again, exact (see `rerun`):

    depth 1   launch n   launch n+1   read n   vote: n unclean   launch n, n+1 again   read both   vote   finish both
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dbo import UNTIMED, Untimed
from ep import PeerFailed, SerriedError, Transport

from ..control.control import Control
from ..failure.recorder import Recorder
from ..failure.straggler import StragglerState, watch
from ..failure.verdict import Phase
from ..forward.batch import RequestTable
from ..forward.decoder import Decoder
from ..forward.device_time import NO_DEVICE_TIME, NoDeviceTime, StepTime
from ..forward.experts import Experts
from ..forward.part_times import NO_PARTS, NoParts
from ..graphs.runner import Runner
from ..graphs.sync_guard import Guard
from ..requests.outputs import News, Note
from ..requests.pages import PagePool
from ..requests.prefix import PrefixCache
from ..requests.rows import Proposal
from ..requests.telemetry import RankStats, StepCounters
from ..sampling.prompt_logprobs import keep
from ..sampling.sampler_ops import SamplerOps
from ..scheduling.heartbeat import HeartbeatState, StepPlan, decide
from ..scheduling.scheduler import Scheduler
from ..scheduling.votes import PrefillWatch, Vote
from .account import stats_of, vote_of
from .in_flight import InFlight, ReadStep
from .launcher import Launcher
from .pace import Pace
from .ranks import Admit, Inbox, Wish
from .showing import NOT_SHOWN, NotShown
from .voice import Excuses, Voice, no_excuse

IDLE_BEAT_S = 0.001
"""A beat in which no rank computes anything, while latents are on their way, lasts at least so long."""


class Worker:
    """A rank. `inbox` is emptied before each step; `emit` gets the News of each, in the rank's own thread.

    `notify` gets what concerns the whole group; all ranks find the same, so only rank 0 says it. `run_twice` says of a
    step, on every rank the same, that all that is in flight after its launch is to be launched once more; for tests.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        scheduler: Scheduler,
        pool: PagePool,
        prefix: PrefixCache,
        table: RequestTable,
        transport: Transport,
        control: Control,
        recorder: Recorder,
        state: HeartbeatState,
        stragglers: StragglerState,
        async_depth: int,
        config_hash: int,
        experts: Experts,
        emit: Callable[[Sequence[News]], None],
        notify: Callable[[Note], None],
        inbox: Inbox,
        may_overflow: bool = False,
        run_twice: Callable[[int], bool] | None = None,
        timeline: Untimed = UNTIMED,
        excuses: Excuses = no_excuse,
        sampler: SamplerOps | None = None,
        parts: NoParts = NO_PARTS,
        show: NotShown = NOT_SHOWN,
        runner: Runner | None = None,
        guard: Guard | None = None,
        device_time: NoDeviceTime = NO_DEVICE_TIME,
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
        self.took = self.took_read = StepTime(own_us=0, waited_us=0)
        self.expert_pairs = 0
        self.pairs_read = 0
        self.async_depth = async_depth
        self.config_hash = config_hash
        self.experts = experts
        self.experts_ready: list[int] = []
        self.inbox = inbox
        self.may_overflow = may_overflow
        self.run_twice = run_twice
        self.parts = parts
        self.show = show
        self.launcher = Launcher(
            decoder,
            table,
            recorder=recorder,
            overlap=state.overlap.config,
            timeline=timeline,
            sampler=sampler,
            runner=runner,
            guard=guard,
            device_time=device_time,
        )
        self.in_flight = InFlight()
        self.counters = StepCounters()
        self.voice = Voice(transport.rank, emit=emit, notify=notify, excuses=excuses)
        self.sequence = 0

    def run_wave(self) -> None:
        """Step until no rank has an unfinished request. Every rank of the group runs this at the same time."""
        with torch.inference_mode(), self.decoder.threads():
            while self.step():
                self.show.stepped(self)
        self.show.rested()

    def step(self) -> bool:
        """One beat; False when the plan says that the wave is over, or paused with nothing in flight."""
        self.recorder.stamp(Phase.PROPOSE, self.sequence)
        self._read_inbox()
        self.voice.say(self.scheduler.turn())
        proposal = self.scheduler.propose()
        plan = self._agree(proposal)
        self._check(plan)
        self._finish_up_to(plan.clean)
        if plan.last or plan.paused:
            return False
        if plan.rerun_from is not None:
            self._run_again(plan)
        elif plan.bucket:
            self._run(proposal, plan)
        elif self.scheduler.hand_over.awaits:
            time.sleep(IDLE_BEAT_S)  # nobody has anything to compute, and what is to come does not come faster
        self._read_down_to(self.async_depth if plan.bucket else 0)
        if plan.rerun_from is None:
            self._move_experts(plan)
        return True

    def _move_experts(self, plan: StepPlan) -> None:
        line = self.experts.turn(self.experts_ready, step=plan.step)
        if line is not None:
            self.voice.tell(line, step=plan.step)

    def _run(self, proposal: Proposal, plan: StepPlan) -> None:
        """Commit to the plan's share of the proposal and launch it."""
        begin = time.monotonic()
        self.recorder.predict(self.pace.predict(plan.bucket))
        self.recorder.stamp(Phase.COMMIT, plan.step)
        rows = self.scheduler.commit(proposal, prefill_allowed=plan.prefill_allowed)
        if proposal.prefill_tokens:
            self.watch.committed(rows)
        for request in self.scheduler.take_entered():
            self.table.enter(request, start=request.num_loaded)
        launched = self.launcher.launch(rows, plan)
        if launched.host.back.is_done():  # else the newest that was read says it
            self.took_read, self.pairs_read = self.launcher.took(launched), launched.num_pairs()
        self.took, self.expert_pairs = self.took_read, self.pairs_read
        self.in_flight.add(launched)
        self.counters.launched(rows)
        self.parts.ran(plan.step, rows, tracks=plan.tracks)
        self.pace.took(plan.bucket, time.monotonic() - begin)
        if self.run_twice is not None and self.run_twice(plan.step):
            self._launch_again(exact=False)

    def _run_again(self, plan: StepPlan) -> None:
        """All steps in flight once more, in their order; the proposal waits."""
        self.recorder.predict(sum([self.pace.predict(bucket) for bucket in self.in_flight.buckets]))
        self.recorder.stamp(Phase.LAUNCH, plan.step)
        self.counters.rerun_steps += len(self.in_flight)
        self.parts.ran(plan.step, None, tracks=1)
        self._launch_again(exact=True)

    def _launch_again(self, *, exact: bool) -> None:
        for step in self.in_flight.discard():
            self.in_flight.add(self.launcher.launch_again(step, replace(step.terms, exact=exact)))

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

    def close(self) -> None:
        """Let go of what outlives waves."""
        self.experts.close()
        self.scheduler.hand_over.close()

    def stats(self) -> RankStats:
        """This rank's counters now."""
        return stats_of(self)

    def _read_inbox(self) -> None:
        for item in self.inbox.take():
            if isinstance(item, Admit):
                self.scheduler.add(item.request)
            elif isinstance(item, Wish):
                self.wish = item
            else:
                self.voice.say(self.scheduler.abort(item.request_id))

    def _agree(self, proposal: Proposal) -> StepPlan:
        self.recorder.stamp(Phase.VOTE, self.sequence)
        gathering = self.control.gather(vote_of(self, proposal).row(), sequence=self.sequence)
        waited_ns = self.recorder.waited_ns
        self.recorder.wait()
        votes = [Vote.from_row(row) for row in gathering.wait()]
        self.recorder.go_on()
        self.counters.beat_wait_ns += self.recorder.waited_ns - waited_ns
        self.experts_ready = [vote.migration_ready for vote in votes]
        self.counters.voted([vote.expert_pairs for vote in votes])
        self.sequence += 1
        level = self.state.overflows.level
        plan, self.state = decide(votes, self.state)
        if plan.capacity_level > level:
            self.voice.raised(plan)
        findings, self.stragglers = watch(votes, plan, self.stragglers)
        for finding in findings:
            self.voice.heed(finding, step=plan.step, degraded=self.stragglers.degraded)
        return plan

    def _read_down_to(self, depth: int) -> None:
        """Read steps until only `depth` are not; where nothing can be left behind they are clean, and finished."""
        while len(self.in_flight.unread) > depth:
            self.recorder.stamp(Phase.READ, self.sequence - 1)  # still the step that was agreed last
            step = self.in_flight.read()
            self.took_read, self.pairs_read = self.launcher.took(step), step.num_pairs()
            if step.faulty():
                self.decoder.check_faults()
        if not self.may_overflow:
            self._finish_up_to(self.in_flight.last_clean)

    def _finish_up_to(self, clean: int) -> None:
        for step in self.in_flight.take_clean(clean):
            self._finish(step)

    def _finish(self, step: ReadStep) -> None:
        """Let a step out: its tokens reach the requests, its expert counts the load; ended requests leave."""
        launched, rows = step.launched, step.launched.rows
        self.parts.counted(launched.counts_LE)
        self.experts.count(launched.counts_LE, num_tokens=rows.num_tokens, experts_LTK=launched.experts_LTK)
        if launched.prompts is not None:
            keep(launched.prompts)
        self.voice.say(self.scheduler.finish(rows, step.samples))
