"""The group of ranks as a service sees it: what it may ask, what it gets, and in which words it is refused.

Values and a protocol only; whoever serves requests knows this and nothing below it. Does not know gRPC, HTTP or text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import msgspec

from runtime.requests.outputs import TokenLogprob
from runtime.requests.sampling_params import SamplingParams
from runtime.requests.telemetry import RankStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """What does not change while the group lives."""

    model_path: str
    served_model_name: str
    model_type: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    ranks: int
    block_size: int
    pages_per_rank: tuple[int, ...]
    max_num_seqs: int
    """Of each rank."""
    model_dtype: str
    kv_cache_dtype: str
    config_hash: str
    kv_connector: str
    kv_engine_id: str
    startup_s: dict[str, float]
    version: str
    commit: str


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """What one choice of a request got in one step, or in several: new tokens only. A struct, for it is made for every
    token.

    index             which of n
    offset            output tokens before these; the chunks of one index have no gap and no token twice
    prompt_logprobs   in the first chunk, where asked for: one entry a prompt token, None for the first
    finish_reason     stop, length, abort or error, in the last chunk of an index
    stop_reason       the token that stopped it, where it was one of stop_token_ids
    """

    index: int
    offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Refused(Exception):
    """A request is not let in now. `reason` is one word for programs, `detail` a line for people."""

    def __init__(self, reason: str, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.retry_after_s = retry_after_s


GroupState = Literal["starting", "ready", "draining", "failed"]
RankState = Literal["live", "ready", "degraded", "draining", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How the group is. `culprit` says who failed and of what; `last_step_age_s` is None before the first step."""

    state: GroupState
    culprit: str | None = None
    last_step_age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """One rank as it last told."""

    rank: int
    state: RankState
    running: int
    waiting: int
    waiting_tokens: int
    used_pages: int
    num_pages: int
    gen_tokens_per_s: float = 0.0
    prefix_hit_rate: float = 0.0
    last_step_age_s: float | None = None
    beat_wait_s: float = 0.0
    """Seconds waited for other ranks' votes, in sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """A full page that entered a rank's prefix cache."""

    block_hash: int
    parent_hash: int | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """What changed in one rank's prefix cache, in this order: cleared, removed, stored. `sequence` counts by rank."""

    rank: int
    sequence: int
    stored: tuple[StoredBlock, ...] = ()
    removed: tuple[int, ...] = ()
    cleared: bool = False


class Stream(Protocol):
    """Chunks of one request; ends after every index got its finish_reason."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Chunk: ...

    def cancel(self, index: int | None = None) -> None:
        """Nobody waits any more for this choice, or for any; harmless after the end."""
        ...


class GroupClient(Protocol):
    """A running group of ranks, from the front door."""

    async def info(self) -> GroupInfo:
        """Waits until the group is ready."""
        ...

    def admit(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        n: int = 1,
        rank: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        interval: int | None = None,
    ) -> Stream:
        """Raises Refused, or RequestError for what can never run.

        `interval`: tokens of a chunk, at least, but for the first and the last of an index; None: as is usual.
        """
        ...

    def abort(self, request_id: str, *, why: str) -> bool:
        """Whether it was known; takes effect by the next step."""
        ...

    def loads(self) -> tuple[RankLoad, ...]: ...

    def health(self) -> Health: ...

    def stats(self) -> tuple[RankStats, ...]: ...

    def subscribe(self) -> AsyncIterator[KvEvents]:
        """From now on; the first items say what is there."""
        ...

    async def flush_cache(self) -> bool:
        """Whether it could be: nothing may run."""
        ...

    async def profile(self, steps: int, path: str) -> None: ...

    async def stop_profile(self) -> str: ...

    async def drain(self, timeout_s: float) -> bool: ...

    async def close(self) -> None: ...
