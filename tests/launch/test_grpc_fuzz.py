"""Any bytes that are a message, and many that are not: a call ends with a typed status, and the server is as before."""

import asyncio
import random
import resource
import sys

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as pb

from launch.service.grpc_faults import Fault
from launch.service.grpc_requests import read_generate
from launch.service.serve_config import LimitsConfig
from tests.launch.fake_group import FakeGroup, info_of
from tests.launch.grpc_rig import generate, served

pytestmark = pytest.mark.timeout(120)

SOAK_MESSAGES = 600_000
INFO, LIMITS = info_of("nowhere"), LimitsConfig(max_n=4)
CLEAN = {grpc.StatusCode.INVALID_ARGUMENT}


def encode(text: str) -> list[int]:
    return [ord(letter) % 2048 for letter in text]


def refused(fault: Fault) -> bool:
    assert fault.status in CLEAN
    assert len(fault.detail) < 1100
    assert fault.detail.isprintable()
    return False


def read(message: pb.GenerateRequest) -> bool:
    """Whether it is a request; what is asked then must be within bounds. Raises only what no reader should."""
    try:
        asked = read_generate(message, INFO, LIMITS, encode)
    except Fault as fault:
        return refused(fault)
    assert 1 <= len(asked.prompt) < INFO.max_model_len
    assert 0 <= min(asked.prompt) <= max(asked.prompt) < INFO.vocab_size
    assert 1 <= asked.n <= LIMITS.max_n
    assert asked.params.max_tokens is not None
    assert len(asked.prompt) + asked.params.max_tokens <= INFO.max_model_len
    assert asked.request_id
    return True


def mutated(dice: random.Random, data: bytes) -> bytes:
    """Some bytes flipped, cut, doubled or put in."""
    out = bytearray(data)
    for _ in range(1 + (dice.random() < 0.3)):
        [kind] = dice.choices(range(4), weights=(8, 1, 1, 1))  # most flips leave a message, lengths that change do not
        place = dice.randrange(len(out) + 1)
        if kind == 0 and place < len(out):
            out[place] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del out[place : place + dice.randint(1, 8)]
        elif kind == 2:
            out[place:place] = out[place : place + dice.randint(1, 16)]
        else:
            out[place:place] = dice.randbytes(dice.randint(1, 8))
    return bytes(out)


SEEDS = [
    generate(
        range(40), request_id="seed", n=2, temperature=0.7, top_p=0.9, top_k=5, seed=3, stop=["ab", "c"], logprobs=2,
        stop_token_ids=[4], logit_bias={3: 1.0}, min_tokens=1, truncate_prompt_tokens=30, rank=1, transfer='{"a": [1]}',
    ),
    pb.GenerateRequest(text="some text", sampling_params=pb.SamplingParams(json_schema="{}")),
    pb.GenerateRequest(request_id="x", mm_inputs=pb.MultimodalInputs(im_token_id=3)),
]  # fmt: skip


class Seen:
    """Lines of the reader that messages have led to: a message that leads to new ones is worth changing further."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self._new = False

    def __call__(self, message: pb.GenerateRequest) -> tuple[bool, bool]:
        """Whether it is a request, and whether reading it led anywhere new."""
        self._new = False
        sys.settrace(self._enter)
        try:
            return read(message), self._new
        finally:
            sys.settrace(None)

    def _enter(self, frame, event, arg):
        return self._line if frame.f_code.co_filename.endswith(("grpc_requests.py", "sampling_params.py")) else None

    def _line(self, frame, event, arg):
        place = (frame.f_code.co_filename, frame.f_lineno)
        if place not in self.lines:
            self.lines.add(place)
            self._new = True
        return self._line


def fuzz(num_messages: int, seed: int) -> tuple[int, int, int]:
    """Counts of messages that were requests, of those that were messages at all, and of lines that they led to."""
    dice, seen = random.Random(seed), Seen()
    corpus = [message.SerializeToString() for message in SEEDS]
    taken = parsed = 0
    for _ in range(num_messages):
        data = mutated(dice, dice.choice(corpus))
        try:
            message = pb.GenerateRequest.FromString(data)
        except DecodeError:
            continue
        parsed += 1
        is_request, is_new = seen(message)
        taken += is_request
        if is_new and len(corpus) < 1000:
            corpus.append(data)
    return taken, parsed, len(seen.lines)


def test_mutated_messages_are_read_or_refused_in_words():
    """Guided by coverage: what leads to new lines is changed further."""
    taken, parsed, lines = fuzz(6000, seed=1)
    assert parsed > 2000
    assert 100 < taken < parsed
    assert lines > 100


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_many_mutated_messages_are_read_or_refused_and_nothing_piles_up():
    fuzz(20_000, seed=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, parsed, _ = fuzz(SOAK_MESSAGES, seed=3)
    assert parsed > SOAK_MESSAGES // 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


FLOATS = st.floats(width=32)
SAMPLING = st.builds(
    pb.SamplingParams,
    temperature=st.none() | FLOATS,
    top_p=FLOATS,
    top_k=st.integers(0, 2**32 - 1),
    min_p=FLOATS,
    frequency_penalty=FLOATS,
    presence_penalty=FLOATS,
    repetition_penalty=FLOATS,
    max_tokens=st.none() | st.integers(0, 2**32 - 1),
    min_tokens=st.integers(0, 2**32 - 1) | st.just(0),
    stop=st.lists(st.text(max_size=300), max_size=20),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=5),
    n=st.integers(0, 2**32 - 1) | st.integers(0, 4),
    logprobs=st.none() | st.integers(-(2**31), 2**31 - 1),
    seed=st.none() | st.integers(-(2**31), 2**31 - 1),
    logit_bias=st.dictionaries(st.integers(-(2**31), 2**31 - 1), FLOATS, max_size=3),
    truncate_prompt_tokens=st.none() | st.integers(-(2**31), 2**31 - 1),
)
REQUESTS = st.builds(
    pb.GenerateRequest,
    request_id=st.text(max_size=300),
    tokenized=st.builds(pb.TokenizedInput, input_ids=st.lists(st.integers(0, 3000), max_size=20)),
    sampling_params=SAMPLING,
    kv_transfer_params_json=st.none() | st.text(max_size=20),
    data_parallel_rank=st.none() | st.integers(-(2**31), 2**31 - 1),
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(REQUESTS)
def test_any_values_of_the_fields_are_taken_or_refused_in_words(message):
    read(message)


def test_bad_messages_on_the_wire_leave_good_requests_alone(tiny):
    async def throw(channel, dice: random.Random, data: bytes) -> grpc.StatusCode:
        call = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(mutated(dice, data), timeout=10)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def body():
        group = FakeGroup(tiny)
        group.per_chunk = 8
        dice = random.Random(5)
        async with served(tiny, group=group) as one:
            good = [asyncio.create_task(one.ask(generate((1, number), max_tokens=100))) for number in range(4)]
            corpus = [message.SerializeToString() for message in SEEDS]
            codes = [await throw(one.channel, dice, dice.choice(corpus)) for _ in range(300)]
            # NOT_FOUND: an id that was answered before, and no prompt any more
            assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
            assert codes.count(grpc.StatusCode.INVALID_ARGUMENT) > 20
            for number, messages in enumerate(await asyncio.gather(*good)):
                assert list(messages[-1].output_ids) == [(1 + number + 7 * place) % 2048 for place in range(100)]
            assert len(one.server._service.calls) == 0

    asyncio.run(body())
