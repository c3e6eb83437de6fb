"""The exchange's own work on a device, behind one name: in torch, in Triton's kernels, or in Numba's.

Chosen once, at start. Both give the same, bit for bit, except where a GPU fuses a product and a sum. Knows no transport
and no hops.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .places import RowPlaces, row_places
from .rows import Codec, Fp8Codec, RowFormat, Rows
from .sums import Sums, add


class ExchangeOps(Protocol):
    """What `send` and the ways back are made of."""

    def encode(self, codec: Codec, x_TD: Tensor, word: torch.dtype, /) -> Tensor:
        """[T, X] what travels of x."""
        ...

    def find_places(self, slots_TK: Tensor, *, slots_per_member: int, num_members: int, capacity: int) -> RowPlaces:
        """See `places.row_places`."""
        ...

    def pack(self, row: RowFormat, rows: Rows, order_N: Tensor, packed_NB: Tensor, /) -> None:
        """Rows in this order, straight into the send buffer. Number T stands for none: it gets slots of -1, and values
        that nobody reads."""
        ...

    def add(self, sums: Sums, out_ND: Tensor, /) -> None:
        """See `sums.add`."""
        ...

    def add_to_places(self, sums: Sums, out_PD: Tensor, /) -> None:
        """The same where nobody reads a result without rows: it may be anything."""
        ...


class ReferenceOps:
    """In torch, on any device. The host waits for the device."""

    def encode(self, codec: Codec, x_TD: Tensor, word: torch.dtype, /) -> Tensor:
        return codec.encode(x_TD, word)

    def find_places(self, slots_TK: Tensor, *, slots_per_member: int, num_members: int, capacity: int) -> RowPlaces:
        return row_places(slots_TK, slots_per_member=slots_per_member, num_members=num_members, capacity=capacity)

    def pack(self, row: RowFormat, rows: Rows, order_N: Tensor, packed_NB: Tensor, /) -> None:
        fields, num_rows = row.fields(packed_NB), rows.slots_NK.shape[0]
        slots_NK = functional.pad(rows.slots_NK, (0, 0, 0, 1), value=-1)
        torch.index_select(slots_NK, 0, order_N, out=fields.slots_NK)
        if num_rows:
            order_N = order_N.clamp(max=num_rows - 1)
            for field, source in zip(fields, rows, strict=True):
                if field is not fields.slots_NK:
                    torch.index_select(source, 0, order_N, out=field)

    def add(self, sums: Sums, out_ND: Tensor, /) -> None:
        add(sums, out_ND)

    def add_to_places(self, sums: Sums, out_PD: Tensor, /) -> None:
        add(sums, out_PD)


class TritonOps:
    """In Triton's kernels; the host waits for nothing."""

    def __init__(self) -> None:
        self._kernels = import_kernels(".kernels", __package__)
        self._quantize_rows = import_kernels(".quant_kernels", __package__).quantize_rows

    def encode(self, codec: Codec, x_TD: Tensor, word: torch.dtype, /) -> Tensor:
        if not isinstance(codec, Fp8Codec):
            return codec.encode(x_TD, word)
        packed = codec.empty(x_TD.shape[0], x_TD.device)
        self._quantize_rows(x_TD, *codec.fields(packed))
        return packed.view(word)

    def find_places(self, slots_TK: Tensor, *, slots_per_member: int, num_members: int, capacity: int) -> RowPlaces:
        (num_rows, top_k), device = slots_TK.shape, slots_TK.device
        places = RowPlaces(
            rows_P=torch.empty(num_members * (1 + capacity), dtype=torch.int64, device=device),
            fits_TR=torch.empty(num_rows, num_members, dtype=torch.bool, device=device),
            counts_R=torch.empty(num_members, dtype=torch.int64, device=device),
            overflow=torch.zeros((), dtype=torch.bool, device=device),
            back_TJ=torch.empty(num_rows, min(top_k, num_members), dtype=torch.int64, device=device),
        )
        self._kernels.find_places(slots_TK, places, slots_per_member=slots_per_member, capacity=capacity)
        return places

    def pack(self, row: RowFormat, rows: Rows, order_N: Tensor, packed_NB: Tensor, /) -> None:
        self._kernels.pack(row, rows, order_N, packed_NB)

    def add(self, sums: Sums, out_ND: Tensor, /) -> None:
        self._kernels.add_rows(sums, out_ND, zeros=True)

    def add_to_places(self, sums: Sums, out_PD: Tensor, /) -> None:
        self._kernels.add_rows(sums, out_PD, zeros=False)


class NumbaOps(ReferenceOps):
    """In torch on a processor; sums of bf16 rows in a kernel."""

    def __init__(self) -> None:
        self._add_rows = import_kernels(".cpu.sums", __package__).add_rows

    def add(self, sums: Sums, out_ND: Tensor, /) -> None:
        if sums.rows_MD.dtype is out_ND.dtype is torch.bfloat16:
            self._add_rows(sums, out_ND)
        else:
            add(sums, out_ND)

    def add_to_places(self, sums: Sums, out_PD: Tensor, /) -> None:
        self.add(sums, out_PD)


OPS: dict[str, Callable[[], ExchangeOps]] = {"reference": ReferenceOps, "numba": NumbaOps, "triton": TritonOps}
PACKAGES = {"triton": ("triton", "'serried[gpu]'"), "numba": ("numba", "numba"), "llvmlite": ("numba", "numba")}
"""What kernels are compiled by: the name of the ops, and what to install for them."""


def exchange_ops(name: str) -> ExchangeOps:
    """The ops of that name. ValueError if they need a package that is not installed."""
    return OPS[name]()


def import_kernels(name: str, package: str | None) -> ModuleType:
    """A module that needs triton or numba, named from `package` if it begins with a dot. ValueError without it."""
    try:
        return import_module(name, package)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in PACKAGES:
            raise
        ops, install = PACKAGES[missing]
        raise ValueError(
            f"ops is {ops!r}; it needs the package {missing}: pip install {install}, or choose reference"
        ) from error
