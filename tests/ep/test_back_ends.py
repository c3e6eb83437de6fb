"""What carries rows instead of the transport: the same checks as every exchange, over libraries that pretend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch

from ep import Exchange, ExchangeConfig, Kind, Tag, TagMismatch, Terms, run_ranks
from ep.back_ends import MAKERS, opener, refusal
from ep.blueprint import Blueprint
from ep.clock import ON_DEVICE
from ep.conformance import check_exchange, exchange_batch, expert, make_batch
from ep.lanes import NoLanes
from ep.nccl_ep import NcclEp
from ep.parts import BackEnd
from ep.reference import dense_combine
from ep.selftest import SelfTestFailed, self_test
from ep.symmetric import Symmetric
from ep.symmetric_hop import row_align
from ep.topology import Topology
from tests.ep.pretend_nccl_ep import World
from tests.ep.pretend_symmetric import Heap
from tests.ep.test_bounded import Reads

LIMIT_S = 60
NAMES = tuple(MAKERS)
CPU = torch.device("cpu")
HIDDEN = 512
TAG = Tag(0, 0, 0, 0, Kind.CHECK)
ROUTINGS = ("spread", "one slot", "one rank", "masked", "idle", "silent")


class Pretended:
    """One back end over its pretended library: `opener` is what an Exchange takes."""

    def __init__(self, name: str, world: World):
        self.name = name
        self.world = world
        self.memory: dict[int, list[torch.Tensor]] = {}
        self.entered: dict[int, tuple[int, int]] = {}
        self.heaps: dict[int, Heap] = {}
        self.spoil = self.before = None

    def opener(self, transport) -> Callable[[Blueprint], BackEnd | None]:
        self.world.transports[transport.rank] = transport
        self.world.spoil, self.world.before = self.spoil, self.before
        if self.name == "nccl_ep":
            return opener(transport, lanes=NoLanes(CPU), device=CPU)
        self.memory.pop(transport.rank, None)
        self.entered.pop(transport.rank, None)
        heap = Heap(transport, self.memory, self.entered, spoil=self.spoil, before=self.before)
        self.heaps[transport.rank] = heap
        make = partial(Symmetric, transport, lanes=NoLanes(CPU), device=CPU, memory=heap)
        return lambda blueprint: make(blueprint) if blueprint.config.exchange == self.name else None

    def end_of_reading(self, transport) -> None:
        """All have read what they were sent: buffers may be written."""
        transport.all_gather(torch.zeros(1), tag=TAG).wait()
        if transport.rank in self.heaps:
            self.heaps[transport.rank].reads.clear()

    def exchange(self, transport, *, num_tracks: int = 1, around=None, **settings) -> Exchange:
        settings = {"num_slots": 8, "hidden": HIDDEN, "top_k": 3, "dtype": torch.float32} | settings
        config = {"round_tokens": 12, "hierarchical": "off"} | settings.pop("config", {})
        return Exchange(
            around or transport,
            device="cpu",
            config=ExchangeConfig(exchange=self.name, **config),
            num_tracks=num_tracks,
            back_end=self.opener(transport),
            **settings,
        )


@pytest.fixture(params=NAMES)
def pretended(request, monkeypatch) -> Pretended:
    world = World()
    for name, module in world.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return Pretended(request.param, world)


def batch_of(routing: str, *, dtype=torch.float32, seed: int = 0):
    return make_batch(routing, num_ranks=4, num_slots=8, hidden=HIDDEN, top_k=3, dtype=dtype, seed=seed)


def send(exchange: Exchange, batch, rank: int, *, tags: tuple[Tag, Tag] = (TAG, TAG)) -> torch.Tensor:
    own = batch.own(rank)
    inputs = batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own]
    arrivals = exchange.dispatch(*inputs, tag=tags[0], terms=Terms(bucket=12)).wait()
    y = expert(arrivals.x_ND[arrivals.rows_M], arrivals.slots_M + rank * exchange.slots_per_rank)
    return exchange.combine(y, arrivals, tag=tags[1]).wait()


def is_right(found: torch.Tensor, batch, rank: int) -> bool:
    own = batch.own(rank)
    truth = dense_combine(batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own], expert)
    return torch.allclose(found.double(), truth, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("round_tokens", [12, 5])
def test_every_number_of_ranks_equals_the_dense_sum_in_one_round_and_in_several(pretended, size, round_tokens):
    config = ExchangeConfig(exchange=pretended.name, hierarchical="off", round_tokens=round_tokens)

    def fn(transport):
        check_exchange(
            transport,
            config=config,
            dtype=torch.float32,
            hidden=HIDDEN,
            top_ks=(1, 4),
            slots_per_rank=2,
            routings=ROUTINGS,
            back_end=pretended.opener(transport),
            in_order=False,
        )

    run_ranks(size, fn, timeout_s=LIMIT_S)
    assert pretended.world.alive == []


@pytest.mark.parametrize("wire", ["run", "float32"])
@pytest.mark.parametrize("rows", ["run", "fp8"])
def test_bf16_and_fp8_rows_arrive_as_they_were_sent_and_repeat_bit_for_bit(pretended, rows, wire):
    config = ExchangeConfig(
        exchange=pretended.name, hierarchical="off", round_tokens=12, dispatch_dtype=rows, combine_dtype=wire
    )

    def fn(transport):
        check_exchange(
            transport,
            config=config,
            dtype=torch.bfloat16,
            hidden=HIDDEN,
            top_ks=(3,),
            routings=("spread", "one slot", "masked"),
            repeats=5,
            back_end=pretended.opener(transport),
            in_order=False,
        )

    run_ranks(4, fn, timeout_s=LIMIT_S)


@pytest.mark.parametrize("dtypes", [(torch.float32, "run"), (torch.bfloat16, "fp8")], ids=str)
def test_it_passes_the_self_test(pretended, dtypes):
    def fn(transport):
        settings = {"num_slots": 12, "dtype": dtypes[0], "config": {"round_tokens": 2, "dispatch_dtype": dtypes[1]}}
        self_test(pretended.exchange(transport, **settings))

    run_ranks(4, fn, timeout_s=LIMIT_S)


@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x01])
def test_what_lay_in_the_buffers_before_does_no_harm(pretended, byte):
    """NaNs, huge numbers and slots that exist, also where headers are, before the way there and before the way back."""

    def fn(transport):
        exchange, found = pretended.exchange(transport), []
        [hop] = exchange._tracks[0][1]
        for step, routing in enumerate(("spread", "masked", "one slot", "silent")):
            pretended.end_of_reading(transport)
            hop._buffers.out.fill_(byte)
            hop._buffers.into.fill_(byte)
            batch = batch_of(routing)
            out = exchange_batch(exchange, batch, rank=transport.rank, step=step, in_order=False)
            found.append(is_right(out, batch, transport.rank))
        exchange.check_faults()
        return found

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [[True] * 4] * 4


def test_between_dispatch_and_combine_the_host_reads_nothing(pretended):
    batch = batch_of("spread")

    def fn(transport):
        rank, reads = transport.rank, Reads()
        exchange = pretended.exchange(transport)
        own = batch.own(rank)
        inputs = batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own]
        with reads:
            arrivals = exchange.dispatch(*inputs, tag=TAG, terms=Terms(bucket=12)).wait()
        y = expert(arrivals.x_ND[arrivals.rows_M], arrivals.slots_M + rank * exchange.slots_per_rank)
        with reads:
            out = exchange.combine(y, arrivals, tag=TAG).wait()
        return is_right(out, batch, rank), reads.found

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [(True, [])] * 4


@pytest.mark.parametrize("kind", [Kind.DISPATCH, Kind.COMBINE])
@pytest.mark.parametrize("routing", ["spread", "one slot", "silent"])
def test_a_rank_out_of_step_is_found_and_named_whoever_sends_rows_to_whom(pretended, kind, routing):
    """Rank 2 is at another layer, in dispatch and combine or in combine alone; headers go to those who get no row."""

    def fn(transport):
        exchange, rank = pretended.exchange(transport), transport.rank
        wrong = TAG._replace(layer=int(rank == 2))
        send(exchange, batch_of(routing), rank, tags=(wrong, wrong) if kind is Kind.DISPATCH else (TAG, wrong))
        assert bool(exchange.fault())
        with pytest.raises(TagMismatch) as raised:
            exchange.check_faults()
        return raised.value

    for rank, error in enumerate(run_ranks(4, fn, timeout_s=LIMIT_S)):
        assert (error.culprit, error.rank) == (2, rank)
        assert (error.expected.layer, error.found.layer, error.found.kind) == (0, 1, kind)


def test_a_rank_out_of_step_is_named_though_its_step_is_larger(pretended):
    """Rank 2 brings 12 tokens where the others have room for one each: its blocks begin past all places of theirs."""

    def fn(transport):
        exchange, rank = pretended.exchange(transport), transport.rank
        num_tokens, tag = (12, TAG._replace(step=1)) if rank == 2 else (1, TAG)
        x_TD = torch.randn(num_tokens, HIDDEN)
        slots_TK = torch.tensor([[0, 2, 4]]).repeat(num_tokens, 1)
        weights_TK, terms = torch.ones(num_tokens, 3), Terms(bucket=num_tokens)
        arrivals = exchange.dispatch(x_TD, slots_TK, weights_TK, tag=tag, terms=terms).wait()
        y = expert(arrivals.x_ND[arrivals.rows_M], arrivals.slots_M + rank * exchange.slots_per_rank)
        exchange.combine(y, arrivals, tag=tag).wait()
        with pytest.raises(TagMismatch) as raised:
            exchange.check_faults()
        return raised.value.culprit

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [2] * 4


@pytest.mark.parametrize("late", [None, 2])
def test_a_replay_names_who_is_a_step_behind(pretended, late):
    def fn(transport):
        exchange, rank, batch = pretended.exchange(transport), transport.rank, batch_of("spread")
        now = TAG._replace(step=ON_DEVICE)
        flags = []
        for step in (1 << 40, (1 << 40) + 1, (1 << 40) + 2):
            exchange.set_step(step - int(rank == late and step == (1 << 40) + 1))
            found = send(exchange, batch, rank, tags=(now, now))
            flags.append(bool(exchange.fault()))
        return flags, is_right(found, batch, rank)

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [([False, late is not None, late is not None], True)] * 4


def test_two_tracks_in_flight_at_once_keep_their_rows_apart(pretended):
    def fn(transport):
        rank, batches = transport.rank, [batch_of("spread", seed=seed) for seed in (1, 2)]
        exchange, found = pretended.exchange(transport, num_tracks=2), []
        for step in range(3):
            tags = [Tag(step, 0, track, 0, Kind.CHECK) for track in (0, 1)]
            started = []
            for batch, tag in zip(batches, tags, strict=True):
                own = batch.own(rank)
                inputs = batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own]
                started.append(exchange.dispatch(*inputs, tag=tag, terms=Terms(bucket=12)))
            back = []
            for pending, tag in zip(started, tags, strict=True):
                arrivals = pending.wait()
                y = expert(arrivals.x_ND[arrivals.rows_M], arrivals.slots_M + rank * exchange.slots_per_rank)
                back.append(exchange.combine(y, arrivals, tag=tag))
            found += [is_right(each.wait(), batch, rank) for each, batch in zip(back, batches, strict=True)]
        exchange.check_faults()
        return found

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [[True] * 6] * 4


def test_nothing_can_be_left_behind_and_a_step_may_still_ask_for_counts_first(pretended):
    """All 36 rows of a full bucket to one slot; then the exact hops of the same exchange, through the same buffers."""

    def fn(transport):
        exchange, rank = pretended.exchange(transport), transport.rank
        assert not exchange.may_overflow
        generator = torch.Generator().manual_seed(rank)
        x_TD = torch.randn(12, HIDDEN, generator=generator)
        slots_TK, weights_TK = torch.full((12, 3), 7), torch.rand(12, 3, generator=generator)
        found = []
        for exact in (False, True):
            terms = Terms(bucket=12, exact=exact)
            arrivals = exchange.dispatch(x_TD, slots_TK, weights_TK, tag=TAG, terms=terms).wait()
            y = expert(arrivals.x_ND[arrivals.rows_M], arrivals.slots_M + rank * exchange.slots_per_rank)
            found.append(exchange.combine(y, arrivals, tag=TAG).wait())
        return torch.allclose(found[0], found[1], atol=1e-5), exchange.take_overflow()

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [(True, None)] * 4


def test_rows_that_are_spoilt_on_the_way_fail_the_self_test(pretended):
    def spoil(rank, landed):
        if rank == 1:
            landed.view(torch.uint8)[..., -64:] ^= 0x40

    pretended.spoil = spoil

    def fn(transport):
        self_test(pretended.exchange(transport))

    with pytest.raises(SelfTestFailed, match=r"rank \d: self-test of the exchange, pattern 'spread'"):
        run_ranks(4, fn, timeout_s=LIMIT_S)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("field", "value", "legal"), [("combine", "slots", "ranks"), ("hierarchical", "on", "off")])
def test_ways_that_a_back_end_does_not_have_are_refused(name, field, value, legal):
    with pytest.raises(ValueError, match=rf"{field} = '{value}': with exchange {name} it must be {legal}"):
        ExchangeConfig(exchange=name, **{field: value})


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"hidden": 500}, r"hidden is 500; nccl_ep needs a multiple of 512, at most 16,384, e\.g\. 7168"),
        ({"hidden": 384, "combine_dtype": "float32"}, "hidden is 384; nccl_ep needs a multiple of 256"),
        ({"dtype": torch.float64}, "dtype is float64; nccl_ep adds up in float32"),
        ({"top_k": 33}, "top_k is 33; nccl_ep takes at most 32"),
        ({"num_slots": 1 << 16}, "num_slots is 65536; nccl_ep takes fewer than 65,536"),
    ],
)
def test_builds_that_the_library_does_not_serve_are_refused_before_anything_is_opened(change, rule):
    sizes = {"num_slots": 8, "hidden": 7168, "top_k": 8, "dtype": torch.bfloat16}
    config = ExchangeConfig(
        exchange="nccl_ep", hierarchical="off", round_tokens=4, combine_dtype=change.pop("combine_dtype", "run")
    )
    blueprint = Blueprint(topology=Topology(num_ranks=1, node_size=1), config=config, **sizes | change)
    with pytest.raises(ValueError, match=rule):
        opener(None, lanes=NoLanes(CPU), device=CPU)(blueprint)


def test_a_package_that_is_not_there_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl", None)
    blueprint = Blueprint(
        topology=Topology(num_ranks=1, node_size=1),
        config=ExchangeConfig(exchange="nccl_ep", hierarchical="off", round_tokens=4),
        num_slots=8, hidden=512, top_k=2, dtype=torch.bfloat16,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"needs the package nccl-extensions .*'serried\[cu12\]' or 'serried\[cu13\]'"):
        NcclEp(None, blueprint, lanes=NoLanes(CPU), device=CPU)


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu_they_are_refused_and_the_transports_own_modes_are_not(name):
    assert "device is cpu; e.g. exact" in refusal(name, "cpu")
    assert refusal("bounded", "cpu") is None
    assert refusal("exact", "cuda") is None


@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_what_is_missing_here_is_said_in_words(name):
    """Neither is installed where tests run: a CPU build of torch has no NVSHMEM."""
    words = {"nccl_ep": "nccl-extensions", "symmetric": "NVSHMEM|symmetric memory"}
    lacks = MAKERS[name].lacks()
    if lacks is None:
        pytest.skip(f"{name} can be used here")
    assert refusal(name, "cuda") == f"exchange is {name!r}, but {lacks}; or take bounded"
    assert any(word in lacks for word in words[name].split("|"))


@pytest.mark.parametrize("rows", ["run", "fp8"])
def test_the_bytes_that_are_planned_are_those_that_are_allocated(pretended, rows):
    def fn(transport):
        settings = {"dtype": torch.bfloat16, "config": {"dispatch_dtype": rows}}
        exchange = pretended.exchange(transport, **settings)
        [hop] = exchange._tracks[0][1]
        blueprint = exchange._blueprint
        assert [(hop._buffers.out.nbytes, hop._buffers.into.nbytes)] == blueprint.buffer_bytes
        return True

    assert run_ranks(2, fn, timeout_s=LIMIT_S) == [True] * 2


@pytest.mark.parametrize(("ranks", "align"), [(1, 64), (2, 32), (3, 1680), (4, 16), (8, 16), (12, 80), (32, 16)])
def test_rows_in_symmetric_memory_can_be_shared_evenly_by_the_blocks_that_fetch_them(ranks, align):
    assert row_align(ranks) == align
    config = ExchangeConfig(exchange="symmetric", hierarchical="off", round_tokens=128)
    blueprint = Blueprint(
        topology=Topology(num_ranks=ranks, node_size=ranks), config=config, num_slots=8 * ranks, hidden=7168,
        top_k=8, dtype=torch.bfloat16,
    )  # fmt: skip
    [spec] = blueprint.specs
    for width in (spec.row.num_bytes, spec.back.block_row_bytes):
        assert width % align == 0
        assert width >= 7168 * 2


@pytest.mark.parametrize("tokens", [1, 12, 30])
def test_as_many_rows_land_as_the_blueprint_says(pretended, tokens):
    def fn(transport):
        exchange, bucket = pretended.exchange(transport), min(tokens, 12)
        blueprint = Blueprint(
            topology=Topology(num_ranks=4, node_size=4), num_slots=8, hidden=HIDDEN, top_k=3, dtype=torch.float32,
            config=exchange.config,
        )  # fmt: skip
        none = torch.zeros(0, HIDDEN), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3)
        arrivals = exchange.dispatch(*none, tag=TAG, terms=Terms(bucket=bucket)).wait()
        return arrivals.slots_NK.shape[0], blueprint.landing(tokens)

    for landed, said in run_ranks(4, fn, timeout_s=LIMIT_S):
        assert landed == said
