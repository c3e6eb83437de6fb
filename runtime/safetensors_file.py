"""One safetensors file: where each tensor lies, and its rows read straight into memory the caller owns.

    8 bytes header length | JSON header | tensors, back to back
                          ^ data starts here; the header's offsets count from it

Nothing is mapped: an open memory map counts as resident memory, and a rank wants a few tensors of a large file.
Knows bytes and offsets; does not know what a tensor is for. Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ep import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
# The format's own bound on a header; anything longer is not a safetensors file.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: bytes [start, end) counted from the file's beginning, `file_bytes` long in all."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    file_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.end - self.start

    @property
    def num_rows(self) -> int:
        """Length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return self.num_bytes // max(self.num_rows, 1)

    def describe(self) -> str:
        """Shape and dtype in words, as errors say them."""
        return f"shape {list(self.shape)} {self.dtype}"


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file by name. Data may still be cut short: compare `end` with `file_bytes`.

    Raises CheckpointError when the file is absent, or its header is cut short or not a header.
    """
    if not file.is_file():
        raise CheckpointError(tensor=None, file=str(file), expected="a safetensors file", found="no such file")
    file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if file_bytes < 8 + length or length > _MAX_HEADER_BYTES:
            raise CheckpointError(
                tensor=None,
                file=str(file),
                expected=f"a header of {length} bytes after the first 8",
                found=f"a file of {file_bytes} bytes; it is truncated or no safetensors file",
            )
        text = stream.read(length)
    try:
        entries = json.loads(text)
        return {
            name: _stored(file, entry, data_start=8 + length, file_bytes=file_bytes)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            tensor=None, file=str(file), expected="a safetensors header in JSON", found=f"{error}"
        ) from error


def read_rows_into(stored: StoredTensor, out: Tensor, *, first: int = 0) -> None:
    """Fill `out`, a contiguous CPU tensor of the stored dtype, with rows [first, first + len(out))."""
    assert out.dtype == DTYPES[stored.dtype], f"{out.dtype} for stored {stored.dtype}"
    assert out.device.type == "cpu", f"{out.device}"
    assert out.is_contiguous(), f"strides {out.stride()}"
    view = out.view(-1).view(torch.uint8).numpy().data
    with stored.file.open("rb", buffering=0) as stream:
        stream.seek(stored.start + first * stored.row_bytes)
        done = 0
        while done < len(view):
            count = stream.readinto(view[done:])
            if not count:
                raise CheckpointError(
                    tensor=None, file=str(stored.file), expected=f"{len(view)} bytes of rows", found=f"{done} bytes"
                )
            done += count


def _stored(file: Path, entry: dict, *, data_start: int, file_bytes: int) -> StoredTensor:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    dtype = str(entry["dtype"])
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"data_offsets {begin} to {end} do not hold shape {list(shape)} {dtype}")
    return StoredTensor(
        file=file, dtype=dtype, shape=shape, start=data_start + begin, end=data_start + end, file_bytes=file_bytes
    )
