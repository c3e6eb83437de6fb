"""`vllm.grpc.engine.VllmEngine`: the service that gateways know, answered by a group of ranks.

    Generate                                       see `grpc_generate`
    Abort, FlushCache, StartProfile, StopProfile   what a caller may do
    HealthCheck, GetLoads                          how it is, now
    GetModelInfo, GetServerInfo, GetTokenizer      what it is
    SubscribeKvEvents                              what its prefix caches hold
    Embed                                          not served

A call is answered, or ends with a Fault. Knows messages and the group by `front_client`; does not know sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from ..command.text import TextCodec
from ..front.front_client import GroupClient, GroupInfo
from .grpc_calls import Calls
from .grpc_facts import loads, model_info, server_info
from .grpc_faults import Fault, invalid, unimplemented
from .grpc_generate import Answering
from .grpc_kv_events import KvRelay
from .grpc_tokenizer import tokenizer_chunks, zip_tokenizer
from .logs import Log
from .metrics import ServiceMetrics
from .serve_config import ServeConfig
from .serve_health import Wellbeing

Context = grpc.aio.ServicerContext
Method = Callable[["EngineService", Any, Context], Awaitable[Any]]

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
MAX_IDS = 4096
MAX_FLUSH_WAIT_S = 60.0
FLUSH_RETRY_S = 0.05
NOT_READY_RETRY_S = 2.0
PROFILE_STEPS, MAX_PROFILE_STEPS = 64, 10_000


def ends_with_faults(method: Method) -> Method:
    """A Fault that `method` raises becomes the call's status, is counted, and logged where it is not the caller's."""

    @wraps(method)
    async def call(self: EngineService, request: Any, context: Context) -> Any:
        try:
            if request is None:
                raise invalid("message", "bytes", "are no message of this method")
            return await method(self, request, context)
        except Fault as fault:
            self.note(fault, request)
            await context.abort(fault.status, fault.detail, fault.trailing())

    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What is known once the group is ready."""

    info: GroupInfo
    codec: TextCodec | None
    relay: KvRelay


