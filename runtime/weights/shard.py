"""Cuts a checkpoint for a number of ranks: one file for each rank's slots, one for what all hold alike.

    DIR/model-shared.safetensors                everything but the routed experts
        model-slots-00001-of-00004.safetensors  the experts of rank 0, in the order in which its memory has them
        model.safetensors.index.json            which tensor is where, and what the files are (`shard_set`)
        config.json, tokenizer.json, ...        as they were

A rank then opens two files and reads each from one end to the other. Names, formats and values stay, so the folder is
an ordinary checkpoint, for any number of ranks and any other program; tensors that the model does not use are left out.
The folder appears when it is complete. Knows files and placements; does not know how weights are loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ep import CheckpointError
from moe import ExpertPlacement

from ..model.json_file import read_json_object
from ..model.model_config import ModelConfig
from ..model.model_shapes import expert_tensors, shared_tensors
from .checkpoint import Checkpoint
from .memory import gib
from .progress import OnProgress, Progress, counted
from .safetensors_file import DTYPES, StoredTensor, encode_header, read_into
from .shard_set import SET_KEY, ShardFile, ShardSet
from .weights import verify_held

SHARED_FILE = "model-shared.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# What belongs to a model besides its weights.
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "LICENSE*")
_INDICES = "*.index.json"
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """What a folder of shards holds."""

    folder: Path
    num_files: int
    num_bytes: int


def cut_shards(
    source: Checkpoint,
    model: ModelConfig,
    placement: ExpertPlacement | None,
    *,
    origin: Path,
    folder: Path,
    on_progress: OnProgress | None = None,
) -> Shards:
    """Write `source`, whose folder is `origin`, to the new folder `folder`, cut for `placement`.

    Raises ValueError when the folder exists, the disk is too small or an expert sits in two slots, CheckpointError for
    a source that is not what the model needs.
    """
    num_ranks = placement.num_ranks if placement is not None else 1
    verify_held(source, model, placement, ranks=range(num_ranks))
    files = plan_files(source, model, placement)
    total = sum(stored.num_bytes for tensors in files.values() for stored in tensors.values())
    _check_room(folder, total)
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    unfinished.mkdir(parents=True)
    try:
        _write_folder(unfinished, files, _slots(placement), origin=origin, report=counted(on_progress, total=total))
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return Shards(folder=folder, num_files=len(files), num_bytes=total)


def check_shards(folder: Path, *, on_progress: OnProgress | None = None) -> Shards:
    """Read a folder of shards from end to end and hold it against the checksums it was written with.

    Raises CheckpointError for the first file that differs, ValueError for a folder that is not one of shards.
    """
    index = folder / INDEX_FILE
    try:
        shards = ShardSet.from_index(read_json_object(index).get("metadata") or {})
    except FileNotFoundError:
        shards = None
    if shards is None:
        raise ValueError(f"{folder} was not cut by `serried shard`: its {INDEX_FILE} says nothing of it, or is missing")
    total = sum(file.bytes for file in shards.files.values())
    report = counted(on_progress, total=total)
    for name, expected in shards.files.items():
        found = _checksum(folder / name, report)
        if found != expected:
            raise CheckpointError(
                tensor=None, file=folder / name, expected=f"{expected.bytes} bytes with sha256 {expected.sha256}",
                found=f"{found.bytes} bytes with {found.sha256}",
            )  # fmt: skip
    return Shards(folder=folder, num_files=len(shards.files), num_bytes=total)


def plan_files(
    source: Checkpoint, model: ModelConfig, placement: ExpertPlacement | None
) -> dict[str, dict[str, StoredTensor]]:
    """Names of the files to be, and what goes into each, in order: where it lies now."""
    files = {SHARED_FILE: _in_file_order(source, shared_tensors(model))}
    if placement is None or model.moe is None:
        return files
    held = [expert for expert in placement.slot_experts if expert != -1]
    if len(set(held)) < len(held):
        raise ValueError("an expert sits in two slots; shards are cut for one copy of each, others come by rebalancing")
    for rank in range(placement.num_ranks):
        names = [
            name
            for layer in model.moe_layers
            for expert in placement.experts_of(rank)
            if expert != -1
            for name in expert_tensors(model, layer, expert)
        ]
        file = f"model-slots-{rank + 1:05d}-of-{placement.num_ranks:05d}.safetensors"
        files[file] = _in_file_order(source, names)
    return files


def _in_file_order(source: Checkpoint, names: Iterable[str]) -> dict[str, StoredTensor]:
    """Wide numbers first, so that every tensor begins at a multiple of its own; else in the order they are loaded."""
    pieces = [piece for name in names for piece in source.pieces(name)]
    stored = {piece: source.stored(piece) for piece in pieces}
    return dict(sorted(stored.items(), key=lambda item: -DTYPES[item[1].dtype].itemsize))


def _slots(placement: ExpertPlacement | None) -> tuple[tuple[int, ...], ...]:
    if placement is None:
        return ((),)
    return tuple(placement.experts_of(rank) for rank in range(placement.num_ranks))


def _check_room(folder: Path, total: int) -> None:
    if folder.exists():
        raise ValueError(f"{folder} exists; shards are written to a new folder, remove it or name another")
    parent = next(path for path in folder.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < total:
        raise ValueError(f"{folder} needs {gib(total)}, but {parent} has {gib(free)} free: {gib(total - free)} short")


def _write_folder(
    folder: Path,
    files: Mapping[str, Mapping[str, StoredTensor]],
    slot_experts: tuple[tuple[int, ...], ...],
    *,
    origin: Path,
    report: Progress,
) -> None:
    name_of_set = secrets.token_hex(8)
    written = {file: _write_file(folder / file, files[file], name_of_set, report) for file in files}
    shards = ShardSet(set=name_of_set, slot_experts=slot_experts, files=written)
    total = sum(stored.num_bytes for tensors in files.values() for stored in tensors.values())
    index = {
        "metadata": {"total_size": total, **shards.to_index()},
        "weight_map": {name: file for file, tensors in files.items() for name in tensors},
    }
    for path in _companions(origin):
        shutil.copyfile(path, folder / path.name)
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _companions(origin: Path) -> list[Path]:
    found = {path for pattern in _COMPANIONS for path in origin.glob(pattern) if path.is_file()}
    return sorted(found - set(origin.glob(_INDICES)))


def _write_file(path: Path, tensors: Mapping[str, StoredTensor], name_of_set: str, report: Progress) -> ShardFile:
    header = encode_header(tensors, {SET_KEY: name_of_set})
    digest = hashlib.sha256(header)
    size = len(header)
    with path.open("xb") as out:
        out.write(header)
        for piece in _pieces(tensors.values()):
            digest.update(piece)
            size += out.write(piece)
            report(len(piece))
        out.flush()
        os.fsync(out.fileno())
    return ShardFile(bytes=size, sha256=digest.hexdigest())


def _pieces(tensors: Iterable[StoredTensor]) -> Iterator[memoryview]:
    """The bytes of these tensors, one after the other; every piece is overwritten by the next."""
    buffer = memoryview(bytearray(_PIECE_BYTES))
    for stored in tensors:
        with stored.file.open("rb", buffering=0) as stream:
            for start in range(stored.start, stored.end, _PIECE_BYTES):
                piece = buffer[: min(_PIECE_BYTES, stored.end - start)]
                read_into(stream, [piece], start=start)
                yield piece


def _checksum(path: Path, report: Progress) -> ShardFile:
    """A file as it is now; one that is not there is empty."""
    digest = hashlib.sha256()
    size = 0
    buffer = memoryview(bytearray(_PIECE_BYTES))
    if path.is_file():
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
                size += count
                report(count)
    return ShardFile(bytes=size, sha256=digest.hexdigest())
