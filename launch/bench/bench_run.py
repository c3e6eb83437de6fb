"""What the benchmarks of a whole engine share: their flags, the engine with its instruments, and one measured run.

Knows the engine by its public API. What is made of a run is `bench_result`'s, how it is said `bench_tables`'.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console

from ep import RequestError
from runtime import Engine, EngineConfig, EngineStats, read_model_config
from runtime.bench.workload import Job, Workload
from runtime.bench.workload_run import Run, run_workload
from runtime.loop.instruments import Instruments

from ..command.generate import announce, check_model, prepare_kernels
from ..command.models import find_hardware, find_model
from ..command.report import loading_bar, request_bar
from ..groups.group import Start, Telling, engine_of
from ..groups.place import GroupFlags, cpu_transport
from ..groups.refusal import Refusal, refusals
from ..groups.world import World, detect
from .bench import commit, machine_line, processor

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]

WARM_TOKENS = 8
"""Tokens that each request of the warm-up gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags:
    """What every benchmark of a whole engine is told."""

    engine: tyro.conf.OmitArgPrefixes[EngineConfig]
    group: tyro.conf.OmitArgPrefixes[GroupFlags] = field(default_factory=GroupFlags)

    temperature: float = 0.0
    """Of every request; 0 is greedy."""

    num_warmups: int | None = None
    """Requests that run before anything is measured, with at most 8 tokens each; unset: as many as run at once."""

    decode_only: Switch = False
    """Fill the caches with random latents instead of computing prompts: every step only decodes. Its tokens mean
    nothing."""

    output_json: Path | None = None
    """File for all figures, as JSON with the keys of `vllm bench`."""

    compare: Path | None = None
    """File of an earlier --output-json: what has changed since, and whether that is more than noise."""

    report: Path | None = None
    """File for a page with plots, a timeline of steps and a heat map of experts; it needs no network."""

    def __post_init__(self) -> None:
        if self.num_warmups is not None and self.num_warmups < 0:
            raise ValueError(f"num_warmups is {self.num_warmups}; it must be at least 0, e.g. 8")
        for name in ("output_json", "report"):
            check_file(name, getattr(self, name))


def check_file(name: str, path: Path | None) -> None:
    """ValueError unless a file can be written there."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"{name} is {str(path)!r}; it must be a file in a folder that is there, e.g. result.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run and what the ranks counted before and after it. `offered`: the load it was given."""

    run: Run
    before: EngineStats
    after: EngineStats
    offered: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """An engine that is ready to be measured, on rank 0.

    config     what it was asked for, with the model's folder
    transport  what carries rows, by name
    sharing    ranks that one core computes one after the other; below 1 where a rank has several threads
    """

    engine: Engine
    config: EngineConfig
    flags: BenchFlags
    transport: str
    sharing: float
    notes: Console

    @property
    def ranks(self) -> int:
        """Of the group."""
        return self.engine.config.ranks

    def jobs(self, load: Workload, *, number: int = 0) -> list[Job]:
        """Requests of the run with that number: each has prompts of its own, so that none finds another's in a cache.
        ValueError for a trace that cannot be read."""
        return load.jobs(vocab=self.engine.model.vocab_size, seed=self.config.seed + number)

    def warm_up(self, load: Workload) -> None:
        """Run requests that are not measured, all at once."""
        at_once = min(load.num_prompts, load.max_concurrency or load.num_prompts)
        count = max(at_once if self.flags.num_warmups is None else self.flags.num_warmups, 1)
        jobs = [
            replace(job, arrival_s=0.0, output_len=min(job.output_len, WARM_TOKENS))
            for job in self.jobs(replace(load, num_prompts=count), number=1_000_003)
        ]
        with _asked():
            run_workload(self.engine, jobs, temperature=self.flags.temperature)

    def measure(self, load: Workload, *, number: int = 0) -> Measured:
        """One run of `load`."""
        jobs = self.jobs(load, number=number)
        before = self.engine.stats()
        with _asked(), request_bar(self.notes) as on_progress:
            run = run_workload(
                self.engine,
                jobs,
                temperature=self.flags.temperature,
                seed=self.config.seed,
                max_concurrency=load.max_concurrency,
                on_progress=on_progress,
            )
        return Measured(run=run, before=before, after=self.engine.stats(), offered=load)


@contextmanager
def _asked() -> Iterator[None]:
    """Requests that the engine does not let in were asked for wrongly; all else is a failure."""
    try:
        yield
    except RequestError as error:
        raise Refusal(str(error)) from error


@contextmanager
def bench_of(flags: BenchFlags, loads: Sequence[Workload], start: Start) -> Iterator[Bench | None]:
    """The engine of a benchmark, ready; None in a process that was a rank of its group, whose work is done by then.

    Raises Refusal for what cannot run: a request of `loads` that is too long, a model, a trace.
    """
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    prepare_kernels(flags.engine)
    with refusals():
        folder = find_model(flags.engine.model)
        check_model(folder, flags.engine)
        config = fit_config(replace(flags.engine, model=str(folder)), loads)
        world = start.child.world if start.child else detect(os.environ)
    with ExitStack() as stack:
        with refusals(), loading_bar(notes) as progress:
            telling = Telling(say=notes.print, on_plan=lambda plan: announce(plan, notes), on_progress=progress)
            instruments = Instruments(parts=True, filled=flags.decode_only)
            engine = stack.enter_context(engine_of(config, flags.group, start, telling, instruments=instruments))
        if engine is None:
            yield None
            return
        for line in engine.notes:
            notes.print(f"note: {line}", markup=False)
        local = engine.config.ranks if world.size == 1 else world.local_size
        transport = transport_name(flags.group.transport, world, config, ranks=engine.config.ranks)
        in_turns = transport == "threads"
        yield Bench(
            engine=engine,
            config=config,
            flags=flags,
            transport=transport,
            sharing=1.0 if config.device != "cpu" else sharing(local, in_turns=in_turns),
            notes=notes,
        )


def fit_config(config: EngineConfig, loads: Sequence[Workload]) -> EngineConfig:
    """A config whose longest request is the loads', where nothing else is said: room for more would only cost memory.

    ValueError for a load with longer requests than the user, or the model, allows.
    """
    longest, model = max([load.longest for load in loads]), read_model_config(Path(config.model))
    allowed = config.scheduler.max_model_len or model.max_position
    if longest > allowed:
        raise ValueError(
            f"the longest request has {longest} tokens, prompt and output; at most {allowed} are allowed, "
            "e.g. --input-len 32 --output-len 64"
        )
    return replace(config, scheduler=replace(config.scheduler, max_model_len=config.scheduler.max_model_len or longest))


def transport_name(chosen: str, world: World, config: EngineConfig, *, ranks: int) -> str:
    """What carries rows between the ranks; a rank alone is a thread like others."""
    if chosen == "threads" or ranks == 1:
        return "threads"
    return "nccl" if config.device != "cpu" else cpu_transport(chosen, world)


def sharing(local_ranks: int, *, in_turns: bool) -> float:
    """How many ranks' work one core does: threads take turns in this process; processes share the machine's cores."""
    threads = torch.get_num_threads()
    if in_turns:
        return local_ranks / threads
    return max(1.0, local_ranks / (os.cpu_count() or 1))


def hardware_path(config: EngineConfig) -> Path | None:
    """The profile to hold a run against: the one that was named, or a CPU's own; None where nobody knows the device."""
    if config.hardware is not None:
        return Path(config.hardware)
    return find_hardware("cpu") if config.device == "cpu" else None


def environment() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "machine": machine_line().removeprefix("machine").strip(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_per_rank": torch.get_num_threads(),
    }
