"""A checkpoint on disk as a source of tensors: what is there, whether it is right, and its numbers read into place.

Single-file and sharded safetensors, plain or with 128 x 128 fp8 blocks, as published or cut by `serried shard`. Every
tensor that a rank will hold is checked against the headers before one is read; reading is given all that is wanted at
once, so that it can go through the files in their order (see `reading`). Knows names and shapes; does not know ranks or
what a tensor is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ep import CheckpointError
from moe.quant import num_blocks

from ..model.json_file import read_json_object
from ..model.model_config import ModelConfig
from ..model.model_shapes import Shape
from .checkpoint_files import check_shard, find_index, join_files, place_files
from .checkpoint_names import SCALE_SUFFIX, map_names
from .progress import Progress
from .reading import FP8, Part, parts_of, read_parts
from .safetensors_file import Header, StoredTensor, read_header
from .shard_set import ShardSet

_PLAIN = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tensor and where it is to go: `out` has its shape, any float dtype and device; fp8 is dequantised.

    An fp8 tensor to be kept as it is stored has an fp8 `out` and `scale_inv`, float32 [ceil(rows / 128),
    ceil(columns / 128)].
    """

    name: str
    out: Tensor
    scale_inv: Tensor | None = None


class TensorSource(Protocol):
    """Where weights come from; two implementations, `Checkpoint` and `dummy.DummyCheckpoint`."""

    notes: tuple[str, ...]
    """Lines that the user should see: what is skipped, or that the weights are random."""
    bytes_read: int
    """Data and scales read so far, without headers."""

    def verify(self, shapes: Mapping[str, Shape]) -> None:
        """CheckpointError unless every one of these tensors can be read with this shape. Reads no data."""
        ...

    def is_fp8(self, name: str) -> bool:
        """Whether the tensor is stored as fp8 blocks with scales."""
        ...

    def stored_bytes(self, name: str) -> int:
        """Bytes that reading the tensor takes, scales included."""
        ...

    def read(self, wanted: Sequence[Wanted], *, progress: Progress | None = None) -> None:
        """Fill all of these, in whatever order is best; a tensor that is wanted in several places is read once."""
        ...


