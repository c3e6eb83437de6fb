"""A group of ranks under a virtual clock: the real scheduler, heartbeat, cadence and routing, and modelled step times.

    depth 0   | vote 1 | step 1 ........ | read 1, vote 2 | step 2 ........ |
    depth 1   | vote 1 | step 1 ........ | step 2 ............ | step 3 ....      ranks vote for a step while the one
                       | vote 2 |        | read 1, vote 3 |    | read 2 ...       before it is on the devices

One plain loop in one thread, for up to hundreds of ranks. Nothing is drawn but from the seed, so the same seed gives
the same run to the microsecond; a rule that breaks (`simulation_rules`) is reported with it.

Knows when things happen; does not know what a scenario is for (see `scenarios`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dbo.policy import Choice, DboConfig, OverlapState
from ep.errors import SerriedError

from ..costs.costs import ItlBudget, StepCosts
from ..failure.judge import Limits
from ..failure.verdict import Phase, Reason, Verdict
from ..ranks.routing import RoutingConfig
from ..requests.rows import Update
from ..scheduling.cadence import CadenceConfig
from ..scheduling.heartbeat import Disagreement, HeartbeatState, StepPlan, Vote, decide
from ..scheduling.overlap import CostModel, uncut_words
from ..scheduling.scheduler import SchedulerConfig
from .simulated_devices import Devices
from .simulated_faults import Fault, Mishaps, find_culprit
from .simulated_front import Arrival, Front
from .simulated_rank import Ballot, SimulatedRank, shape_of
from .simulation_record import Run, StepRecord, Story, Tokens
from .simulation_rules import Rules

MAX_DECIDERS = 8
"""So many ranks decide each for itself, and are compared; the others would repeat them."""


class SimulationFailed(SerriedError):
    """A rule broke in a simulated group; the seed in the message replays it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """A group to be simulated.

    num_blocks  pages of each rank; 3285 is what `serried plan deepseek-v3 --ranks 8` leaves on an H200
    vote_us     from the votes until everybody has them all
    """

    ranks: int = 8
    async_depth: Literal[0, 1] = 1
    num_blocks: int = 3285
    block_size: int = 64
    vote_us: float = 100.0
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cadence: CadenceConfig = field(default_factory=CadenceConfig)
    overlap: DboConfig = field(default_factory=DboConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("ranks", "num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1, e.g. 8")


class Simulation:
    """A group, what comes to it and what befalls it; `run` once, until the arrivals numbered `until` (None: all) have
    ended."""

    def __init__(
        self,
        config: GroupConfig,
        costs: StepCosts,
        arrivals: Sequence[Arrival],
        *,
        seed: int = 0,
        faults: Sequence[Fault] = (),
        until: Collection[int] | None = None,
    ) -> None:
        scheduler = _settled(config, arrivals)
        self._config = config
        self._seed = seed
        self._open = set(range(len(arrivals)) if until is None else until)
        self._ranks = [
            SimulatedRank(
                scheduler,
                num_pages=config.num_blocks,
                page_size=config.block_size,
                tells_rows=config.overlap.dbo != "off",
            )
            for _ in range(config.ranks)
        ]
        self._front = Front(arrivals, self._ranks, config.routing)
        self._devices = Devices(costs)
        self._mishaps = Mishaps(faults, seed=seed)
        self._rules = Rules(config.cadence, ranks=config.ranks)
        target = config.cadence.itl_target_ms
        budget = None if target is None else ItlBudget(costs=costs, target_ms=target)
        overlap = OverlapState(config=config.overlap, model=CostModel(costs=costs))
        state = HeartbeatState.start(config.cadence, budget=budget, overlap=overlap)
        self._states = [state] * min(config.ranks, MAX_DECIDERS)
        self._sequence = 0
        self._said_before: list[list[int]] = []
        self._now_us = 0.0
        self._in_flight: deque[StepRecord] = deque()
        self._steps: list[StepRecord] = []
        self._stories = [Story(arrival_us=one.at_us, prompt_len=one.prompt_len) for one in arrivals]
        self._tokens = Tokens()
        self._verdict: Verdict | None = None

    def run(self, on_progress: Callable[[int, int], None] | None = None) -> Run:
        """Until it is over. SimulationFailed names the rule that broke, the step and the seed.

        on_progress   called after every step with the requests that have ended, and with all
        """
        try:
            while self._open and self._verdict is None:
                self._step()
                if on_progress is not None:
                    on_progress(len(self._stories) - len(self._open), len(self._stories))
            if self._verdict is None and all(story.ended for story in self._stories):
                self._come_to_rest()
        except (AssertionError, SerriedError) as error:
            raise SimulationFailed(f"{error} (in step {self._sequence}; seed {self._seed} replays it)") from error
        return Run(
            ranks=self._config.ranks,
            seed=self._seed,
            steps=self._steps,
            stories=self._stories,
            tokens=self._tokens,
            waves=self._states[0].wave,
            longest_put_off=self._rules.longest_put_off,
            end_us=self._now_us,
            verdict=self._verdict,
            cut_steps=self._states[0].overlap.counts.get(Choice.CUT, 0),
            uncut_steps=uncut_words(self._states[0].overlap),
        )

    def _come_to_rest(self) -> None:
        """All requests have ended: the group knows it within depth + 1 steps, and nothing is left."""
        for _ in range(self._config.async_depth + 1):
            plan = self._step()
            if plan is None:
                return
            if plan.last:
                self._rules.check_end(self._ranks)
                return
        raise AssertionError("all requests have ended, and the ranks do not know it")

    def _step(self) -> StepPlan | None:
        """One beat of the group, as `Worker.step` on every rank; None when something has ended it."""
        self._deliver()
        ballots = [rank.ballot(sequence=self._sequence, now_us=self._now_us) for rank in self._ranks]
        if self._ended(up_to=Phase.VOTE):
            return None
        rows, complete_us = self._gather(ballots)
        plan = self._decide(rows)
        if plan is None:
            return None
        self._rules.check_plan(plan, [ballot.vote for ballot in ballots], now_us=self._now_us)
        self._sequence += 1
        self._now_us = complete_us
        if plan.bucket:
            self._launch(plan, ballots)
        if self._ended(up_to=Phase.MIGRATE):
            return None
        self._read_down_to(self._config.async_depth if plan.bucket else 0)
        if plan.last:
            self._sleep()
        return plan

    def _deliver(self) -> None:
        for index, rank in self._front.deliver(self._now_us, lambda: self._mishaps.request_delay_us(self._sequence)):
            self._stories[index].rank = rank

    def _gather(self, ballots: Sequence[Ballot]) -> tuple[list[list[int]], float]:
        """Everybody's row as it arrives, in rank order, and when the last one is there."""
        said = [ballot.vote.row() for ballot in ballots]
        rows: list[list[int]] = [[] for _ in said]
        times = [self._mishaps.vote_delay_us(rank, self._sequence) for rank in range(len(said))]
        for rank in sorted(range(len(said)), key=lambda rank: (times[rank], rank)):
            is_stale = bool(self._said_before) and self._mishaps.is_stale(rank, self._sequence)
            rows[rank] = self._said_before[rank] if is_stale else said[rank]
        self._said_before = said
        return rows, self._now_us + self._config.vote_us + max(times)

    def _decide(self, rows: Sequence[Sequence[int]]) -> StepPlan | None:
        """Each for itself. None when ranks disagree: all of them stop."""
        try:
            decided = [decide([Vote.from_row(row) for row in rows], state) for state in self._states]
        except Disagreement as error:
            self._verdict = Verdict(
                culprit=error.culprit,
                reason=Reason.RAISED,
                cause=str(error.args[0]),
                step=self._sequence,
                phase=Phase.VOTE,
            )
            return None
        self._rules.check_plans([plan for plan, _ in decided])
        self._states = [state for _, state in decided]
        return decided[0][0]

    def _launch(self, plan: StepPlan, ballots: Sequence[Ballot]) -> None:
        rows_R = [rank.launch(ballot.proposal, plan) for rank, ballot in zip(self._ranks, ballots, strict=True)]
        step = self._devices.run(
            plan,
            [shape_of(rows) for rows in rows_R],
            ready_us=self._now_us,
            factors=[self._mishaps.factor(rank, plan.step) for rank in range(len(rows_R))],
        )
        self._rules.check_step(plan, ballots, step)
        self._steps.append(step)
        self._in_flight.append(step)

    def _read_down_to(self, depth: int) -> None:
        """Wait for the oldest launched steps, and read them."""
        while len(self._in_flight) > depth:
            step = self._in_flight.popleft()
            self._now_us = max(self._now_us, step.end_us)
            for rank, busy_us in zip(self._ranks, step.busy_us_R, strict=True):
                rank.compute_us = int(busy_us)
                for update in rank.read():
                    self._book(update, step.end_us)

    def _book(self, update: Update, at_us: float) -> None:
        """A token has come, the only one of this step: there are no drafts."""
        index = int(update.request.id)
        story = self._stories[index]
        if story.last_us is None:
            story.first_us = at_us
        else:
            self._tokens.at_us.append(at_us)
            self._tokens.gap_us.append(at_us - story.last_us)
        story.last_us = at_us
        story.num_tokens += 1
        if update.finish_reason is not None:
            story.ended = True
            self._open.discard(index)

    def _ended(self, *, up_to: Phase) -> bool:
        """Whether a fault stops a rank here; then the others find out which, and all end."""
        fault = self._mishaps.end(self._sequence if up_to is Phase.VOTE else self._sequence - 1, up_to=up_to)
        if fault is None:
            return False
        step_us = self._steps[-1].length_us if self._steps else 0.0
        self._verdict, self._now_us = find_culprit(
            fault, size=self._config.ranks, now_us=self._now_us, step_us=step_us, limits=self._config.limits
        )
        return True

    def _sleep(self) -> None:
        """The wave is over: nothing happens until something comes."""
        next_us = self._front.next_us()
        assert next_us is not None or not self._open, "requests are open, and none is under way"
        if next_us is not None:
            self._now_us = max(self._now_us, next_us)


def _settled(config: GroupConfig, arrivals: Sequence[Arrival]) -> SchedulerConfig:
    """The ranks' scheduler, with room for the longest request. ValueError when a rank's cache has none."""
    longest = max([one.total_len for one in arrivals], default=2)
    pages = -(-longest // config.block_size)
    if pages > config.num_blocks:
        raise ValueError(
            f"num_blocks is {config.num_blocks}; the longest request needs {pages} of {config.block_size} tokens, "
            f"e.g. {pages}"
        )
    scheduler = config.scheduler
    return scheduler if scheduler.max_model_len is not None else replace(scheduler, max_model_len=max(longest, 2))
