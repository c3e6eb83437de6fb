import asyncio
import dataclasses
import json
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from launch.command.text import TextCodec
from launch.front.front_client import Chunk, Health, Refused
from launch.service.serve_config import LimitsConfig
from tests.launch.fake_group import VOCAB, FakeGroup, FakeStream, tokens
from tests.launch.grpc_rig import Served, generate, served, until, unwrap

pytestmark = pytest.mark.timeout(120)
Code = grpc.StatusCode


def offsets(messages, index=0):
    """Where each message's tokens begin in the output of a choice."""
    chunks = [m for m in messages if isinstance(m, pb.GenerateStreamChunk) and m.index == index]
    return [(m.completion_tokens - len(m.token_ids), list(m.token_ids)) for m in chunks]


def test_a_stream_gives_new_tokens_and_then_the_whole_without_gap_or_repeat(on):
    async def body(one: Served):
        for per_chunk in (1, 3, 50):
            one.group.per_chunk = per_chunk
            *chunks, complete = await one.ask(generate(max_tokens=10))
            wanted = tokens((1, 2, 3), 10)
            place = 0
            for begin, ids in offsets(chunks):
                assert begin == place
                assert ids == wanted[begin : begin + len(ids)]
                place += len(ids)
            assert place == 10
            assert list(complete.output_ids) == wanted
            assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 10)

    on(body)


def test_a_whole_answer_is_one_message_with_everything(on):
    async def body(one: Served):
        one.group.num_cached = 2
        [complete] = await one.ask(generate(stream=False, logprobs=2, prompt_logprobs=0))
        assert list(complete.output_ids) == tokens((1, 2, 3), 4)
        assert complete.cached_tokens == 2
        assert list(complete.output_logprobs.token_ids) == tokens((1, 2, 3), 4)
        assert complete.output_logprobs.token_logprobs[1] == pytest.approx(-0.013)
        assert list(complete.output_logprobs.top_logprobs[0].token_ids) == [6, 7]
        values = complete.input_logprobs.token_logprobs
        assert [value.HasField("value") for value in values] == [False, True, True]
        assert (values[2].value, list(complete.input_logprobs.token_ids)) == (-3.0, [1, 2, 3])

    on(body)


def test_streamed_log_probabilities_go_with_their_tokens_and_those_of_the_prompt_go_first(on):
    async def body(one: Served):
        *chunks, complete = await one.ask(generate(logprobs=1, prompt_logprobs=1))
        assert [list(c.output_logprobs.token_ids) for c in chunks] == [list(c.token_ids) for c in chunks]
        assert [len(c.input_logprobs.token_ids) for c in chunks] == [3, 0, 0, 0]
        assert not complete.HasField("output_logprobs")
        assert not complete.HasField("input_logprobs")

    on(body)


def test_each_of_n_answers_has_its_index_and_its_own_end(on):
    async def body(one: Served):
        messages = await one.ask(generate(n=3))
        for index in range(3):
            assert [t for _, ids in offsets(messages, index) for t in ids] == tokens((1, 2, 3), 4, index)
        ends = {m.index: list(m.output_ids) for m in messages if isinstance(m, pb.GenerateComplete)}
        assert ends == {index: tokens((1, 2, 3), 4, index) for index in range(3)}
        assert one.group.asked[-1]["n"] == 3

    on(body)


def test_a_stop_token_is_named_and_stays(on):
    async def body(one: Served):
        *_, complete = await one.ask(generate(max_tokens=50, stop_token_ids=[20]))
        assert list(complete.output_ids) == [6, 13, 20]
        assert (complete.finish_reason, complete.matched_token_id) == ("stop", 20)

    on(body)


def spelled(tiny: str, text: str):
    """A script whose output is `text`, again and again, and its token ids."""
    ids = TextCodec.open(Path(tiny)).encode(text)
    return ids, lambda prompt, index, place: ids[place % len(ids)]


