"""What ranks in processes of their own are put through, whatever carries their rows. Every scenario takes one rank's
transport and returns what the test looks at, fit for JSON.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import psutil
import torch

from ep import CapacityPlan, ExchangeConfig, Kind, Tag, Transport, TransportError
from ep.conformance import check_exchange, check_transport, same
from ep.envelope import HEADER_BYTES
from ep.mail import LETTER_BYTES

LIMIT_S = 20.0


def tag(step: int, kind: Kind = Kind.CHECK) -> Tag:
    return Tag(step, 0, 0, 0, kind)


def gather(transport: Transport, step: int) -> None:
    """One exchange with everybody."""
    row = torch.tensor([transport.rank, step])
    found = transport.all_gather(row, tag=tag(step)).wait()
    same(found[:, 0], torch.arange(transport.size), f"ranks of step {step}")


def send_rows(transport: Transport, step: int, *, rows: int = 1, extra: int = 0, dtype: torch.dtype = torch.int64):
    """`rows` rows to everybody, `extra` more to rank 0, which expects none of these."""
    counts = [rows + extra * (rank == 0) for rank in range(transport.size)]
    send, recv = torch.zeros(sum(counts), 3, dtype=dtype), torch.zeros(rows * transport.size, 3, dtype=dtype)
    splits = [rows] * transport.size
    return transport.all_to_all(recv, send, recv_splits=splits, send_splits=counts, tag=tag(step))


def failure(transport: Transport, fail: Callable[[], object]) -> dict:
    """What `fail` raises, and what the next exchange raises then."""
    begin = time.monotonic()
    try:
        fail()
    except TransportError as error:
        seconds = time.monotonic() - begin
        found = {"error": type(error).__name__, "culprit": getattr(error, "culprit", None), "words": str(error)}
        try:
            gather(transport, 99)
        except TransportError as error:
            return found | {"seconds": seconds, "next": type(error).__name__}
        return found | {"seconds": seconds, "next": "nothing"}
    return {"error": "nothing"}


def last(transport: Transport) -> bool:
    """The last rank is the culprit of all failures: the majority is right and rank 0 has to find out."""
    return transport.rank == transport.size - 1


def await_file(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def conformance(transport: Transport, _folder: Path) -> str:
    check_transport(transport)
    for combine in ("ranks", "slots"):
        for dtype in (torch.float64, torch.bfloat16):
            config = ExchangeConfig(exchange="exact", hierarchical="off", combine=combine, round_tokens=4)
            check_exchange(
                transport,
                config=config,
                dtype=dtype,
                top_ks=(1, 16),
                routings=("spread", "one slot", "masked", "silent"),
            )
    return "passed"


def exchange_modes(transport: Transport, _folder: Path) -> str:
    """Exact and bounded, both ways back, flat and over nodes of 1, 2 and 4."""
    modes = product(("exact", "bounded"), ("off", "on"), ("ranks", "slots"))
    node_sizes = [size for size in (1, 2, 4) if transport.size % size == 0]
    for (exchange, hierarchical, combine), node_size in product(modes, node_sizes):
        check_exchange(
            transport,
            config=ExchangeConfig(exchange=exchange, hierarchical=hierarchical, combine=combine, round_tokens=7),
            dtype=torch.float64,
            node_size=node_size,
            plan=CapacityPlan.fixed(1 << 20, num_hops=2 if hierarchical == "on" else 1, combine=1 << 20),
            top_ks=(4,),
            routings=("spread", "one slot", "one node", "masked", "idle"),
        )
    return "passed"


def inference_mode(transport: Transport, _folder: Path) -> str:
    """On odd ranks only."""
    with torch.inference_mode(transport.rank % 2 == 1):
        check_transport(transport)
    return "passed"


def every_length(transport: Transport, _folder: Path) -> str:
    """fp8 rows of one byte, as many as fit into a letter and one more or less, none, and many letters' worth."""
    room = LETTER_BYTES - HEADER_BYTES
    lengths = [room, room + 1, 0, room - 1, 5 * LETTER_BYTES + 3, 1, 2 * room]
    me, ranks = transport.rank, range(transport.size)

    def rows(source: int, destination: int, turn: int) -> torch.Tensor:
        count = lengths[(3 * source + destination + turn) % len(lengths)]
        return (torch.arange(count) * 31 + 7 * source + destination).to(torch.uint8)

    for turn in range(len(lengths)):
        outgoing = [rows(me, rank, turn) for rank in ranks]
        expected = [rows(rank, me, turn) for rank in ranks]
        recv = torch.empty(sum(map(len, expected)), 1, dtype=torch.float8_e4m3fn)
        pending = transport.all_to_all(
            recv,
            torch.cat(outgoing)[:, None].view(torch.float8_e4m3fn),
            recv_splits=[len(part) for part in expected],
            send_splits=[len(part) for part in outgoing],
            tag=tag(turn),
        )
        same(pending.wait().view(torch.uint8)[:, 0], torch.cat(expected), f"lengths, turn {turn}")
    return "passed"


