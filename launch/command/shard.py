"""`serried shard`: cut a checkpoint for a number of ranks, so that each opens its own file only; or check such a cut.

Knows the command line; what the files are is `runtime.weights.shard`'s.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ep import CheckpointError
from moe import spread
from runtime.model.model_config import read_model_config
from runtime.weights.checkpoint import open_checkpoint
from runtime.weights.memory import gib
from runtime.weights.shard import Shards, check_shards, cut_shards

from ..groups.refusal import refusals
from .models import find_model
from .report import loading_bar

ABOUT = """\
Cut a checkpoint for a number of ranks, for fast restarts: one file for each rank's experts, one for the rest.

Examples:
  serried shard MODEL_FOLDER --ranks 8 --out MODEL_FOLDER-8
  serried generate MODEL_FOLDER-8 --ranks 8 --prompt 'One'
  serried shard MODEL_FOLDER-8 --check

The new folder is an ordinary checkpoint: any number of ranks can load it, and so can other programs.
"""

DONE, FAILED = 0, 1
_GIGA = 1e9

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFlags:
    """What `serried shard` is told."""

    model: str
    """Folder of a Hugging Face checkpoint, or with --check one that this command wrote."""

    ranks: int | None = None
    """Ranks that will share the experts."""

    out: Path | None = None
    """The folder to write; it must not exist."""

    check: Switch = False
    """Write nothing: read the folder from end to end and compare it with the checksums it was written with."""

    def __post_init__(self) -> None:
        if self.check and (self.out is not None or self.ranks is not None):
            raise ValueError("check is given with out or ranks; it takes a folder and nothing else")
        if not self.check and (self.out is None or self.ranks is None):
            raise ValueError("out and ranks are needed to write shards, e.g. --ranks 8 --out MODEL-8; or give --check")
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"ranks is {self.ranks}; it must be at least 1, e.g. 8")


def run(flags: ShardFlags) -> int:
    """Write or check; returns 0, or 1 for a folder that fails the check. Raises Refusal for what cannot be done."""
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with refusals():
        return check(flags, notes) if flags.check else cut(flags, notes)


def check(flags: ShardFlags, notes: Console) -> int:
    """Hold a folder against its checksums, and say which file differs. Raises ValueError for any other folder."""
    began = time.perf_counter()
    try:
        with loading_bar(notes) as progress:
            shards = check_shards(Path(flags.model), on_progress=progress)
    except CheckpointError as error:
        notes.print(f"serried: {error}", markup=False)
        return FAILED
    notes.print(done_line("checked", shards, time.perf_counter() - began), markup=False)
    return DONE


def cut(flags: ShardFlags, notes: Console) -> int:
    """Write the folder. Raises ValueError, OSError or CheckpointError for what cannot be cut."""
    assert flags.out is not None, "checked when the flags were made"
    assert flags.ranks is not None, "checked when the flags were made"
    began = time.perf_counter()
    origin = find_model(flags.model)
    model = read_model_config(origin)
    source = open_checkpoint(origin, model)
    for line in source.notes:
        notes.print(f"note: {line}", markup=False)
    placement = spread(model.moe.num_experts, flags.ranks) if model.moe is not None else None
    with loading_bar(notes) as progress:
        shards = cut_shards(source, model, placement, origin=origin, folder=flags.out, on_progress=progress)
    notes.print(done_line("wrote", shards, time.perf_counter() - began), markup=False)
    return DONE


def done_line(verb: str, shards: Shards, seconds: float) -> str:
    """What was done, and how fast."""
    rate = shards.num_bytes / seconds / _GIGA
    size = gib(shards.num_bytes)
    return f"{verb} {shards.num_files} files, {size}, in {seconds:.2f} s ({rate:.2f} GB/s): {shards.folder}"
