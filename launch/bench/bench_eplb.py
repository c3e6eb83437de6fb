"""`serried bench eplb`: how level the ranks' experts are before and after they move, and what moving costs. Measured.

    waves   before            | ... until a rebalance is over ...  | after
            experts in order,   counted, planned, moved while        the same requests
            nothing moves       decoding goes on                     as before

Prints the question, the machine, the commit, the settings, a table, then one last line of JSON. Knows the engine by its
public API and its counters.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from eplb.config import EplbConfig
from runtime import CacheConfig, Engine, EngineConfig, EngineStats, SamplingParams, SchedulerConfig, read_model_config

from ..command.models import find_model
from ..command.wide_table import print_table
from ..groups.group import Start, Telling, engine_of
from ..groups.place import GroupFlags
from ..groups.refusal import Refusal, refusals
from .bench import commit, machine_line

ABOUT = """\
Measure how level the ranks' experts are before and after a rebalance, and what the move costs the steps it falls into.

Examples:
  serried bench eplb --ranks 4
  serried bench eplb --ranks 4 --num-redundant-experts 16 --skew 0.8
  serried bench eplb --ranks 8 --transport threads

Level is mean over max of the (token, expert) pairs that the ranks' experts computed, step by step: what an average rank
had to do over what all waited for. Prompts draw their tokens from a skewed distribution, so that some experts are hot.
"""

DONE = 0
MOST_WAVES = 12
QUESTION = "How level are the ranks' experts, step by step, before and after they move, and what does the move cost?"


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbBenchFlags:
    """What `serried bench eplb` is told."""

    group: tyro.conf.OmitArgPrefixes[GroupFlags] = field(default_factory=GroupFlags)

    model: str = "profiles/models/tiny-v3"
    """Checkpoint; the bundled one is trained, so that its router has preferences."""

    ranks: int = 4
    """Ranks that share the experts."""

    num_redundant_experts: int = 8
    """Slots for copies, in each layer."""

    requests: int = 8
    """Requests that decode on each rank at once."""

    prompt_len: int = 48
    """Tokens of a prompt."""

    tokens: int = 64
    """Tokens that each request gets."""

    skew: float = 1.0
    """The n-th most frequent token of the prompts comes 1 / n ** skew as often; 0: all alike."""

    eplb_bytes_per_step: int = 1 << 20
    """Bytes of experts that a rank sends, and gets, in one step at most."""

    seed: int = 0
    """Seed of the prompts."""

    def __post_init__(self) -> None:
        for name in ("ranks", "requests", "prompt_len", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1, e.g. 4")
        if not 0.0 <= self.skew <= 10.0:
            raise ValueError(f"skew is {self.skew}; it must be from 0 to 10, e.g. 1.0")

    def engine(self, folder: Path) -> EngineConfig:
        """Nothing moves in the first wave: a window is longer than that, and the first look comes after a window."""
        longest = self.prompt_len + self.tokens
        pages = self.requests * -(-longest // 16)
        window = 2 * (self.tokens + self.prompt_len)
        return EngineConfig(
            model=str(folder),
            ranks=self.ranks,
            cache=CacheConfig(block_size=16, num_blocks=pages),
            scheduler=SchedulerConfig(max_num_seqs=self.requests, max_model_len=longest, enable_prefix_caching=False),
            eplb=EplbConfig(
                enable_eplb=True,
                num_redundant_experts=self.num_redundant_experts,
                eplb_window=window,
                eplb_interval=100 * window,
                eplb_min_gain=0.0,
                eplb_bytes_per_step=self.eplb_bytes_per_step,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """What one wave of requests showed."""

    level: float
    """Mean over max of the ranks' pairs, over its steps."""
    steps: int
    tokens_per_s: float


def run(flags: EplbBenchFlags, start: Start) -> int:
    """Measure on all ranks and print on rank 0; returns 0. Raises Refusal for what cannot run."""
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with refusals():
        folder = find_model(flags.model)
        config = flags.engine(folder)
        vocab = read_model_config(folder).vocab_size
    telling = Telling(say=notes.print, on_plan=lambda _: None, on_progress=lambda _done, _total: None)
    with ExitStack() as stack:
        with refusals():
            engine = stack.enter_context(engine_of(config, flags.group, start, telling))
        if engine is None:
            return DONE
        before, moving, after, stats = measure(engine, flags, vocab)
    tell(flags, before, moving, after, stats)
    return DONE


def measure(engine: Engine, flags: EplbBenchFlags, vocab: int) -> tuple[Wave, Wave, Wave, EngineStats]:
    """The first wave, the one in which experts moved, and the first again."""
    engine.generate([[1]] * flags.ranks, SamplingParams(max_tokens=1))  # ranks that are processes tell after a wave
    before = run_wave(engine, flags, prompts_of(flags, vocab, wave=0))
    for number in range(1, MOST_WAVES):
        moving = run_wave(engine, flags, prompts_of(flags, vocab, wave=number))
        experts = engine.stats().ranks[0].experts
        if experts.rebalances or experts.dropped:
            after = run_wave(engine, flags, prompts_of(flags, vocab, wave=0))
            return before, moving, after, engine.stats()
    raise Refusal(
        f"no rebalance came to its end in {MOST_WAVES} waves of {flags.tokens} steps: the experts are as level as they "
        "can be, or --eplb-bytes-per-step is too small; try a larger --skew or --tokens"
    )


