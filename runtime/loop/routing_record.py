"""Recordings of routing as files of a run: each rank writes its own, and together they are read as one.

    --record-routing routing     routing.0  routing.1  ..

Knows names of files; what is in them is `eplb.recording`'s.
"""

from __future__ import annotations

import os
from pathlib import Path

from eplb.config import EplbConfig
from eplb.recording import Recording, RoutingRecorder

from ..model.model_config import ModelConfig


def rank_file(path: Path | str, rank: int) -> Path:
    """Where one rank writes: (routing, 3) -> routing.3."""
    path = Path(path)
    return path.with_name(f"{path.name}.{rank}")


def read_routing(path: Path | str) -> Recording:
    """The recording of this name: one file, or those of all ranks together.

    Raises ValueError for files that are no recordings or not of one run, FileNotFoundError when there is none.
    """
    return Recording.total([Recording.read(each) for each in routing_files(path)])


def routing_files(path: Path | str) -> list[Path]:
    """The files that this name stands for. Raises as `read_routing`."""
    path = Path(path)
    if path.name in ("", ".."):
        raise ValueError(f"{str(path)!r} is no recording of routing; it must name a file, e.g. routing")
    if path.is_file():
        return [path]
    first = rank_file(path, 0)
    if not first.is_file():
        raise FileNotFoundError(f"neither {path} nor {first.name} is there: no recording of routing")
    return [rank_file(path, rank) for rank in range(Recording.read(first).num_ranks)]


def check_writable(config: EplbConfig, *, ranks: int) -> None:
    """Before anything is decoded: ValueError where a recording could not be written at the end."""
    if config.record_routing is None:
        return
    folder = Path(config.record_routing).absolute().parent
    if not folder.is_dir():
        raise ValueError(f"record_routing is {config.record_routing!r}; there is no folder {folder}, so make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"record_routing is {config.record_routing!r}; nothing can be written to {folder}")
    for path in [rank_file(config.record_routing, rank) for rank in range(ranks)]:
        if path.is_dir():
            raise ValueError(f"record_routing is {config.record_routing!r}; {path}, a rank's file, is a folder")


def open_recorder(
    config: EplbConfig, model: ModelConfig, *, ranks: int, rank: int, name: str
) -> RoutingRecorder | None:
    """What one rank records with; None where nothing is to be recorded. `name`: where the model was found."""
    if config.record_routing is None or model.moe is None:
        return None
    return RoutingRecorder(
        rank_file(config.record_routing, rank),
        num_layers=len(model.moe_layers),
        num_experts=model.moe.num_experts,
        top_k=model.moe.top_k,
        num_ranks=ranks,
        model=name,
        max_token_ids=config.record_routing_tokens,
    )
