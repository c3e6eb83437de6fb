"""Tensors from files to where they belong, in few large reads: neighbours in a file come with one system call.

    file      ... | gate 7 | up 7 | down 7 | somebody else's | gate 8 | ...
    runs          [--- one read, three places ---]             [ one ]

A part that lands in CPU memory as it is stored is read straight there; what has to be converted or goes to a device
passes through a buffer of bounded size. Only neighbours are joined: not a byte is read that nobody here wants.
Knows places in files and in memory; does not know names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from moe.quant import BLOCK, dequantize_blocks, num_blocks

from .safetensors_file import DTYPES, MOST_BUFFERS, StoredTensor, bytes_of, read_into

# What must be converted passes through a buffer of about this size.
STAGING_BYTES = 32 << 20
# One read; larger ones are no faster, and progress is told after each.
RUN_BYTES = 256 << 20
_ALIGNMENT = 64
FP8 = "F8_E4M3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows [first, first + num_rows) of a stored tensor, on their way to every one of `outs` (those rows of each)."""

    stored: StoredTensor
    first: int
    num_rows: int
    outs: tuple[Tensor, ...]
    scale_inv: Tensor | None = None
    """Scales of these rows' blocks, for those of `outs` that are not fp8 themselves."""

    @property
    def start(self) -> int:
        return self.stored.start + self.first * self.stored.row_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.stored.row_bytes

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes

    @property
    def direct(self) -> Tensor | None:
        """One of `outs` that can be read into as it is."""
        return next((out for out in self.outs if _is_direct(self.stored, out)), None)

    @property
    def staged_bytes(self) -> int:
        """Room it takes in the staging buffer."""
        return 0 if self.direct is not None else _aligned(self.num_bytes)


def parts_of(stored: StoredTensor, outs: Sequence[Tensor], *, scale_inv: Tensor | None = None) -> Iterator[Part]:
    """The whole of a stored tensor, into every one of `outs`, in parts that fit the staging buffer."""
    for out in outs:
        assert out.shape == stored.shape, f"a tensor of {stored.describe()} cannot go to {tuple(out.shape)}"
    multiple = BLOCK if scale_inv is not None else 1
    step = max(STAGING_BYTES // max(stored.row_bytes, 1) // multiple, 1) * multiple
    if not stored.shape or any(_is_direct(stored, out) for out in outs):
        step = max(stored.num_rows, 1)
    for first in range(0, stored.num_rows, step):
        rows = slice(first, min(first + step, stored.num_rows))
        yield Part(
            stored=stored,
            first=first,
            num_rows=rows.stop - rows.start,
            outs=tuple(out[rows] if stored.shape else out for out in outs),
            scale_inv=None if scale_inv is None else scale_inv[rows.start // BLOCK : num_blocks(rows.stop)],
        )


def read_parts(parts: Iterable[Part], *, turn: tuple[int, int] = (0, 1)) -> Iterator[Part]:
    """Read all parts, and yield each when it is where it belongs.

    turn: (i, n), the i-th of n readers begins i/n down the list, so that they do not all ask for the same place.
    """
    runs = list(_runs(sorted(parts, key=lambda part: (str(part.stored.file), part.start))))
    begin = len(runs) * turn[0] // turn[1]
    staging = torch.empty(max(map(_staged_bytes, runs), default=0), dtype=torch.uint8)
    for file, group in groupby(runs[begin:] + runs[:begin], key=lambda run: run[0].stored.file):
        with file.open("rb", buffering=0) as stream:
            for run in group:
                places = _places(run, staging)
                read_into(stream, [bytes_of(place) for place in places], start=run[0].start)
                for part, place in zip(run, places, strict=True):
                    _deliver(part, place)
                    yield part


def _runs(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Neighbours together, as far as buffers and bounds allow; `parts` are sorted."""
    run: list[Part] = []
    staged = 0
    for part in parts:
        staged += part.staged_bytes
        if run and not (_is_next(run, part) and staged <= STAGING_BYTES):
            yield run
            run, staged = [], part.staged_bytes
        run.append(part)
    if run:
        yield run


def _is_next(run: Sequence[Part], part: Part) -> bool:
    return (
        part.stored.file == run[-1].stored.file
        and part.start == run[-1].stop
        and part.stop - run[0].start <= RUN_BYTES
        and len(run) < MOST_BUFFERS
    )


def _staged_bytes(run: Sequence[Part]) -> int:
    return sum(part.staged_bytes for part in run)


def _places(run: Sequence[Part], staging: Tensor) -> list[Tensor]:
    """Where each part of a run is read to: its destination, or a piece of the staging buffer."""
    places: list[Tensor] = []
    used = 0
    for part in run:
        direct = part.direct
        if direct is None:
            shape = (part.num_rows, *part.stored.shape[1:]) if part.stored.shape else ()
            direct = staging[used : used + part.num_bytes].view(DTYPES[part.stored.dtype]).view(shape)
            used += part.staged_bytes
        places.append(direct)
    return places


def _deliver(part: Part, values: Tensor) -> None:
    """Copy what was read to those of a part's destinations that it was not read into."""
    for out in part.outs:
        if out is values:
            continue
        if part.scale_inv is None or out.dtype == values.dtype:
            out.copy_(values)
        else:
            out.copy_(dequantize_blocks(values, part.scale_inv, out.dtype))


def _is_direct(stored: StoredTensor, out: Tensor) -> bool:
    return out.dtype == DTYPES[stored.dtype] and out.device.type == "cpu" and out.is_contiguous()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
