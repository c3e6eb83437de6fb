"""A prefill and a decode engine together answer as one engine does, or say what went wrong; nothing else."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ep import RequestError
from runtime import CacheConfig, Engine, EngineConfig, FinishReason, RequestOutput, SamplingParams
from runtime.requests.kv_config import KvConfig
from runtime.requests.prefix import token_digest
from tests.runtime.handing import BASE, GREEDY, check_whole, decode, engine, prefill, total, workers
from tests.runtime.mixes import Ask, engine_config
from tests.runtime.test_invariance import assert_same, mixed_asks

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parent.parent.parent
Alone = Callable[[Ask], RequestOutput]
NIXL = pytest.param(
    "nixl",
    1,
    8,
    marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="there is no package nixl here"),
)


@pytest.fixture(scope="module")
def prefiller(small_v3: Path) -> Iterator[Engine]:
    with engine(small_v3, kv_connector="tcp", kv_role="prefill", kv_lease_s=20.0) as running:
        yield running
        check_whole(running)


def prompt(seed: int, length: int = 53) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, 160, (length,), generator=generator).tolist())


def ask(seed: int, length: int = 53) -> Ask:
    return Ask(prompt=prompt(seed, length), params=GREEDY)


@pytest.mark.parametrize(("name", "ranks", "count"), [("tcp", 3, 14), NIXL])
def test_prefill_and_decode_engines_answer_as_one(small_v3: Path, alone: Alone, name: str, ranks: int, count: int):
    asks = mixed_asks(21, count)
    with (
        engine(small_v3, replace(BASE, ranks=min(ranks, 2)), kv_connector=name, kv_role="prefill") as first,
        engine(small_v3, replace(BASE, ranks=ranks), kv_connector=name, kv_role="decode") as second,
    ):
        outputs = decode(second, asks, prefill(first, asks))
        for one, output in zip(asks, outputs, strict=True):
            assert_same(output, alone(one))
        longer = [one for one in asks if len(one.prompt) > 1]
        assert total(second, "loads") + total(second, "failures") <= len(longer)
        assert total(second, "failures") == 0
        computed = sum(stats.computed_tokens for stats in second.stats().ranks)
        # One token a request and those that it samples, but no prompt; at depth 1 the last one may be a wasted row.
        assert computed <= sum(len(output.token_ids) + 1 for output in outputs)
        check_whole(first)
        check_whole(second)


def test_engines_that_share_a_folder_answer_as_one(small_v3: Path, alone: Alone, tmp_path: Path):
    asks = mixed_asks(22, 10)
    with engine(small_v3, kv_connector="file", kv_path=str(tmp_path)) as first:
        prefill(first, asks, marks=False)
        check_whole(first)
    with engine(small_v3, replace(BASE, ranks=1), kv_connector="host,file", kv_path=str(tmp_path)) as second:
        for one, output in zip(asks, decode(second, asks, [None] * len(asks)), strict=True):
            assert_same(output, alone(one))
        assert total(second, "loads") > 0
        check_whole(second)


def test_a_broken_file_is_computed_again_and_then_written_anew(small_v3: Path, alone: Alone, tmp_path: Path):
    one = ask(1)
    with engine(small_v3, replace(BASE, ranks=1), kv_connector="file", kv_path=str(tmp_path)) as first:
        first.generate([one.prompt], one.params)
    files = sorted(tmp_path.rglob("*.safetensors"))
    for file in files:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with engine(small_v3, replace(BASE, ranks=1), kv_connector="file", kv_path=str(tmp_path)) as second:
        assert_same(decode(second, [one], [None])[0], alone(one))
        assert (total(second, "loads"), total(second, "failures")) == (0, 1)
        check_whole(second)
    with engine(small_v3, replace(BASE, ranks=1), kv_connector="file", kv_path=str(tmp_path)) as third:
        assert_same(decode(third, [one], [None])[0], alone(one))
        assert total(third, "loads") == 1


@pytest.mark.parametrize("async_depth", [0, 1])
def test_preempted_requests_resume_from_host_memory(small_v3: Path, alone: Alone, async_depth: int):
    asks = [Ask(prompt=one.prompt[:30], params=replace(one.params, max_tokens=40)) for one in mixed_asks(4, 8)]
    settings = replace(BASE, ranks=2, async_depth=async_depth, block_size=4, num_blocks=24, max_num_seqs=4)
    with engine(small_v3, settings, kv_connector="host") as running:
        outputs = decode(running, asks, [None] * len(asks))
        for one, output in zip(asks, outputs, strict=True):
            assert_same(output, alone(one))
        assert sum(output.num_preemptions for output in outputs) > 0
        assert total(running, "loads") > 0
        check_whole(running)


def test_a_repeated_prompt_comes_from_host_memory_when_the_cache_has_lost_it(small_v3: Path, alone: Alone):
    settings = replace(BASE, ranks=1, num_blocks=12)
    with engine(small_v3, settings, kv_connector="host") as running:
        for seed in range(4):
            decode(running, [ask(seed)], [None])
        before = total(running, "loads")
        assert_same(decode(running, [ask(0)], [None])[0], alone(ask(0)))
        assert total(running, "loads") == before + 1
        check_whole(running)


def corrupt(prefiller: Engine, given: dict[str, Any], page: int) -> None:
    """One bit of a page that is held for others."""
    worker = workers(prefiller)[int(given["remote_engine_id"].rsplit("-", 1)[1])]
    latents = worker.decoder.cache.pages[1, given["remote_block_ids"][page], 3]
    latents.view(torch.uint8)[5] ^= 4


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_changed_page_gives_no_token(small_v3: Path, alone: Alone, prefiller: Engine, policy: str):
    one = ask(31)
    [given] = prefill(prefiller, [one])
    corrupt(prefiller, given, page=2)
    with engine(small_v3, kv_connector="tcp", kv_load_failure_policy=policy) as second:
        [output] = decode(second, [one], [given])
        if policy == "recompute":
            assert_same(output, alone(one))
        else:
            assert (output.token_ids, output.finish_reason) == ([], FinishReason.ERROR)
            assert "page 2 of its latents came with other content" in output.error
        assert (total(second, "loads"), total(second, "failures")) == (0, 1)
        check_whole(second)
    prefiller._ranks.workers[0].prefix.flush()
    prefiller._ranks.workers[1].prefix.flush()
    check_whole(prefiller)


def expect_failure(model: Path, given: dict[str, Any], one: Ask, words: str, alone: Alone, **changes: Any) -> None:
    """It fails in these words, or is computed here; both times no page is lost."""
    for policy in ("fail", "recompute"):
        with engine(
            model, replace(BASE, **changes), kv_connector="tcp", kv_load_failure_policy=policy, kv_load_timeout_s=20.0
        ) as second:
            [output] = decode(second, [one], [given])
            if policy == "recompute":
                assert_same(output, alone(one))
            else:
                assert output.finish_reason is FinishReason.ERROR
                assert words in output.error
                assert output.token_ids == []
            check_whole(second)


def test_a_wrong_page_size_is_found_in_the_handshake(small_v3: Path, alone: Alone, prefiller: Engine):
    one = ask(32)
    [given] = prefill(prefiller, [one])
    expect_failure(small_v3, given, one, "computes other latents: its layout is", alone, block_size=32)
    [output] = decode_in_order(small_v3, one, given)
    assert_same(output, alone(one))  # it was still there for who could use it


def decode_in_order(model: Path, one: Ask, given: dict[str, Any]) -> list[RequestOutput]:
    with engine(model, kv_connector="tcp") as second:
        return decode(second, [one], [given])


def test_another_model_is_found_in_the_handshake(small_v3: Path, prefiller: Engine):
    one = ask(33)
    [given] = prefill(prefiller, [one])
    config = replace(engine_config(small_v3, BASE), kv=KvConfig(kv_connector="tcp"), seed=7)
    with Engine(config) as second:
        [output] = decode(second, [one], [given])
        assert "computes other latents: its model is" in output.error
    decode_in_order(small_v3, one, given)


def test_another_prompt_of_that_name_is_not_handed_out(small_v3: Path, alone: Alone, prefiller: Engine):
    one = ask(34)
    [given] = prefill(prefiller, [one])
    other = Ask(prompt=(*one.prompt[:20], 3, *one.prompt[21:]), params=one.params)
    expect_failure(small_v3, given, other, "the prompt of that name has other tokens", alone)
    decode_in_order(small_v3, one, given)


def test_an_expired_lease_gives_the_pages_back_and_fails_the_fetch(small_v3: Path, alone: Alone):
    one = ask(35)
    with engine(small_v3, kv_connector="tcp", kv_lease_s=2.0) as first:
        [given] = prefill(first, [one])
        assert sum(stats.lent_pages for stats in first.stats().ranks) == 4
        check_whole(first)
        expect_failure(small_v3, given, one, "its lease is over", alone)


def test_an_engine_that_was_restarted_is_told_from_the_one_that_had_the_latents(small_v3: Path, alone: Alone):
    one = ask(36)
    with engine(small_v3, replace(BASE, ranks=1), kv_connector="tcp") as first:
        [given] = prefill(first, [one])
    expect_failure(small_v3, given, one, f"{given['remote_host']}:{given['remote_port']}", alone)  # nobody is there
    with engine(small_v3, replace(BASE, ranks=1), kv_connector="tcp", kv_port=given["remote_port"]):
        expect_failure(small_v3, given, one, "it was restarted", alone)


def test_a_request_whose_latents_do_not_come_holds_nobody_back(small_v3: Path, alone: Alone, prefiller: Engine):
    one, others = ask(37), [ask(seed) for seed in range(40, 44)]
    [given] = prefill(prefiller, [one])
    halt = [workers(prefiller)[rank].scheduler.hand_over._connectors[0] for rank in range(2)]
    woken = threading.Event()
    with engine(small_v3, kv_connector="tcp", kv_load_timeout_s=3.0) as second:
        for connector in halt:  # the lender's thread stands still until it is woken
            connector.call_soon(lambda: woken.wait(60))
        begin = time.monotonic()
        second.submit(one.prompt, one.params, request_id="late", kv_transfer_params=given)
        for index, other in enumerate(others):
            second.submit(other.prompt, other.params, request_id=str(index))
        ends = [(event.request_id, time.monotonic() - begin) for event in second.events() if event.finish_reason]
        woken.set()
        assert [name for name, _ in ends][-1] == "late"
        assert ends[-2][1] < ends[-1][1]
        assert ends[-1][1] >= 3.0
        check_whole(second)
    check_whole(prefiller)


def test_an_abort_while_latents_are_on_their_way_leaves_nothing_behind(small_v3: Path, prefiller: Engine):
    one = ask(38)
    [given] = prefill(prefiller, [one])
    with engine(small_v3, kv_connector="tcp") as second:
        second.submit(one.prompt, one.params, request_id="x", kv_transfer_params=given)
        second.abort("x")
        [output] = second.run()
        assert output.finish_reason is FinishReason.ABORT
        check_whole(second)
    check_whole(prefiller)


def test_an_aborted_prompt_is_lent_to_nobody(prefiller: Engine):
    prefiller.submit(prompt(39), GREEDY, request_id="x", kv_transfer_params={"do_remote_decode": True})
    prefiller.abort("x")
    [output] = prefiller.run()
    assert output.kv_transfer_params is None
    check_whole(prefiller)


def test_a_prompt_of_one_token_is_handed_to_nobody_and_computed_by_everybody(small_v3: Path, prefiller: Engine):
    one = Ask(prompt=(5,), params=SamplingParams(temperature=0.0, max_tokens=3, logprobs=1))
    assert prefill(prefiller, [one]) == [None]
    with engine(small_v3, kv_connector="tcp") as second:
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": "x",
            "remote_request_id": "y",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
        }
        [output] = decode(second, [one], [params])
        assert len(output.token_ids) == 3


def test_requests_that_name_strangers_are_refused_at_the_door(small_v3: Path, prefiller: Engine):
    good = {
        "do_remote_prefill": True,
        "remote_engine_id": "x",
        "remote_request_id": "y",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
    }
    with engine(small_v3, kv_connector="tcp", kv_role="decode") as second:
        for change, words in (
            ({"remote_host": "10.0.0.1"}, r"kv_transfer_params.remote_host.*--kv-allow-hosts"),
            ({"remote_port": 0}, r"remote_port = 0: must be from 1 to 65535"),
            ({"remote_engine_id": None}, "remote_engine_id"),
            ({"remote_port": "x"}, "Expected `int | null`"),
            ({"remote_protocol": "nixl"}, "must be one of tcp here"),
            ({"do_remote_decode": True}, "not both"),
        ):
            with pytest.raises(RequestError, match=words):
                second.submit([1, 2, 3], kv_transfer_params={**good, **change})
        with pytest.raises(RequestError, match="--kv-role prefill or both; this one is decode"):
            second.submit([1, 2, 3], kv_transfer_params={"do_remote_decode": True})
    with engine(small_v3) as third, pytest.raises(RequestError, match="no connector here"):
        third.submit([1, 2, 3], kv_transfer_params=good)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_killing_the_prefill_engine_while_pages_travel_costs_no_page_and_no_token(
    small_v3: Path, alone: Alone, policy: str
):
    one = ask(50)
    with engine(small_v3, replace(BASE, ranks=1), kv_connector="tcp", kv_load_failure_policy=policy) as second:
        cache = workers(second)[0].decoder.cache.pages
        asked = {
            "protocol": "tcp",
            "model": workers(second)[0].scheduler.hand_over._connectors[0]._terms.kind.model,
            "shape": list(cache.shape),
            "num_tokens": len(one.prompt) - 1,
            "identity": token_digest(one.prompt[:-1]).hex(),
            "page_s": 0.5,
        }
        program = [sys.executable, "-m", "tests.runtime.programs.lending", json.dumps(asked)]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT) as lender:
            given = json.loads(lender.stdout.readline())

            def kill() -> None:
                assert [lender.stdout.readline() for _ in range(2)] == ["page\n"] * 2
                lender.kill()

            killer = threading.Thread(target=kill)
            killer.start()
            [output] = decode(second, [one], [given])
            killer.join()
        if policy == "recompute":
            assert_same(output, alone(one))
        else:
            assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, [])
        assert total(second, "failures") == 1
        check_whole(second)


def test_pages_in_fp8_travel_as_they_are_and_never_into_a_plain_cache():
    """Greedy in float32: tokens are those of one engine with such a cache; log-probabilities as near as float32 is."""
    prompts = [[5, 6, 7, 400], list(range(20, 90)), list(range(300, 333))]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    asks = [Ask(prompt=tuple(one), params=params) for one in prompts]

    def of(kv_cache_dtype: str, **kv: Any) -> EngineConfig:
        return EngineConfig(
            model="profiles/models/tiny-v3",
            dtype="float32",
            cache=CacheConfig(num_blocks=64, block_size=16, kv_cache_dtype=kv_cache_dtype),
            kv=KvConfig(**kv),
        )

    with Engine(of("fp8")) as together, Engine(of("fp8", kv_connector="tcp")) as first:
        truth = together.generate(prompts, params)
        with Engine(of("fp8", kv_connector="tcp")) as second:
            for output, other in zip(decode(second, asks, prefill(first, asks)), truth, strict=True):
                assert output.token_ids == other.token_ids
                for mine, theirs in zip(output.logprobs, other.logprobs, strict=True):
                    assert abs(mine.logprob - theirs.logprob) < 1e-3
            assert total(second, "loads") == 3
        with Engine(of("auto", kv_connector="tcp")) as plain:
            given = prefill(first, asks)
            assert all("its layout is" in output.error for output in decode(plain, asks, given))
