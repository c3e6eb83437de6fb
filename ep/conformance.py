"""What any transport, and the exchange on top of it, must do. All ranks call the check together; it raises
AssertionError saying what differs. Contents follow from closed forms and seeds, so that every rank predicts every row
without being told.

Legend: R ranks, G tokens of all ranks in rank order, D model, K top-k, N rows received, L local slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from .batches import ROUTINGS, GlobalBatch, count_off, expert, make_batch
from .blueprint import Blueprint
from .capacity import CapacityPlan
from .config import ExchangeConfig
from .exchange import Arrivals, Exchange
from .ops import ExchangeOps
from .parts import BackEnd
from .reference import dense_combine
from .rows import CODECS, RowFormat
from .terms import Terms
from .topology import Topology
from .transport import Kind, Pending, Tag, Transport

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)

Splits = Callable[[int, int], int]
"""splits(source, destination) -> rows."""

PATTERNS: dict[str, Splits] = {
    "uniform": lambda _source, _destination: 3,
    "ragged": lambda source, destination: (5 * source + 3 * destination) % 4,
    "nothing": lambda _source, _destination: 0,
    "all to rank 0": lambda _source, destination: 7 if destination == 0 else 0,
    "all from rank 0": lambda source, _destination: 2 if source == 0 else 0,
    "to itself": lambda source, destination: source if source == destination else 0,
    "one long": lambda source, destination: 1000 if (source, destination) == (0, 0) else 1,
}


def same(found: Tensor, expected: Tensor, what: str) -> None:
    """AssertionError with the first place that differs, unless found equals expected bit for bit."""
    assert found.shape == expected.shape, f"{what}: shape {list(found.shape)}, expected {list(expected.shape)}"
    assert found.dtype is expected.dtype, f"{what}: {found.dtype}, expected {expected.dtype}"
    if not torch.equal(found, expected):
        place = tuple((found != expected).nonzero()[0].tolist())
        raise AssertionError(f"{what}: at {place} {found[place].item()}, expected {expected[place].item()}")


def check_transport(transport: Transport, *, device: torch.device | str = "cpu") -> None:
    """Put a transport through all that the exchange relies on. Takes some 40 exchanges."""
    tags = (Tag(step, 0, 0, 0, Kind.CHECK) for step in itertools.count())
    for name, splits in PATTERNS.items():
        _check_rows(transport, name, splits, (5,), torch.float32, device, tags)
    for dtype in DTYPES:
        _check_rows(transport, str(dtype), PATTERNS["ragged"], (5,), dtype, device, tags)
    for trailing in ((3,), (1, 3), (2, 2, 4)):
        _check_rows(transport, f"rows of {trailing}", PATTERNS["ragged"], trailing, torch.float32, device, tags)
    _check_gather(transport, device, tags)
    _check_in_flight(transport, device, tags)
    _check_reuse(transport, device, tags)


def _content(source: Tensor, destination: Tensor, row: Tensor, trailing: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Rows that tell where they come from, where they go and which they are; wide ones hold what would not survive
    being made narrower on the way."""
    extra = 2**40 if dtype is torch.int64 else 2.0**-40 if dtype is torch.float64 else 0
    columns = torch.stack([source, destination, row % 128], dim=1).to(dtype) + extra
    size = torch.Size(trailing).numel()
    return columns.repeat(1, -(-size // 3))[:, :size].reshape(-1, *trailing).contiguous()


def _start_rows(
    transport: Transport,
    splits: Splits,
    trailing: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    tag: Tag,
) -> tuple[Pending[Tensor], Tensor, Tensor]:
    """(pending, what should arrive, the send buffer)."""
    me, ranks = transport.rank, range(transport.size)
    destination, row = count_off([splits(me, rank) for rank in ranks], device)
    send = _content(torch.full_like(row, me), destination, row, trailing, dtype)
    source, row = count_off([splits(rank, me) for rank in ranks], device)
    expected = _content(source, torch.full_like(row, me), row, trailing, dtype)
    pending = transport.all_to_all(
        torch.full_like(expected, 99),
        send,
        recv_splits=[splits(rank, me) for rank in ranks],
        send_splits=[splits(me, rank) for rank in ranks],
        tag=tag,
    )
    return pending, expected, send


def _check_rows(
    transport: Transport,
    name: str,
    splits: Splits,
    trailing: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    tags: Iterator[Tag],
) -> None:
    pending, expected, _ = _start_rows(transport, splits, trailing, dtype, device, next(tags))
    same(pending.wait(), expected, f"all_to_all, {name}")


def _check_gather(transport: Transport, device: torch.device | str, tags: Iterator[Tag]) -> None:
    for shape in ((), (3,), (2, 5)):
        row = torch.full(shape, transport.rank, dtype=torch.int64, device=device)
        gathered = transport.all_gather(row, tag=next(tags)).wait()
        ranks = torch.arange(transport.size, device=device)
        expected = ranks.view(-1, *(1 for _ in shape)).expand(-1, *shape)
        same(gathered, expected, f"all_gather of {shape}")
        gathered.fill_(transport.rank)
        transport.all_gather(row, tag=next(tags)).wait()
        same(gathered, torch.full_like(gathered, transport.rank), "all_gather's value belongs to one rank alone")


def _check_in_flight(transport: Transport, device: torch.device | str, tags: Iterator[Tag]) -> None:
    """Several started before any is waited for; the last is waited for first, and twice."""
    names = ("ragged", "uniform", "nothing", "all to rank 0")
    started = [_start_rows(transport, PATTERNS[name], (4,), torch.float32, device, next(tags)) for name in names]
    for name, (pending, expected, _) in reversed(list(zip(names, started, strict=True))):
        same(pending.wait(), expected, f"several in flight, {name}")
        assert pending.wait() is pending.wait(), "a second wait returns the same tensor"


def _check_reuse(transport: Transport, device: torch.device | str, tags: Iterator[Tag]) -> None:
    """A send buffer is its owner's after wait(): what is written into it then arrives nowhere."""
    for _ in range(3):
        pending, expected, send = _start_rows(transport, PATTERNS["ragged"], (4,), torch.float32, device, next(tags))
        received = pending.wait()
        send.fill_(-1)
        transport.all_gather(torch.zeros(1, device=device), tag=next(tags)).wait()
        same(received, expected, "send buffer reused after wait")


def check_exchange(
    transport: Transport,
    *,
    config: ExchangeConfig,
    dtype: torch.dtype,
    node_size: int | None = None,
    plan: CapacityPlan | None = None,
    slots_per_rank: int = 3,
    hidden: int = 17,
    top_ks: Sequence[int] = (1, 3, 16),
    routings: Sequence[str] = ROUTINGS,
    repeats: int = 1,
    ops: ExchangeOps | None = None,
    back_end: Callable[[Blueprint], BackEnd | None] | None = None,
    in_order: bool = True,
) -> None:
    """Dispatch and combine of every routing, then again `repeats` times, against the prediction of what arrives and the
    dense sum. A bounded exchange has to have room for everything: in a plan that leaves nothing behind. in_order: rows
    of one source have to lie as they were sent; a back end may bring them in any order."""
    topology = Topology(num_ranks=transport.size, node_size=node_size or transport.size)
    steps = itertools.count()
    for top_k in top_ks:
        num_slots = slots_per_rank * transport.size
        exchange = Exchange(
            transport,
            num_slots=num_slots,
            hidden=hidden,
            top_k=top_k,
            dtype=dtype,
            device="cpu",
            config=config,
            topology=topology,
            plan=plan,
            ops=ops,
            back_end=back_end,
        )
        exchange_once = partial(exchange_batch, exchange, rank=transport.rank, topology=topology, in_order=in_order)
        for routing in routings:
            batch = make_batch(
                routing,
                num_ranks=transport.size,
                num_slots=num_slots,
                hidden=hidden,
                top_k=top_k,
                dtype=dtype,
                node_size=topology.node_size,
            )
            what = f"{routing}, top-{top_k}, {dtype}, {config}, {topology}, rank {transport.rank}"
            first = exchange_once(batch, step=next(steps))
            for _ in range(repeats):
                again = exchange_once(batch, step=next(steps))
                same(again, first, f"repeated, {what}")
            overflow = exchange.take_overflow()
            assert overflow is None or not overflow, f"something was left behind, {what}"
            exchange.check_faults()
            own = batch.own(transport.rank)
            x_TD = as_dispatched(batch.x_GD[own], config)
            truth = dense_combine(x_TD, batch.slots_GK[own], batch.weights_GK[own], expert)
            _check_sum(first, truth, f"combine, {what}")
        exchange.close()


def as_dispatched(x_TD: Tensor, config: ExchangeConfig) -> Tensor:
    """What arrives of x."""
    codec = CODECS[config.dispatch_dtype](x_TD.shape[1], x_TD.dtype)
    word = RowFormat(1, torch.float32, codec.value_bytes).word
    return codec.decode(codec.encode(x_TD, word)).clone()


def exchange_batch(
    exchange: Exchange,
    batch: GlobalBatch,
    *,
    rank: int,
    step: int,
    topology: Topology | None = None,
    exact: bool = False,
    in_order: bool = True,
) -> Tensor:
    """Send this rank's part of the batch through all rounds, checking every arrival; [T, D]."""
    topology = topology or Topology(num_ranks=len(batch.num_tokens_R), node_size=len(batch.num_tokens_R))
    own, terms = batch.own(rank), Terms(bucket=max(batch.num_tokens_R), exact=exact)
    x, slots, weights = batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own]
    first_slot = rank * exchange.slots_per_rank
    outputs, counts_L = [], torch.zeros(exchange.slots_per_rank, dtype=torch.int64)
    for number, part in enumerate(exchange.round_slices(x.shape[0], terms)):
        tag = Tag(step, 0, 0, number, Kind.CHECK)
        arrivals = exchange.dispatch(x[part], slots[part], weights[part], tag=tag, terms=terms).wait()
        _check_arrivals(
            arrivals, batch, exchange=exchange, rank=rank, number=number, topology=topology, in_order=in_order
        )
        counts_L += torch.bincount(arrivals.slots_M, minlength=exchange.slots_per_rank)
        y = expert(arrivals.x_ND[arrivals.rows_M], arrivals.slots_M + first_slot)
        outputs.append(exchange.combine(y, arrivals, tag=tag).wait())
    everywhere = torch.bincount(batch.slots_GK[batch.slots_GK >= 0], minlength=first_slot + exchange.slots_per_rank)
    same(counts_L, everywhere[first_slot : first_slot + exchange.slots_per_rank], "pairs of each slot")
    return torch.cat(outputs)


def _check_arrivals(
    arrivals: Arrivals,
    batch: GlobalBatch,
    *,
    exchange: Exchange,
    rank: int,
    number: int,
    topology: Topology,
    in_order: bool,
) -> None:
    """Rows with a slot here are those that the batch has for it, by source; other rows are nobody's."""
    here_GK = (batch.slots_GK >= 0) & (batch.slots_GK // exchange.slots_per_rank == rank)
    now_G = batch.place_G // exchange.config.round_tokens == number
    sent = (here_GK.any(1) & now_G).nonzero()[:, 0]
    if exchange.config.hierarchical == "on":  # rows come from the gateways of the node, by the place of their source
        source = batch.source_G[sent]
        by_place = source % topology.node_size * topology.num_nodes + source // topology.node_size
        sent = sent[by_place.argsort(stable=True)]
    what = f"rank {rank}, round {number}"
    used_N = (arrivals.slots_NK >= 0).any(1)
    if not in_order:
        sent = sent[_as_arrived(arrivals.x_ND[used_N], as_dispatched(batch.x_GD[sent], exchange.config))]
    same(arrivals.x_ND[used_N], as_dispatched(batch.x_GD[sent], exchange.config), f"rows, {what}")
    same(arrivals.source_N[used_N], batch.source_G[sent], f"sources, {what}")
    rows_M = used_N.nonzero()[:, 0][here_GK[sent].nonzero()[:, 0]]
    same(arrivals.rows_M, rows_M, f"rows of pairs, {what}")
    slots_M = batch.slots_GK[sent][here_GK[sent]] - rank * exchange.slots_per_rank
    same(arrivals.slots_M, slots_M, f"slots of pairs, {what}")
    same(arrivals.weights_M, batch.weights_GK[sent][here_GK[sent]], f"weights of pairs, {what}")


def _as_arrived(found_ND: Tensor, expected_ND: Tensor) -> Tensor:
    """The order that brings the expected rows to where the same rows were found, as far as there are such."""
    ranked = [sorted(range(len(rows)), key=rows.__getitem__) for rows in (found_ND.tolist(), expected_ND.tolist())]
    order = torch.tensor(ranked[1], dtype=torch.int64)
    return order.scatter(0, torch.tensor(ranked[0], dtype=torch.int64), order) if len(order) == len(found_ND) else order


def _check_sum(found: Tensor, truth: Tensor, what: str) -> None:
    """Within the rounding that the wire and the sum in the wide dtype allow; 1e-12 in float64."""
    tolerance = 1e-12 if found.dtype is torch.float64 else 4 * torch.finfo(found.dtype).eps * max(1.0, _peak(truth))
    worst = _peak(found.double() - truth)
    assert worst <= tolerance, f"{what}: off by {worst:.3g}, allowed {tolerance:.3g}"


def _peak(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
