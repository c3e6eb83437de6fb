"""An exchange whose own work is done by Triton's kernels, in the interpreter, is the same exchange."""

import sys

import pytest
import torch

from ep import CapacityPlan, Exchange, ExchangeConfig, Kind, Tag, Terms, Topology, exchange_ops, run_ranks
from ep.conformance import check_exchange, expert, make_batch
from ep.reference import dense_combine
from ep.rows import Fp8Codec

LIMIT_S = 60
MODES = [
    ("exact", "off", "ranks"),
    ("exact", "on", "slots"),
    ("bounded", "off", "ranks"),
    ("bounded", "on", "ranks"),
    ("bounded", "on", "slots"),
]


def plan_of(mode: tuple[str, str, str], places: int) -> CapacityPlan | None:
    exchange, hierarchical, combine = mode
    if exchange == "exact":
        return None
    back = places if combine == "slots" else None
    return CapacityPlan.fixed(places, num_hops=2 if hierarchical == "on" else 1, combine=back)


def config_of(mode: tuple[str, str, str], **more) -> ExchangeConfig:
    exchange, hierarchical, combine = mode
    return ExchangeConfig(exchange=exchange, hierarchical=hierarchical, combine=combine, round_tokens=16, **more)


@pytest.mark.interpret
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_all_modes_pass_what_any_exchange_must(mode):
    def fn(transport):
        how = {"dtype": torch.float64, "plan": plan_of(mode, 1 << 20), "top_ks": (4,), "slots_per_rank": 2}
        routings = ("masked", "one slot")
        ops = exchange_ops("triton")
        check_exchange(transport, config=config_of(mode), node_size=2, routings=routings, repeats=1, ops=ops, **how)

    run_ranks(4, fn, timeout_s=LIMIT_S)


@pytest.mark.interpret
@pytest.mark.parametrize("dispatch_dtype", ["run", "fp8"])
def test_rows_of_bfloat16_arrive_and_return_as_with_torch(dispatch_dtype):
    batch = make_batch("spread", num_ranks=2, num_slots=6, hidden=136, top_k=3, dtype=torch.bfloat16, node_size=2)

    def fn(transport):
        found = []
        for name in ("reference", "triton"):
            exchange = Exchange(
                transport, num_slots=6, hidden=136, top_k=3, dtype=torch.bfloat16, device="cpu",
                config=config_of(("bounded", "off", "ranks"), dispatch_dtype=dispatch_dtype),
                plan=plan_of(("bounded", "off", "ranks"), 16), ops=exchange_ops(name),
            )  # fmt: skip
            found.append(there_and_back(exchange, batch, transport.rank, Terms(bucket=12)))
        return all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    assert run_ranks(2, fn, timeout_s=LIMIT_S) == [True, True]


@pytest.mark.interpret
@pytest.mark.parametrize("mode", MODES[2:], ids="-".join)
def test_what_does_not_fit_is_told_and_the_step_can_be_run_again(mode):
    """Blocks of one place; what lay in the buffers before is NaN. The second run is exact; two more have room."""
    sizes = {"num_slots": 8, "hidden": 6, "top_k": 3}
    batch = make_batch("spread", num_ranks=4, node_size=2, dtype=torch.float64, **sizes)

    def fn(transport):
        rank, topology = transport.rank, Topology(num_ranks=4, node_size=2)
        own = batch.own(rank)
        truth = dense_combine(batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own], expert)
        told, right = [], []
        for places in (1, 1 << 20):
            exchange = Exchange(
                transport, dtype=torch.float64, device="cpu", config=config_of(mode), topology=topology,
                plan=plan_of(mode, places), ops=exchange_ops("triton"), **sizes,
            )  # fmt: skip
            for hop in exchange._tracks[0][1]:
                hop._buffers.out.fill_(0xFF)
                hop._buffers.into.fill_(0xFF)
            for exact in (False, True):
                _, out = there_and_back(exchange, batch, rank, Terms(bucket=12, exact=exact))
                told.append(bool(exchange.take_overflow()))
                right.append(torch.allclose(out, truth, rtol=0, atol=1e-12))
        return told, right

    results = run_ranks(4, fn, timeout_s=LIMIT_S)
    assert any(told[0] for told, _ in results), "some rank tells"
    assert [told[1:] for told, _ in results] == [[False] * 3] * 4
    assert [right[1:] for _, right in results] == [[True] * 3] * 4
    assert not all(right[0] for _, right in results), "something was left behind"


def there_and_back(exchange, batch, rank, terms):
    """(the rows that arrived, the sums that came back) of one round."""
    own, tag = batch.own(rank), Tag(0, 0, 0, 0, Kind.CHECK)
    arrivals = exchange.dispatch(
        batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own], tag=tag, terms=terms
    ).wait()
    rows = arrivals.x_ND[arrivals.rows_M].clone()
    y = expert(rows, arrivals.slots_M + rank * exchange.slots_per_rank)
    return rows, exchange.combine(y.to(rows.dtype), arrivals, tag=tag).wait()


@pytest.mark.interpret
@pytest.mark.parametrize("hidden", [1, 130, 256])
def test_fp8_rows_travel_in_the_same_bytes(hidden):
    codec = Fp8Codec(hidden, torch.bfloat16)
    x_TD = torch.randn(5, hidden, generator=torch.Generator().manual_seed(hidden)).bfloat16()
    words = torch.uint8
    ours, theirs = (exchange_ops(name).encode(codec, x_TD, words) for name in ("triton", "reference"))
    assert torch.equal(ours, theirs)


def test_without_triton_the_reader_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("ep.") and "kernel" in name]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"pip install 'serried\[gpu\]', or choose reference"):
        exchange_ops("triton")
    exchange_ops("reference")