def prompts_of(flags: EplbBenchFlags, vocab: int, *, wave: int) -> list[list[int]]:
    """Skewed prompts; every wave draws others from the same distribution."""
    rng = random.Random(f"{flags.seed}:{wave}")
    weights = [1.0 / (place + 1) ** flags.skew for place in range(vocab)]
    order = random.Random(flags.seed).sample(range(vocab), vocab)
    count = flags.ranks * flags.requests
    return [rng.choices(order, weights, k=flags.prompt_len) for _ in range(count)]


def run_wave(engine: Engine, flags: EplbBenchFlags, prompts: Sequence[Sequence[int]]) -> Wave:
    first, began = engine.stats().ranks[0], time.perf_counter()
    params = SamplingParams(temperature=1.0, seed=flags.seed, max_tokens=flags.tokens, ignore_eos=True)
    outputs = engine.generate(prompts, params)
    seconds, last = time.perf_counter() - began, engine.stats().ranks[0]
    mean, most = last.mean_pairs - first.mean_pairs, last.most_pairs - first.most_pairs
    return Wave(
        level=mean / most if most else 1.0,
        steps=last.steps - first.steps,
        tokens_per_s=sum(len(output.token_ids) for output in outputs) / seconds,
    )


def copying_s(num_bytes: int, *, rounds: int = 20) -> float:
    """Processor seconds that so many bytes cost by themselves: copied and check-summed when sent, and when received."""
    here, there = np.zeros(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    found = []
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(2):
            there[:] = here
            zlib.crc32(there.data)
        found.append(time.thread_time() - began)
    return sorted(found)[rounds // 2]


def tell(flags: EplbBenchFlags, before: Wave, moving: Wave, after: Wave, stats: EngineStats) -> None:
    """Print what was asked, where, with which settings, and what came out."""
    out = Console(highlight=False, soft_wrap=True)
    for line in (
        QUESTION,
        machine_line(),
        f"commit    {commit()}",
        f"settings  {flags.model}, {flags.ranks} ranks, {flags.num_redundant_experts} redundant experts a layer, "
        f"{flags.requests} requests a rank, prompts of {flags.prompt_len} tokens with skew {flags.skew:g}, "
        f"{flags.tokens} tokens each, at most {flags.eplb_bytes_per_step} B a rank and step",
    ):
        out.print(line, markup=False)
    print_table(out, wave_table(before, moving, after))
    found = summary(flags, before, moving, after, stats)
    out.print(
        f"moved     {found['experts_moved']} experts, {found['bytes_moved']} B, in {found['beats']} steps; most in one "
        f"{found['most_bytes_a_step']} B; a step's processor time rose by {found['beat_cpu_ms']} ms, of which "
        f"{found['bytes_cpu_ms']} ms for copying and checking as many bytes"
    )
    print(json.dumps(found))


def wave_table(before: Wave, moving: Wave, after: Wave) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("wave", "level", "steps", "tokens/s"):
        table.add_column(name, justify="left" if name == "wave" else "right")
    for name, wave in (("before", before), ("while experts move", moving), ("after", after)):
        table.add_row(name, f"{wave.level:.3f}", str(wave.steps), f"{wave.tokens_per_s:.1f}")
    return table


def summary(flags: EplbBenchFlags, before: Wave, moving: Wave, after: Wave, stats: EngineStats) -> dict[str, Any]:
    """The last line; of what each rank counts for itself the largest."""
    experts = [rank.experts for rank in stats.ranks]
    most_bytes = max(each.most_bytes for each in experts)
    beat_s = max(each.beat_cpu_s / max(each.beats, 1) for each in experts)
    first = experts[0]
    return {
        "ranks": flags.ranks,
        "redundant": flags.num_redundant_experts,
        "skew": flags.skew,
        "commit": commit(),
        "level_before": round(before.level, 4),
        "level_moving": round(moving.level, 4),
        "level_after": round(after.level, 4),
        "expected_before": [round(each, 4) for each in first.balance_before],
        "expected_after": [round(each, 4) for each in first.balance_after],
        "tokens_per_s": [round(wave.tokens_per_s, 1) for wave in (before, moving, after)],
        "rebalances": first.rebalances,
        "dropped": first.dropped,
        "experts_moved": first.experts_moved,
        "bytes_moved": first.bytes_moved,
        "beats": first.beats,
        "bytes_a_step": flags.eplb_bytes_per_step,
        "most_bytes_a_step": most_bytes,
        "beat_cpu_ms": round(1000 * beat_s, 3),
        "bytes_cpu_ms": round(1000 * copying_s(most_bytes), 3),
    }
