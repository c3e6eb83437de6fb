"""`serried doctor` without files: a first look at this machine and this group, in under two minutes.

    every rank     its machine; with all others transport and exchange in every mode; kernels, a small model's tokens
    rank 0         says what ranks found alike once, and every failure with what it means and what to try

A check that hangs ends the process and says which it was. Written on machines without a GPU: there it checks what there
is, and says what it could not look at. Knows order and words; the checks are `machine_checks` and
`runtime.bench.group_checks`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import tyro
from rich.console import Console

from attention_mla import interpreted
from ep import ExchangeConfig
from runtime import Engine, EngineConfig, SamplingParams, SchedulerConfig
from runtime.bench.group_checks import Bench, group_checks, kernel_checks, token_check
from runtime.bench.kernel_case import CaseSize
from runtime.failure.checkup import (
    Check,
    Finding,
    NotHere,
    Outcome,
    Shared,
    from_word,
    gather,
    look,
    look_at_all,
    passed,
    to_word,
)
from runtime.forward.reference import reference_logits
from runtime.graphs.graph_config import GraphConfig
from runtime.graphs.graph_device import GRAPH_DEVICES
from runtime.loading import load_ranks, weight_source
from runtime.model.model_config import read_model_config
from runtime.settings.settling import settle

from ..bench.bench import commit, machine_line
from ..command.models import PROFILES, find_model
from ..groups.as_rank import hush
from ..groups.group import Start, meet_ranks
from ..groups.place import cpu_transport, open_transport
from ..groups.refusal import refusals
from ..groups.rendezvous import RendezvousConfig
from ..groups.world import World, check_ranks, detect, own_world
from .last_steps import join_ranks
from .machine_checks import machine_checks
from .machine_facts import MachineFacts, find_facts

DONE, FAILED = 0, 1
CPU_RANKS = 2
CHECK_S = 60.0
"""Of one check; kernels are compiled in theirs."""
GATHER_S = 120.0
PROMPTS = ([5, 6, 7, 400], [11])
NEW_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ContactFlags:
    """What a first look is told; of no use with flight records."""

    ranks: int | None = None
    """Ranks that are checked together, each a process; unset: a GPU each, 2 on a CPU, or what the launcher started."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the run is to use; auto: GPUs where torch is built for them."""

    kernels: bool = True
    """Whether kernels are run beside their references; --no-kernels saves their compilation."""

    meeting: tyro.conf.OmitArgPrefixes[RendezvousConfig] = field(default_factory=RendezvousConfig)

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"ranks is {self.ranks}; it must be at least 1, e.g. 2")


def look_around(flags: ContactFlags, start: Start) -> int:
    """Check everything and print; 1 where something failed. Raises Refusal for ranks that cannot be started."""
    on_gpu = flags.device == "cuda" or (flags.device == "auto" and torch.version.cuda is not None)
    with refusals():
        world = start.child.world if start.child else detect(os.environ)
        check_ranks(world, flags.ranks)
        if world.size == 1:
            usual = max(torch.cuda.device_count(), 1) if on_gpu else CPU_RANKS
            world = own_world(0, flags.ranks or usual)
    torch.set_num_threads(1)
    if not world.is_primary:
        hush(world.rank)
    began = time.monotonic()
    facts = find_facts()
    say = Speaker(world)
    say.head(facts, on_gpu=on_gpu)
    mine = list(
        look_at_all(
            machine_checks(facts, on_gpu=on_gpu, num_nodes=world.num_nodes, interface=flags.meeting.interface),
            before=lambda _: None,
        )
    )
    able = not on_gpu or not facts.cuda_error
    with ExitStack() as stack:
        together = look_together(flags, start, world, stack, mine, on_gpu=on_gpu) if able else gather([mine])
    say.findings(together)
    say.tail(together, facts, seconds=time.monotonic() - began)
    return DONE if passed(together) else FAILED


