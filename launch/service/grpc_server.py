"""The server: gRPC and HTTP on their ports from the start, ready once the ranks are, and down in good order.

    listen ──▶ live ──▶ the group is ready ──▶ requests ──▶ SIGTERM: nothing new, what runs may end ──▶ down
                                                  └───────▶ the group failed: say who, for a moment ──▶ GroupFailed

Knows when; what is answered is `grpc_service`'s and `http_port`'s.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from ..front.front_client import GroupClient, GroupInfo
from .front_loop import patient_threads
from .grpc_access import MessageGuard, TokenGuard, read_token, server_credentials
from .grpc_service import SERVICE, EngineService
from .http_port import HttpPort
from .logs import Log
from .metrics import ServiceMetrics
from .openai_gateway import Gateway, GatewayLost
from .serve_config import ServeConfig
from .serve_health import Wellbeing, pages

WATCH_S = 0.25
LAST_WORDS_S = 2.0
"""After the group has failed: so long its culprit is still told to whoever asks."""
ABORT_GRACE_S = 2.0
STREAMS_PER_REQUEST = 2
"""A dropped request's stream stays open, with its status, until its client reads or leaves: so many may."""

T = TypeVar("T")


class GroupFailed(Exception):
    """The ranks are gone, and with them the server. str() says who failed and of what."""


def server_options(config: ServeConfig) -> Sequence[tuple[str, int]]:
    """Of gRPC's core. Gateways ping connections that have nothing to say, more often than its default allows."""
    return (
        ("grpc.max_receive_message_length", config.limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", STREAMS_PER_REQUEST * config.limits.max_requests_per_connection),
    )


class Server:
    """One front door."""

    def __init__(self, client: GroupClient, config: ServeConfig, log: Log) -> None:
        self._client = client
        self._config = config
        self._log = log
        self._metrics = ServiceMetrics(client)
        self._wellbeing = Wellbeing(client, stall_after_s=config.stall_after_s)
        self._service = EngineService(client, config, metrics=self._metrics, wellbeing=self._wellbeing, log=log)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  # set at import
        self._http = HttpPort(pages(self._wellbeing, self._metrics))
        interceptors: list[grpc.aio.ServerInterceptor] = []
        if config.token_file is not None:
            interceptors.append(TokenGuard(read_token(config.token_file)))
        with patient_threads():
            self._grpc = grpc.aio.server(interceptors=interceptors, options=server_options(config))
        self._tasks: list[asyncio.Task[None]] = []
        self._gateway: Gateway | None = None
        self.port = 0
        self.http_port = 0

    async def listen(self) -> None:
        """Open both ports. Raises OSError with the port that cannot be had."""
        self.http_port = await self._http.open(self._config.host, self._config.http_port_or_next)
        pb_grpc.add_VllmEngineServicer_to_server(self._service, MessageGuard(self._grpc))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        self.port = self._bind()
        await self._tell_health(serving=False)
        await self._grpc.start()
        if self._config.is_open and self._config.tls_cert is None:
            self._log.say(f"{self._config.host} can be reached from elsewhere, and is not encrypted", level="warning")

    def _bind(self) -> int:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{host}:{self._config.port}"
        credentials = server_credentials(self._config)
        try:
            if credentials is None:
                return self._grpc.add_insecure_port(address)
            return self._grpc.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error

    async def begin(self, info: GroupInfo) -> None:
        """The group is ready: let requests in, and say so."""
        relay = self._service.begin(info)
        self._tasks = [
            asyncio.create_task(relay.follow(self._client.subscribe()), name="cache events"),
            asyncio.create_task(self._sweep(), name="slow readers"),
        ]
        await self._tell_health(serving=True)
        self._log.say(
            f"ready: {info.served_model_name} on {info.ranks} rank{'' if info.ranks == 1 else 's'}",
            grpc=f"{self._config.host}:{self.port}",
            http=f"http://{self._config.host}:{self.http_port}",
        )
        if self._config.openai:
            self._gateway = Gateway.start(self._config, info, port=self.port, log=self._log)

    async def serve(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises GroupFailed, and Exception of what this server needs and has lost."""
        stopped = asyncio.create_task(stop.wait())
        try:
            while not stopped.done():
                await asyncio.wait([stopped], timeout=WATCH_S)
                self._check()
        finally:
            stopped.cancel()

    def _check(self) -> None:
        condition = self._wellbeing.now()
        if condition.state == "failed":
            raise GroupFailed(condition.words)
        for task in self._tasks:
            if task.done():
                task.result()
        if self._gateway is not None:
            self._gateway.check()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Let nothing new in, and what runs come to its end, as long as --drain-timeout-s allows and nobody hurries."""
        self._log.say("draining", running=len(self._service.calls))
        await self._tell_health(serving=False)
        draining = self._client.drain(self._config.drain_timeout_s)
        done = await _unless_set(draining, hurry)
        if done is None:
            done = await self._client.drain(0.0)
        self._log.say("drained" if done else "aborted what was left", level="info" if done else "warning")

    async def last_words(self, error: GroupFailed) -> None:
        """Every open call has been ended by its stream; tell those who ask, for a moment."""
        self._log.say(str(error), level="error")
        await self._tell_health(serving=False)
        await asyncio.sleep(LAST_WORDS_S)

    async def close(self) -> None:
        """Close the ports, and end what runs beside."""
        if self._gateway is not None:
            await self._gateway.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._grpc.stop(ABORT_GRACE_S)
        await self._http.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._config.limits.slow_reader_timeout_s / 4))
            self._service.calls.sweep()

    async def _tell_health(self, *, serving: bool) -> None:
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, state)


async def serve_grpc(
    client: GroupClient, config: ServeConfig, *, log: Log | None = None, stop: asyncio.Event | None = None
) -> None:
    """Serve until SIGTERM or SIGINT (or `stop`), then drain; a second signal aborts what still runs.

    Raises GroupFailed, GatewayLost, OSError for a port, ValueError for a file of the configuration.
    """
    server = Server(client, config, log or Log(config.log_format))
    stop, hurry = stop or asyncio.Event(), asyncio.Event()
    with _signals_set(stop, hurry):
        async with AsyncExitStack() as stack:
            stack.push_async_callback(server.close)
            await server.listen()
            try:
                info = await _unless_set(client.info(), stop)
                if info is not None:
                    await server.begin(info)
                    await server.serve(stop)
                    await server.drain(hurry)
            except GroupFailed as error:
                await server.last_words(error)
                raise
            except GatewayLost:  # the ranks are well: what others have asked for comes to its end
                await server.drain(hurry)
                raise


async def _unless_set(waiting: Awaitable[T], event: asyncio.Event) -> T | None:
    """What is waited for; None when `event` comes first."""
    wanted, first = asyncio.ensure_future(waiting), asyncio.create_task(event.wait())
    await asyncio.wait([wanted, first], return_when=asyncio.FIRST_COMPLETED)
    first.cancel()
    if wanted.done():
        return wanted.result()
    wanted.cancel()
    return None


@contextmanager
def _signals_set(*events: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set one event after the other; one more than there are events does what it did before."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    left = list(events)

    def on_signal() -> None:
        left.pop(0).set()
        if not left:
            for number in numbers:
                loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
