"""What passes between the scheduler and whoever runs its steps: rows out, sampled tokens in, updates out.

    propose -> Proposal of Rows -> commit -> the step's Rows -> (device) -> SampledRows -> finish -> Updates

Values only; nothing here knows pages, slots or policies. They are msgspec structs, for a full rank makes hundreds of
each in every step: a struct is made in a quarter of a named tuple's time, and the garbage collector passes it over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from .request import FinishReason, Request

FAILED_TOKEN = -1
"""A sampled position that has no token: its logits were NaN, or minus infinity everywhere."""


class Row(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step: positions start .. start + num_tokens - 1 are computed.

    The ids are the request's tokens; a token sampled by a launched step is in the token table only. The last
    `num_drafts` of them are guesses (`request.drafts`), which only a row that `samples` may have: its last
    1 + num_drafts positions get logits, and each samples the token that follows.
    """

    request: Request
    start: int
    num_tokens: int
    num_drafts: int
    samples: bool

    @property
    def is_prefill(self) -> bool:
        """Whether it computes more than the newest token and drafts: the plan may put it off or cut it."""
        return not self.samples or self.num_tokens > 1 + self.num_drafts

    @property
    def end(self) -> int:
        """The first position after it."""
        return self.start + self.num_tokens


class Proposal(NamedTuple):
    """What one rank would run: rows that only decode come first; tokens of both kinds, drafts included."""

    rows: tuple[Row, ...]
    decode_tokens: int
    prefill_tokens: int


class SampledRow(msgspec.Struct, frozen=True, gc=False):
    """The host's copy of what a row sampled: a token (or FAILED_TOKEN) for each of its 1 + num_drafts last positions.

    `logprobs` has an entry a token, handed on untouched, or is None when nobody asked.
    """

    token_ids: tuple[int, ...]
    logprobs: Sequence[Any] | None = None


class Update(msgspec.Struct, frozen=True, gc=False):
    """News of a request: tokens read in this step, and why it ended if it did. An ended request has no later update."""

    request: Request
    new_tokens: tuple[int, ...]
    logprobs: tuple[Any, ...] | None
    finish_reason: FinishReason | None


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """How far a row's samples reach: tokens to append, drafts among them, and whether the request ends there."""

    new_tokens: tuple[int, ...]
    num_accepted: int
    finish_reason: FinishReason | None


def judge(row: Row, token_ids: tuple[int, ...]) -> Verdict:
    """Accept drafts as long as they are what was sampled, plus one token more; stop early where the request ends.

    With drafts (5, 6) the samples (5, 7, 9) give new tokens (5, 7) and one accepted draft: 9 followed a wrong guess.
    """
    request = row.request
    num_known = len(request.tokens)
    for index, token in enumerate(token_ids):
        if token == FAILED_TOKEN:
            return Verdict(token_ids[:index], index, FinishReason.ERROR)
        num_known += 1
        reason = None
        if token in request.stop_ids and num_known >= len(request.prompt) + request.params.min_tokens:
            reason = FinishReason.STOP
        elif num_known >= request.max_len:
            reason = FinishReason.LENGTH
        if reason is not None or index == row.num_drafts or request.drafts[index] != token:
            return Verdict(token_ids[: index + 1], index, reason)
    raise AssertionError(
        f"row of request {request.id} sampled {len(token_ids)} tokens for {1 + row.num_drafts} positions"
    )
