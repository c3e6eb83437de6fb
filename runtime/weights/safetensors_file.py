"""One safetensors file: where each tensor lies, and its bytes read straight into memory the caller owns.

    8 bytes header length | JSON header | tensors, back to back
                          ^ data starts here; the header's offsets count from it

Nothing is mapped: an open memory map counts as resident memory, and a rank wants a few tensors of a large file.
Knows bytes and offsets; does not know what a tensor is for. Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ep import CheckpointError

from ..model.config_fields import shown
from ..model.json_file import parse_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
# The format's own bound on a header; anything longer is not a safetensors file.
_MAX_HEADER_BYTES = 100_000_000
# Data starts at a multiple of this, as other writers have it.
_HEADER_STEP = 8
_METADATA = "__metadata__"
# IOV_MAX of Linux: buffers that one system call fills.
MOST_BUFFERS = 1024


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file says of itself."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    file_bytes: int


def read_header(file: Path) -> Header:
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
        entries = parse_json(text)
        metadata = {str(name): str(value) for name, value in entries.pop(_METADATA, {}).items()}
        tensors = {
            name: _stored(file, name, entry, data_start=8 + length, file_bytes=file_bytes)
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            tensor=None, file=str(file), expected="a safetensors header in JSON", found=f"{error}"
        ) from error
    _check_layout(file, tensors, data_start=8 + length, file_bytes=file_bytes)
    return Header(tensors=tensors, metadata=metadata, file_bytes=file_bytes)


def tensor_names(file: Path) -> list[str]:
    """Names of the tensors in a file; raises as `read_header`."""
    return list(read_header(file).tensors)


def encode_header(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file that holds these tensors back to back in this order, whatever files they are in now."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, stored in tensors.items():
        begin, end = end, end + stored.num_bytes
        entries[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _HEADER_STEP) * _HEADER_STEP)
    return len(text).to_bytes(8, "little") + text


def read_into(stream: BinaryIO, buffers: Sequence[memoryview], *, start: int) -> None:
    """Fill the buffers, one after the other, with what lies at `start`; one system call fills up to 1024 of them.

    buffers a, b, c of 4, 2 and 6 bytes   <-   file: ... | start: aaaabbcccccc | ...

    Raises CheckpointError when the file ends before.
    """
    unfilled = [buffer for buffer in buffers if len(buffer)]
    while unfilled:
        count = os.preadv(stream.fileno(), unfilled[:MOST_BUFFERS], start)
        start += count
        if not count:
            missing = sum(map(len, unfilled))
            raise CheckpointError(
                tensor=None,
                file=stream.name,
                expected=f"a file of at least {start + missing} bytes",
                found=f"its end after {start}",
            )
        unfilled = _without(unfilled, count)


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's memory."""
    assert tensor.device.type == "cpu", f"{tensor.device}"
    assert tensor.is_contiguous(), f"strides {tensor.stride()}"
    return tensor.view(-1).view(torch.uint8).numpy().data


def _without(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after their first `count` bytes."""
    for place, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[place + 1 :]]
        count -= len(buffer)
    return []


def _stored(file: Path, name: str, entry: dict, *, data_start: int, file_bytes: int) -> StoredTensor:
    """One entry of the header, checked by itself; a dtype that is not read here is left to whoever wants the tensor."""
    offsets, shape, dtype = entry["data_offsets"], entry["shape"], str(entry["dtype"])
    if not _are_sizes(offsets) or len(offsets) != 2:
        rule = "data_offsets of two whole numbers from 0 on"
        raise CheckpointError(tensor=name, file=str(file), expected=rule, found=shown(offsets))
    if not _are_sizes(shape):
        rule = "a shape of whole numbers from 0 on"
        raise CheckpointError(tensor=name, file=str(file), expected=rule, found=shown(shape))
    begin, end = offsets
    if begin > end or (dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize):
        rule = f"data_offsets that hold shape {shown(shape)} {shown(dtype)[1:-1]}"
        raise CheckpointError(tensor=name, file=str(file), expected=rule, found=f"{begin} to {end}")
    return StoredTensor(
        file=file,
        dtype=dtype,
        shape=tuple(shape),
        start=data_start + begin,
        end=data_start + end,
        file_bytes=file_bytes,
    )


def _are_sizes(values: object) -> bool:
    """Whether these are whole numbers that can count bytes or rows of a file."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_layout(file: Path, tensors: Mapping[str, StoredTensor], *, data_start: int, file_bytes: int) -> None:
    """Tensors lie back to back and fill the file, as the format says; one that is cut short is found by its `end`."""
    last = data_start
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if stored.start != last:
            raise CheckpointError(
                tensor=name,
                file=str(file),
                expected=f"data from byte {last - data_start} on, where the last tensor ends",
                found=f"it at byte {stored.start - data_start}",
            )
        last = stored.end
    if file_bytes > last:
        found = f"{file_bytes} bytes, {file_bytes - last} too many"
        raise CheckpointError(
            tensor=None, file=str(file), expected=f"{last} bytes, where the last tensor ends", found=found
        )
