"""The whole house: `serried serve` on two ranks, the gateway before it, OpenAI's client before that.

All tests share one server in float64, where tokens do not depend on who decodes beside whom; what they are held against
is the engine of `serried generate`, on one rank.
"""

import asyncio
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from tokenizers import Tokenizer

from launch.bench.bench_serve import ServeBenchFlags, measure
from launch.service.openai_gateway import find_program
from runtime import Engine, EngineConfig, SamplingParams
from runtime.settings.config import CacheConfig
from tests.launch.grpc_rig import get

openai = pytest.importorskip("openai", reason="the extra openai is not installed")

try:
    find_program()
except ValueError as missing:  # where there is no wheel of it
    pytest.skip(str(missing), allow_module_level=True)

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent.parent
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
WORDS = ["def", "class", "return", "for", "import", "the", "value", "list", "file", "self", "None", "with"]
PROMPTS = [f"{WORDS[number % 12]} {WORDS[number % 7]} {number}" for number in range(32)]
CHAT = [{"role": "user", "content": "How is a file opened?"}]
CHAT_TEXT = "user: How is a file opened?\nassistant:"
NUM_TOKENS = 24


@dataclass(frozen=True)
class Truth:
    """What the engine alone says: prompt text -> token ids of the answer, and their log-probabilities."""

    tokenizer: Tokenizer
    tokens: dict[str, list[int]]
    logprobs: dict[str, list[float]]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, prompt: str, count: int = NUM_TOKENS) -> str:
        """The answer's text, as it goes on after its prompt."""
        ids = self.ids(prompt)
        whole = self.tokenizer.decode([*ids, *self.tokens[prompt][:count]])
        return whole[len(self.tokenizer.decode(ids)) :]


@dataclass(frozen=True)
class House:
    """A running server; `grpc`, `http` and `api` are where it listens."""

    process: "subprocess.Popen[bytes]"
    grpc: str
    http: str
    api: str


@pytest.fixture(scope="module")
def truth(tiny) -> Truth:
    tokenizer = Tokenizer.from_file(f"{tiny}/tokenizer.json")
    prompts = [*PROMPTS, CHAT_TEXT]
    ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0)
    with Engine(EngineConfig(model=tiny, dtype="float64", cache=CacheConfig(num_blocks=128))) as engine:
        outputs = engine.generate(ids, params)
    return Truth(
        tokenizer=tokenizer,
        tokens={prompt: list(output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)},
        logprobs={
            prompt: [entry.logprob for entry in output.logprobs or ()]
            for prompt, output in zip(prompts, outputs, strict=True)
        },
    )


@pytest.fixture(scope="module")
def house(tiny, tmp_path_factory) -> Iterator[House]:
    """Up until the last test of this file, and then down by SIGTERM, which must go well."""
    folder = tmp_path_factory.mktemp("model") / "tiny-chat"
    folder.mkdir()
    for file in Path(tiny).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    log = folder.parent / "log"
    words = f"serve {folder} --ranks 2 --dtype float64 --num-blocks 128 --max-num-seqs 32 --log-format json"
    words += " --port 0 --http-port 0 --openai --openai-port 0"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch", *words.split()], cwd=ROOT, env=environment, stdout=out, stderr=out
        )
    try:
        ready, gateway = said(log, process, "ready: "), said(log, process, "openai: ")
        house = House(process=process, grpc=ready["grpc"], http=ready["http"], api=gateway["api"])
        wait_for_gateway(house)
        yield house
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        assert not alive(gateway["pid"])
    finally:
        process.kill()
        process.wait()


def said(log: Path, process: "subprocess.Popen[bytes]", words: str) -> dict:
    """The line of the log that begins with `words`."""
    until = time.monotonic() + 80
    while time.monotonic() < until and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith('{"time"') and json.loads(line)["text"].startswith(words):
                return json.loads(line)
        time.sleep(0.05)
    raise AssertionError(log.read_text(errors="replace"))


def wait_for_gateway(house: House) -> None:
    """It asks its worker what it is before it lets requests in."""
    until = time.monotonic() + 40
    with client(house) as api:
        while time.monotonic() < until:
            try:
                if api.completions.create(model="tiny-chat", prompt="a", max_tokens=1):
                    return
            except openai.APIError:
                time.sleep(0.1)
    raise AssertionError("the gateway does not get ready")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def client(house: House, **more):
    return openai.OpenAI(
        base_url=house.api, api_key="none", max_retries=0, timeout=60.0,
        http_client=openai.DefaultHttpxClient(trust_env=False), **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def api(house):
    with client(house) as api:
        yield api


def complete(api, prompt: str, **more):
    return api.completions.create(model="tiny-chat", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0.0, **more)


def test_completions_say_what_the_engine_says(api, truth):
    for prompt in PROMPTS[:4]:
        answer = complete(api, prompt)
        assert answer.choices[0].text == truth.text(prompt)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens == len(truth.ids(prompt))
        assert answer.usage.completion_tokens == NUM_TOKENS


def test_streamed_completions_are_the_same_in_pieces(api, truth):
    for prompt in PROMPTS[:4]:
        chunks = list(complete(api, prompt, stream=True))
        pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
        assert "".join(pieces) == truth.text(prompt)
        assert len(pieces) > NUM_TOKENS // 2
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]