class EngineService(pb_grpc.VllmEngineServicer):
    """One server's answers. `begin` once the group is ready; until then calls end with UNAVAILABLE."""

    def __init__(
        self, client: GroupClient, config: ServeConfig, *, metrics: ServiceMetrics, wellbeing: Wellbeing, log: Log
    ) -> None:
        self._client = client
        self._config = config
        self._metrics = metrics
        self._wellbeing = wellbeing
        self._log = log
        self._ready: Ready | None = None
        self._began = time.time()
        self._last_request = 0.0
        self.calls = Calls(config.limits)

    def begin(self, info: GroupInfo) -> KvRelay:
        """The group is ready. Returns what is to follow its cache events. Raises ValueError for a tokenizer that
        cannot be read."""
        relay = KvRelay(block_size=info.block_size, loads=self._client.loads, max_running=info.max_num_seqs)
        self._ready = Ready(info=info, codec=TextCodec.open(Path(info.model_path)), relay=relay)
        self._metrics.ready(info)
        return relay

    def note(self, fault: Fault, request: Any) -> None:
        """A call ends with `fault`. A group that fails is logged once, not for each of its requests."""
        self._metrics.refused[fault.reason] += 1
        if fault.status != grpc.StatusCode.INVALID_ARGUMENT and fault.reason != "group_failed":
            name = getattr(request, "request_id", None)
            self._log.say(fault.detail, level="warning", request=name, reason=fault.reason)

    def _now(self) -> Ready:
        if self._ready is None:
            words = "the ranks are starting"
            raise Fault(grpc.StatusCode.UNAVAILABLE, words, reason="not_ready", retry_after_s=NOT_READY_RETRY_S)
        return self._ready

    @ends_with_faults
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Messages with new tokens and then the whole answer of each choice; or only the latter."""
        self._last_request = time.time()
        ready = self._now()
        answering = Answering(
            self._client,
            self._config,
            info=ready.info,
            codec=ready.codec,
            calls=self.calls,
            metrics=self._metrics,
        )
        await answering.answer(request, context)

    @ends_with_faults
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Idempotent; NOT_FOUND when not one of the requests runs, nor was aborted lately."""
        if len(request.request_ids) > MAX_IDS:
            raise invalid("request_ids", f"{len(request.request_ids)} ids", f"must have at most {MAX_IDS}")
        known = [self._abort(request_id) for request_id in request.request_ids]
        if known and not any(known):
            shown = ", ".join(map(repr, request.request_ids[:3]))
            raise Fault(grpc.StatusCode.NOT_FOUND, f"no such request runs: {shown}", reason="not_found")
        return pb.AbortResponse()

    def _abort(self, request_id: str) -> bool:
        """Whether the request is known."""
        if self.calls.was_aborted(request_id):
            return True
        if not self.calls.is_running(request_id):
            return False
        self._metrics.aborted["by_name"] += 1
        self.calls.mark_aborted(request_id)
        self._client.abort(request_id, why="aborted by its client")
        return True

    @ends_with_faults
    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Not served."""
        raise unimplemented("Embed")

    @ends_with_faults
    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Healthy while steps get done, or nothing is to be done."""
        condition = self._wellbeing.now()
        healthy = condition.healthy and self._ready is not None
        return pb.HealthCheckResponse(healthy=healthy, message=condition.words)

    @ends_with_faults
    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """What the model is."""
        return model_info(self._now().info)

    @ends_with_faults
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """How the group is set up."""
        return server_info(
            self._now().info,
            active=len(self.calls),
            draining=self._client.health().state == "draining",
            last_request=self._last_request,
            uptime_s=time.time() - self._began,
        )

    @ends_with_faults
    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Every rank's queue and cache; one rank's with `dp_rank`."""
        info = self._now().info
        told = self._client.loads()
        if request.HasField("dp_rank"):
            if not 0 <= request.dp_rank < info.ranks:
                raise invalid("dp_rank", request.dp_rank, f"must be from 0 to {info.ranks - 1}, or be left out")
            told = [load for load in told if load.rank == request.dp_rank]
        return loads(info, told)

    @ends_with_faults
    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: Context) -> None:
        """The tokenizer's files, as a zip in pieces."""
        packed = await asyncio.to_thread(zip_tokenizer, Path(self._now().info.model_path))
        if packed is None:
            raise Fault(grpc.StatusCode.NOT_FOUND, "the model's folder has no tokenizer", reason="not_found")
        for chunk in tokenizer_chunks(packed):
            await context.write(chunk)

    @ends_with_faults
    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        """What the prefix caches hold, and every change, until the caller leaves."""
        relay = self._now().relay
        await context.send_initial_metadata(())
        early = request.load_records_before_first_batch
        async for batch in relay.subscribe(request.start_sequence_number, loads_first=early):
            await context.write(batch)

    @ends_with_faults
    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Empty the prefix caches; with a timeout, wait as long for requests to end."""
        self._now()
        wait = request.timeout_s
        if not 0.0 <= wait <= MAX_FLUSH_WAIT_S:
            raise invalid("timeout_s", wait, f"must be from 0 to {MAX_FLUSH_WAIT_S:g}")
        until = time.monotonic() + wait
        while not (done := await self._client.flush_cache()) and time.monotonic() < until:
            await asyncio.sleep(FLUSH_RETRY_S)
        words = "the prefix caches are empty" if done else "requests are running; nothing was flushed"
        return common_pb2.FlushCacheResponse(success=done, message=words)

    @ends_with_faults
    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Trace the next steps into a folder that the server was started with."""
        self._now()
        steps = request.num_steps if request.HasField("num_steps") else PROFILE_STEPS
        if not 1 <= steps <= MAX_PROFILE_STEPS:
            raise invalid("num_steps", steps, f"must be from 1 to {MAX_PROFILE_STEPS}")
        if request.HasField("start_step"):
            raise invalid("start_step", request.start_step, "a trace starts at once; leave it out")
        path = profile_path(self._config.profile_dir, request.output_dir)
        await self._client.profile(steps, str(path))
        return common_pb2.ProfileResponse(success=True, message=f"tracing {steps} steps into {path}")

    @ends_with_faults
    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> common_pb2.ProfileResponse:
        """End the trace, if one is being taken, and say where it is."""
        self._now()
        where = await self._client.stop_profile()
        return common_pb2.ProfileResponse(success=bool(where), message=where or "no trace was being taken")


def profile_path(base: Path | None, wanted: str) -> Path:
    """A new file in `base`, or in the folder `wanted` in it. A caller must not choose where else this process writes:
    raises Fault."""
    if base is None:
        words = "profiling is off; start the server with --profile-dir FOLDER"
        raise Fault(grpc.StatusCode.FAILED_PRECONDITION, words, reason="no_profile_dir")
    folder = (base / wanted).resolve() if "\0" not in wanted else Path("/")
    if not folder.is_relative_to(base.resolve()):
        raise invalid("output_dir", wanted, "must be a folder inside --profile-dir, or be left out")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"trace-{time.strftime('%Y%m%d-%H%M%S')}.json"
