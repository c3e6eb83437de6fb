"""Clients for a benchmark of serving: the engine's own gRPC, or OpenAI's HTTP API through a gateway.

Both stream, with greedy sampling, past the end of text, so that every request has as many tokens as it asked for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from .serve_load import Ask, Client, Told

GRPC, HTTP = "grpc://", "http://"
ANY_VOCAB = 2048
CONNECT_S = 60.0
"""How long a server may take to say which model it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server that answers."""

    client: Client
    model: str
    vocab_size: int


@asynccontextmanager
async def target_of(url: str, model: str | None) -> AsyncIterator[Target]:
    """Connect to grpc://HOST:PORT or http://HOST:PORT. Raises ValueError for other addresses."""
    if url.startswith(GRPC):
        async with grpc.aio.insecure_channel(url.removeprefix(GRPC)) as channel:
            yield await _grpc_target(channel, url, model)
    elif url.startswith(HTTP):
        async with _openai_target(url, model) as target:
            yield target
    else:
        raise ValueError(f"url is {url!r}; it must begin with {GRPC} or {HTTP}, e.g. grpc://127.0.0.1:50051")


async def _grpc_target(channel: grpc.aio.Channel, url: str, model: str | None) -> Target:
    stub = pb_grpc.VllmEngineStub(channel)
    try:
        info = await stub.GetModelInfo(pb.GetModelInfoRequest(), wait_for_ready=True, timeout=CONNECT_S)
    except grpc.aio.AioRpcError as error:
        said = error.details() or error.code().name
        raise ValueError(f"the server did not say which model it has: {said} ({url}, waited {CONNECT_S} s)") from error

    async def client(ask: Ask, told: Told) -> tuple[int, int]:
        request = pb.GenerateRequest(
            request_id=ask.id,
            tokenized=pb.TokenizedInput(input_ids=ask.prompt),
            sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True),
            stream=True,
        )
        num_tokens = 0
        async for message in stub.Generate(request):
            if message.HasField("chunk"):
                told()
                num_tokens += len(message.chunk.token_ids)
        return len(ask.prompt), num_tokens

    return Target(client=client, model=model or info.served_model_name, vocab_size=info.vocab_size)


@asynccontextmanager
async def _openai_target(url: str, model: str | None) -> AsyncIterator[Target]:
    try:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError  # optional: only this client needs it
    except ModuleNotFoundError as error:
        raise ValueError(f"url is {url!r}, and openai is not installed; pip install 'serried[openai]'") from error
    direct = DefaultAsyncHttpxClient(trust_env=False)  # what is measured is this server, not a proxy before it
    async with AsyncOpenAI(
        base_url=f"{url.rstrip('/')}/v1", api_key="none", max_retries=0, timeout=600.0, http_client=direct
    ) as api:
        try:
            served = [each.id for each in (await api.models.list()).data]
        except OpenAIError as error:
            raise ValueError(f"{url} did not say which models it has: {error}") from error
        name = model or next(iter(served), None)
        if name is None:
            raise ValueError(f"{url} serves no model yet; wait until its workers are ready")
        if name not in served:
            raise ValueError(f"model is {name!r}; {url} serves {', '.join(served) or 'none yet'}")

        async def client(ask: Ask, told: Told) -> tuple[int, int]:
            chunks = await api.completions.create(
                model=name,
                prompt=ask.text,
                max_tokens=ask.max_tokens,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            return await _read(chunks, told)

        yield Target(client=client, model=name, vocab_size=ANY_VOCAB)


async def _read(chunks: AsyncIterator[Any], told: Told) -> tuple[int, int]:
    """This API tells no numbers of tokens before the usage at the end."""
    usage = None
    async for chunk in chunks:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].text:
            told()
    if usage is None:
        raise ValueError("the answer came without usage")
    return usage.prompt_tokens, usage.completion_tokens
