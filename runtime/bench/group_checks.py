"""What a group of ranks is put through before it is trusted: its transport, the exchange in every mode and over every
back end, captured and not, which of them is fastest, the kernels beside their references, and a small model's tokens.

All ranks make the checks together and in this order. Knows what is checked; how findings are told is `checkup`'s.

Legend: T tokens, K top-k, N rows received, D hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ep import Exchange, ExchangeConfig, Kind, PairRows, Tag, Terms, Topology, Transport, exchange_ops, wide
from ep.back_ends import opener, refusal
from ep.blueprint import Blueprint
from ep.config import BACK_ENDS
from ep.conformance import check_transport
from ep.lanes import LANES
from ep.parts import BackEnd
from ep.selftest import self_test
from ep.trial import Trial, fastest, lines

from ..failure.checkup import Check, NotHere
from ..graphs.exchange_times import round_us
from ..graphs.graph_device import GraphDevice, Recording
from ..model.model_config import ModelConfig
from .kernel_case import CaseSize, KernelCase, worst_difference
from .kernel_cases import kernel_cases

HIDDEN, TOP_K, SLOTS, TOKENS = 512, 4, 4, 8
"""Of the exchange that is checked; slots are those of a rank."""
FAST_HIDDEN, FAST_TOP_K, FAST_SLOTS, FAST_TOKENS = 7168, 8, 8, 128
"""Of the one that is timed: DeepSeek-V3's rows."""
TOLERANCE = 1 / 64

WIRE = "rows do not reach the right rank, or not whole: nothing that this group decodes could be trusted"
TRY_EXACT = "start with --exchange exact --hierarchical off; then add --hierarchical on, then --exchange bounded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where ranks are checked: their transport and device, and what records graphs there, if anything does."""

    transport: Transport
    device: torch.device
    ops: str
    graphs: Callable[[], GraphDevice] | None


