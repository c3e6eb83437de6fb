"""Blocks of a fixed size: nothing is read by the host, what nobody sent does no harm, what does not fit is told."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ep import CapacityPlan, Kind, Pending, Tag, TagMismatch, Terms, Topology, run_ranks
from ep.clock import ON_DEVICE, StepClock
from ep.conformance import exchange_batch, expert, make_batch
from ep.reference import dense_combine

LIMIT_S = 20
SIZES = {"num_slots": 8, "hidden": 6, "top_k": 3}
TAG = Tag(0, 0, 0, 0, Kind.CHECK)
WAYS = [(hierarchical, combine) for hierarchical in ("off", "on") for combine in ("ranks", "slots")]


def bounded(make, transport, way, *, places=1 << 20, back=None, **more):
    """4 ranks on 2 nodes, unless told otherwise."""
    hierarchical, combine = way
    back = (back or places) if combine == "slots" else None
    plan = CapacityPlan.fixed(places, num_hops=2 if hierarchical == "on" else 1, combine=back)
    more = {"node_size": 2, "plan": plan, "round_tokens": 16} | SIZES | more
    return make(transport, exchange="bounded", hierarchical=hierarchical, combine=combine, **more)


def batch_of(routing: str, seed: int = 0):
    return make_batch(routing, num_ranks=4, node_size=2, dtype=torch.float64, seed=seed, **SIZES)


def send(exchange, batch, rank: int, *, step: int = 0, terms: Terms | None = None) -> torch.Tensor:
    """One round there and back, with nothing checked."""
    own, tag = batch.own(rank), TAG._replace(step=step)
    inputs = batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own]
    arrivals = exchange.dispatch(*inputs, tag=tag, terms=terms or Terms(bucket=12)).wait()
    y = expert(arrivals.x_ND[arrivals.rows_M], arrivals.slots_M + rank * exchange.slots_per_rank)
    return exchange.combine(y, arrivals, tag=tag).wait()


def truth_of(batch, rank: int) -> torch.Tensor:
    own = batch.own(rank)
    return dense_combine(batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own], expert)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x01])
def test_what_lay_in_the_buffers_before_does_no_harm(make, way, byte):
    """NaNs, huge numbers and slots that exist: in places without a row nothing of it is computed, added or sent on."""

    def fn(transport):
        exchange = bounded(make, transport, way)
        results = []
        for step, routing in enumerate(("spread", "masked", "one slot")):
            for hop in exchange._tracks[0][1]:
                hop._buffers.out.fill_(byte)
                hop._buffers.into.fill_(byte)
            batch = batch_of(routing)
            out = exchange_batch(
                exchange, batch, rank=transport.rank, step=step, topology=Topology(num_ranks=4, node_size=2)
            )
            results.append(torch.allclose(out, truth_of(batch, transport.rank), rtol=0, atol=1e-12))
        return results, bool(exchange.take_overflow())

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [([True] * 3, False)] * 4


class Reads(TorchDispatchMode):
    """Notes every operation by which the host would have to wait for a device, on the rank that it is entered on."""

    OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "unique", "repeat_interleave")

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self.pauses = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if not self.pauses and (
            any(name.startswith(each) for each in self.OPERATIONS)
            or any(index is not None and index.dtype is torch.bool for index in indices)
        ):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Unwatched:
    """A transport whose own reads are not noted: what it does with rows is its business."""

    def __init__(self, inner, reads: Reads):
        self.rank, self.size = inner.rank, inner.size
        self._inner, self._reads = inner, reads

    def all_to_all(self, recv, send, **how):
        pending = self._unwatched(lambda: self._inner.all_to_all(recv, send, **how))
        return Pending(lambda: self._unwatched(pending.wait))

    def _unwatched(self, call):
        self._reads.pauses += 1
        value = call()
        self._reads.pauses -= 1
        return value


@pytest.mark.parametrize("exchange_mode", ["bounded", "exact"])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_between_dispatch_and_combine_the_host_reads_nothing(make, way, exchange_mode, monkeypatch):
    """The pairs apart, which are for the bank. The same watch sees an exact exchange read."""
    batch = batch_of("spread")
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: self.flatten().nonzero() is None or self.numpy().tolist())

    def fn(transport):
        rank = transport.rank
        reads, terms = Reads(), Terms(bucket=12, exact=exchange_mode == "exact")
        exchange = bounded(make, Unwatched(transport, reads), way)
        own = batch.own(rank)
        inputs = batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own]
        with reads:
            arrivals = exchange.dispatch(*inputs, tag=TAG, terms=terms).wait()
        y = expert(arrivals.x_ND[arrivals.rows_M], arrivals.slots_M + rank * exchange.slots_per_rank)
        with reads:
            out = exchange.combine(y, arrivals, tag=TAG).wait()
            exchange.take_overflow()
        return torch.allclose(out, truth_of(batch, rank), rtol=0, atol=1e-12), reads.found == []

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [(True, exchange_mode == "bounded")] * 4


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("places", [1, 2, 5])
def test_what_does_not_fit_raises_the_flag_and_the_step_can_be_run_again(make, way, places):
    """Some rank tells; a rank whose rows all fitted need not. Exact, right after, brings the dense sum."""

    def fn(transport):
        exchange = bounded(make, transport, way, places=places)
        batch = batch_of("spread")
        assert exchange.may_overflow
        assert not exchange.take_overflow()
        spoilt = send(exchange, batch, transport.rank)
        told = bool(exchange.take_overflow()), bool(exchange.take_overflow())
        again = send(exchange, batch, transport.rank, step=1, terms=Terms(bucket=12, exact=True))
        assert not exchange.take_overflow()
        truth = truth_of(batch, transport.rank)
        assert torch.allclose(again, truth, rtol=0, atol=1e-12)
        return told, torch.allclose(spoilt, truth, rtol=0, atol=1e-12), bool(spoilt.isfinite().all())

    found = run_ranks(4, fn, timeout_s=LIMIT_S)
    assert any(first for (first, _), _, _ in found)
    assert not any(second for (_, second), _, _ in found)
    assert not all(right for _, right, _ in found)
    assert all(finite for _, _, finite in found)


@pytest.mark.parametrize("way", [("off", "slots"), ("on", "slots")], ids="-".join)
def test_pairs_that_do_not_fit_on_the_way_back_are_told_too(make, way):
    """The way there has room for everything, so only the way back can tell."""

    def fn(transport):
        exchange = bounded(make, transport, way, back=2)
        send(exchange, batch_of("spread"), transport.rank)
        return bool(exchange.take_overflow())

    assert any(run_ranks(4, fn, timeout_s=LIMIT_S))


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_rows_that_just_fit_raise_no_flag_and_one_place_less_does(make, way):
    """All 9 tokens of rank 1 to one slot of rank 3: the fullest block has 9 rows, 27 pairs."""
    batch = batch_of("one slot")

    def flags(transport, places, back):
        exchange = bounded(make, transport, way, places=places, back=back)
        out = send(exchange, batch, transport.rank)
        right = torch.allclose(out, truth_of(batch, transport.rank), rtol=0, atol=1e-12)
        return bool(exchange.take_overflow()), right

    counts = batch.num_tokens_R
    both = [counts[0] + counts[2], counts[1] + counts[3]]  # inside the node a gateway has the rows of two sources
    enough = max(both) if way[0] == "on" else max(counts)
    assert run_ranks(4, lambda t: flags(t, enough, 3 * enough), timeout_s=LIMIT_S) == [(False, True)] * 4
    assert any(flag for flag, _ in run_ranks(4, lambda t: flags(t, enough - 1, 3 * enough), timeout_s=LIMIT_S))
    if way[1] == "slots":
        assert any(flag for flag, _ in run_ranks(4, lambda t: flags(t, enough, 3 * enough - 1), timeout_s=LIMIT_S))


def test_a_level_adds_a_quarter_until_everything_fits(make):
    batch = batch_of("one slot")

    def fn(transport):
        exchange = bounded(make, transport, ("off", "ranks"), places=8)
        flags = []
        for level in range(3):  # 8, 10, 12 places for at most 9 or 11 rows
            send(exchange, batch, transport.rank, step=level, terms=Terms(bucket=12, level=level))
            flags.append(bool(exchange.take_overflow()))
        return flags

    found = run_ranks(4, fn, timeout_s=LIMIT_S)
    most = max(batch.num_tokens_R)
    assert [any(rank[level] for rank in found) for level in range(3)] == [most > 8, most > 10, most > 12]
    assert most > 8


def test_inside_one_node_nothing_can_overflow_in_mode_ranks(make):
    def fn(transport):
        exchange = make(transport, exchange="bounded", round_tokens=16, **SIZES)
        batch = batch_of("one rank")
        right = torch.allclose(send(exchange, batch, transport.rank), truth_of(batch, transport.rank), atol=1e-12)
        return exchange.may_overflow, exchange.take_overflow(), right

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [(False, None, True)] * 4


def test_exact_exchanges_never_overflow(make):
    def fn(transport):
        exchange = make(transport, **SIZES)
        return exchange.may_overflow, exchange.take_overflow()

    assert run_ranks(2, fn, timeout_s=LIMIT_S) == [(False, None)] * 2


class Blind:
    """A transport that compares no tags: it shows the group the same one always."""

    def __init__(self, inner):
        self.rank, self.size = inner.rank, inner.size
        self._inner = inner

    def all_to_all(self, recv, send, *, recv_splits, send_splits, tag):
        return self._inner.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=TAG)


@pytest.mark.parametrize("kind", [Kind.DISPATCH, Kind.COMBINE])
def test_blocks_of_a_rank_out_of_step_are_found_when_somebody_looks(make, kind):
    """On a transport that does not compare tags itself. Rank 2 is at another layer, in dispatch or in combine alone."""

    def fn(transport):
        exchange = bounded(make, Blind(transport), ("off", "ranks"))
        batch = batch_of("spread")
        own = batch.own(transport.rank)
        inputs = batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own]
        wrong = TAG._replace(layer=int(transport.rank == 2))
        tags = (wrong, wrong) if kind is Kind.DISPATCH else (TAG, wrong)
        arrivals = exchange.dispatch(*inputs, tag=tags[0], terms=Terms(bucket=12)).wait()
        if kind is Kind.COMBINE:
            exchange.check_faults()
        y = torch.zeros(arrivals.rows_M.shape[0], 6, dtype=torch.float64)
        exchange.combine(y, arrivals, tag=tags[1]).wait()
        with pytest.raises(TagMismatch) as raised:
            exchange.check_faults()
        return raised.value

    for rank, error in enumerate(run_ranks(4, fn, timeout_s=LIMIT_S)):
        assert (error.culprit, error.rank) == (2, rank)
        assert (error.expected.layer, error.found.layer, error.found.kind) == (0, 1, kind)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("late", [None, 2])
def test_a_replay_of_a_recorded_exchange_names_who_is_a_step_behind(make, way, late):
    """What is recorded is a closure that knows no step: it runs again and again, and only the clock is set between."""

    def fn(transport):
        exchange, rank = bounded(make, transport, way), transport.rank
        batch = batch_of("spread")
        send(exchange, batch, rank, step=4)  # the warm-up

        def replay() -> torch.Tensor:
            return send(exchange, batch, rank, step=ON_DEVICE)

        flags = []
        for step in (5, 6, 7):
            exchange.set_step(step - int(rank == late and step == 6))
            found = replay()
            flags.append(exchange.fault())
        assert torch.allclose(found, truth_of(batch, rank), atol=1e-12)
        try:
            exchange.check_faults()
        except TagMismatch as error:
            return [bool(flag) for flag in flags], error
        return [bool(flag) for flag in flags], None

    results = run_ranks(4, fn, timeout_s=LIMIT_S)
    if late is None:
        assert results == [([False] * 3, None)] * 4
        return
    for rank, (flags, error) in enumerate(results):
        if way[0] == "on" and rank == 1:
            assert error is None  # exchanges rows with ranks 0 and 3 alone
            continue
        assert flags == [False, True, True]
        assert {error.expected.step, error.found.step} == {6, 5}
        # Of two that differ the higher rank is blamed; among four the one that is alone.
        assert error.culprit == late or (way[0] == "on" and error.culprit == max(rank, late))


@pytest.mark.parametrize("combine", ["ranks", "slots"])
def test_rows_on_their_way_back_say_their_step_too(make, combine):
    def fn(transport):
        exchange, rank = bounded(make, transport, ("off", combine)), transport.rank
        batch, tag = batch_of("spread"), TAG._replace(step=ON_DEVICE)
        own = batch.own(rank)
        exchange.set_step(6)
        inputs = batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own]
        arrivals = exchange.dispatch(*inputs, tag=tag, terms=Terms(bucket=12)).wait()
        exchange.set_step(5 if rank == 2 else 6)
        y = torch.zeros(arrivals.rows_M.shape[0], 6, dtype=torch.float64)
        exchange.combine(y, arrivals, tag=tag).wait()
        with pytest.raises(TagMismatch) as raised:
            exchange.check_faults()
        return raised.value.culprit, raised.value.expected.step, raised.value.found

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [(2, 6, Tag(5, 0, 0, 0, Kind.COMBINE))] * 4


def test_an_exact_exchange_has_no_fault_to_tell(make):
    assert make(_Alone(), exchange="exact", hierarchical="off", **SIZES | {"round_tokens": 16}).fault() is None


def test_a_clock_copies_nothing_from_the_host_once_a_tag_is_known():
    clock, tag = StepClock("cpu"), Tag(7, 1, 0, 2, Kind.COMBINE)
    assert clock.words(tag).tolist() == [7, 1, 0, 2, Kind.COMBINE]
    with _Watch() as watch:
        clock.set(8)
        assert watch.names == ["aten.fill_.Scalar"]
        words = clock.words(tag._replace(step=ON_DEVICE))
        clock.set(8)
    assert watch.names == ["aten.fill_.Scalar", "aten.cat.default"]
    assert words.tolist() == [8, 1, 0, 2, Kind.COMBINE]


class _Alone:
    rank, size = 0, 1


class _Watch(TorchDispatchMode):
    """The names of what is computed."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_counts_of_each_source_stay_on_the_device_and_are_true(make):
    def fn(transport):
        exchange = bounded(make, transport, ("off", "ranks"))
        batch = batch_of("spread")
        own = batch.own(transport.rank)
        inputs = batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own]
        arrivals = exchange.dispatch(*inputs, tag=TAG, terms=Terms(bucket=12)).wait()
        [(_, trail)] = arrivals.handle.legs
        here_G = (batch.slots_GK // exchange.slots_per_rank == transport.rank).any(1)
        expected = torch.bincount(batch.source_G[here_G], minlength=4).tolist()
        exchange.combine(torch.zeros(arrivals.rows_M.shape[0], 6, dtype=torch.float64), arrivals, tag=TAG).wait()
        return trail.counts_R.tolist() == expected

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [True] * 4


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("tokens", [1, 12, 30])
def test_as_many_rows_land_as_the_blueprint_says(make, way, tokens):
    def fn(transport):
        exchange = bounded(make, transport, way, places=5)
        none = torch.zeros(0, 6, dtype=torch.float64), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3).double()
        arrivals = exchange.dispatch(*none, tag=TAG, terms=Terms(bucket=min(tokens, 16))).wait()
        return arrivals.slots_NK.shape[0], exchange._blueprint.landing(tokens)

    for landed, said in run_ranks(4, fn, timeout_s=LIMIT_S):
        assert landed == said
