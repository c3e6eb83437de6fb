import asyncio
import hashlib
import io
import json
import zipfile

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from launch.front.front_client import Health, KvEvents, StoredBlock
from launch.service.grpc_facts import default_sampling
from tests.launch.grpc_rig import Served, generate, served, until

pytestmark = pytest.mark.timeout(120)
Code = grpc.StatusCode


def test_the_model_says_what_it_is(on, tiny):
    async def body(one: Served):
        info = await one.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.model_path, info.tokenizer_path) == ("tiny", tiny, tiny)
        assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (256, 255, 2048)
        assert (list(info.eos_token_ids), info.model_type, info.is_generation) == ([1], "deepseek_v3", True)
        assert list(info.architectures) == ["DeepseekV3ForCausalLM"]
        assert json.loads(info.default_sampling_params_json) == {}

    on(body)


def test_a_models_own_sampling_is_the_default_where_it_is_numbers(tmp_path):
    assert default_sampling(tmp_path) == {}
    said = {"temperature": 0.6, "top_p": 0.95, "top_k": True, "min_p": "x", "eos_token_id": 1}
    for extra, wanted in (({}, {"temperature": 0.6, "top_p": 0.95}), ({"do_sample": False}, {})):
        (tmp_path / "generation_config.json").write_text(json.dumps(said | extra))
        assert default_sampling(tmp_path) == wanted
    (tmp_path / "generation_config.json").write_text("[1]")
    assert default_sampling(tmp_path) == {}


def test_the_server_says_how_it_is_set_up(on):
    async def body(one: Served):
        await one.ask(generate())
        info = await one.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.server_type, info.data_parallel_size, info.block_size) == ("vllm-grpc", 2, 16)
        assert (info.kv_cache_dtype, info.model_dtype, info.max_num_seqs) == ("auto", "float32", 8)
        assert (info.kv_connector, info.active_requests, info.is_paused) == ("", 0, False)
        assert 0 < info.uptime_seconds < 60
        assert info.last_receive_timestamp > 1e9

    on(body)


def test_loads_are_told_rank_by_rank_or_of_one(on):
    async def body(one: Served):
        both = await one.stub.GetLoads(pb.GetLoadsRequest())
        assert (both.dp_rank_count, [load.dp_rank for load in both.loads]) == (2, [0, 1])
        [load] = (await one.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 1, 4)
        assert (load.token_usage, load.num_used_tokens, load.max_total_num_tokens) == (0.75, 96, 128)
        assert (load.gen_throughput, load.cache_hit_rate, load.utilization) == (12.5, 0.25, 0.75)
        assert (load.max_running_requests, load.num_waiting_uncached_tokens) == (4, 40)
        error = await one.fails(one.stub.GetLoads(pb.GetLoadsRequest(dp_rank=2)))
        assert (error.code(), "dp_rank = 2" in error.details()) == (Code.INVALID_ARGUMENT, True)

    on(body)


def test_health_is_progress_and_not_presence(on):
    async def body(one: Served):
        async def health():
            said = await one.stub.HealthCheck(pb.HealthCheckRequest())
            return said.healthy, said.message

        assert await health() == (True, "4 requests, the last step ended 0.1 s ago")
        one.group.state = Health(state="ready", last_step_age_s=31.0)
        assert await health() == (False, "no step has ended for 31 s, and 4 requests wait for one")
        one.group.load = []
        assert await health() == (True, "no requests")
        one.group.state = Health(state="failed", culprit="rank 1 hangs in combine")
        assert await health() == (False, "rank 1 hangs in combine")

    on(body)


def test_embeddings_are_not_implemented(on):
    async def body(one: Served):
        error = await one.fails(one.stub.Embed(pb.EmbedRequest(request_id="a")))
        assert (error.code(), error.details()) == (Code.UNIMPLEMENTED, "Embed is not served by this engine")

    on(body)


def test_the_tokenizer_comes_as_a_zip_whose_hash_is_on_the_last_piece(on, tiny, monkeypatch):
    async def body(one: Served):
        whole = {}
        for size in (512 * 1024, 1000):
            monkeypatch.setattr("launch.service.grpc_tokenizer.CHUNK_BYTES", size)
            pieces = [piece async for piece in one.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
            whole[size] = b"".join(piece.data for piece in pieces)
            assert [bool(piece.sha256) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            assert pieces[-1].sha256 == hashlib.sha256(whole[size]).hexdigest()
        assert len(pieces) > 3
        assert whole[1000] == whole[512 * 1024]
        with zipfile.ZipFile(io.BytesIO(whole[1000])) as archive:
            assert set(archive.namelist()) == {
                "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json",
            }  # fmt: skip
            with open(f"{tiny}/tokenizer.json", "rb") as file:
                assert archive.read("tokenizer.json") == file.read()

    on(body)


def test_a_folder_without_a_tokenizer_has_none_to_give(run, tmp_path):
    async def body():
        (tmp_path / "config.json").write_text("{}")
        async with served(str(tmp_path)) as one:
            error = await one.fails(one.stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
            assert error.code() == Code.NOT_FOUND

    run(body())


def test_flushing_waits_for_requests_as_long_as_it_is_told(on):
    async def body(one: Served):
        one.group.flushes = [False, False, True]
        answer = await one.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.0))
        assert (answer.success, answer.message) == (False, "requests are running; nothing was flushed")
        assert (await one.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5.0))).success
        for wrong in (-1.0, 61.0, float("nan")):
            error = await one.fails(one.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=wrong)))
            assert error.code() == Code.INVALID_ARGUMENT

    on(body)


