"""From chunks to messages: what a choice has so far, what of it the client has, and how both are said.

    chunk of the group ──▶ cut at a stop string ──▶ kept for `complete`
                                               └──▶ told in a message, when there is enough for one

`completion_tokens` of a message counts the tokens up to its last, so that offset = completion_tokens - number of
token_ids; in one choice offsets have no gap and no token comes twice. Knows messages; does not know calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from runtime.requests.outputs import TokenLogprob

from ..front.detokenizer import StopWatch
from ..front.front_client import Chunk


class Choice:
    """One of the n answers to a prompt, while it grows."""

    def __init__(self, index: int, prompt: Sequence[int], *, watch: StopWatch | None) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._prompt = prompt
        self._watch = watch
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self._prompt_told = False
        self._num_cached = 0
        self._matched: int | str | None = None
        self._transfer: dict[str, Any] | None = None
        self._num_told = 0

    def take(self, chunk: Chunk) -> bool:
        """Keep what came, up to a stop string; True when that has ended this choice before the group did."""
        assert chunk.offset == len(self.token_ids), f"offset {chunk.offset} after {len(self.token_ids)} tokens"
        stopped = self._watch.push(chunk.token_ids) if self._watch is not None and chunk.token_ids else None
        end = None if stopped is None else stopped.num_tokens
        self.token_ids += chunk.token_ids[:end]
        self._logprobs += (chunk.logprobs or ())[:end]
        self._num_cached = max(self._num_cached, chunk.num_cached_tokens)
        self._prompt_logprobs = chunk.prompt_logprobs or self._prompt_logprobs
        if stopped is not None:
            self.finish_reason, self._matched = "stop", stopped.stop
            return chunk.finish_reason is None
        self.finish_reason, self.error = chunk.finish_reason, chunk.error
        self._matched, self._transfer = chunk.stop_reason, chunk.kv_transfer_params
        return False

    @property
    def num_untold(self) -> int:
        """Tokens that no message has told yet."""
        return len(self.token_ids) - self._num_told

    def tell(self) -> pb.GenerateResponse:
        """The tokens that no message has told yet."""
        begin, self._num_told = self._num_told, len(self.token_ids)
        message = pb.GenerateResponse()
        chunk = message.chunk  # filled where it lies: made by itself and copied, it would take twice as long
        chunk.token_ids.extend(self.token_ids[begin:])
        chunk.prompt_tokens = len(self._prompt)
        chunk.completion_tokens = len(self.token_ids)
        chunk.cached_tokens = self._num_cached
        chunk.index = self.index
        if self._logprobs:
            chunk.output_logprobs.CopyFrom(_output_logprobs(self._logprobs[begin:]))
        if self._prompt_logprobs is not None and not self._prompt_told:
            self._prompt_told = True
            chunk.input_logprobs.CopyFrom(_input_logprobs(self._prompt, self._prompt_logprobs))
        return message

    def complete(self, *, streamed: bool) -> pb.GenerateResponse:
        """The whole answer; what is long and was streamed already, log-probabilities, is not said again."""
        assert self.finish_reason is not None, "this choice goes on"
        whole = pb.GenerateComplete(
            output_ids=self.token_ids,
            finish_reason=self.finish_reason,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(self.token_ids),
            cached_tokens=self._num_cached,
            index=self.index,
        )
        if self._logprobs and not streamed:
            whole.output_logprobs.CopyFrom(_output_logprobs(self._logprobs))
        if self._prompt_logprobs is not None and not self._prompt_told:
            whole.input_logprobs.CopyFrom(_input_logprobs(self._prompt, self._prompt_logprobs))
        if isinstance(self._matched, str):
            whole.matched_stop_str = self._matched
        elif self._matched is not None:
            whole.matched_token_id = self._matched
        if self._transfer is not None:
            whole.kv_transfer_params_json = json.dumps(self._transfer)
        return pb.GenerateResponse(complete=whole)


def _output_logprobs(entries: Sequence[TokenLogprob]) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[_top(entry) for entry in entries],
    )


def _input_logprobs(prompt: Sequence[int], entries: Sequence[TokenLogprob | None]) -> pb.InputLogProbs:
    """The first token of a prompt follows nothing, so it has no value."""
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=entry.logprob if entry else None) for entry in entries],
        token_ids=prompt,
        top_logprobs=[_top(entry) if entry else pb.TopLogProbs() for entry in entries],
    )


def _top(entry: TokenLogprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=list(entry.top.values()), token_ids=list(entry.top))