@pytest.mark.parametrize("per_chunk", [1, 4, 64])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_a_choice_at_the_token_that_completes_it(on, tiny, per_chunk, stream):
    text = "def seen(self):\n    return None and nothing else"
    ids, script = spelled(tiny, text)
    codec = TextCodec.open(Path(tiny))

    async def body(one: Served):
        one.group.per_chunk, one.group.script = per_chunk, script
        messages = await one.ask(
            generate(max_tokens=200, stop=["None and", "zzz"], stream=stream, skip_special_tokens=True, n=2)
        )
        ends = [m for m in messages if isinstance(m, pb.GenerateComplete)]
        assert [m.index for m in sorted(ends, key=lambda m: m.index)] == [0, 1]
        for end in ends:
            got = list(end.output_ids)
            assert got == ids[: len(got)]
            assert "None and" in codec.decode(got)
            assert "None and" not in codec.decode(got[:-1])
            assert (end.finish_reason, end.matched_stop_str) == ("stop", "None and")
            if stream:
                assert [t for _, part in offsets(messages, end.index) for t in part] == got
        assert one.group.streams[-1].cancelled[:2] == [0, 1]  # the engine goes on with neither

    on(body)


def test_min_tokens_are_not_searched_for_stop_strings(on, tiny):
    _, script = spelled(tiny, "one two one two one two")

    async def body(one: Served):
        one.group.script = script
        *_, early = await one.ask(generate(max_tokens=60, stop=["two"]))
        *_, late = await one.ask(generate(max_tokens=60, stop=["two"], min_tokens=len(early.output_ids) + 1))
        assert len(late.output_ids) > len(early.output_ids) + 1
        assert late.finish_reason == "stop"

    on(body)


def test_the_parameters_arrive_as_they_were_written(on):
    async def body(one: Served):
        await one.ask(
            generate(
                (5, 6, 7, 8), rank=1, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, frequency_penalty=0.3,
                presence_penalty=-0.2, repetition_penalty=1.1, min_tokens=2, stop_token_ids=[3, 9], ignore_eos=True,
                logprobs=3, prompt_logprobs=2, seed=17, logit_bias={4: -1.5}, truncate_prompt_tokens=3,
                transfer='{"do_remote_prefill": true}',
            ),
            timeout=30,
        )  # fmt: skip
        asked = one.group.asked[-1]
        params = asked["params"]
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 40, 0.05)
        assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.3, -0.2, 1.1)
        assert (params.min_tokens, params.max_tokens, params.stop_token_ids) == (2, 4, (3, 9))
        assert (params.ignore_eos, params.logprobs, params.prompt_logprobs) == (True, 3, 2)
        assert (params.seed, params.logit_bias) == (17, {4: -1.5})
        assert asked["prompt"] == [6, 7, 8]
        assert asked["rank"] == 1
        assert asked["kv_transfer_params"] == {"do_remote_prefill": True}
        assert 0 < asked["deadline_s"] < 31  # both ends round

    on(body)


def test_what_is_left_out_is_neutral_and_max_tokens_fill_the_models_length(on):
    async def body(one: Served):
        await one.ask(generate(max_tokens=None, stop_token_ids=[6]))
        asked = one.group.asked[-1]
        params = asked["params"]
        assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (1.0, 1.0, 0, 1.0)
        assert (params.max_tokens, params.seed, params.logprobs, params.logit_bias) == (253, None, None, None)
        assert (asked["n"], asked["rank"], asked["deadline_s"], asked["kv_transfer_params"]) == (1, None, None, None)
        await one.ask(generate(max_tokens=1000, stop_token_ids=[6]))
        assert one.group.asked[-1]["params"].max_tokens == 253  # and no more than that

    on(body)


def test_text_is_tokenised_here(on, tiny):
    async def body(one: Served):
        request = pb.GenerateRequest(text="def f", sampling_params=pb.SamplingParams(max_tokens=1))
        [complete] = await one.ask(request)
        assert one.group.asked[-1]["prompt"] == TextCodec.open(Path(tiny)).encode("def f")
        assert complete.prompt_tokens == len(one.group.asked[-1]["prompt"])

    on(body)