def many_in_flight(transport: Transport, _folder: Path) -> str:
    """More exchanges at once than the window has letters; every rank waits in an order of its own."""
    order = random.Random(transport.rank)
    for turn in range(6):
        started = []
        for step in range(10 * turn, 10 * turn + 10):
            row = torch.full((1 if step % 3 else 40_000,), 100 * transport.rank + step)
            started.append((step, transport.all_gather(row, tag=tag(step))))
        order.shuffle(started)
        for step, pending in started:
            expected = 100 * torch.arange(transport.size) + step
            same(pending.wait()[:, 0], expected, f"step {step}")
            same(pending.wait()[:, -1], expected, f"end of step {step}")
    return "passed"


def sockets(transport: Transport, _folder: Path) -> list[str]:
    """Addresses on which this process listens."""
    gather(transport, 0)
    found = [one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    gather(transport, 1)
    return found


def at_once_to_the_end(transport: Transport, _folder: Path) -> str:
    """Ranks that close right after the last exchange cut nobody off."""
    for step in range(20):
        send_rows(transport, step, rows=1 + step % 4).wait()
    return "passed"


def out_of_step(transport: Transport, _folder: Path) -> dict:
    gather(transport, 0)
    return failure(transport, lambda: gather(transport, 1 if not last(transport) else 7))


def left_one_out(transport: Transport, _folder: Path) -> dict:
    """One rank is an exchange ahead, and that is far longer than what the others expect."""
    gather(transport, 0)
    if last(transport):
        return failure(transport, lambda: send_rows(transport, 2, rows=20_000).wait())
    return failure(transport, lambda: [send_rows(transport, step, rows=step**10).wait() for step in (1, 2)])


def more_rows(transport: Transport, _folder: Path) -> dict:
    """One rank sends 20,000 rows more to rank 0 than that expects; the others hear of it in the next exchange."""

    def send() -> None:
        send_rows(transport, 0, extra=20_000 * last(transport)).wait()
        gather(transport, 1)

    return failure(transport, send)


def other_dtype(transport: Transport, _folder: Path) -> dict:
    dtype = torch.float64 if last(transport) else torch.int64
    return failure(transport, lambda: send_rows(transport, 0, dtype=dtype).wait())


def raised_while_others_wait(transport: Transport, folder: Path) -> dict:
    gather(transport, 0)
    if last(transport):
        await_file(folder / "rank 0 waits")
        transport.abort(ValueError("planted"))
        return {"error": "planted"}
    if transport.rank == 0:
        (folder / "rank 0 waits").touch()
    return failure(transport, lambda: gather(transport, 1))


def raised_while_others_compute(transport: Transport, folder: Path) -> dict:
    """The others start their next exchange when the failed rank has closed its connections."""
    gather(transport, 0)
    gone = folder / "gone"
    if last(transport):
        transport.abort(ValueError("planted"))
        gone.touch()
        return {"error": "planted"}
    await_file(gone)
    return failure(transport, lambda: gather(transport, 1))


def raised_with_rows_under_way(transport: Transport, folder: Path) -> dict:
    """Long messages of the failed rank and to it are started and never waited for."""
    gather(transport, 0)
    if last(transport):
        send_rows(transport, 1, rows=20_000)
        await_file(folder / "rank 0 waits")
        transport.abort(ValueError("planted"))
        return {"error": "planted"}

    def send() -> None:
        pending = send_rows(transport, 1, rows=20_000)
        (folder / "rank 0 waits").touch()
        pending.wait()
        gather(transport, 2)

    return failure(transport, send)


def ended_early(transport: Transport, _folder: Path) -> dict:
    gather(transport, 0)
    if last(transport):
        transport.close()
        transport.close()
        return {"error": "ended"}
    return failure(transport, lambda: gather(transport, 1))


def killed(transport: Transport, _folder: Path) -> dict:
    gather(transport, 0)
    if last(transport):
        os.kill(os.getpid(), signal.SIGKILL)
    return failure(transport, lambda: gather(transport, 1))


def severed(transport: Transport, folder: Path) -> dict:
    """One rank cuts its connections without a word, and lives on until all have noticed."""
    gather(transport, 0)
    if last(transport):
        transport._wire.sever()
        for rank in range(transport.size - 1):
            await_file(folder / f"{rank} noticed")
        return {"error": "severed"}
    found = failure(transport, lambda: gather(transport, 1))
    (folder / f"{transport.rank} noticed").touch()
    return found


PASSES = (conformance, exchange_modes, inference_mode, every_length, many_in_flight, at_once_to_the_end, sockets)
FAILS = (
    out_of_step,
    left_one_out,
    more_rows,
    other_dtype,
    raised_while_others_wait,
    raised_while_others_compute,
    raised_with_rows_under_way,
    ended_early,
)


def run(scenario: Callable, transport: Transport, folder: Path) -> object:
    """The scenario's value, or in words what it raised; the transport is closed."""
    try:
        value = scenario(transport, folder)
    except Exception as error:
        transport.abort(error)
        return f"{type(error).__name__}: {error}"
    transport.close()
    return value
