"""What cannot be served is said before anything reaches the ranks: which field, which rule, and when to come back."""

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from launch.front.front_client import Health, Refused
from launch.service.serve_config import LimitsConfig
from tests.launch.fake_group import VOCAB, FakeGroup
from tests.launch.grpc_rig import Served, generate, served, until

pytestmark = pytest.mark.timeout(120)
Code = grpc.StatusCode


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
