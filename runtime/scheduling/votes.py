"""What one rank says before a step: one fixed row of int64, and how its prompts' fields are filled.

Knows the fields and their order on the wire; does not know what follows from them (see `cadence` and `heartbeat`), nor
how rows travel. Imports no tensor library, so that a process without one can read votes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from ..requests.rows import Proposal, Rows


class Vote(NamedTuple):
    """One rank's row; every field is one int64, in this order. Wishes and marks are 0 or 1.

    sequence                 steps this rank has agreed to so far
    epoch                    placement epoch in force here
    config_hash              63 bits over everything that must be configured alike
    last_read                number of the newest step whose tokens and overflow flag the host has read; -1 before any
    last_clean               nothing was left behind here in any step up to this one (see `rerun`)
    decode_tokens            tokens of proposed rows that end in a sampled token and hold no prompt chunk
    prefill_tokens           tokens of all other proposed rows: prompts that have a slot, pages and a share of tokens
    unfinished               requests that have not ended, those in flight included
    in_flight                steps launched here that are not finished: not read, or not known to be clean everywhere
    running                  requests that hold a slot
    waiting                  requests that hold none
    free_pages               pages of the latent cache that nobody holds
    free_slots               requests that may still start to run
    spare_tokens             what the proposal leaves of this rank's token budget
    prefill_ready            this rank's prompts would gain nothing by waiting (see `PrefillWatch`)
    oldest_prefill_wait_ms   how long the cadence has put off the oldest of them; a duration, so no clocks are compared
    prefill_start            the deepest position at which one of their chunks starts
    context_tokens           cached tokens that the decode rows attend to, all together
    pause                    wish: launch nothing
    drain                    wish: take no new request, finish those that are here
    compute_us               time of the last step that this rank spent on its own work
    exchange_us              time that it waited for exchanges in that step
    expert_pairs             (token, expert) pairs that this rank's experts computed in that step, all layers together;
                             where the host does not know yet, in the step read last
    decode_row               tokens of the longest proposed row that only decodes; 0 where nobody asks (see `overlap`)
    prefill_row              tokens of the longest other proposed row; likewise
    migration_ready          switches of experts made, and one more where all that the next needs has arrived; below 0 a
                             fault (see `eplb.rebalancer`)
    awaiting                 latents on their way here, and prompts that others are to fetch: somebody outside the group
                             is to act, so that a rank that cannot move is not stuck
    error                    0, or the number of an error that keeps this rank from going on
    """

    sequence: int
    epoch: int
    config_hash: int
    last_read: int = -1
    last_clean: int = -1
    decode_tokens: int = 0
    prefill_tokens: int = 0
    unfinished: int = 0
    in_flight: int = 0
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    free_slots: int = 0
    spare_tokens: int = 0
    prefill_ready: int = 0
    oldest_prefill_wait_ms: int = 0
    prefill_start: int = 0
    context_tokens: int = 0
    pause: int = 0
    drain: int = 0
    compute_us: int = 0
    exchange_us: int = 0
    expert_pairs: int = 0
    decode_row: int = 0
    prefill_row: int = 0
    migration_ready: int = 0
    awaiting: int = 0
    error: int = 0

    def row(self) -> list[int]:
        """The vote as integers, in field order."""
        return list(self)

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Self:
        """The inverse of `row()`."""
        assert len(row) == len(cls._fields), f"a vote has {len(cls._fields)} fields, this row {len(row)}"
        return cls(*row)


class PrefillVote(NamedTuple):
    """The fields of a vote that a proposal's prompts fill, by the names they have there."""

    prefill_ready: int
    oldest_prefill_wait_ms: int
    prefill_start: int
    context_tokens: int


class PrefillWatch:
    """How long this rank's prompts have been put off, and whether one of them was cut by the last release.

    A rank is *ready* when its budget of tokens is spent (more prompts would not fit the step anyway), or when a prompt
    that an earlier step began goes on: such a prompt has waited already. The wait is counted from the first proposal
    that held prompts which were not released; time spent in line for a slot or for pages is not the cadence's.
    """

    def __init__(self) -> None:
        self._since_ns: int | None = None
        self._cut = False

    def vote(self, proposal: Proposal, *, spare_tokens: int, now_ns: int) -> PrefillVote:
        """What to vote for this proposal. `now_ns` is a clock of this rank that never goes back."""
        if not proposal.prefill_tokens:
            self._since_ns = None
            self._cut = False
        elif self._since_ns is None:
            self._since_ns = now_ns
        rows, is_prefill_B = proposal.rows, proposal.rows.is_prefill_B
        return PrefillVote(
            prefill_ready=int(proposal.prefill_tokens > 0 and (self._cut or spare_tokens <= 0)),
            oldest_prefill_wait_ms=0 if self._since_ns is None else (now_ns - self._since_ns) // 1_000_000,
            prefill_start=int(rows.start_B[is_prefill_B].max(initial=0)),
            context_tokens=int(rows.end_B[~is_prefill_B].sum()),
        )

    def committed(self, rows: Rows) -> None:
        """The step was launched with these rows: if prompts are among them, nothing is put off any more."""
        is_prefill_B = rows.is_prefill_B
        if is_prefill_B.any():
            self._since_ns = None
            self._cut = bool((rows.num_sampled_B[is_prefill_B] == 0).any())
