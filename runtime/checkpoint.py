"""A checkpoint on disk as a source of tensors: what is there, whether it is right, and its numbers read into place.

Single-file and sharded safetensors, plain or with 128 x 128 fp8 blocks. Every tensor that a rank will hold is checked
against the headers before one is read; reading goes through bounded pieces and the destination alone is kept. Knows
names and shapes; does not know ranks or what a tensor is for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ep import CheckpointError
from moe.quant import BLOCK, dequantize_blocks, num_blocks

from .checkpoint_names import SCALE_SUFFIX, map_names
from .model_config import ModelConfig
from .model_shapes import Shape
from .safetensors_file import DTYPES, StoredTensor, read_header, read_rows_into

# Rows that must be converted pass through a buffer of about this size.
_PIECE_BYTES = 32 << 20
_PLAIN = ("BF16", "F16", "F32", "F64")
_FP8 = "F8_E4M3"


class TensorSource(Protocol):
    """Where weights come from; two implementations, `Checkpoint` and `dummy.DummyCheckpoint`."""

    notes: tuple[str, ...]
    """Lines that the user should see: what is skipped, or that the weights are random."""

    def verify(self, shapes: Mapping[str, Shape]) -> None:
        """CheckpointError unless every one of these tensors can be read with this shape. Reads no data."""
        ...

    def is_fp8(self, name: str) -> bool:
        """Whether the tensor is stored as fp8 blocks with scales."""
        ...

    def stored_bytes(self, name: str) -> int:
        """Bytes that reading the tensor takes, scales included."""
        ...

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out`, of the tensor's shape and any float dtype and device; fp8 is dequantised."""
        ...

    def read_fp8_into(self, name: str, out: Tensor, scale_inv: Tensor) -> None:
        """Fill `out` (fp8) and its float32 block scales [ceil(rows / 128), ceil(columns / 128)] as they are stored."""
        ...


def open_checkpoint(path: Path | str, model: ModelConfig) -> Checkpoint:
    """The checkpoint in a folder (or one .safetensors file), its names sorted out against `model`.

    Raises CheckpointError for tensors that the model has no place for, FileNotFoundError when there are no weights.
    """
    file_of = _files_by_name(Path(path))
    names = map_names(file_of, model, file_of={name: str(file) for name, file in file_of.items()})
    files = {name: file_of[raw] for name, raw in names.stored.items()}
    return Checkpoint(stored_names=names.stored, files=files, notes=names.notes, place=Path(path))