def exchange_configs(num_ranks: int) -> list[tuple[ExchangeConfig, int]]:
    """Every way to build the exchange, with the ranks of a node; over nodes also where all ranks are on one."""
    ways = []
    nodes = [("off", num_ranks)] + ([("on", num_ranks // 2)] if num_ranks > 1 and num_ranks % 2 == 0 else [])
    for mode, (hierarchical, node_size), combine, dtype in itertools.product(
        ("exact", "bounded"), nodes, ("ranks", "slots"), ("run", "fp8")
    ):
        config = ExchangeConfig(
            exchange=mode,  # type: ignore[arg-type]
            hierarchical=hierarchical,  # type: ignore[arg-type]
            combine=combine,  # type: ignore[arg-type]
            dispatch_dtype=dtype,  # type: ignore[arg-type]
            round_tokens=TOKENS,
        )
        ways.append((config, node_size))
    return ways


def group_checks(bench: Bench) -> Iterator[Check]:
    """The transport, then the exchange in every mode, then bounded ones captured, then what else may carry rows."""
    yield Check(
        name="transport",
        run=partial(_transport_words, bench),
        means="the ranks' collectives themselves do not work, whatever is sent over them",
        tries="NCCL_DEBUG=INFO and look for the interface it took; --interface for the right one; gloo on CPUs",
    )
    for number, (config, node_size) in enumerate(exchange_configs(bench.transport.size)):
        yield Check(
            name=f"exchange, {name_of(config)}",
            run=partial(_exchange_words, bench, config, node_size, first_step=1000 * number),
            means=WIRE,
            tries=TRY_EXACT,
        )
    for config, node_size in exchange_configs(bench.transport.size):
        if config.exchange == "bounded":
            yield Check(
                name=f"exchange, {name_of(config)}, captured",
                run=partial(_captured_words, bench, config, node_size),
                means="this exchange cannot be replayed in a CUDA graph here, though it may work without",
                tries="--enforce-eager; a newer NCCL (2.28 or later); see which library was loaded above",
            )

    yield from back_end_checks(bench)


def back_end_checks(bench: Bench) -> Iterator[Check]:
    """What may carry rows instead of the transport, captured and not; then which way is fastest."""
    for number, mode in enumerate(BACK_ENDS):
        config = ExchangeConfig(exchange=mode, hierarchical="off", round_tokens=TOKENS)
        means = f"this back end does not serve here; --exchange auto leaves it out, {mode} would fail"
        for captured in (False, True):
            yield Check(
                name=f"exchange, {mode}{', captured' if captured else ''}",
                run=partial(_back_end_words, bench, config, captured=captured, first_step=100_000 + 1000 * number),
                means=means,
                tries="--exchange bounded decodes without it; the package's own version and CUDA's have to fit torch's",
            )
    yield Check(
        name="exchange, the fastest",
        run=partial(_fastest_words, bench),
        means="no way of exchange serves rows as wide as a large model's",
        tries=TRY_EXACT,
    )


def _back_end_words(bench: Bench, config: ExchangeConfig, *, captured: bool, first_step: int) -> str:
    lacks = _first_lack(bench, refusal(config.exchange, bench.device))
    if lacks is not None:
        raise NotHere(lacks)
    if captured:
        return _captured_words(bench, config, bench.transport.size)
    return _exchange_words(bench, config, bench.transport.size, first_step=first_step)


def _first_lack(bench: Bench, mine: str | None) -> str | None:
    """What this rank lacks, or that another one does: all skip a check, or none."""
    row = torch.tensor([int(mine is not None)], device=bench.device)
    lacking = bench.transport.all_gather(row, tag=Tag(0, 0, 0, 0, Kind.CHECK)).wait().flatten().tolist()
    return mine or (f"rank {lacking.index(1)} lacks it" if any(lacking) else None)


def _fastest_words(bench: Bench) -> str:
    if bench.graphs is None:
        raise NotHere(f"a {bench.device.type} has one way at a time, which its transport decides")
    size = bench.transport.size
    ways = [ExchangeConfig(exchange="bounded", hierarchical="off", round_tokens=FAST_TOKENS)]
    ways += [replace(ways[0], exchange=mode) for mode in BACK_ENDS]
    trial = Trial(
        configs=ways,
        lacks=lambda config: refusal(config.exchange, bench.device),
        build=lambda config: _wide_exchange(bench, config, size),
        time_us=partial(round_us, tokens=FAST_TOKENS),
    )
    exchange, tried = fastest(trial, bench.transport, device=bench.device)
    exchange.close()
    return "; ".join(lines(tried))


def _wide_exchange(bench: Bench, config: ExchangeConfig, size: int) -> Exchange:
    return _exchange(bench, config, num_slots=FAST_SLOTS * size, hidden=FAST_HIDDEN, top_k=FAST_TOP_K, node_size=size)


def _exchange(
    bench: Bench, config: ExchangeConfig, *, num_slots: int, hidden: int, top_k: int, node_size: int
) -> Exchange:
    return Exchange(
        bench.transport,
        num_slots=num_slots,
        hidden=hidden,
        top_k=top_k,
        dtype=torch.bfloat16,
        device=bench.device,
        config=config,
        topology=Topology(num_ranks=bench.transport.size, node_size=node_size),
        ops=exchange_ops(bench.ops),
        back_end=_open_back_end(bench),
    )


def _open_back_end(bench: Bench) -> Callable[[Blueprint], BackEnd | None]:
    return opener(bench.transport, lanes=LANES[bench.device.type](bench.device), device=bench.device)


def name_of(config: ExchangeConfig) -> str:
    """In words."""
    over = "over nodes" if config.hierarchical == "on" else "straight"
    return f"{config.exchange}, {over}, {config.combine} back, {config.dispatch_dtype} there"


def _transport_words(bench: Bench) -> str:
    check_transport(bench.transport, device=bench.device)
    return f"{bench.transport.size} ranks, every pattern and number format"


def build_exchange(bench: Bench, config: ExchangeConfig, node_size: int) -> Exchange:
    """The exchange of the checks."""
    num_slots = SLOTS * bench.transport.size
    return _exchange(bench, config, num_slots=num_slots, hidden=HIDDEN, top_k=TOP_K, node_size=node_size)


def _exchange_words(bench: Bench, config: ExchangeConfig, node_size: int, *, first_step: int) -> str:
    with closing(build_exchange(bench, config, node_size)) as exchange:
        self_test(exchange, first_step=first_step)
    return "every pattern arrived and came back"


def _captured_words(bench: Bench, config: ExchangeConfig, node_size: int) -> str:
    if bench.graphs is None:
        raise NotHere(f"a {bench.device.type} has no graphs")
    with closing(build_exchange(bench, config, node_size)) as exchange:
        replay_round(exchange, bench.graphs())
        exchange.check_faults()
    return "replayed with other rows, which came back right"


def replay_round(exchange: Exchange, graphs: GraphDevice) -> None:
    """Record one round, then replay it with other tokens to other slots. AssertionError where a sum is wrong."""
    num_slots = exchange.slots_per_rank * exchange.num_ranks
    x_TD = torch.zeros(TOKENS, exchange.hidden, dtype=exchange.dtype, device=exchange.device)
    slots_TK = torch.zeros(TOKENS, exchange.top_k, dtype=torch.int64, device=exchange.device)
    weights_TK = torch.full(slots_TK.shape, 0.25, dtype=wide(exchange.dtype), device=exchange.device)
    round_of = partial(_round, exchange, x_TD, slots_TK, weights_TK)
    with torch.inference_mode(), graphs.lane():
        round_of()
        program = Recording(graphs).record(round_of, None)
        for turn in range(2):
            values_T = 1.0 + torch.arange(TOKENS) + TOKENS * turn
            first = torch.arange(TOKENS).unsqueeze(1) * 5 + exchange.rank + turn
            chosen_TK = (first + torch.arange(exchange.top_k) * 3) % num_slots
            x_TD.copy_(values_T.unsqueeze(1).expand(x_TD.shape))
            slots_TK.copy_(chosen_TK)
            back_TD = program.replay(None).double().cpu()
            wanted_T = 0.25 * values_T.double() * (1 + chosen_TK % 3).sum(dim=1)
            off = float(((back_TD - wanted_T.unsqueeze(1)).abs() / wanted_T.unsqueeze(1)).max())
            assert off <= TOLERANCE, f"replay {turn}: a sum is off by {off:.3g} of itself"


def _round(exchange: Exchange, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Dispatch and combine without the host; the expert of slot s multiplies by 1 + s % 3."""
    tag, terms = Tag(0, 0, 0, 0, Kind.CHECK), Terms(bucket=TOKENS)
    arrivals = exchange.dispatch(x_TD, slots_TK, weights_TK, tag=tag, terms=terms).wait()
    num_rows, top_k = arrivals.slots_NK.shape
    factors_NK = 1 + (arrivals.slots_NK + exchange.rank * exchange.slots_per_rank) % 3
    rows_MD = (arrivals.x_ND.unsqueeze(1) * factors_NK.unsqueeze(2).to(exchange.dtype)).flatten(0, 1)
    index_NK = torch.arange(num_rows * top_k, device=rows_MD.device).view(num_rows, top_k)
    pairs = PairRows(rows_MD, index_NK.where(arrivals.slots_NK >= 0, -1))
    return exchange.combine(pairs, arrivals, tag=tag).wait()


def kernel_checks(
    model: ModelConfig, size: CaseSize, *, name: str, device: torch.device, dtype: torch.dtype
) -> Iterator[Check]:
    """Each kernel beside its reference. The cases are made one after the other, for they are large."""
    for case in kernel_cases(model, size, name=name, device=device, dtype=dtype):
        yield Check(
            name=f"kernel, {case.title}",
            run=partial(_kernel_words, case),
            means="this kernel computes something else here than where it was tested",
            tries="--ops reference decodes without Triton; compare triton and driver versions with those of the README",
        )


def _kernel_words(case: KernelCase) -> str:
    with torch.inference_mode():
        off = worst_difference(case)
    assert off <= case.bound, f"off by {off:.3g} of a row's largest value, at most {case.bound:g}"
    return f"off by {off:.2g} of a row's largest value"


def token_check(name: str, wanted: Callable[[], list[list[int]]], got: Callable[[], list[list[int]]]) -> Check:
    """Whether two ways to decode give the same greedy tokens."""
    return Check(
        name=f"tokens, {name}",
        run=partial(_token_words, wanted, got),
        means="single parts work, and the engine as a whole does not: its order of work is wrong on this device",
        tries="--enforce-eager, --ops reference, --async-depth 0, one by one; then report which of them helps",
    )


def _token_words(wanted: Callable[[], list[list[int]]], got: Callable[[], list[list[int]]]) -> str:
    expected, found = wanted(), got()
    num_tokens = sum(map(len, expected))
    assert found == expected, f"{sum(map(_alike, expected, found))} of {num_tokens} tokens alike before they differ"
    return f"{num_tokens} greedy tokens alike"


def _alike(expected: list[int], found: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), len(expected))
