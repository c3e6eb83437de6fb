"""One rank of a simulated group: the loop of a worker without its device, taken apart at the points where others act.

    ballot    requests in, propose, vote        launch    commit the plan        read    the oldest step's tokens

The scheduler, the page pool, the prefix cache and the watch over prompts are the real ones. What a step takes, and when
its tokens are there, is the group's business (see `simulation`).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from ..costs.costs import StepShape
from ..ranks.routing import RankView
from ..requests.pages import PagePool
from ..requests.prefix import PrefixCache
from ..requests.request import Request
from ..requests.rows import Proposal, Rows, Samples, Update
from ..scheduling.heartbeat import StepPlan, Vote
from ..scheduling.overlap import longest_rows
from ..scheduling.scheduler import Scheduler, SchedulerConfig
from ..scheduling.votes import PrefillWatch

CONFIG_HASH = 1
_TOKEN = 7


class Ballot(NamedTuple):
    """What a rank would run, and what it says to the others."""

    proposal: Proposal
    vote: Vote


class SimulatedRank:
    """A rank. Its scheduler's `max_model_len` is settled. Every row that samples says the same token, so that requests
    end by their length only. `tells_rows`: its votes say how long its rows are."""

    def __init__(self, config: SchedulerConfig, *, num_pages: int, page_size: int, tells_rows: bool = False) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.prefix = PrefixCache(self.pool, enabled=config.enable_prefix_caching)
        self.scheduler = Scheduler(config, self.pool, self.prefix)
        self.watch = PrefillWatch()
        self.unread: deque[Rows] = deque()
        self.compute_us = 0
        self._config = config
        self._tells_rows = tells_rows
        self._prompts: dict[Request, None] = {}

    def admit(self, request: Request) -> None:
        """A request enters the rank."""
        self.scheduler.add(request)
        self._prompts[request] = None

    def view(self) -> RankView:
        """What the front knows of it."""
        return RankView(
            queued_tokens=sum([len(request.prompt) - request.num_computed for request in self._prompts]),
            used_pages=self.pool.num_pages - self.pool.num_free,
            num_pages=self.pool.num_pages,
        )

    def ballot(self, *, sequence: int, now_us: float) -> Ballot:
        """Propose a step and say so."""
        proposal = self.scheduler.propose()
        spare = self._config.max_num_batched_tokens - proposal.decode_tokens - proposal.prefill_tokens
        decode_row, prefill_row = longest_rows(proposal) if self._tells_rows else (0, 0)
        vote = Vote(
            sequence=sequence,
            epoch=0,
            config_hash=CONFIG_HASH,
            decode_tokens=proposal.decode_tokens,
            prefill_tokens=proposal.prefill_tokens,
            unfinished=self.scheduler.num_unfinished,
            in_flight=len(self.unread),
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            free_pages=self.pool.num_free,
            free_slots=self.scheduler.num_free_slots,
            spare_tokens=spare,
            compute_us=self.compute_us,
            decode_row=decode_row,
            prefill_row=prefill_row,
            **self.watch.vote(proposal, spare_tokens=spare, now_ns=int(now_us * 1000))._asdict(),
        )
        return Ballot(proposal, vote)

    def launch(self, proposal: Proposal, plan: StepPlan) -> Rows:
        """Put the plan's share of the proposal on the device."""
        rows = self.scheduler.commit(proposal, prefill_allowed=plan.prefill_allowed)
        self.watch.committed(rows)
        self.unread.append(rows)
        if self._prompts:
            for row in rows:
                if row.samples:
                    self._prompts.pop(row.request, None)
        return rows

    def read(self) -> list[Update]:
        """The tokens of the oldest launched step."""
        rows = self.unread.popleft()
        return self.scheduler.finish(rows, Samples(tokens=[_TOKEN] * int(rows.num_sampled_B.sum())))


def shape_of(rows: Rows) -> StepShape:
    """What the cost model has to know of a rank's rows."""
    is_prefill_B, num_tokens_B, end_B = rows.is_prefill_B, rows.num_tokens_B, rows.end_B
    prompts, decodes = num_tokens_B * is_prefill_B, num_tokens_B * ~is_prefill_B
    tokens = int(prompts.sum())
    return StepShape(
        decode_tokens=int(decodes.sum()),
        context_len=int(end_B[~is_prefill_B].sum()) / max(np.count_nonzero(~is_prefill_B), 1),
        prefill_tokens=tokens,
        prefill_position=int((prompts * (rows.start_B + end_B)).sum()) / 2 / max(tokens, 1),
    )
