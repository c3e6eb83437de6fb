"""A group of ranks that exists only as a script: what it answers is a pure function of the prompt.

Token k of choice i to a prompt is (sum of the prompt + 31 i + 7 k) % vocabulary, so a test can say what is to come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from launch.front.front_client import Chunk, GroupInfo, Health, KvEvents, RankLoad, Refused
from runtime.requests.sampling_params import SamplingParams
from runtime.sampling.samples import TokenLogprob

VOCAB = 2048


def info_of(model: str, **changes: Any) -> GroupInfo:
    return replace(
        GroupInfo(
            model_path=model, served_model_name="tiny", model_type="deepseek_v3", vocab_size=VOCAB, max_model_len=256,
            eos_token_ids=(1,), bos_token_id=0, ranks=2, block_size=16, pages_per_rank=(8, 8), max_num_seqs=4,
            model_dtype="float32", kv_cache_dtype="auto", config_hash="abc", kv_connector="", kv_engine_id="",
            startup_s={"import": 1.5, "load": 0.5}, version="0.1", commit="c0ffee",
        ),
        **changes,
    )  # fmt: skip


def token(prompt: Sequence[int], index: int, place: int) -> int:
    return (sum(prompt) + 31 * index + 7 * place) % VOCAB


def tokens(prompt: Sequence[int], count: int, index: int = 0) -> list[int]:
    return [token(prompt, index, place) for place in range(count)]


class FakeStream:
    """Chunks of `per_chunk` tokens, a turn of the event loop each; all choices in turn."""

    def __init__(
        self, group: FakeGroup, request_id: str, prompt: Sequence[int], params: SamplingParams, n: int
    ) -> None:
        self.group, self.request_id, self.prompt, self.params = group, request_id, list(prompt), params
        self.have = dict.fromkeys(range(n), 0)
        self.cancelled: list[int | None] = []
        self.aborted = False
        self.failed: str | None = None
        self.turn = 0

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Chunk:
        await asyncio.sleep(self.group.delay_s)
        while self.group.held and not (self.aborted or self.failed):
            await asyncio.sleep(0.002)
        if not self.have:
            raise StopAsyncIteration
        index = list(self.have)[self.turn % len(self.have)]
        self.turn += 1
        return self._chunk(index)

    def _chunk(self, index: int) -> Chunk:
        begin, most = self.have[index], self.params.max_tokens or 16
        if self.aborted or self.failed:
            del self.have[index]
            reason = "error" if self.failed else "abort"
            return Chunk(index=index, offset=begin, token_ids=(), finish_reason=reason, error=self.failed)
        end = min(most, begin + self.group.per_chunk)
        ids = tuple(self.group.script(self.prompt, index, place) for place in range(begin, end))
        stop = next((place for place, one in enumerate(ids) if one in self.params.stop_token_ids), None)
        ids = ids if stop is None else ids[: stop + 1]
        self.have[index] = begin + len(ids)
        ended = stop is not None or self.have[index] >= most
        if ended:
            del self.have[index]
        return Chunk(
            index=index,
            offset=begin,
            token_ids=ids,
            logprobs=None if self.params.logprobs is None else tuple(map(self._logprob, ids)),
            finish_reason=("stop" if stop is not None else "length") if ended else None,
            stop_reason=ids[-1] if stop is not None else None,
            num_cached_tokens=self.group.num_cached,
            prompt_logprobs=self._prompt_logprobs() if begin == 0 else None,
            kv_transfer_params=self.group.transfer if ended else None,
        )

    def _logprob(self, one: int) -> TokenLogprob:
        count = self.params.logprobs or 0
        return TokenLogprob(one, -one / 1000, {(one + k) % VOCAB: -(one + k) / 1000 for k in range(count)})

    def _prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        if getattr(self.params, "prompt_logprobs", None) is None:
            return None
        return (None, *(TokenLogprob(one, -float(one), {one: -float(one)}) for one in self.prompt[1:]))

    def cancel(self, index: int | None = None) -> None:
        self.cancelled.append(index)
        if index is not None:
            self.have.pop(index, None)


class FakeGroup:
    """For the protocol see `GroupClient`. Fields are what a test sets and reads."""

    def __init__(self, model: str, **changes: Any) -> None:
        self.facts = info_of(model, **changes)
        self.state = Health(state="ready", last_step_age_s=0.1)
        self.per_chunk = 1
        self.delay_s = 0.0
        self.held = False
        self.num_cached = 0
        self.transfer: dict[str, Any] | None = None
        self.refusal: Refused | None = None
        self.script = token
        self.streams: list[FakeStream] = []
        self.asked: list[dict[str, Any]] = []
        self.aborts: list[str] = []
        self.events: asyncio.Queue[KvEvents] = asyncio.Queue()
        self.flushes = [True]
        self.profiles: list[tuple[int, str]] = []
        self.load = [
            RankLoad(rank=0, state="ready", running=0, waiting=0, waiting_tokens=0, used_pages=2, num_pages=8),
            RankLoad(
                rank=1, state="degraded", running=3, waiting=1, waiting_tokens=40, used_pages=6, num_pages=8,
                gen_tokens_per_s=12.5, prefix_hit_rate=0.25, last_step_age_s=0.1, beat_wait_s=1.5,
            ),
        ]  # fmt: skip
        self.drained: list[float] = []
        self.ready = asyncio.Event()
        self.ready.set()

    async def info(self) -> GroupInfo:
        await self.ready.wait()
        return self.facts

    def admit(self, request_id: str, prompt: Sequence[int], params: SamplingParams, *, n: int = 1, **more: Any) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append({"request_id": request_id, "prompt": list(prompt), "params": params, "n": n} | more)
        stream = FakeStream(self, request_id, prompt, params, n)
        self.streams.append(stream)
        return stream

    def abort(self, request_id: str, *, why: str) -> bool:
        self.aborts.append(request_id)
        for stream in self.streams:
            if stream.request_id == request_id:
                stream.aborted = True
        return True

    def fail(self, culprit: str) -> None:
        """All ranks are gone."""
        self.state = Health(state="failed", culprit=culprit)
        for stream in self.streams:
            stream.failed = culprit

    def loads(self) -> tuple[RankLoad, ...]:
        return tuple(self.load)

    def health(self) -> Health:
        return self.state

    def stats(self) -> tuple[Any, ...]:
        return ()

    async def subscribe(self) -> AsyncIterator[KvEvents]:
        while True:
            yield await self.events.get()

    async def flush_cache(self) -> bool:
        return self.flushes.pop(0) if len(self.flushes) > 1 else self.flushes[0]

    async def profile(self, steps: int, path: str) -> None:
        self.profiles.append((steps, path))

    async def stop_profile(self) -> str:
        return self.profiles[-1][1] if self.profiles else ""

    async def drain(self, timeout_s: float) -> bool:
        self.drained.append(timeout_s)
        self.state = Health(state="draining")
        return True

    async def close(self) -> None: ...