def test_a_profile_goes_into_the_folder_it_was_given_and_nowhere_else(on, tmp_path):
    base = tmp_path / "traces"

    async def body(one: Served):
        start, stop = one.stub.StartProfile, one.stub.StopProfile
        assert not (await stop(common_pb2.StopProfileRequest())).success
        answer = await start(common_pb2.StartProfileRequest(num_steps=5, output_dir="a"))
        [(steps, path)] = one.group.profiles
        assert (answer.success, steps, path.startswith(f"{base}/a/trace-")) == (True, 5, True)
        assert (await stop(common_pb2.StopProfileRequest())).message == path
        for wrong in ("..", "/", "a/../../b", "a\0b"):
            error = await one.fails(start(common_pb2.StartProfileRequest(output_dir=wrong)))
            assert error.code() == Code.INVALID_ARGUMENT, wrong
        for wrong in ({"num_steps": 0}, {"num_steps": 10_001}, {"start_step": 3}):
            error = await one.fails(start(common_pb2.StartProfileRequest(**wrong)))
            assert error.code() == Code.INVALID_ARGUMENT
        assert len(one.group.profiles) == 1

    on(body, profile_dir=base)


def test_without_a_folder_for_it_profiling_is_off(on):
    async def body(one: Served):
        error = await one.fails(one.stub.StartProfile(common_pb2.StartProfileRequest()))
        assert (error.code(), "--profile-dir" in error.details()) == (Code.FAILED_PRECONDITION, True)

    on(body)


def test_cache_events_come_in_one_line_of_numbers_with_loads_between(on, monkeypatch):
    monkeypatch.setattr("launch.service.grpc_kv_events.LOAD_INTERVAL_S", 0.05)

    async def body(one: Served):
        block = StoredBlock(block_hash=-7, parent_hash=None, token_ids=tuple(range(16)))
        call = one.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        await call.initial_metadata()
        one.group.events.put_nowait(KvEvents(rank=1, sequence=40, stored=(block,)))
        batch = await call.read()
        assert (batch.sequence_number, batch.dp_rank) == (1, 1)
        [stored] = batch.events[-1].stored.blocks  # in a snapshot, if it came before the server began to look
        assert (stored.block_hash, list(stored.token_ids), stored.block_size) == (-7, list(range(16)), 16)
        loads = [await call.read() for _ in range(2)]
        assert [(each.load.load_only, each.dp_rank, each.sequence_number) for each in loads] == [
            (True, 0, 1), (True, 1, 1),
        ]  # fmt: skip
        assert (loads[1].load.running_requests, loads[1].load.token_usage) == (3, 0.75)
        one.group.events.put_nowait(KvEvents(rank=0, sequence=3, removed=(-7,)))
        while (batch := await call.read()).load.load_only:
            pass
        assert (batch.sequence_number, batch.dp_rank, batch.events[0].removed.block_hashes) == (2, 0, [-7])
        call.cancel()

    on(body)


def test_the_usual_health_service_and_reflection_are_there(on):
    async def body(one: Served):
        health = health_pb2_grpc.HealthStub(one.channel)
        for name in ("", "vllm.grpc.engine.VllmEngine"):
            said = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert said.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2_grpc.ServerReflectionStub(one.channel).ServerReflectionInfo
        call = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        [answer] = [each async for each in call]
        names = {service.name for service in answer.list_services_response.service}
        assert {"vllm.grpc.engine.VllmEngine", "grpc.health.v1.Health"} < names
        one.group.fail("rank 0 raised")
        await until(lambda: one.group.state.state == "failed")

    on(body)


def test_while_it_drains_it_says_so(on):
    async def body(one: Served):
        await one.server.drain(asyncio.Event())
        assert one.group.drained == [60.0]
        health = health_pb2_grpc.HealthStub(one.channel)
        said = await health.Check(health_pb2.HealthCheckRequest())
        assert said.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await one.stub.GetServerInfo(pb.GetServerInfoRequest())).is_paused

    on(body)
