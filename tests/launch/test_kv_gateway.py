"""Two servers and the gateway's --pd-disaggregation before them: prompts on one, answers from the other."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.service.openai_gateway import find_program, free_port, quiet
from runtime import Engine, EngineConfig, SamplingParams
from runtime.settings.config import CacheConfig
from tests.launch.test_serve_openai import ROOT, said

tokenizers = pytest.importorskip("tokenizers")
openai = pytest.importorskip("openai", reason="the extra openai is not installed")

try:
    find_program()
except ValueError as missing:  # where there is no wheel of it
    pytest.skip(str(missing), allow_module_level=True)

pytestmark = [pytest.mark.timeout(420), pytest.mark.soak]

NUM_TOKENS = 12
WORDS = ["def", "class", "return", "for", "import", "the", "value", "list", "file", "self", "None", "with"]
PROMPTS = [
    " ".join(WORDS[(number * 7 + place * (number % 5 + 1)) % 12] for place in range(1 + number * 3 % 150))
    for number in range(200)
]


@dataclass(frozen=True)
class Pair:
    """Who computes prompts, who answers, and the gateway's address; each server's process and pages."""

    prefill: subprocess.Popen[bytes]
    decode: subprocess.Popen[bytes]
    prefill_http: str
    decode_http: str
    api: str
    lines: Path

    def value(self, http: str, name: str) -> float:
        """Of a metric, over all ranks."""
        with urllib.request.urlopen(f"{http.rstrip('/')}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)]
        assert found, name
        return sum(found)


@contextmanager
def server(folder: Path, log: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], dict]]:
    base = f"serve {folder} --ranks 2 --dtype float64 --num-blocks 200 --block-size 16 --max-num-seqs 32"
    base += " --log-format json --port 0 --http-port 0"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch", *base.split(), *words], cwd=ROOT, env=environment, stdout=out, stderr=out
        )
    try:
        yield process, said(log, process, "ready: ")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def pair(tiny: str, folder: Path, connector: str, *decode_words: str) -> Iterator[Pair]:
    with ExitStack() as stack:
        both = []
        for role, more in (("prefill", ()), ("decode", decode_words)):
            words = ["--kv-connector", connector, "--kv-role", role, *more]
            both.append(stack.enter_context(server(Path(tiny), folder / role, *words)))
        (prefill, first), (decode, second) = both
        port, metrics = free_port("127.0.0.1"), free_port("127.0.0.1")
        words = [find_program(), "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
        words += ["--prometheus-port", str(metrics), "--pd-disaggregation", "--prefill", f"grpc://{first['grpc']}"]
        words += ["--decode", f"grpc://{second['grpc']}", "--model-path", tiny, "--log-level", "warn"]
        words += ["--health-check-interval-secs", "1", "--worker-startup-check-interval", "1"]
        with (folder / "gateway").open("wb") as out:
            gateway = subprocess.Popen(words, env=quiet(os.environ), stdout=out, stderr=out)
        stack.callback(gateway.wait)
        stack.callback(gateway.kill)
        yield Pair(
            prefill=prefill,
            decode=decode,
            prefill_http=first["http"],
            decode_http=second["http"],
            api=f"http://127.0.0.1:{port}/v1",
            lines=folder,
        )


def wait_for(pair: Pair, api: openai.OpenAI) -> str:
    """The model's name, once the gateway lets requests in."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            name = api.models.list().data[0].id
            api.completions.create(model=name, prompt="a b c", max_tokens=1)
        except (openai.APIError, IndexError):
            time.sleep(0.2)
        else:
            return name
    raise AssertionError((pair.lines / "gateway").read_text())


def texts(tiny: str) -> list[str]:
    """What one engine alone answers."""
    tokenizer = tokenizers.Tokenizer.from_file(f"{tiny}/tokenizer.json")
    ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with Engine(EngineConfig(model=tiny, dtype="float64", cache=CacheConfig(num_blocks=128))) as engine:
        outputs = engine.generate(ids, params)
    whole = [tokenizer.decode([*one, *output.token_ids]) for one, output in zip(ids, outputs, strict=True)]
    return [text[len(tokenizer.decode(one)) :] for text, one in zip(whole, ids, strict=True)]


@pytest.mark.parametrize("connector", ["tcp", "nixl"])
def test_two_servers_answer_as_one_engine_and_lose_no_page(tiny: str, tmp_path: Path, connector: str):
    if connector == "nixl":
        pytest.importorskip("nixl", reason="there is no package nixl here")
    with (
        pair(tiny, tmp_path, connector) as both,
        openai.OpenAI(base_url=both.api, api_key="x", max_retries=0, timeout=60) as api,
    ):
        name = wait_for(both, api)

        def ask(prompt: str) -> str:
            for _ in range(10):
                try:
                    done = api.completions.create(model=name, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0.0)
                except openai.InternalServerError:  # the gateway gives a worker some 4 s, on a busy machine too
                    continue
                else:
                    return done.choices[0].text
            raise AssertionError(f"no answer to {prompt!r}")

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, PROMPTS))
        assert found == texts(tiny)
        assert both.value(both.decode_http, "serried:kv_loads_total") > 50
        assert both.value(both.decode_http, "serried:kv_load_failures_total") == 0
        until = time.monotonic() + 45  # a lease, where the gateway did not wait for an answer
        while both.value(both.prefill_http, "serried:kv_lent_pages") and time.monotonic() < until:
            time.sleep(0.1)
        for http in (both.prefill_http, both.decode_http):
            assert both.value(http, "serried:kv_lent_pages") == 0
            assert both.value(http, "vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("connector", ["tcp", "nixl"])
def test_prompts_of_a_server_that_was_killed_fail_cleanly(tiny: str, tmp_path: Path, connector: str):
    """Under load: every answer is whole and right, or an error; and the other server goes on."""
    if connector == "nixl":
        pytest.importorskip("nixl", reason="there is no package nixl here")
    truth = dict(zip(PROMPTS, texts(tiny), strict=True))
    with (
        pair(tiny, tmp_path, connector, "--kv-load-timeout-s", "3") as both,
        openai.OpenAI(base_url=both.api, api_key="x", max_retries=0, timeout=60) as api,
    ):
        name = wait_for(both, api)

        def ask(prompt: str) -> str | None:
            try:
                done = api.completions.create(model=name, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0.0)
            except openai.APIError:
                return None
            return done.choices[0].text

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(ask, prompt) for prompt in PROMPTS]
            while sum(one.done() for one in asked) < 20:
                time.sleep(0.01)
            both.prefill.kill()
            found = [one.result() for one in asked]
        for prompt, text in zip(PROMPTS, found, strict=True):
            assert text in (None, truth[prompt])
        assert 20 <= sum(text is not None for text in found) < len(PROMPTS)
        until = time.monotonic() + 20
        while both.value(both.decode_http, "serried:kv_lent_pages") and time.monotonic() < until:
            time.sleep(0.1)
        assert both.value(both.decode_http, "vllm:kv_cache_usage_perc") == 0
        assert both.decode.poll() is None
