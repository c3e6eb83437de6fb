"""One request as the scheduler carries it: how many of its tokens are known, and how many are computed.

    position    0 ......... num_computed ......... len(tokens) ..... num_known
                [ in the cache, or launched )[ gap: the next row ............ )
                                             [ tokens on the host )[ pending: sampled by a launched step, not read yet )

There is no prompt phase and no decode phase: a step computes tokens of the gap, and a row that reaches `num_known`
samples what comes next. What a request does not know: the budget, the pool, or who runs beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from .kv_params import KvParams
from .ledger import Ledger
from .sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """It sampled one of its `stop_ids`; that token is its last."""

    LENGTH = "length"
    """It has max_tokens tokens of output, or as many as the model's length allows."""

    ABORT = "abort"
    """Someone took it back; tokens that were in flight are dropped."""

    ERROR = "error"
    """The sampler found no usable logits for it (see `rows.FAILED_TOKEN`), or its latents could not be fetched."""


class Status(Enum):
    """Where a request is. Pages of one that is not RUNNING stay its own until no unread step holds a row of it."""

    WAITING = "waiting"
    ARRIVING = "arriving"
    """Its latents are fetched; pages that are given for them are the load's (see `hand_over`)."""
    ARRIVED = "arrived"
    """They lie in its pages, and it waits for a slot."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt, what is asked of it, and how far it has come. Only the scheduler writes the fields below `is_plain`."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int
    """Place in the order of arrival; lower is older. Ties go to the one that was added first."""
    priority: int = 0
    """Lower is served first; looked at under the policy "priority" only."""
    seed: int = 0
    """Of its random numbers: `params.seed`, or the one drawn for it at the door."""
    choice_index: int = 0
    """Which of several answers to one prompt this is; part of the random numbers' counter."""
    cache_salt: str = ""
    """Only requests of equal salt share cached prefixes."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it, see `ending_ids`."""
    kv: KvParams | None = None
    """Who has its latents, or that another engine is to fetch them."""

    is_plain: bool = field(init=False)
    """See `SamplingParams.is_plain`: asked of each row in each step."""
    tokens: list[int] = field(init=False)
    """Prompt and output, as far as the host knows them."""
    drafts: list[int] = field(default_factory=list)
    """Guesses that follow `tokens` in the row proposed last."""
    pages: list[int] = field(default_factory=list)
    """Page i holds positions i * page_size .. (i + 1) * page_size - 1."""
    slot: int | None = None
    """Its line of all tables, while it runs and until its last launched step is read."""
    ledger: Ledger | None = None
    """Where its counts are as long as it has a slot. Without one nothing of it is computed or in flight."""
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    num_cached: int = 0
    """Prompt tokens found in the prefix cache when it was first admitted."""

    status: Status = Status.WAITING
    turn: tuple[int, int, int] = (0, 0, 0)
    """Order of service, lowest first: priority (0 under fcfs), arrival, order of adding."""
    max_len: int = 0
    """Prompt and output together are never longer than this."""
    digests: list[bytes] = field(default_factory=list)
    """Chained digest of each full page of `tokens`, as far as they were needed (see `prefix`)."""
    num_published: int = 0
    """Pages, from the first, that need no more publishing."""
    prompt_logprobs: list[Any] | None = field(init=False)
    """Where it asks for them: those known so far, None for a token whose is not; None altogether once they are told."""
    num_loaded: int = 0
    """Tokens whose latents lie in its pages when it is ARRIVED."""
    kv_lent: KvParams | None = None
    """Where another engine finds its prompt's latents, once it ended and if that was asked."""
    error: str | None = None
    """Why it ended, where that is an ERROR with a cause of its own."""

    def __post_init__(self) -> None:
        self.is_plain = self.params.is_plain
        self.tokens = list(self.prompt)
        self.prompt_logprobs = None if self.params.prompt_logprobs is None else [None] * len(self.prompt)

    @property
    def num_pending(self) -> int:
        """See `Ledger.num_pending_S`."""
        return 0 if self.ledger is None else int(self.ledger.num_pending_S[self.slot])

    @property
    def num_computed(self) -> int:
        """See `Ledger.num_computed_S`."""
        return 0 if self.ledger is None else int(self.ledger.num_computed_S[self.slot])

    @property
    def in_flight(self) -> int:
        """See `Ledger.in_flight_S`."""
        return 0 if self.ledger is None else int(self.ledger.in_flight_S[self.slot])

    @property
    def num_known(self) -> int:
        """Tokens that have a position: on the host, or on the device only."""
        return len(self.tokens) + self.num_pending

    @property
    def num_output(self) -> int:
        """Tokens of output that the host has read."""
        return len(self.tokens) - len(self.prompt)

    @property
    def gap(self) -> int:
        """Tokens to compute before something new can be sampled; 0 or less while drafts are in flight."""
        return self.num_known - self.num_computed


def take_prompt_logprobs(request: Request) -> tuple[Any, ...] | None:
    """What is known of the prompt's tokens, once; None for a request that ended before all of it was."""
    known, request.prompt_logprobs = request.prompt_logprobs, None
    return None if known is None or None in known[1:] else tuple(known)


def ending_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Tokens that end a request: its own stop tokens, and the model's end-of-text ones unless it ignores them."""
    return frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