def test_chat_goes_through_the_models_template_with_log_probabilities(api, truth):
    answer = api.chat.completions.create(
        model="tiny-chat", messages=CHAT, max_tokens=NUM_TOKENS, temperature=0.0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].message.content.strip() == truth.text(CHAT_TEXT).strip()
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(truth.logprobs[CHAT_TEXT], abs=1e-4)
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-6) for entry in content)


def test_chat_streams(api, truth):
    chunks = api.chat.completions.create(
        model="tiny-chat", messages=CHAT, max_tokens=NUM_TOKENS, temperature=0.0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip() == truth.text(CHAT_TEXT).strip()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it_and_the_request_at_it(api, house, truth, stream):
    prompt = PROMPTS[5]
    text = truth.text(prompt)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    wanted = text[: text.index(stop)]
    before = counter(house, "vllm:generation_tokens_total")
    if stream:
        chunks = [chunk.choices[0] for chunk in complete(api, prompt, stop=[stop], stream=True) if chunk.choices]
        got, reason = "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason
    else:
        answer = complete(api, prompt, stop=[stop])
        got, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert (got, reason) == (wanted, "stop")
    assert counter(house, "vllm:generation_tokens_total") - before < NUM_TOKENS


def test_two_answers_to_a_prompt_are_told_apart(api, truth):
    greedy = complete(api, PROMPTS[0], n=2)
    assert [choice.text for choice in greedy.choices] == [truth.text(PROMPTS[0])] * 2
    ask = {"model": "tiny-chat", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 1.5, "seed": 5, "n": 2}
    first, again = (api.completions.create(**ask) for _ in range(2))
    texts = [choice.text for choice in sorted(first.choices, key=lambda choice: choice.index)]
    assert texts == [choice.text for choice in sorted(again.choices, key=lambda choice: choice.index)]
    assert texts[0] != texts[1]


def test_thirty_two_streams_at_once_say_what_each_says_alone(api, truth):
    def stream(prompt: str) -> str:
        return "".join(chunk.choices[0].text for chunk in complete(api, prompt, stream=True) if chunk.choices)

    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        got = list(pool.map(stream, PROMPTS))
    assert got == [truth.text(prompt) for prompt in PROMPTS]


def test_over_grpc_token_ids_are_those_of_the_engine_sampled_too(house, truth, tiny):
    sampling = {"temperature": 0.7, "top_p": 0.9, "seed": 11, "max_tokens": 20}
    ids = [truth.ids(prompt) for prompt in PROMPTS[:6]]
    with Engine(EngineConfig(model=tiny, dtype="float64", cache=CacheConfig(num_blocks=128))) as engine:
        wanted = [list(one.token_ids) for one in engine.generate(ids, SamplingParams(**sampling))]
    with grpc.insecure_channel(house.grpc) as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        calls = [
            stub.Generate(
                pb.GenerateRequest(
                    tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=pb.SamplingParams(**sampling)
                )
            )
            for prompt in ids
        ]
        got = [[list(message.complete.output_ids) for message in call] for call in calls]
    assert got == [[one] for one in wanted]


def test_a_client_that_leaves_frees_its_place(api, house):
    chunks = api.completions.create(model="tiny-chat", prompt=PROMPTS[1], max_tokens=1500, stream=True)
    next(iter(chunks))
    assert running(house) == 1
    chunks.close()
    until = time.monotonic() + 40
    while running(house) and time.monotonic() < until:
        time.sleep(0.05)
    assert running(house) == 0


def test_what_is_not_served_is_a_bad_request_in_words(api):
    with pytest.raises(openai.BadRequestError, match="JSON"):
        api.chat.completions.create(model="tiny-chat", messages=CHAT, response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError, match="must have at most"):
        complete(api, PROMPTS[0], stop=["a" * 300])


def test_the_benchmark_runs_through_the_gateway_too(house):
    url = house.api.removesuffix("/v1")
    flags = ServeBenchFlags(
        url=url, num_prompts=8, input_len=6, output_len=8, warmup=0, cpu_of_pid=(house.process.pid,)
    )
    result = asyncio.run(measure(flags))
    assert (result["completed"], result["failed"], result["errors"]) == (8, 0, [])
    assert result["total_output_tokens"] == 64
    assert result["mean_ttft_ms"] > 0


def test_the_metrics_have_seen_it_all(house):
    assert counter(house, "vllm:generation_tokens_total") > 32 * NUM_TOKENS
    assert counter(house, "vllm:num_requests_running") == 0
    assert counter(house, "serried:steps_total") > 100


def fetch(house: House, path: str) -> str:
    return asyncio.run(get(int(house.http.rpartition(":")[2]), path))[1]


def counter(house: House, name: str) -> float:
    """Sum over labels."""
    lines = [line for line in fetch(house, "/metrics").splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def running(house: House) -> int:
    with grpc.insecure_channel(house.grpc) as channel:
        return pb_grpc.VllmEngineStub(channel).GetServerInfo(pb.GetServerInfoRequest()).active_requests