def look_together(
    flags: ContactFlags, start: Start, world: World, stack: ExitStack, mine: list[Finding], *, on_gpu: bool
) -> list[Shared]:
    """The checks that ranks make together, added to `mine`; on every rank what all of them found."""
    with refusals():
        meeting, _ = meet_ranks(flags.meeting, start, world, stack, fields=(), endpoints=("store",))
    device = torch.device("cuda", world.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    name = "nccl" if on_gpu else cpu_transport("auto", world)
    transport = open_transport(name, world, meeting, interface=flags.meeting.interface, device=device)
    stack.enter_context(closing(transport))
    make_graphs = GRAPH_DEVICES.get(device.type)
    bench = Bench(
        transport=transport,
        device=device,
        ops="triton" if on_gpu else "reference",
        graphs=None if make_graphs is None else lambda: make_graphs(device),
    )
    for finding in until_one_fails(group_checks(bench), transport.abort):
        mine.append(finding)
    for check in [*own_checks(device, kernels=flags.kernels)]:
        with deadline(check):
            mine.append(look(check))
    return gather([from_word(word) for word in meeting.gather(to_word(mine), timeout_s=GATHER_S)])


def until_one_fails(checks: Iterator[Check], abort: Callable[[BaseException], None]) -> Iterator[Finding]:
    """All of them, or as far as it goes: a rank that failed has left the others' exchanges, and says so at once."""
    for check in checks:
        with deadline(check):
            finding = look(check)
        yield finding
        if finding.outcome is Outcome.FAILED:
            abort(RuntimeError(f"{finding.name}: {finding.words}"))
            return


def own_checks(device: torch.device, *, kernels: bool) -> Iterator[Check]:
    """What a rank does by itself: kernels, and a small model."""
    runs_kernels = device.type == "cuda" or (_has_triton() and interpreted())
    if kernels and runs_kernels:
        on_gpu = device.type == "cuda"
        name, size = ("deepseek-v3", CaseSize()) if on_gpu else ("tiny-v3", CaseSize(batch=3, context=70, ranks=4))
        model = read_model_config(find_model(name))
        yield from kernel_checks(model, size, name=name, device=device, dtype=torch.bfloat16)
    elif kernels:
        yield Check(name="kernels", run=_no_kernels, means="", tries="")
    if (PROFILES / "models" / "tiny-v3").is_dir():
        yield token_check(
            "engine against the model as one plain function", reference_tokens, lambda: decoded(device, "reference")
        )
        if device.type == "cuda":
            yield token_check(
                "kernels against torch", lambda: decoded(device, "reference"), lambda: decoded(device, "triton")
            )
            yield token_check(
                "graphs against kernels one by one",
                lambda: decoded(device, "triton"),
                lambda: decoded(device, "triton", eager=False),
            )


def _has_triton() -> bool:
    try:
        interpreted()
    except ValueError:
        return False
    return True


def _no_kernels() -> str:
    raise NotHere("kernels need a GPU; TRITON_INTERPRET=1 before Python starts runs them in the interpreter, slowly")


def tiny_config(device: str, ops: str, *, eager: bool = True) -> EngineConfig:
    """The small model on one rank, in a format in which no two logits tie; few sizes, so that little is recorded."""
    return EngineConfig(
        model=str(find_model("tiny-v3")),
        dtype="float32",
        device=device,
        ops=ops,  # type: ignore[arg-type]
        exchange=ExchangeConfig(exchange="bounded", hierarchical="off"),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256),
        graphs=GraphConfig(enforce_eager=eager, cuda_graph_sizes=(4,)),
    )


def decoded(device: torch.device, ops: str, *, eager: bool = True) -> list[list[int]]:
    """Greedy tokens of the engine."""
    with Engine(tiny_config(device.type, ops, eager=eager)) as engine:
        outputs = engine.generate([*PROMPTS], SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True))
    return [list(output.token_ids) for output in outputs]


def reference_tokens() -> list[list[int]]:
    """Those of the plain function, on the host."""
    settled = settle(tiny_config("cpu", "reference"))
    [weights] = load_ranks(settled, weight_source(settled), [0], None)
    found = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            tokens = list(prompt)
            for _ in range(NEW_TOKENS):
                tokens.append(int(reference_logits(settled.model, weights, torch.tensor(tokens))[-1].argmax()))
            found.append(tokens[len(prompt) :])
    return found


@contextmanager
def deadline(check: Check, *, seconds: float = CHECK_S) -> Iterator[None]:
    """End the process when this takes too long: a rank that hangs in a collective cannot be called back."""
    timer = threading.Timer(seconds, _give_up, [check, seconds])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(check: Check, seconds: float) -> None:
    print(
        f"serried: stuck for {seconds:g} s in the check of {check.name}\n  that means  {check.means}\n"
        f"  try         {check.tries}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(FAILED)


def not_checked_once(together: Sequence[Shared]) -> Iterator[Shared]:
    """What was not checked for one and the same reason becomes one finding, at the place of the first."""
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for shared in together:
        if shared.finding.outcome is Outcome.NOT_CHECKED:
            alike.setdefault((shared.finding.words, shared.ranks), []).append(shared.finding.name)
    for shared in together:
        if shared.finding.outcome is Outcome.NOT_CHECKED:
            names = alike.pop((shared.finding.words, shared.ranks), [])
            if names:
                yield replace(shared, finding=replace(shared.finding, name="; ".join(names)))
        else:
            yield shared


class Speaker:
    """Rank 0's voice; the others have none."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._out = Console(highlight=False, soft_wrap=True) if world.is_primary else Console(quiet=True)

    def head(self, facts: MachineFacts, *, on_gpu: bool) -> None:
        """Where this is."""
        self._print(self._world.describe())
        self._print(machine_line())
        self._print(f"commit    {commit()}")
        self._print(f"looks at  {'GPUs' if on_gpu else 'CPUs'}")
        for line in facts.topology:
            self._print(f"  {line}")

    def findings(self, together: list[Shared]) -> None:
        """A line each; failures and doubts with what they mean."""
        for shared in not_checked_once(together):
            finding, everywhere = shared.finding, len(shared.ranks) == self._world.size
            who = "" if everywhere or self._world.size == 1 else f" ({join_ranks(list(shared.ranks))})"
            self._print(f"{finding.outcome:<12}{finding.name}{who}: {finding.words}")
            if finding.means:
                self._print(f"            that means  {finding.means}")
                self._print(f"            try         {finding.tries}")

    def tail(self, together: list[Shared], facts: MachineFacts, *, seconds: float) -> None:
        """How many of what, and what nobody could look at."""
        counts = {outcome: sum(shared.finding.outcome is outcome for shared in together) for outcome in Outcome}
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
        self._print(f"\n{told}, in {seconds:.0f} s")
        if not facts.gpus:
            self._print("GPUs, NCCL and captured exchanges were not looked at: there is no GPU here")

    def _print(self, line: str) -> None:
        self._out.print(line, markup=False)
