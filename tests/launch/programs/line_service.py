"""A front door whose service is lines of JSON over a socket file: the group of ranks seen without gRPC.

    front_start.front_command(..., module="line_service") with this folder on PYTHONPATH; LINE_SERVICE names the file

A connection asks one thing: {"admit": {...}} is answered with a line a chunk, everything else with one line.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from ep.errors import RequestError
from launch.front.front_client import GroupClient, Refused
from launch.service.front_door import run
from launch.service.serve_config import ServeConfig
from runtime.requests.sampling_params import SamplingParams


def main(arguments: Sequence[str]) -> int:
    return run(arguments, serve)


async def serve(client: GroupClient, config: ServeConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async for value in answers(client, json.loads(await reader.readline())):
                writer.write(json.dumps(value).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, os.environ["LINE_SERVICE"])
    async with server:
        await stop.wait()
        await client.drain(config.drain_timeout_s)


async def answers(client: GroupClient, question: dict[str, Any]):
    [(what, how)] = question.items()
    if what == "admit":
        how["params"] = SamplingParams.from_dict(how.get("params", {}))
        try:
            stream = client.admit(how.pop("id"), how.pop("prompt"), how.pop("params"), **how)
        except (Refused, RequestError) as error:
            yield {"refused": str(error)}
            return
        async for chunk in stream:
            yield msgspec.structs.asdict(chunk)
    elif what == "info":
        yield asdict(await client.info())
    elif what == "abort":
        yield client.abort(how, why="asked to")
    elif what == "health":
        yield asdict(client.health())
    elif what == "loads":
        yield [asdict(load) for load in client.loads()]
    elif what == "stats":
        yield [asdict(stats) for stats in client.stats()]
    elif what == "flush":
        yield await client.flush_cache()
    elif what == "cache":
        async for events in client.subscribe():
            yield asdict(events)
    elif what == "profile":
        await client.profile(how["steps"], how["path"])
        yield None
    elif what == "stop_profile":
        yield await client.stop_profile()
    elif what == "process":
        yield {"pid": os.getpid(), "torch": "torch" in sys.modules, "pickle": "pickle" in sys.modules}
