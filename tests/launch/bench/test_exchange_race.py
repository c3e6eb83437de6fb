"""The race of ways that GPUs have, run by threads over back ends that pretend; and what is refused without a GPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from ep import ExchangeConfig, Topology, run_ranks
from ep.back_ends import MAKERS
from ep.exchange_bench import Load
from launch.bench.bench_exchange import ABOUT, ExchangeFlags
from launch.bench.exchange_race import race, tell_race, ways
from launch.commands import parse_flags
from launch.groups.refusal import Refusal
from tests.ep.pretend_nccl_ep import World
from tests.ep.test_back_ends import Pretended

LOADS = [Load(tokens=tokens, hidden=512, num_slots=8, top_k=2, dtype=torch.float32) for tokens in (3, 5)]


def flags(words: str) -> ExchangeFlags:
    return parse_flags(ExchangeFlags, words.split(), name="bench exchange", about=ABOUT)


def test_every_size_has_a_line_for_each_way_and_one_that_is_missing_says_so(monkeypatch, capsys):
    world = World()
    for name, module in world.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    back_end = Pretended("nccl_ep", world)

    def fn(transport):
        return race(
            transport, LOADS, ExchangeConfig(), topology=Topology(num_ranks=2, node_size=2),
            device=torch.device("cpu"), ops="reference", back_end=back_end.opener(transport),
            lacks={"symmetric": "no heap"}.get,
        )  # fmt: skip

    races = run_ranks(2, fn, timeout_s=60)[0]
    tell_race(races, ["machine   one"], {"ranks": 2})
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["ranks"] == 2
    assert [(line["tokens"], line["exchange"]) for line in result["lines"]] == [
        (tokens, mode) for tokens in (3, 5) for mode in ("bounded", "nccl_ep", "symmetric")
    ]
    for line in result["lines"]:
        if line["exchange"] == "symmetric":
            assert (line["round_us"], line["fault"]) == (None, "no heap (rank 0)")
        else:
            assert line["round_us"] > 0
    assert table[0].endswith("?")
    assert sum("no heap (rank 0)" in line for line in table) == 2
    assert world.alive == []


def test_what_was_asked_for_runs_alone_and_pairs_have_one_way():
    assert [way.exchange for way in ways(ExchangeConfig())] == ["bounded", *MAKERS]
    assert [way.exchange for way in ways(ExchangeConfig(combine="slots"))] == ["bounded"]
    assert [way.exchange for way in ways(ExchangeConfig(exchange="exact"))] == ["exact"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--transport nccl", "transport is nccl, but torch sees no CUDA device; e.g. gloo"),
        ("--exchange symmetric", "which carries rows between GPUs, but device is cpu; e.g. exact, or transport nccl"),
    ],
)
def test_without_a_gpu_it_is_refused_in_words(words, rule):
    with pytest.raises(Refusal, match=rule):
        flags(words)
