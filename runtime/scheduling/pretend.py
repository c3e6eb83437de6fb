"""A model and a device that only pretend, so that a schedule can be checked token by token without either.

The pretend model says the next token as a hash of the request and of all tokens before it, so what a request must say
is a pure function of the request (`PretendModel.script`), found by a loop that knows nothing of steps, pages or drafts.

The pretend device keeps a fingerprint of tokens 0 .. p in the cache place of position p, made from the fingerprint it
finds in the place of position p - 1. A page that was shared, moved or reused by mistake gives a wrong fingerprint, and
the first row that reads it fails with the position.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from ..requests.request import FinishReason, Request
from ..requests.rows import FAILED_TOKEN, Row, SampledRow


class Script(NamedTuple):
    """What a request says if nobody interrupts it."""

    output: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class PretendModel:
    """Next tokens for requests: ids 0 .. vocab_size - 1. Requests named in `fails_at` fail at that position instead."""

    vocab_size: int = 13
    fails_at: dict[str, int] = field(default_factory=dict)

    def next_token(self, request_id: str, position: int, fingerprint: int) -> int:
        """The token at `position`, after tokens that have this fingerprint."""
        if self.fails_at.get(request_id) == position:
            return FAILED_TOKEN
        return hash((crc32(request_id.encode()), fingerprint)) % self.vocab_size

    def script(self, request: Request, max_model_len: int) -> Script:
        """Say everything, one token after the other."""
        params, tokens, mark = request.params, list(request.prompt), 0
        for token in tokens:
            mark = fingerprint(mark, token)
        while True:
            token = self.next_token(request.id, len(tokens), mark)
            num_output = len(tokens) - len(request.prompt)
            if token == FAILED_TOKEN:
                return Script(tuple(tokens[len(request.prompt) :]), FinishReason.ERROR)
            tokens.append(token)
            mark = fingerprint(mark, token)
            num_output += 1
            output = tuple(tokens[len(request.prompt) :])
            if token in request.stop_ids and num_output >= params.min_tokens:
                return Script(output, FinishReason.STOP)
            if num_output == params.max_tokens or len(tokens) == max_model_len:
                return Script(output, FinishReason.LENGTH)


def fingerprint(before: int, token: int) -> int:
    """Of one token more."""
    return hash((before, token))


class PretendDevice:
    """A token table and a paged cache of fingerprints; runs steps at once and in the order of their launch."""

    def __init__(self, model: PretendModel, *, page_size: int) -> None:
        self.model = model
        self.page_size = page_size
        self._table: dict[int, dict[int, int]] = {}
        self._owner: dict[int, tuple[Request, int]] = {}
        self._cache: dict[int, int] = {}

    def run(self, rows: Iterable[Row]) -> list[SampledRow | None]:
        """What each row samples; AssertionError where the cache does not hold what the request's tokens say."""
        return [self._run_row(row) for row in rows]

    def _run_row(self, row: Row) -> SampledRow | None:
        request = row.request
        tokens = self._tokens_of(row)
        for position in range(row.start, row.end):
            before = self._cache.get(self._place(request, position - 1), -1) if position else 0
            self._cache[self._place(request, position)] = fingerprint(before, tokens[position])
        marks = self._read_all(request, tokens, row.end)
        if not row.samples:
            return None
        places = range(row.end - row.num_drafts, row.end + 1)
        sampled = [self.model.next_token(request.id, position, marks[position - 1]) for position in places]
        tokens.update(zip(places, sampled, strict=True))
        return SampledRow(tuple(sampled), [(request.id, token) for token in sampled])

    def _tokens_of(self, row: Row) -> dict[int, int]:
        """The request's line of the table: written by the host when it enters the slot, and drafts every time."""
        request = row.request
        assert request.slot is not None, f"request {request.id} runs without a slot"
        stay = (request, request.num_preemptions)
        if self._owner.get(request.slot) != stay:
            assert request.num_pending - row.samples == 0, f"request {request.id} enters with a token still to be read"
            self._owner[request.slot] = stay
            self._table[request.slot] = dict(enumerate(request.tokens))
        tokens = self._table[request.slot]
        if row.num_drafts:
            first = row.end - row.num_drafts
            tokens.update(enumerate(request.drafts[: row.num_drafts], start=first))
        return tokens

    def _read_all(self, request: Request, tokens: dict[int, int], length: int) -> list[int]:
        """Attention: every place before `length` is read, and must hold what the tokens up to there say."""
        marks, mark = [], 0
        for position in range(length):
            mark = fingerprint(mark, tokens[position])
            found = self._cache.get(self._place(request, position))
            assert found == mark, f"request {request.id} reads something else at position {position}"
            marks.append(mark)
        return marks

    def _place(self, request: Request, position: int) -> int:
        return request.pages[position // self.page_size] * self.page_size + position % self.page_size


class PretendDrafter:
    """Drafts up to `max_drafts` tokens, each right with probability `accuracy`, the same way for the same position."""

    def __init__(self, *, accuracy: float, max_drafts: int = 3) -> None:
        self.accuracy = accuracy
        self.max_drafts = max_drafts
        self.scripts: dict[Request, Script] = {}

    def __call__(self, request: Request) -> list[int]:
        start = request.num_output
        rest = self.scripts[request].output[start : start + self.max_drafts]
        return [token if self._is_right(request, start + i) else token + 1 for i, token in enumerate(rest)]

    def _is_right(self, request: Request, index: int) -> bool:
        return hash((crc32(request.id.encode()), index, 77)) % 1000 < 1000 * self.accuracy