def image() -> pb.GenerateRequest:
    request = generate()
    request.mm_inputs.im_token_id = 7
    return request


WRONG = [
    (generate(()), "prompt = '0 tokens': must have at least 1 token"),
    (generate([1] * 256), "prompt = '256 tokens': must have at most 255 tokens"),
    (generate([1, VOCAB]), "input_ids[1] = 2048: must be at most 2047"),
    (generate(max_tokens=0), "max_tokens = 0"),
    (generate(max_tokens=33), "max_tokens = 33: must be at most 32"),
    (generate(n=5), "n = 5: must be at most 4"),
    (generate(logprobs=21), "logprobs = 21"),
    (generate(logprobs=-1), "logprobs = -1"),
    (generate(prompt_logprobs=-1), "prompt_logprobs = -1"),
    (generate(temperature=float("nan")), "temperature = nan"),
    (generate(temperature=-0.5), "temperature = -0.5"),
    (generate(top_p=1.5), "top_p = 1.5"),
    (generate(min_p=2.0), "min_p = 2.0"),
    (generate(presence_penalty=3.0), "presence_penalty = 3.0"),
    (generate(repetition_penalty=-1.0), "repetition_penalty = -1.0"),
    (generate(seed=-3), "seed = -3"),
    (generate(min_tokens=9), "min_tokens = 9: must be at most max_tokens"),
    (generate(stop=["a"] * 17), "stop = '17 strings': must have at most 16"),
    (generate(stop=[""]), "stop[0] = '': must have at least 1 character"),
    (generate(stop=["a" * 257]), "stop[0] = '257 characters'"),
    (generate(stop_token_ids=list(range(129))), "stop_token_ids = '129 entries'"),
    (generate(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias = '1025 entries'"),
    (generate(logit_bias={-1: 1.0}), "logit_bias = -1"),
    (generate(logit_bias={1: 1e9}), "logit_bias = 1000000000.0"),
    (generate(truncate_prompt_tokens=0), "truncate_prompt_tokens = 0"),
    (generate(truncate_prompt_tokens=-2), "truncate_prompt_tokens = -2"),
    (generate(rank=2), "data_parallel_rank = 2: must be from 0 to 1"),
    (generate(rank=-1), "data_parallel_rank = -1"),
    (generate(transfer="[1]"), "kv_transfer_params_json = '[1]': must be an object"),
    (generate(transfer="{"), "kv_transfer_params_json = '{': must be JSON"),
    (generate(transfer="[" * 60_000), "must be JSON"),
    (generate(transfer=" " * 65_537), "65537 characters"),
    (generate(request_id="x" * 257), "request_id"),
    (generate(json_schema="{}"), "json_schema: an output that follows a JSON schema is not served"),
    (generate(regex="a+"), "regex: "),
    (generate(grammar="x"), "grammar: "),
    (generate(structural_tag="x"), "structural_tag: "),
    (generate(json_object=True), "json_object: "),
    (generate(choice=pb.ChoiceConstraint(choices=["a"])), "choice: "),
    (image(), "mm_inputs: input of images, sound or video is not served"),
    (pb.GenerateRequest(request_id="z"), "input = None: must be tokenized.input_ids or text"),
]  # fmt: skip


def test_every_field_is_checked_and_named(on):
    async def body(one: Served):
        for request, words in WRONG:
            code, details = await one.refused(request)
            assert (code, words in details) == (Code.INVALID_ARGUMENT, True), (words, details)
        assert one.group.streams == []  # nothing of it reached the ranks
        assert len(await one.ask(generate(json_object=False))) == 5

    on(body, limits=LimitsConfig(max_n=4, max_output_tokens=32))


def test_stop_strings_and_text_need_a_tokenizer(run, tiny, tmp_path):
    async def body():
        async with served(str(tmp_path)) as one:
            assert "no tokenizer.json" in (await one.refused(generate(stop=["a"])))[1]
            assert "no tokenizer.json" in (await one.refused(pb.GenerateRequest(text="a")))[1]
            assert len(await one.ask(generate())) == 5

    run(body())


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("queue_tokens", Code.RESOURCE_EXHAUSTED),
        ("queue_pages", Code.RESOURCE_EXHAUSTED),
        ("draining", Code.UNAVAILABLE),
        ("not_ready", Code.UNAVAILABLE),
        ("group_failed", Code.UNAVAILABLE),
        ("too_long", Code.INVALID_ARGUMENT),
    ],
)
def test_a_refusal_says_why_and_when_to_come_back(on, reason, code):
    async def body(one: Served):
        one.group.refusal = Refused(reason, "as the test wants it", retry_after_s=1.5)
        error = await one.fails(one.stub.Generate(generate()))
        assert (error.code(), "as the test wants it" in error.details()) == (code, True)
        said = dict(error.trailing_metadata())
        assert (said["serried-reason"], said["grpc-retry-pushback-ms"]) == (reason, "1500")
        assert f'serried:requests_refused_total{{reason="{reason}"}} 1.0' in one.server._metrics.text().decode()

    on(body)


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


