"""What any transport, and the exchange on top of it, must do. All ranks call the check together; it raises
AssertionError saying what differs. Contents follow from closed forms and seeds, so that every rank predicts every row
without being told.

Legend: R ranks, G tokens of all ranks in rank order, D model, K top-k, N rows received, L local slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .combine import wide
from .exchange import Arrivals, Exchange, ExchangeConfig
from .reference import dense_combine
from .terms import Terms
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


def _count_off(counts: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(rank, number) of each row: counts [2, 0, 1] -> [0, 0, 2], [0, 1, 0]."""
    counts_R = torch.tensor(counts, device=device)
    rank = torch.arange(len(counts), device=device).repeat_interleave(counts_R)
    return rank, torch.arange(rank.shape[0], device=device) - (counts_R.cumsum(0) - counts_R)[rank]


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
    destination, row = _count_off([splits(me, rank) for rank in ranks], device)
    send = _content(torch.full_like(row, me), destination, row, trailing, dtype)
    source, row = _count_off([splits(rank, me) for rank in ranks], device)
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


def expert(x_ND: Tensor, slots_N: Tensor) -> Tensor:
    """A stand-in for an expert: depends on the slot, row by row, in x's dtype."""
    scale_N = (slots_N % 13).to(x_ND.dtype)[:, None] / 8 + 0.5
    return x_ND * scale_N + (slots_N % 5).to(x_ND.dtype)[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class GlobalBatch:
    """The tokens of all ranks. Every rank makes it from the seed, sends its own part and predicts the rest."""

    num_tokens_R: tuple[int, ...]
    x_GD: Tensor
    slots_GK: Tensor
    weights_GK: Tensor

    def own(self, rank: int) -> slice:
        begin = sum(self.num_tokens_R[:rank])
        return slice(begin, begin + self.num_tokens_R[rank])

    @property
    def source_G(self) -> Tensor:
        return _count_off(self.num_tokens_R, "cpu")[0]

    @property
    def place_G(self) -> Tensor:
        """Each token's place among those of its rank."""
        return _count_off(self.num_tokens_R, "cpu")[1]


ROUTINGS = ("spread", "one slot", "one rank", "masked", "idle", "silent")
"""What check_exchange routes. idle: ranks of odd number have no tokens; silent: none has any."""


def make_batch(
    routing: str, *, num_ranks: int, num_slots: int, hidden: int, top_k: int, dtype: torch.dtype, seed: int = 0
) -> GlobalBatch:
    """A batch of one of the ROUTINGS, the same for every caller."""
    generator = torch.Generator().manual_seed(1000 * seed + ROUTINGS.index(routing))
    num_tokens = [(5 * rank + 4) % 12 for rank in range(num_ranks)]
    if routing == "idle":
        num_tokens = [0 if rank % 2 else count for rank, count in enumerate(num_tokens)]
    if routing == "silent":
        num_tokens = [0] * num_ranks
    total = sum(num_tokens)
    if routing == "one slot":
        slots = torch.full((total, top_k), num_slots - 1)
    elif routing == "one rank":
        slots = torch.randint(0, num_slots // num_ranks, (total, top_k), generator=generator)
    elif top_k <= num_slots:
        slots = torch.rand(total, num_slots, generator=generator).argsort(1)[:, :top_k]
    else:
        slots = torch.randint(0, num_slots, (total, top_k), generator=generator)
    if routing == "masked":
        slots = slots.where(torch.rand(total, top_k, generator=generator) < 0.5, -1)
    x = torch.randn(total, hidden, dtype=torch.float64, generator=generator)
    weights = torch.rand(total, top_k, dtype=torch.float64, generator=generator)
    return GlobalBatch(tuple(num_tokens), x.to(dtype), slots, weights.to(wide(dtype)))


def check_exchange(
    transport: Transport,
    *,
    config: ExchangeConfig,
    dtype: torch.dtype,
    slots_per_rank: int = 3,
    hidden: int = 17,
    top_ks: Sequence[int] = (1, 3, 16),
    routings: Sequence[str] = ROUTINGS,
) -> None:
    """Dispatch and combine of every routing, twice, against the prediction of what arrives and the dense sum."""
    steps = itertools.count()
    for top_k in top_ks:
        num_slots = slots_per_rank * transport.size
        exchange = Exchange(
            transport, num_slots=num_slots, hidden=hidden, top_k=top_k, dtype=dtype, device="cpu", config=config
        )
        for routing in routings:
            batch = make_batch(
                routing, num_ranks=transport.size, num_slots=num_slots, hidden=hidden, top_k=top_k, dtype=dtype
            )
            first = exchange_batch(exchange, batch, rank=transport.rank, step=next(steps))
            again = exchange_batch(exchange, batch, rank=transport.rank, step=next(steps))
            what = f"{routing}, top-{top_k}, {dtype}, {config.combine}, rank {transport.rank} of {transport.size}"
            same(again, first, f"repeated, {what}")
            own = batch.own(transport.rank)
            truth = dense_combine(batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own], expert)
            _check_sum(first, truth, f"combine, {what}")


def exchange_batch(exchange: Exchange, batch: GlobalBatch, *, rank: int, step: int) -> Tensor:
    """Send this rank's part of the batch through all rounds, checking every arrival; [T, D]."""
    own, terms = batch.own(rank), Terms(bucket=max(batch.num_tokens_R))
    x, slots, weights = batch.x_GD[own], batch.slots_GK[own], batch.weights_GK[own]
    first_slot = rank * exchange.slots_per_rank
    outputs, counts_L = [], torch.zeros(exchange.slots_per_rank, dtype=torch.int64)
    for number, part in enumerate(exchange.round_slices(x.shape[0], terms)):
        tag = Tag(step, 0, 0, number, Kind.CHECK)
        arrivals = exchange.dispatch(x[part], slots[part], weights[part], tag=tag, terms=terms).wait()
        _check_arrivals(arrivals, batch, exchange=exchange, rank=rank, number=number)
        counts_L += torch.bincount(arrivals.slots_M, minlength=exchange.slots_per_rank)
        y = expert(arrivals.x_ND[arrivals.rows_M], arrivals.slots_M + first_slot)
        outputs.append(exchange.combine(y, arrivals, tag=tag).wait())
    everywhere = torch.bincount(batch.slots_GK[batch.slots_GK >= 0], minlength=first_slot + exchange.slots_per_rank)
    same(counts_L, everywhere[first_slot : first_slot + exchange.slots_per_rank], "pairs of each slot")
    return torch.cat(outputs)


def _check_arrivals(arrivals: Arrivals, batch: GlobalBatch, *, exchange: Exchange, rank: int, number: int) -> None:
    here_GK = (batch.slots_GK >= 0) & (batch.slots_GK // exchange.slots_per_rank == rank)
    now_G = batch.place_G // exchange.config.round_tokens == number
    sent_G = here_GK.any(1) & now_G
    pairs_MK = here_GK[sent_G].nonzero()
    what = f"rank {rank}, round {number}"
    same(arrivals.x_ND, batch.x_GD[sent_G], f"rows, {what}")
    same(arrivals.source_N, batch.source_G[sent_G], f"sources, {what}")
    same(arrivals.rows_M, pairs_MK[:, 0], f"rows of pairs, {what}")
    slots_M = batch.slots_GK[sent_G][here_GK[sent_G]] - rank * exchange.slots_per_rank
    same(arrivals.slots_M, slots_M, f"slots of pairs, {what}")
    same(arrivals.weights_M, batch.weights_GK[sent_G][here_GK[sent_G]], f"weights of pairs, {what}")


def _check_sum(found: Tensor, truth: Tensor, what: str) -> None:
    """Within the rounding that the wire and the sum in the wide dtype allow; 1e-12 in float64."""
    tolerance = 1e-12 if found.dtype is torch.float64 else 4 * torch.finfo(found.dtype).eps * max(1.0, _peak(truth))
    worst = _peak(found.double() - truth)
    assert worst <= tolerance, f"{what}: off by {worst:.3g}, allowed {tolerance:.3g}"


def _peak(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
