"""`serried generate`: decode the prompts of the command line and of a file, and print the text as it grows.

Standard output carries the answers and nothing else, so that it can be piped; the memory plan, progress, speed and the
table of ranks go to standard error. Knows the engine by its public API; what it does, any program can do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ep import SerriedError
from runtime import Engine, EngineConfig, EngineStats, FinishReason, MemoryPlan, SamplingParams, read_model_config
from runtime.weights.memory import plan_lines

from ..groups.group import Start, Telling, engine_of, is_primary
from ..groups.place import GroupFlags
from ..groups.refusal import Refusal, refusals
from .answers import Answer, JsonPrinter, Printer, TextPrinter
from .models import find_model
from .prompts import Prompt, gather_prompts
from .report import (
    LEGEND,
    error_line,
    exchange_line,
    graph_line,
    loading_bar,
    overflow_line,
    overlap_line,
    rank_table,
    speed_line,
)
from .text import TextCodec
from .wide_table import print_table

ABOUT = """\
Decode prompts and print the text.

Examples:
  serried generate profiles/models/tiny-v3 --prompt 'The "assert" statement' --ranks 4
  serried generate MODEL_FOLDER --prompt 'One' --prompt 'Two' --temperature 0 --max-tokens 64 --table
  serried generate MODEL_FOLDER --prompts requests.jsonl --json > answers.jsonl
  serried generate deepseek-v2-lite --load-format dummy --prompts requests.jsonl

A line of requests.jsonl, with any sampling field:
  {"prompt": "The for loop", "max_tokens": 32, "temperature": 0.7, "seed": 1, "id": "loop"}
  {"prompt_token_ids": [17, 4, 250], "logprobs": 5}
"""

DONE, FAILED = 0, 1

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags(SamplingParams):
    """How the tokens of a request are chosen, unless its line in --prompts says otherwise."""

    # The engine's configuration has a field `seed` too, and that one is vLLM's --seed.
    seed: Annotated[int | None, tyro.conf.arg(name="sampling-seed")] = None
    """Seed of every request; unset: each draws its own from --seed.
    Same seed, same tokens, whatever else runs, in float32 and float64.
    In 16-bit formats the CPU's own matmul may round differently with other batch mates."""

    def params(self) -> SamplingParams:
        return SamplingParams(**{item.name: getattr(self, item.name) for item in fields(SamplingParams)})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFlags:
    """What `serried generate` is told."""

    engine: tyro.conf.OmitArgPrefixes[EngineConfig]
    sampling: tyro.conf.OmitArgPrefixes[SamplingFlags] = field(default_factory=SamplingFlags)
    group: tyro.conf.OmitArgPrefixes[GroupFlags] = field(default_factory=GroupFlags)

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; give it once for each prompt."""

    prompts: Path | None = None
    """File with one JSON object a line: prompt or prompt_token_ids, and optionally id, priority and sampling fields."""

    json: Switch = False
    """Print one JSON object a request, in input order, instead of text."""

    explain_routing: Switch = False
    """Print, for each request, what every rank would have cost and which was chosen."""

    table: Switch = False
    """Print what each rank did, at the end."""


def run(flags: GenerateFlags, start: Start) -> int:
    """Decode; returns the exit code: 1 when a request ended in an error. Raises Refusal for what cannot be run."""
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    prepare_kernels(flags.engine)
    with refusals():
        folder = find_model(flags.engine.model)
        check_model(folder, flags.engine)
        codec, prompts = None, []
        if is_primary(start):  # the others have nothing to read: a pipe can be read once
            codec = TextCodec.open(folder)
            prompts = gather_prompts(flags.prompt, flags.prompts, flags.sampling.params())
        token_lists = [prompt_tokens(prompt, codec, folder) for prompt in prompts]
    with ExitStack() as stack:
        with refusals(), loading_bar(notes) as progress:
            telling = Telling(say=notes.print, on_plan=lambda plan: announce(plan, notes), on_progress=progress)
            config = replace(flags.engine, model=str(folder))
            engine = stack.enter_context(engine_of(config, flags.group, start, telling))
        if engine is None:
            return DONE
        for line in engine.notes:
            notes.print(f"note: {line}", markup=False)
        answers = submit(engine, prompts, token_lists, codec)
        if flags.explain_routing:
            for answer in answers:
                for line in engine.explain(answer.prompt.id):
                    notes.print(f"{answer.prompt.id}: {line}", markup=False)
        if not flags.json and any(answer.prompt.params.logprobs is not None for answer in answers):
            notes.print("note: logprobs are printed with --json only", markup=False)
        printer = JsonPrinter(answers, sys.stdout) if flags.json else TextPrinter(answers, sys.stdout, codec=codec)
        seconds = follow(engine, answers, printer)
        stats = engine.stats()
    return conclude(answers, stats, seconds, notes, table=flags.table)


def prepare_kernels(config: EngineConfig) -> None:
    """What Triton wants to be told before it is imported: kernels on a CPU are interpreted, products and sums may fuse.

    Some versions fuse by default and warn that later ones will not.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if config.ops == "triton" and config.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


