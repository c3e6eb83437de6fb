"""What must hold in every step of a group, said in the plainest form: for simulations and their tests.

    all ranks come to the same plan             somebody moves, or reads, whenever work exists
    prompts wait no longer than their bound     no rank computes prompts while others put theirs off
    tokens that decode are never held           in the end no request, page or slot is left

Counts for itself, from votes and rows, what the cadence also counts. Each broken rule is an AssertionError.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..scheduling.cadence import CadenceConfig, Reason
from ..scheduling.heartbeat import StepPlan, Vote
from .simulated_rank import Ballot, SimulatedRank
from .simulation_record import StepRecord


class Rules:
    """The rules of one group, fed step by step."""

    def __init__(self, cadence: CadenceConfig, *, ranks: int) -> None:
        self._interval = cadence.prefill_schedule_interval
        self._max_steps = cadence.prefill_max_delay_steps if self._interval == "auto" else self._interval - 1
        self._max_us = 1000.0 * (cadence.prefill_max_delay_ms + 1) if self._interval == "auto" else float("inf")
        self._put_off = [0] * ranks
        self._since_us = [0.0] * ranks
        self._empty_steps = 0
        self.longest_put_off = 0

    def check_plans(self, plans: Sequence[StepPlan]) -> None:
        """Everybody decides the same."""
        different = [rank for rank, plan in enumerate(plans) if plan != plans[0]]
        assert not different, f"ranks {different} come to another plan than rank 0"

    def check_plan(self, plan: StepPlan, votes: Sequence[Vote], *, now_us: float) -> None:
        """The group moves, and no prompt is put off beyond its bound. `now_us`: when the votes were cast."""
        assert not plan.stalled, "no rank can move, nothing is in flight, and requests are unfinished"
        self._empty_steps = 0 if plan.bucket or plan.last else self._empty_steps + 1
        assert self._empty_steps < 2, "two steps in a row launch nothing, and the wave goes on"
        for rank, vote in enumerate(votes):
            self._check_wait(rank, vote, plan, now_us)

    def _check_wait(self, rank: int, vote: Vote, plan: StepPlan, now_us: float) -> None:
        if not vote.prefill_tokens or plan.reason is not Reason.DEFERRED:
            self._put_off[rank] = 0
            return
        if not self._put_off[rank]:
            self._since_us[rank] = now_us
        self._put_off[rank] += 1
        self.longest_put_off = max(self.longest_put_off, self._put_off[rank])
        steps, waited_us = self._put_off[rank], now_us - self._since_us[rank]
        assert steps <= self._max_steps, f"prompts of rank {rank} are put off for {steps} steps"
        assert waited_us < self._max_us, f"prompts of rank {rank} are put off for {waited_us / 1000:.0f} ms"

    def check_step(self, plan: StepPlan, ballots: Sequence[Ballot], step: StepRecord) -> None:
        """What is launched is what the plan allows, and all that decodes."""
        for rank, ballot in enumerate(ballots):
            decode, prefill = step.decode_R[rank], step.prefill_R[rank]
            assert decode + prefill <= plan.bucket, f"rank {rank} runs more than the bucket holds"
            assert decode >= ballot.vote.decode_tokens, f"rank {rank} holds tokens back that decode"
            allowed = ballot.vote.prefill_tokens if plan.prefill_allowed is None else plan.prefill_allowed
            computed = decode + prefill - ballot.vote.decode_tokens
            assert computed <= allowed, f"rank {rank} computes {computed} tokens of prompts, {allowed} are allowed"

    def check_end(self, ranks: Sequence[SimulatedRank]) -> None:
        """Nothing is left behind."""
        for number, rank in enumerate(ranks):
            scheduler, pool = rank.scheduler, rank.pool
            left = scheduler.num_unfinished + scheduler.num_running + scheduler.num_waiting + scheduler.num_parked
            assert not left, f"rank {number} has requests left: {scheduler.describe()}"
            assert pool.num_free == pool.num_pages, f"rank {number} has pages left: {scheduler.describe()}"
