"""What passes between the scheduler and whoever runs its steps: rows out, sampled tokens in, updates out.

    propose -> Proposal of Rows -> commit -> the step's Rows -> (device) -> Samples -> finish -> Updates

Values only; nothing here knows pages or policies. A step's rows and samples are columns: a `Row` and a `SampledRow` are
made for whoever looks at a single one. What a full rank makes hundreds of in every step is a msgspec struct: it is made
in a quarter of a named tuple's time, and the garbage collector passes it over.

Shapes: B rows of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from .ledger import Column, Mask
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

    @property
    def num_sampled(self) -> int:
        """Positions that get logits."""
        return 1 + self.num_drafts if self.samples else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """A step's rows, at most one a request, a column a field; int64 on the host. See `Row` for what they mean.

    slot_B          the request's line of the tables
    num_sampled_B   positions that get logits: 1 + num_drafts, 0 for a row that does not sample
    asks_B          see `Ledger.asks_S`
    """

    requests: Sequence[Request]
    slot_B: Column
    start_B: Column
    num_tokens_B: Column
    num_sampled_B: Column
    asks_B: Mask

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Rows:
        """The same as columns. A TypeError where a request has no slot."""
        rows = tuple(rows)
        return cls(
            requests=[row.request for row in rows],
            slot_B=_column([row.request.slot for row in rows]),
            start_B=_column([row.start for row in rows]),
            num_tokens_B=_column([row.num_tokens for row in rows]),
            num_sampled_B=_column([row.num_sampled for row in rows]),
            asks_B=np.array([not row.request.is_plain for row in rows], dtype=np.bool_),
        )

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """One part after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            requests=[request for part in parts for request in part.requests],
            slot_B=np.concatenate([part.slot_B for part in parts]),
            start_B=np.concatenate([part.start_B for part in parts]),
            num_tokens_B=np.concatenate([part.num_tokens_B for part in parts]),
            num_sampled_B=np.concatenate([part.num_sampled_B for part in parts]),
            asks_B=np.concatenate([part.asks_B for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: int) -> Row:
        num_sampled = int(self.num_sampled_B[index])
        return Row(
            self.requests[index],
            int(self.start_B[index]),
            int(self.num_tokens_B[index]),
            max(num_sampled - 1, 0),
            num_sampled > 0,
        )

    def __iter__(self) -> Iterator[Row]:
        if not self.requests:
            return
        columns = self.start_B.tolist(), self.num_tokens_B.tolist(), self.num_sampled_B.tolist()
        for request, start, num_tokens, num_sampled in zip(self.requests, *columns, strict=True):
            yield Row(request, start, num_tokens, max(num_sampled - 1, 0), num_sampled > 0)

    def take(self, places: Sequence[int] | Column) -> Rows:
        """Those at these places, in this order."""
        places = np.asarray(places, dtype=np.int64)
        return Rows(
            requests=[self.requests[place] for place in places.tolist()],
            slot_B=self.slot_B[places],
            start_B=self.start_B[places],
            num_tokens_B=self.num_tokens_B[places],
            num_sampled_B=self.num_sampled_B[places],
            asks_B=self.asks_B[places],
        )

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return int(self.num_tokens_B.sum())

    @property
    def is_prefill_B(self) -> Mask:
        """See `Row.is_prefill`: only of the others each token is the newest, or a draft, and gets logits."""
        return self.num_tokens_B > self.num_sampled_B

    @property
    def end_B(self) -> Column:
        """The first position after each."""
        return self.start_B + self.num_tokens_B

    @property
    def first_sample_B(self) -> Column:
        """Where each row's samples begin, among those of all rows."""
        return self.num_sampled_B.cumsum() - self.num_sampled_B


def _column(values: Sequence[int | None]) -> Column:
    return np.array(values, dtype=np.int64)


class Proposal(NamedTuple):
    """What one rank would run: rows that only decode come first; tokens of both kinds, drafts included."""

    rows: Rows
    decode_tokens: int
    prefill_tokens: int


class SampledRow(msgspec.Struct, frozen=True, gc=False):
    """The host's copy of what a row sampled: a token (or FAILED_TOKEN) for each of its 1 + num_drafts last positions.

    `logprobs` has an entry a token, handed on untouched, or is None when nobody asked.
    """

    token_ids: tuple[int, ...]
    logprobs: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The host's copy of what a step sampled: see `SampledRow`.

    tokens     of all rows that sample, one row after the other
    logprobs   of the rows that somebody asked, by their place among the step's rows
    """

    tokens: Sequence[int] = ()
    logprobs: Mapping[int, Sequence[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[SampledRow | None]) -> Samples:
        """An entry a row, None for one that does not sample."""
        rows = tuple(rows)
        return cls(
            tokens=[token for row in rows if row is not None for token in row.token_ids],
            logprobs={
                place: row.logprobs for place, row in enumerate(rows) if row is not None and row.logprobs is not None
            },
        )

    def row(self, rows: Rows, index: int) -> SampledRow:
        """What the step's row at this place sampled."""
        begin = int(rows.first_sample_B[index])
        end = begin + int(rows.num_sampled_B[index])
        return SampledRow(tuple(self.tokens[begin:end]), self.logprobs.get(index))


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
