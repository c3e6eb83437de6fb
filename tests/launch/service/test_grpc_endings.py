"""However a request ends, by abort, with its client or with the group, no other notices and nothing stays."""

import asyncio
import dataclasses

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from launch.front.front_client import Chunk
from launch.service.serve_config import LimitsConfig
from tests.launch.fake_group import FakeGroup, FakeStream
from tests.launch.grpc_rig import Served, generate, served, until, unwrap

pytestmark = pytest.mark.timeout(120)
Code = grpc.StatusCode


def test_an_abort_ends_the_stream_and_twice_is_once(on):
    async def body(one: Served):
        one.group.held = True
        asking = asyncio.create_task(one.ask(generate(request_id="a")))
        await until(lambda: one.group.streams)
        await one.stub.Abort(pb.AbortRequest(request_ids=["a", "nobody"]))
        [complete] = await asking
        assert (complete.finish_reason, list(complete.output_ids)) == ("abort", [])
        await one.stub.Abort(pb.AbortRequest(request_ids=["a"]))
        assert one.group.aborts == ["a"]
        assert 'requests_aborted_total{reason="by_name"} 1.0' in one.server._metrics.text().decode()

    on(body)


def test_a_request_that_ended_or_never_was_is_not_found(on):
    async def body(one: Served):
        await one.ask(generate(request_id="a"))
        for name in ("a", "never"):
            error = await one.fails(one.stub.Abort(pb.AbortRequest(request_ids=[name])))
            assert error.code() == Code.NOT_FOUND
        code, words = await one.refused(pb.GenerateRequest(request_id="a", stream=True))
        assert (code, "has ended" in words) == (Code.NOT_FOUND, True)
        assert len(await one.ask(generate(request_id="a"))) == 5  # with a prompt it is a new request

    on(body)


def test_an_id_is_in_use_until_its_request_ends(on):
    async def body(one: Served):
        one.group.held = True
        asking = asyncio.create_task(one.ask(generate(request_id="a")))
        await until(lambda: one.group.streams)
        assert (await one.refused(generate(request_id="a")))[0] == Code.ALREADY_EXISTS
        one.group.held = False
        assert len(await asking) == 5

    on(body)


def test_a_client_that_cancels_or_runs_out_of_time_lets_the_group_go(on):
    async def body(one: Served):
        one.group.held = True
        call = one.stub.Generate(generate())
        await until(lambda: one.group.streams)
        call.cancel()
        await until(lambda: None in one.group.streams[0].cancelled)
        error = await one.fails(one.stub.Generate(generate(), timeout=0.5))
        assert error.code() == Code.DEADLINE_EXCEEDED
        await until(lambda: None in one.group.streams[1].cancelled)
        await until(lambda: len(one.server._service.calls) == 0)
        assert 'requests_aborted_total{reason="client_gone"} 2.0' in one.server._metrics.text().decode()

    on(body)


def test_a_group_that_fails_ends_every_stream_with_its_culprit(on):
    async def body(one: Served):
        one.group.held = True
        asking = [asyncio.create_task(one.refused(generate())) for _ in range(3)]
        await until(lambda: len(one.group.streams) == 3)
        one.group.fail("rank 1 was killed")
        assert await asyncio.gather(*asking) == [(Code.UNAVAILABLE, "rank 1 was killed")] * 3

    on(body)


def test_one_requests_own_error_is_told_in_its_answer(on):
    async def body(one: Served):
        one.group.held = True
        call = one.stub.Generate(generate())
        await until(lambda: one.group.streams)
        one.group.streams[0].failed = "the sampler found no usable logits"
        messages = [message async for message in call]
        assert messages[-1].complete.finish_reason == "error"
        assert ("serried-error", "the sampler found no usable logits") in tuple(await call.trailing_metadata())

    on(body)


class Dropped(FakeStream):
    """The group drops what its reader does not take: tokens are missing before the end."""

    def _chunk(self, index):
        if self.turn < 3:
            return super()._chunk(index)
        del self.have[index]
        return Chunk(index=index, offset=40, token_ids=(), finish_reason="abort", error="38 tokens wait for it")


def test_an_answer_with_a_hole_is_an_error_and_not_an_answer(on, monkeypatch):
    async def body(one: Served):
        monkeypatch.setattr("tests.launch.fake_group.FakeStream", Dropped)
        code, words = await one.refused(generate(max_tokens=60))
        assert (code, words) == (Code.RESOURCE_EXHAUSTED, "38 tokens wait for it")

    on(body)


def test_a_client_that_does_not_read_loses_its_request_and_no_other_waits(run, tiny):
    async def body():
        limits = LimitsConfig(slow_reader_timeout_s=0.3)
        group = FakeGroup(tiny, max_model_len=2_000_000)
        async with served(tiny, group=group, limits=limits) as one:
            group.per_chunk = 20_000  # more than the windows of a connection hold
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{one.server.port}", options=options) as lazy:
                call = pb_grpc.VllmEngineStub(lazy).Generate(generate(max_tokens=1_900_000))
                await until(lambda: group.streams)
                assert len(await one.ask(generate())) == 2
                await until(lambda: None in group.streams[0].cancelled)
                error = await one.fails(call)
                assert error.code() == Code.RESOURCE_EXHAUSTED
                assert error.details() == "its client took nothing for 0.3 s; the request was dropped"
                assert "took nothing" in one.log.getvalue()
            assert 'requests_aborted_total{reason="slow_reader"} 1.0' in one.server._metrics.text().decode()

    run(body())


def test_dropped_requests_that_nobody_reads_take_up_their_connection(run, tiny):
    """Else a client that never reads could pile up streams without end."""

    async def body():
        limits = LimitsConfig(slow_reader_timeout_s=0.1, max_requests_per_connection=1)
        group = FakeGroup(tiny, max_model_len=2_000_000)
        async with served(tiny, group=group, limits=limits) as one:
            group.per_chunk = 20_000
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{one.server.port}", options=options) as lazy:
                stub, calls = pb_grpc.VllmEngineStub(lazy), []
                for number in range(2):
                    calls.append(stub.Generate(generate(max_tokens=1_900_000)))
                    await until(lambda at=number: len(group.streams) > at and None in group.streams[at].cancelled)
                    await until(lambda: not len(one.server._service.calls))
                assert (await one.fails(stub.Generate(generate(), timeout=0.5))).code() == Code.DEADLINE_EXCEEDED
                assert len(group.streams) == 2
                calls.pop().cancel()
                assert [unwrap(message) async for message in stub.Generate(generate())]

    run(body())


def test_the_service_keeps_nothing_of_requests_that_ended(on):
    async def body(one: Served):
        for _ in range(20):
            await one.ask(generate())
        assert len(one.server._service.calls) == 0
        assert dataclasses.asdict(one.server._config.limits)["max_n"] == 16
        assert not one.server._service.calls._by_peer

    on(body)
