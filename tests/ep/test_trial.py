"""Ways of exchange in competition: what raises or brings wrong rows is dropped by all and said, the fastest is kept."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from ep import Exchange, ExchangeConfig, TransportError, run_ranks
from ep.trial import Trial, Tried, fastest, lines
from tests.ep.pretend_nccl_ep import World
from tests.ep.test_back_ends import HIDDEN, Pretended, batch_of, is_right, send

LIMIT_S = 60
US = {"bounded": 300.0, "nccl_ep": 100.0, "symmetric": 200.0}
MODES = tuple(US)


@pytest.fixture
def world(monkeypatch):
    found = World()
    for name, module in found.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


class Contest:
    """The three ways on four ranks, with times that a test says, and what is wrong with some of them."""

    def __init__(self, world: World):
        self.back_ends = {name: Pretended(name, world) for name in ("nccl_ep", "symmetric")}
        self.us = {rank: dict(US) for rank in range(4)}
        self.lacks = {rank: {} for rank in range(4)}
        self.untimed: dict[str, str] = {}
        self.built: list[tuple[int, str]] = []

    def run(self, *, size: int = 4):
        def fn(transport):
            rank = transport.rank

            def build(config: ExchangeConfig) -> Exchange:
                self.built.append((rank, config.exchange))
                if config.exchange in self.back_ends:
                    return self.back_ends[config.exchange].exchange(transport)
                return Exchange(
                    transport, num_slots=8, hidden=HIDDEN, top_k=3, dtype=torch.float32, device="cpu", config=config
                )

            def time_us(exchange: Exchange) -> float:
                if rank == 2 and exchange.config.exchange in self.untimed:
                    raise RuntimeError(self.untimed[exchange.config.exchange])
                return self.us[rank][exchange.config.exchange]

            trial = Trial(
                configs=[ExchangeConfig(exchange=mode, hierarchical="off", round_tokens=12) for mode in MODES],
                lacks=lambda config: self.lacks[rank].get(config.exchange),
                build=build,
                time_us=time_us,
            )
            exchange, tried = fastest(trial, transport, device="cpu")
            batch = batch_of("spread")
            right = is_right(send(exchange, batch, rank), batch, rank)
            exchange.check_faults()
            return exchange.config.exchange, lines(tried), right

        return run_ranks(size, fn, timeout_s=LIMIT_S)

    def chosen(self) -> tuple[str, list[str]]:
        """The same on every rank, and what it says; the exchange that was kept works."""
        results = self.run()
        assert all(result == results[0] for result in results)
        mode, said, right = results[0]
        assert right
        return mode, said


@pytest.fixture
def contest(world):
    return Contest(world)


def test_the_fastest_of_those_that_pass_is_kept_and_all_times_are_said(contest, world):
    mode, said = contest.chosen()
    assert mode == "nccl_ep"
    assert said == [
        "exchange: nccl_ep, the fastest that passed its self-test; a round on the slowest rank: "
        "bounded 300 us, nccl_ep 100 us, symmetric 200 us"
    ]
    assert [mode for rank, mode in contest.built if rank == 0] == [*MODES, "nccl_ep"]


def test_a_slow_one_is_tried_and_not_kept_whichever_rank_is_slow_with_it(contest):
    contest.us[2]["nccl_ep"] = 250.0
    mode, said = contest.chosen()
    assert mode == "symmetric"
    assert "bounded 300 us, nccl_ep 250 us, symmetric 200 us" in said[0]


def test_of_equals_the_first_is_kept(contest):
    for rank in range(4):
        contest.us[rank] = dict.fromkeys(US, 7.0)
    assert contest.chosen()[0] == "bounded"


@pytest.mark.parametrize("name", ["nccl_ep", "symmetric"])
def test_one_that_raises_in_its_self_test_is_dropped_and_the_warning_says_why(contest, name, world):
    def fail(rank, call):
        raise RuntimeError(f"{call}: no such kernel")

    contest.back_ends[name].before = fail
    mode, said = contest.chosen()
    assert mode == ("symmetric" if name == "nccl_ep" else "nccl_ep")
    call = "dispatch" if name == "nccl_ep" else "all_to_all_vdev"
    assert said[1:] == [f"warning: exchange {name} is not used: RuntimeError: {call}: no such kernel (rank 0)"]
    assert name not in said[0]


@pytest.mark.parametrize("name", ["nccl_ep", "symmetric"])
def test_one_that_brings_wrong_rows_is_dropped_by_all(contest, name):
    def spoil(rank, landed):
        if rank == 3:
            landed.view(torch.uint8)[..., -64:] ^= 0x40

    contest.back_ends[name].spoil = spoil
    mode, said = contest.chosen()
    assert mode != name
    [warning] = said[1:]
    assert re.search(
        rf"^warning: exchange {name} is not used: SelfTestFailed: .* pattern 'spread': .*rank \d\)$", warning
    )


def test_one_that_a_single_rank_lacks_is_not_even_built(contest):
    contest.lacks[1]["nccl_ep"] = "the package nccl-extensions is not installed"
    mode, said = contest.chosen()
    assert mode == "symmetric"
    assert said[1:] == ["warning: exchange nccl_ep is not used: the package nccl-extensions is not installed (rank 1)"]
    assert {mode for _, mode in contest.built} == {"bounded", "symmetric"}


def test_one_that_a_single_rank_cannot_record_is_dropped_by_all_after_its_self_test(contest):
    contest.untimed["nccl_ep"] = "operation not permitted when stream is capturing"
    mode, said = contest.chosen()
    assert mode == "symmetric"
    assert said[1].endswith("stream is capturing (rank 2)")


def test_what_was_dropped_or_beaten_has_given_back_what_it_held(contest, world):
    contest.us[0]["nccl_ep"] = 1000.0
    assert contest.chosen()[0] == "symmetric"
    assert world.alive == []


def test_when_nothing_passes_the_start_fails_with_every_reason(contest):
    contest.lacks[0] = {"bounded": "no NCCL", "nccl_ep": "no package", "symmetric": "no heap"}
    with pytest.raises(TransportError, match=r"no way .*bounded: no NCCL \(rank 0\); nccl_ep: no package .*no heap"):
        contest.run()


def test_a_long_reason_is_cut_where_it_can_be_and_told_on_one_line(contest):
    contest.untimed["symmetric"] = "first line\n" + "x" * 1000 + "é"
    _, said = contest.chosen()
    assert "RuntimeError: first line xxx" in said[1]
    assert len(said[1]) < 320


def test_ways_by_node_are_told_as_such():
    config = ExchangeConfig(exchange="bounded", hierarchical="on")
    assert lines([Tried(config=config, us=12.4)]) == [
        "exchange: bounded by node, the fastest that passed its self-test; a round on the slowest rank: "
        "bounded by node 12 us"
    ]
