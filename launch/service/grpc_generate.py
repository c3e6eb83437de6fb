"""One Generate, from the message that asks to the last that answers.

    read and check ──▶ admit ──▶ headers ──▶ chunks as they come ──▶ a message each, ──▶ `complete` of each choice
                         │                                            or none until the end
                         └─ refused: a status, and nothing else

Headers go out as soon as the group has the request: a client that leaves after that is known to us by name. However the
call ends (answered, aborted by name, cancelled, dropped for not reading), the group is told, once, that nobody waits.
Knows messages and the group's stream; does not know servers.
"""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as pb

from ep.errors import RequestError

from ..command.text import TextCodec
from ..front.detokenizer import StopWatch
from ..front.front_client import Chunk, GroupClient, GroupInfo, Refused, Stream
from .grpc_answers import Choice
from .grpc_calls import Call, Calls
from .grpc_faults import Fault, fault_of
from .grpc_requests import Asked, read_generate
from .metrics import ServiceMetrics
from .serve_config import ServeConfig

Context = grpc.aio.ServicerContext

WHOLE_INTERVAL = 64
"""Tokens of a chunk where nobody reads before the end: fewer chunks cost less, and an outbox holds so many at ease."""


class Answering:
    """Answers requests to one group."""

    def __init__(
        self,
        client: GroupClient,
        config: ServeConfig,
        *,
        info: GroupInfo,
        codec: TextCodec | None,
        calls: Calls,
        metrics: ServiceMetrics,
    ) -> None:
        self._client = client
        self._config = config
        self._info = info
        self._codec = codec
        self._calls = calls
        self._metrics = metrics

    async def answer(self, request: pb.GenerateRequest, context: Context) -> None:
        """Raises Fault for what is not answered."""
        self._refuse_the_ended(request)
        encode = self._codec.encode if self._codec is not None else None
        asked = read_generate(request, self._info, self._config.limits, encode)
        with self._calls.enter(asked.request_id, context.peer()) as call:
            stream = self._admit(asked, context)
            try:
                await context.send_initial_metadata(())
                await self._tell(asked, stream, call, context)
            except asyncio.CancelledError as error:
                if not call.dropped:
                    self._metrics.aborted["client_gone"] += 1
                    raise
                self._metrics.aborted["slow_reader"] += 1
                raise self._dropped() from error
            finally:
                stream.cancel()

    def _dropped(self) -> Fault:
        """A call that is only cancelled has no status: its client would wait for one for good."""
        words = f"its client took nothing for {self._config.limits.slow_reader_timeout_s:g} s; the request was dropped"
        return Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, words, reason="slow_reader")

    def _refuse_the_ended(self, request: pb.GenerateRequest) -> None:
        """A client that comes back to its request, with the id and no prompt, hears that there is nothing to read."""
        if request.WhichOneof("input") is None and self._calls.has_ended(request.request_id):
            words = f"request {request.request_id!r} has ended; send it again with its prompt"
            raise Fault(grpc.StatusCode.NOT_FOUND, words, reason="not_found")

    def _admit(self, asked: Asked, context: Context) -> Stream:
        try:
            return self._client.admit(
                asked.request_id,
                asked.prompt,
                asked.params,
                n=asked.n,
                rank=asked.rank,
                deadline_s=context.time_remaining(),
                kv_transfer_params=asked.kv_transfer_params,
                interval=None if asked.stream or asked.stop else WHOLE_INTERVAL,
            )
        except (Refused, RequestError) as error:
            raise fault_of(error) from error

    async def _tell(self, asked: Asked, stream: Stream, call: Call, context: Context) -> None:
        clock = self._metrics.begin(len(asked.prompt))
        choices = [Choice(index, asked.prompt, watch=self._watch(asked)) for index in range(asked.n)]
        unfinished = asked.n
        async for chunk in stream:
            choice = choices[chunk.index]
            if choice.finish_reason is not None:
                continue  # it ended at a stop string; this was on its way
            self._check(choice, chunk)
            if choice.take(chunk):
                stream.cancel(choice.index)
            if chunk.token_ids:
                clock.told(choice.index, len(chunk.token_ids))
            if asked.stream and choice.num_untold:
                await _write(call, context, choice.tell())
            if choice.finish_reason is not None:
                clock.ended(choice.finish_reason, len(choice.token_ids))
                unfinished -= 1
                if asked.stream:
                    await self._complete(choice, asked, call, context)
            if not unfinished:
                break
        if unfinished:
            raise Fault(grpc.StatusCode.INTERNAL, "the group fell silent amid an answer", reason="cut_off")
        if not asked.stream:  # in order: gateways number whole answers as they come
            for choice in choices:
                await self._complete(choice, asked, call, context)

    def _watch(self, asked: Asked) -> StopWatch | None:
        if not asked.stop:
            return None
        assert self._codec is not None, "stop strings were refused without a tokenizer"
        codec = self._codec if asked.skip_special_tokens else self._codec.showing_special_tokens()
        return StopWatch(codec, asked.prompt, asked.stop, min_tokens=asked.params.min_tokens)

    def _check(self, choice: Choice, chunk: Chunk) -> None:
        """An answer that has no end, or a hole, must not look whole: the call ends with the reason instead."""
        if chunk.offset > len(choice.token_ids):
            words = chunk.error or "its client does not read"
            raise Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, words, reason="slow_reader")
        if chunk.finish_reason == "error" and (health := self._client.health()).state == "failed":
            words = health.culprit or chunk.error or "a rank has failed"
            raise Fault(grpc.StatusCode.UNAVAILABLE, words, reason="group_failed")

    async def _complete(self, choice: Choice, asked: Asked, call: Call, context: Context) -> None:
        if choice.error is not None:
            context.set_trailing_metadata((("serried-error", choice.error.encode("ascii", "replace").decode()),))
        await _write(call, context, choice.complete(streamed=asked.stream))


async def _write(call: Call, context: Context, message: pb.GenerateResponse) -> None:
    """Hand a message to the client, however slowly it reads; `Calls.sweep` ends those that do not."""
    call.writing_since = time.monotonic()
    await context.write(message)
    call.writing_since = None
