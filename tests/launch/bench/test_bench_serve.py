import asyncio
import json
import os
import socket
import statistics
from math import inf

import pytest

from launch.bench import serve_clients
from launch.bench.bench_serve import ServeBenchFlags, cpu_seconds, measure, percentile, summary, tell
from launch.bench.serve_load import Ask, Outcome, asks, drive, gaps
from launch.cli import main
from launch.commands import COMMANDS, parse_flags
from tests.launch.fake_group import FakeGroup
from tests.launch.grpc_rig import served

pytestmark = pytest.mark.timeout(120)

VLLM_KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "output_throughput", "total_token_throughput",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip


def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for():
    for burstiness in (0.5, 1.0, 4.0):
        found = gaps(20_000, rate=10.0, burstiness=burstiness, seed=3)
        assert statistics.fmean(found) == pytest.approx(0.1, rel=0.05)
        assert statistics.pstdev(found) / statistics.fmean(found) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert gaps(3, rate=inf, burstiness=1.0, seed=0) == [0.0] * 3
    assert gaps(3, rate=4.0, burstiness=inf, seed=0) == [0.25] * 3


def test_prompts_are_the_same_for_a_seed_and_share_nothing():
    first = asks(20, prompt_len=5, max_tokens=3, vocab_size=2048, seed=1)
    assert first == asks(20, prompt_len=5, max_tokens=3, vocab_size=2048, seed=1)
    assert len({ask.prompt for ask in first} | {ask.id for ask in first}) == 40
    assert all(256 <= token < 2048 for ask in first for token in ask.prompt)
    assert {len(ask.text.split()) for ask in first} == {5}


def test_no_more_run_at_a_time_than_are_allowed_and_failures_are_results():
    running = most = 0

    async def client(ask: Ask, told) -> tuple[int, int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        told()
        running -= 1
        if ask.id.startswith("bench-0-3-"):
            raise ValueError("no\nroom")
        return 5, 1

    wanted = asks(10, prompt_len=5, max_tokens=1, vocab_size=2048, seed=0)
    outcomes = asyncio.run(drive(client, wanted, waits=[0.0] * 10, max_concurrency=3))
    assert most == 3
    assert [number for number, one in enumerate(outcomes) if one.error] == [3]
    assert outcomes[3].error == "ValueError: no room"
    assert all(0.005 < one.ttft <= one.latency < 5.0 for one in outcomes)


def test_figures_are_those_of_the_definition():
    flags = ServeBenchFlags(url="grpc://x", num_prompts=3)
    good = [
        Outcome(num_prompt_tokens=10, num_output_tokens=5, ttft=0.1, latency=0.5, itls=[0.1] * 4, num_messages=5),
        Outcome(num_prompt_tokens=10, num_output_tokens=1, ttft=0.3, latency=0.3, num_messages=1),
    ]
    result = summary([*good, Outcome(error="x", num_prompt_tokens=9)], flags, model="m", duration=2.0, cpu_s=0.0006)
    assert set(result) >= VLLM_KEYS
    assert (result["completed"], result["failed"], result["errors"]) == (2, 1, ["x"])
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 6)
    assert (result["request_throughput"], result["output_throughput"], result["total_token_throughput"]) == (1, 3, 13)
    assert result["mean_tpot_ms"] == pytest.approx(100.0)  # (0.5 - 0.1) / 4; a single token has none
    assert (result["median_ttft_ms"], result["mean_itl_ms"]) == (pytest.approx(200.0), pytest.approx(100.0))
    assert result["cpu_us_per_output_token"] == pytest.approx(100.0)
    assert json.loads(json.dumps(result))["request_rate"] == "inf"
    nothing = summary([Outcome(error="x")], flags, model="m", duration=1.0, cpu_s=None)
    assert (nothing["mean_ttft_ms"], "cpu_seconds" in nothing) == (None, False)
    tell(nothing, flags)


def test_percentiles_lie_between_the_two_nearest():
    assert percentile([4.0, 1.0, 2.0, 3.0], 50.0) == 2.5
    assert percentile([1.0], 99.0) == 1.0


def test_a_server_is_measured(tiny, capsys):
    async def body():
        group = FakeGroup(tiny)
        async with served(tiny, group=group) as one:
            flags = ServeBenchFlags(
                url=f"grpc://127.0.0.1:{one.server.port}", num_prompts=12, input_len=9, output_len=7, warmup=2,
                request_rate=2000.0, max_concurrency=4, cpu_of_pid=(os.getpid(),),
            )  # fmt: skip
            return await measure(flags), flags, group

    result, flags, group = asyncio.run(body())
    assert (result["completed"], result["failed"], result["num_messages"]) == (12, 0, 84)
    assert (result["total_input_tokens"], result["total_output_tokens"], result["model_id"]) == (108, 84, "tiny")
    assert len(group.asked) == 14
    assert group.asked[0]["params"].ignore_eos
    tell(result, flags)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["completed"] == 12


def test_processor_time_is_that_of_the_process():
    before = cpu_seconds([os.getpid()])
    sum(range(3_000_000))
    assert cpu_seconds([os.getpid()]) > before
    with pytest.raises(OSError, match="No such file"):
        cpu_seconds([2**22 + 1])


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--num-prompts 0", "num_prompts is 0"),
        ("--request-rate 0", "request_rate is 0.0"),
        ("--burstiness -1", "burstiness is -1.0"),
        ("--max-concurrency 0", "max_concurrency is 0"),
        ("--warmup -1", "warmup is -1"),
    ],
)
def test_what_makes_no_sense_is_refused(words, refused):
    command = COMMANDS["bench serve"]
    with pytest.raises(Exception, match=refused):
        parse_flags(command.flags, ["grpc://x", *words.split()], name="bench serve", about=command.about)


def test_an_address_of_no_kind_is_refused():
    with pytest.raises(ValueError, match="url is 'x:1'; it must begin with grpc:// or http://"):
        asyncio.run(measure(ServeBenchFlags(url="x:1")))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("kind", ["http", "grpc"])
@pytest.mark.timeout(120)
def test_a_server_that_is_not_there_is_refused_in_one_line(kind, capsys, monkeypatch):
    monkeypatch.setattr(serve_clients, "CONNECT_S", 0.5)
    url = f"{kind}://127.0.0.1:{free_port()}"
    assert main(["bench", "serve", url, "--num-prompts", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("serried: ")
    assert said.count("\n") == 1
    assert url in said


def test_why_requests_failed_is_printed_before_the_figures(capsys):
    flags = ServeBenchFlags(url="grpc://x")
    lost = Outcome(error="RuntimeError: no room")
    tell(summary([lost], flags, model="m", duration=1.0, cpu_s=None), flags)
    assert "\nfailed: RuntimeError: no room\n{" in capsys.readouterr().out