def conclude(answers: Sequence[Answer], stats: EngineStats, seconds: float, notes: Console, *, table: bool) -> int:
    """Say how fast it was, what each rank did if asked, and what went wrong; returns the exit code."""
    notes.print(speed_line(stats, seconds))
    if table:
        print_table(notes, rank_table(stats))
        notes.print(LEGEND, markup=False)
    for line in (exchange_line(stats) if table else None, overflow_line(stats), overlap_line(stats), graph_line(stats)):
        if line is not None:
            notes.print(line, markup=False)
    failed = sum(answer.finish_reason == FinishReason.ERROR for answer in answers)
    if failed:
        notes.print(f"serried: {error_line(failed, len(answers))}", markup=False)
    return FAILED if failed else DONE


def check_model(folder: Path, config: EngineConfig) -> None:
    """Raise ValueError for a model that cannot be run, before anything is said about its tokenizer."""
    read_model_config(folder)
    if folder.is_file() and config.load_format != "dummy":
        raise ValueError(
            f"{folder} is a configuration without weights; give a checkpoint's folder, or --load-format dummy "
            "for random ones"
        )


def announce(plan: MemoryPlan, notes: Console) -> None:
    """Print where a rank's bytes go; called before any is allocated."""
    for line in plan_lines(plan, contexts=()):
        notes.print(line, markup=False)
    notes.print()


def prompt_tokens(prompt: Prompt, codec: TextCodec | None, folder: Path) -> Sequence[int]:
    """The prompt as token ids. Raises ValueError for text when the model folder has no tokenizer."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    assert prompt.text is not None, "a prompt has text or token ids"
    if codec is None:
        raise ValueError(
            f"{prompt.origin}: {folder} has no tokenizer.json, so text cannot be read; "
            'give token ids in a file of --prompts, e.g. {"prompt_token_ids": [1, 2, 3]}'
        )
    return codec.encode(prompt.text)


def submit(
    engine: Engine, prompts: Sequence[Prompt], token_lists: Sequence[Sequence[int]], codec: TextCodec | None
) -> list[Answer]:
    """Hand every prompt to the engine, in order. Raises Refusal with the prompt's origin when one is refused."""
    answers = []
    for prompt, tokens in zip(prompts, token_lists, strict=True):
        try:
            with refusals():
                engine.submit(tokens, prompt.params, request_id=prompt.id, priority=prompt.priority)
        except Refusal as refusal:
            raise Refusal(f"{prompt.origin}: {refusal}") from refusal
        stream = codec.stream(tokens) if codec is not None else None
        answers.append(Answer(prompt=prompt, prompt_tokens=tokens, stream=stream))
    return answers


def follow(engine: Engine, answers: Sequence[Answer], printer: Printer) -> float:
    """Take the engine's events until every answer is complete, printing meanwhile; returns the seconds it took.

    When a rank fails, what is unfinished ends with what it has and the reason "error".
    """
    by_id = {answer.prompt.id: answer for answer in answers}
    start = time.perf_counter()
    try:
        for event in engine.events():
            by_id[event.request_id].take(event)
            printer.advance()
    except SerriedError:
        for answer in answers:  # the group has failed: none of them ends in silence
            answer.fail()
        printer.advance()
        raise
    return time.perf_counter() - start