def open_checkpoint(path: Path | str, model: ModelConfig, *, turn: tuple[int, int] = (0, 1)) -> Checkpoint:
    """The checkpoint in a folder (or one .safetensors file), its names sorted out against `model`.

    turn: (i, n), the i-th of n readers begins i/n down the files. Raises CheckpointError for tensors that the model has
    no place for, FileNotFoundError when there are no weights.
    """
    found = _find_files(Path(path))
    names = map_names(found.file_of, model, file_of={name: str(file) for name, file in found.file_of.items()})
    files = {name: found.file_of[raw] for name, raw in names.stored.items()}
    notes = names.notes if found.shards is None else (*names.notes, found.shards.describe())
    return Checkpoint(stored_names=names.stored, files=files, found=found, notes=notes, turn=turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """What there is: every tensor name and the file it is in, and the headers that had to be read to know."""

    place: Path
    file_of: Mapping[str, Path]
    headers: Mapping[Path, Header]
    shards: ShardSet | None = None


class Checkpoint:
    """Weights in safetensors files. See TensorSource."""

    def __init__(
        self,
        *,
        stored_names: Mapping[str, str],
        files: Mapping[str, Path],
        found: FoundFiles,
        notes: tuple[str, ...],
        turn: tuple[int, int],
    ) -> None:
        self.notes = notes
        self.bytes_read = 0
        self._stored_names = stored_names
        self._files = files
        self._found = found
        self._headers: dict[Path, Header] = dict(found.headers)
        self._turn = turn

    def verify(self, shapes: Mapping[str, Shape]) -> None:
        """Check presence, shape, dtype, scales and length of every tensor; the error names the first and counts all."""
        problems = [problem for name, shape in shapes.items() for problem in self._problems(name, shape)]
        if not problems:
            return
        tensor, expected, found = problems[0]
        if len(problems) > 1:
            found += f" (and {len(problems) - 1} more tensors are wrong, such as {problems[1][0]})"
        file = self._files.get(tensor) or self._files.get(tensor.removesuffix(SCALE_SUFFIX)) or self._found.place
        raise CheckpointError(tensor=tensor, file=file, expected=expected, found=found)

    def is_fp8(self, name: str) -> bool:
        """Trusts the tensors, whatever config.json says."""
        return self.stored(name).dtype == FP8

    def stored_bytes(self, name: str) -> int:
        """Bytes of data, and of scales when there are any."""
        return sum(self.stored(each).num_bytes for each in self.pieces(name))

    def read(self, wanted: Sequence[Wanted], *, progress: Progress | None = None) -> None:
        """Scales first, a few bytes of each tensor, then the data through all files in one go."""
        by_name: dict[str, list[Wanted]] = {}
        for each in wanted:
            by_name.setdefault(each.name, []).append(each)
        report = progress or (lambda _: None)
        scales = self._read_scales(by_name, report)
        parts: list[Part] = []
        for name, places in by_name.items():
            parts += parts_of(self.stored(name), [each.out for each in places], scale_inv=scales.get(name))
        self._read_parts(parts, report)

    def stored(self, name: str) -> StoredTensor:
        """Where a (verified) tensor or its scales lie."""
        stored = self._find(name)
        assert stored is not None, f"{name} is read before it was verified"
        return stored

    def pieces(self, name: str) -> tuple[str, ...]:
        """The names of all that belongs to a (verified) tensor: itself, and its scales if it is fp8."""
        return (name, f"{name}{SCALE_SUFFIX}") if self.is_fp8(name) else (name,)

    def _read_scales(self, by_name: Mapping[str, Sequence[Wanted]], report: Progress) -> dict[str, Tensor]:
        """Block scales of every fp8 tensor, in float32; put where they are wanted, too."""
        scales: dict[str, Tensor] = {}
        parts: list[Part] = []
        for name, places in by_name.items():
            if self.is_fp8(name):
                stored = self.stored(f"{name}{SCALE_SUFFIX}")
                scales[name] = torch.empty(stored.shape, dtype=torch.float32)
                kept = [each.scale_inv for each in places if each.scale_inv is not None]
                parts += parts_of(stored, [scales[name], *kept])
        self._read_parts(parts, report)
        return scales

    def _read_parts(self, parts: Sequence[Part], report: Progress) -> None:
        for part in read_parts(parts, turn=self._turn):
            self.bytes_read += part.num_bytes
            report(part.num_bytes)

    def _find(self, name: str) -> StoredTensor | None:
        """The tensor's place, None when no file has it; headers are read once a file."""
        file = self._files.get(name)
        return None if file is None else self._header(file).tensors.get(self._stored_names[name])

    def _header(self, file: Path) -> Header:
        if file not in self._headers:
            header = read_header(file)
            if self._found.shards is not None:
                self._found.shards.check(file, header)
            check_shard(file, header.tensors, self._found.file_of)
            self._headers[file] = header
        return self._headers[file]

    def _problems(self, name: str, shape: Shape) -> Iterator[tuple[str, str, str]]:
        """(tensor, expected, found) of what is wrong with one tensor and its scales."""
        stored = self._find(name)
        if stored is None:
            yield name, f"shape {list(shape)}", "no such tensor"
        elif stored.dtype == FP8 and len(shape) == 2:
            yield from _wrong(name, stored, shape, (FP8,))
            scale_name, blocks = f"{name}{SCALE_SUFFIX}", (num_blocks(shape[0]), num_blocks(shape[1]))
            scale = self._find(scale_name)
            if scale is None:
                yield scale_name, f"shape {list(blocks)} F32 beside fp8 weights", "no such tensor"
            else:
                yield from _wrong(scale_name, scale, blocks, ("F32", "BF16"))
        else:
            yield from _wrong(name, stored, shape, _PLAIN)
            if f"{name}{SCALE_SUFFIX}" in self._files:
                yield name, f"{FP8} beside a {SCALE_SUFFIX.removeprefix('_')}", stored.describe()


def _wrong(name: str, stored: StoredTensor, shape: Shape, dtypes: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    if stored.shape != shape:
        yield name, f"shape {list(shape)}", f"shape {list(stored.shape)}"
    elif stored.dtype not in dtypes:
        yield name, f"dtype {' or '.join(dtypes)}", f"dtype {stored.dtype}; weights of this format are not built"
    elif stored.end > stored.file_bytes:
        missing = stored.end - stored.file_bytes
        yield name, f"a file of at least {stored.end} bytes", f"{stored.file_bytes} bytes, {missing} are missing"


def _find_files(path: Path) -> FoundFiles:
    """Every tensor name of a checkpoint and the file it is in."""
    if path.is_file():
        return _by_headers(path, [path])
    index = find_index(path)
    if index is not None:
        return _by_index(index)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} holds no .safetensors files; --load-format dummy makes random weights instead")
    return _by_headers(path, files)


def _by_headers(place: Path, files: Sequence[Path]) -> FoundFiles:
    headers = {file: read_header(file) for file in files}
    file_of = join_files({file: header.tensors for file, header in headers.items()})
    return FoundFiles(place=place, file_of=file_of, headers=headers)


def _by_index(index: Path) -> FoundFiles:
    try:
        content = read_json_object(index)
        weight_map = dict(content["weight_map"].items())
        shards = ShardSet.from_index(content.get("metadata") or {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            tensor=None, file=index, expected="an object with weight_map", found=f"{type(error).__name__}: {error}"
        ) from error
    file_of = place_files(weight_map, index)
    return FoundFiles(place=index.parent, file_of=file_of, headers={}, shards=shards)
