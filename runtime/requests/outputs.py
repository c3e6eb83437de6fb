"""What a caller of the engine gets: events while a request decodes, and its whole answer at the end.

`News` is made for every token, so it is a struct that is quick to make and travels as a plain list.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from .kv_params import KvParams
from .request import FinishReason


class TokenLogprob(NamedTuple):
    """A sampled token and how likely it was; `top` maps the most likely token ids to log-probabilities, in order."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """Tokens that one request got in one step; `finish_reason` is set in its last event, `seed` in all, and
    `prompt_logprobs` in its first where it asked for them."""

    request_id: str
    rank: int
    seed: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class News(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank says of one request after a step: all that crosses to whoever asked for it.

    kv_lent, error   see `Request`; with the last news only
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    num_cached: int
    num_preemptions: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """In its first news, where asked for; None for the first token."""
    kv_lent: KvParams | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request's whole answer.

    token_ids           sampled tokens, a stop token included
    logprobs            one entry a token, when the request asked for them
    prompt_logprobs     the same for the tokens of the prompt, None for the first
    seed                the request's own, or the one that was drawn for it: asking again with it gives the same tokens
    num_cached_tokens   prompt tokens whose latents came from the prefix cache
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    rank: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    """Where another engine finds the prompt's latents, if that was asked."""
    error: str | None = None
    """Why it ended with an error, where that is known."""

    def hear(self, news: News, rank: int) -> TokenEvent:
        """Add what `rank` said, and turn it into what the caller sees."""
        self.token_ids.extend(news.token_ids)
        if self.logprobs is not None:
            self.logprobs.extend(news.logprobs or ())
        if news.prompt_logprobs is not None:
            self.prompt_logprobs = news.prompt_logprobs
        if news.finish_reason is not None:
            self.finish_reason = news.finish_reason
            self.num_cached_tokens = news.num_cached
            self.num_preemptions = news.num_preemptions
            self.kv_transfer_params = None if news.kv_lent is None else news.kv_lent.as_json()
            self.error = news.error
        return TokenEvent(
            request_id=news.request_id,
            rank=rank,
            seed=self.seed,
            token_ids=news.token_ids,
            logprobs=None if self.logprobs is None else news.logprobs or (),
            finish_reason=news.finish_reason,
            prompt_logprobs=news.prompt_logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a rank says of the group: a line for the log, and ranks that get no new requests from now on."""

    text: str
    degraded: tuple[int, ...] = ()
