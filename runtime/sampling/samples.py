"""Between rows and the sampler: which positions a step samples, and the host's copy of what came out.

Knows requests and the sampler's rows; does not know logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..requests.outputs import TokenLogprob
from ..requests.request import Request
from ..requests.rows import FAILED_TOKEN, Rows, Samples
from .sampler import Sampled, SampleRow


def sample_rows(rows: Rows) -> dict[int, SampleRow]:
    """What positions that get logits ask of the sampler, by their place among those logits; plain ones are left out."""
    asked: dict[int, SampleRow] = {}
    (asking_B,) = rows.asks_B.nonzero()
    for index, first in zip(asking_B.tolist(), rows.first_sample_B[asking_B].tolist(), strict=True):
        row = rows[index]
        for number in range(row.num_sampled):
            asked[first + number] = _sample_row(row.request, row.end - row.num_drafts + number)
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


def tokens_of(sampled: Sampled) -> Tensor:
    """int64 [B]: each sampled token, or FAILED_TOKEN."""
    return sampled.token_B.where(sampled.ok_B, FAILED_TOKEN)


def read_rows(rows: Rows, sampled: Sampled | None, tokens: Sequence[int]) -> Samples:
    """What a step sampled, on the host: `tokens` are `tokens_of` it, there already; without samples, nothing.

    Waits for the device where log-probabilities were asked for.
    """
    if sampled is None:
        return Samples()
    wanted = {
        index: num_top
        for index in rows.asks_B.nonzero()[0].tolist()
        if rows.num_sampled_B[index] and (num_top := rows.requests[index].params.logprobs) is not None
    }
    if not wanted:
        return Samples(tokens=tokens)
    on_host, first_B = _Logprobs(sampled), rows.first_sample_B.tolist()
    logprobs = {
        index: on_host.between(first_B[index], first_B[index] + int(rows.num_sampled_B[index]), tokens, num_top)
        for index, num_top in wanted.items()
    }
    return Samples(tokens=tokens, logprobs=logprobs)


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
