"""A server over a scripted group of ranks, and clients of it, in this process: one event loop for a whole module."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from launch.service.grpc_server import Server
from launch.service.logs import Log
from launch.service.serve_config import LimitsConfig, ServeConfig
from tests.launch.fake_group import FakeGroup


class Served:
    """A running server and a client."""

    def __init__(self, server: Server, group: FakeGroup, channel: grpc.aio.Channel, log: io.StringIO) -> None:
        self.server, self.group, self.channel, self.log = server, group, channel, log
        self.stub = pb_grpc.VllmEngineStub(channel)

    async def ask(self, request: pb.GenerateRequest, **call: Any) -> list[Any]:
        """All messages of an answer."""
        return [unwrap(message) async for message in self.stub.Generate(request, **call)]

    async def fails(self, answer: Any) -> grpc.aio.AioRpcError:
        """The error that a call, or a stream of messages, ends with."""
        try:
            if hasattr(answer, "__aiter__"):
                async for _ in answer:
                    pass
            else:
                await answer
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("the call was answered")

    async def refused(self, request: pb.GenerateRequest, **call: Any) -> tuple[grpc.StatusCode, str]:
        error = await self.fails(self.stub.Generate(request, **call))
        return error.code(), error.details() or ""


def unwrap(message: pb.GenerateResponse) -> Any:
    return getattr(message, message.WhichOneof("response"))


def generate(
    prompt: Sequence[int] = (1, 2, 3), *, request_id: str = "", stream: bool = True, max_tokens: int | None = 4,
    rank: int | None = None, transfer: str | None = None, **sampling: Any,
) -> pb.GenerateRequest:  # fmt: skip
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(max_tokens=max_tokens, **sampling),
        stream=stream,
        data_parallel_rank=rank,
        kv_transfer_params_json=transfer,
    )


@asynccontextmanager
async def served(
    model: str, *, group: FakeGroup | None = None, limits: LimitsConfig | None = None, **changes: Any
) -> AsyncIterator[Served]:
    """On free ports of loopback."""
    group = group or FakeGroup(model)
    log = io.StringIO()
    config = ServeConfig(limits=limits or LimitsConfig(), port=0, http_port=0, **changes)
    server = Server(group, config, Log("json", stream=log))
    await server.listen()
    if group.ready.is_set():
        await server.begin(await group.info())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Served(server, group, channel, log)
    finally:
        await server.close()


async def until(condition: Any, *, within_s: float = 25.0) -> None:
    """Wait for what will be true."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


async def get(port: int, path: str, *, words: bytes | None = None) -> tuple[int, str]:
    """Status and body of one HTTP request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(words if words is not None else f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), body