class Checkpoint:
    """Weights in safetensors files. `bytes_read` counts the data and scales read so far, without headers."""

    def __init__(
        self, *, stored_names: Mapping[str, str], files: Mapping[str, Path], notes: tuple[str, ...], place: Path
    ) -> None:
        self.notes = notes
        self.bytes_read = 0
        self._stored_names = stored_names
        self._files = files
        self._place = place
        self._headers: dict[Path, dict[str, StoredTensor]] = {}

    def verify(self, shapes: Mapping[str, Shape]) -> None:
        """Check presence, shape, dtype, scales and length of every tensor; the error names the first and counts all."""
        problems = [problem for name, shape in shapes.items() for problem in self._problems(name, shape)]
        if not problems:
            return
        tensor, expected, found = problems[0]
        if len(problems) > 1:
            found += f" (and {len(problems) - 1} more tensors are wrong, such as {problems[1][0]})"
        file = self._files.get(tensor) or self._files.get(tensor.removesuffix(SCALE_SUFFIX)) or self._place
        raise CheckpointError(tensor=tensor, file=file, expected=expected, found=found)

    def is_fp8(self, name: str) -> bool:
        """Trusts the tensors, whatever config.json says."""
        return self._stored(name).dtype == _FP8

    def stored_bytes(self, name: str) -> int:
        """Bytes of data, and of scales when there are any."""
        names = (name, f"{name}{SCALE_SUFFIX}") if self.is_fp8(name) else (name,)
        return sum(self._stored(each).num_bytes for each in names)

    def read_into(self, name: str, out: Tensor) -> None:
        """Read straight into `out` when nothing has to change, else piece by piece."""
        stored = self._stored(name)
        assert out.shape == stored.shape, f"{name} is {stored.shape}, destination {tuple(out.shape)}"
        self.bytes_read += self.stored_bytes(name)
        if stored.dtype == _FP8:
            self._dequantize_into(stored, self._read_scale(name), out)
        elif out.dtype == DTYPES[stored.dtype] and out.device.type == "cpu" and out.is_contiguous():
            read_rows_into(stored, out)
        else:
            for rows, piece in _pieces(stored, multiple=1):
                out[rows].copy_(piece)

    def read_fp8_into(self, name: str, out: Tensor, scale_inv: Tensor) -> None:
        """Copy quantised values and scales unchanged."""
        stored = self._stored(name)
        assert stored.dtype == _FP8, f"{name} is {stored.dtype}"
        assert out.dtype == DTYPES[_FP8], f"destination of {name} is {out.dtype}"
        self.bytes_read += self.stored_bytes(name)
        for rows, piece in _pieces(stored, multiple=1):
            out[rows].copy_(piece)
        scale_inv.copy_(self._read_scale(name))

    def _dequantize_into(self, stored: StoredTensor, scale_inv: Tensor, out: Tensor) -> None:
        for rows, piece in _pieces(stored, multiple=BLOCK):
            blocks = slice(rows.start // BLOCK, num_blocks(rows.stop))
            out[rows].copy_(dequantize_blocks(piece, scale_inv[blocks], out.dtype))

    def _read_scale(self, name: str) -> Tensor:
        stored = self._stored(f"{name}{SCALE_SUFFIX}")
        scale_inv = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        read_rows_into(stored, scale_inv)
        return scale_inv.to(torch.float32)

    def _stored(self, name: str) -> StoredTensor:
        stored = self._find(name)
        assert stored is not None, f"{name} is read before it was verified"
        return stored

    def _find(self, name: str) -> StoredTensor | None:
        """The tensor's place, None when no file has it; headers are read once a file."""
        file = self._files.get(name)
        if file is None:
            return None
        if file not in self._headers:
            self._headers[file] = read_header(file)
        return self._headers[file].get(self._stored_names[name])

    def _problems(self, name: str, shape: Shape) -> Iterator[tuple[str, str, str]]:
        """(tensor, expected, found) of what is wrong with one tensor and its scales."""
        stored = self._find(name)
        if stored is None:
            yield name, f"shape {list(shape)}", "no such tensor"
        elif stored.dtype == _FP8 and len(shape) == 2:
            yield from _wrong(name, stored, shape, (_FP8,))
            scale_name, blocks = f"{name}{SCALE_SUFFIX}", (num_blocks(shape[0]), num_blocks(shape[1]))
            scale = self._find(scale_name)
            if scale is None:
                yield scale_name, f"shape {list(blocks)} F32 beside fp8 weights", "no such tensor"
            else:
                yield from _wrong(scale_name, scale, blocks, ("F32", "BF16"))
        else:
            yield from _wrong(name, stored, shape, _PLAIN)
            if f"{name}{SCALE_SUFFIX}" in self._files:
                yield name, f"{_FP8} beside a {SCALE_SUFFIX.removeprefix('_')}", stored.describe()


def _wrong(name: str, stored: StoredTensor, shape: Shape, dtypes: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    if stored.shape != shape:
        yield name, f"shape {list(shape)}", f"shape {list(stored.shape)}"
    elif stored.dtype not in dtypes:
        yield name, f"dtype {' or '.join(dtypes)}", f"dtype {stored.dtype}; weights of this format are not built"
    elif stored.end > stored.file_bytes:
        missing = stored.end - stored.file_bytes
        yield name, f"a file of at least {stored.end} bytes", f"{stored.file_bytes} bytes, {missing} are missing"


def _pieces(stored: StoredTensor, *, multiple: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their values) of a stored tensor in bounded pieces of whole multiples of rows; one buffer is reused."""
    step = max(_PIECE_BYTES // max(stored.row_bytes, 1) // multiple, 1) * multiple
    buffer = torch.empty((min(step, stored.num_rows), *stored.shape[1:]), dtype=DTYPES[stored.dtype])
    for first in range(0, stored.num_rows, step):
        rows = slice(first, min(first + step, stored.num_rows))
        piece = buffer[: rows.stop - rows.start]
        read_rows_into(stored, piece, first=first)
        yield rows, piece


def _files_by_name(path: Path) -> dict[str, Path]:
    """Every tensor name of a checkpoint and the file it is in."""
    if path.is_file():
        return dict.fromkeys(read_header(path), path)
    indices = sorted(path.glob("*.safetensors.index.json"))
    if indices:
        return _read_index(indices[0])
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} holds no .safetensors files; --load-format dummy makes random weights instead")
    return {name: file for file in files for name in read_header(file)}


def _read_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            tensor=None, file=index, expected="an object with weight_map", found=f"{type(error).__name__}: {error}"
        ) from error
    for name, file in names.items():
        if Path(file).name != file:
            raise CheckpointError(tensor=name, file=index, expected="the name of a file in its folder", found=file)
    return {name: index.parent / file for name, file in names.items()}