def test_chunks_are_long_where_nobody_reads_before_the_end(on):
    async def body(one: Served):
        for how in ({"stream": True}, {"stream": False, "stop": ["zzz"]}, {"stream": False}):
            await one.ask(generate(**how))
        assert [asked["interval"] for asked in one.group.asked] == [None, None, 64]

    on(body)


def test_headers_come_before_the_first_token(on):
    async def body(one: Served):
        one.group.held = True
        call = one.stub.Generate(generate())
        async with asyncio.timeout(25):
            await call.initial_metadata()
        assert one.group.streams[0].turn == 0
        call.cancel()

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


def test_a_connection_has_only_so_many_requests_and_others_still_get_theirs(on):
    async def body(one: Served):
        one.group.held = True
        calls = [one.stub.Generate(generate()) for _ in range(2)]
        await until(lambda: len(one.group.streams) == 2)
        error = await one.fails(one.stub.Generate(generate()))
        assert error.code() == Code.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata())["serried-reason"] == "connection_requests"
        other = grpc.aio.insecure_channel(
            f"127.0.0.1:{one.server.port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        async with other:
            call = pb_grpc.VllmEngineStub(other).Generate(generate())
            await until(lambda: len(one.group.streams) == 3)
            call.cancel()
        for call in calls:
            call.cancel()

    on(body, limits=LimitsConfig(max_requests_per_connection=2))


def test_a_message_that_is_too_long_is_not_read(on):
    async def body(one: Served):
        code, _ = await one.refused(generate([1] * 2000))
        assert code == Code.RESOURCE_EXHAUSTED
        assert one.group.streams == []

    on(body, limits=LimitsConfig(max_message_bytes=1000))


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


def test_the_connectors_parameters_come_back_with_the_end(on):
    async def body(one: Served):
        one.group.transfer = {"remote_block_ids": [1, 2]}
        *_, complete = await one.ask(generate())
        assert json.loads(complete.kv_transfer_params_json) == {"remote_block_ids": [1, 2]}

    on(body)


def test_before_the_group_is_ready_calls_are_told_so(run, tiny):
    async def body():
        group = FakeGroup(tiny)
        group.ready.clear()
        group.state = Health(state="starting")
        async with served(tiny, group=group) as one:
            error = await one.fails(one.stub.Generate(generate()))
            assert (error.code(), error.details()) == (Code.UNAVAILABLE, "the ranks are starting")
            assert not (await one.stub.HealthCheck(pb.HealthCheckRequest())).healthy

    run(body())


def test_the_service_keeps_nothing_of_requests_that_ended(on):
    async def body(one: Served):
        for _ in range(20):
            await one.ask(generate())
        assert len(one.server._service.calls) == 0
        assert dataclasses.asdict(one.server._config.limits)["max_n"] == 16
        assert not one.server._service.calls._by_peer

    on(body)
