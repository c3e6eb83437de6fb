"""Between rows and the sampler: which positions a step samples, and the host's copy of what came out.

Knows requests and the sampler's rows; does not know logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .request import Request
from .rows import FAILED_TOKEN, Row, SampledRow
from .sampler import Sampled, SampleRow


class TokenLogprob(NamedTuple):
    """A sampled token and how likely it was; `top` maps the most likely token ids to log-probabilities, in order."""

    token_id: int
    logprob: float
    top: dict[int, float]


def sample_rows(rows: Sequence[Row]) -> dict[int, SampleRow]:
    """What positions that get logits ask of the sampler, by their place among those logits; plain ones are left out."""
    asked: dict[int, SampleRow] = {}
    place = 0
    for row in rows:
        if row.samples:
            if not row.request.is_plain:
                for index in range(1 + row.num_drafts):
                    asked[place + index] = _sample_row(row.request, row.end - row.num_drafts + index)
            place += 1 + row.num_drafts
    return asked


def _sample_row(request: Request, position: int) -> SampleRow:
    assert request.slot is not None, f"request {request.id} runs without a slot"
    return SampleRow(
        params=request.params,
        seed=request.seed,
        slot=request.slot,
        position=position,
        prompt_len=len(request.prompt),
        choice_index=request.choice_index,
        stop_ids=request.stop_ids,
    )


def read_rows(rows: Sequence[Row], sampled: Sampled | None) -> list[SampledRow | None]:
    """Wait for the device and give each row its samples; None for a row that samples nothing."""
    if sampled is None:
        return [None] * len(rows)
    tokens = tuple(sampled.token_B.masked_fill(~sampled.ok_B, FAILED_TOKEN).tolist())
    logprobs: _Logprobs | None = None
    answers: list[SampledRow | None] = []
    begin = 0
    for row in rows:
        if not row.samples:
            answers.append(None)
            continue
        end = begin + 1 + row.num_drafts
        if row.request.is_plain or (num_top := row.request.params.logprobs) is None:
            answers.append(SampledRow(tokens[begin:end]))
        else:
            logprobs = logprobs or _Logprobs(sampled)
            answers.append(SampledRow(tokens[begin:end], logprobs.between(begin, end, tokens, num_top)))
        begin = end
    return answers


class _Logprobs:
    """The reported log-probabilities on the host."""

    def __init__(self, sampled: Sampled) -> None:
        self._chosen = sampled.logprob_B.tolist()
        self._top_ids = sampled.top_ids_BK.tolist()
        self._top_logprobs = sampled.top_logprobs_BK.tolist()

    def between(self, begin: int, end: int, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """The entries of sampled positions begin .. end - 1."""
        return [self._at(place, tokens[place], num_top) for place in range(begin, end)]

    def _at(self, place: int, token: int, num_top: int) -> TokenLogprob:
        pairs = zip(self._top_ids[place][:num_top], self._top_logprobs[place][:num_top], strict=True)
        return TokenLogprob(token, self._chosen[place], {top: value for top, value in pairs if top >= 0})
