"""What a request asks for arrives at the ranks, and what they make of it comes back whole."""

import asyncio
import json
from pathlib import Path

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from launch.command.text import TextCodec
from tests.launch.fake_group import tokens
from tests.launch.grpc_rig import Served, generate

pytestmark = pytest.mark.timeout(120)


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


def test_the_connectors_parameters_come_back_with_the_end(on):
    async def body(one: Served):
        one.group.transfer = {"remote_block_ids": [1, 2]}
        *_, complete = await one.ask(generate())
        assert json.loads(complete.kv_transfer_params_json) == {"remote_block_ids": [1, 2]}

    on(body)
