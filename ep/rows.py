"""What travels: a token's row with its slots and weights, packed into bytes.

    | origin | K slots | K weights | values | pad |        fields begin at multiples of 8 bytes, values and rows of 16

Values are opaque here, words of as many bytes as fit: what a codec made of x, and what it makes x of again.

Legend: T tokens here, D model, K top-k, N rows, X words of a row's values, B bytes of a row; d blocks of D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .config import DispatchDtype

HEADER_WORDS = 6
"""int64 words at the head of a bounded block: the tag's five and a count."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_BLOCK = 128
FP8_FLOOR = 1e-4
"""Values below this are not worth a finer scale; the floor keeps an all-zero block finite."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums, weights, router and norms are computed in: float64 for a float64 run, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class Rows(NamedTuple):
    """Rows on their way to experts. On arrival the fields are views of packed rows, slots but for a new tensor."""

    origin_N: Tensor
    """int64: the rank whose token this is."""
    slots_NK: Tensor
    """int64, counted from the first slot of those who exchange; -1 none."""
    weights_NK: Tensor
    values_NX: Tensor


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The bytes of a packed row."""

    top_k: int
    weight_dtype: torch.dtype
    value_bytes: int
    align: int = 16
    """A row's bytes are a multiple of this, itself a multiple of 16."""

    @property
    def word(self) -> torch.dtype:
        """The widest integer that a row's values are made of."""
        words = {8: torch.int64, 4: torch.int32, 2: torch.int16}
        return next((word for size, word in words.items() if self.value_bytes % size == 0), torch.uint8)

    @property
    def begins(self) -> tuple[int, int, int, int]:
        """Where origin, slots, weights and values begin."""
        weights = 8 + 8 * self.top_k
        return 0, 8, weights, up_to(16, weights + self.weight_dtype.itemsize * self.top_k)

    @property
    def num_bytes(self) -> int:
        _, _, weights, values = self.begins
        return up_to(self.align, max(values + self.value_bytes, weights + 8 * HEADER_WORDS))

    def fields(self, rows_NB: Tensor) -> Rows:
        """The fields of packed rows, as views."""
        _, slots, weights, values = self.begins
        return Rows(
            rows_NB[:, :8].view(torch.int64).squeeze(1),
            rows_NB[:, slots:weights].view(torch.int64),
            rows_NB[:, weights : weights + self.weight_dtype.itemsize * self.top_k].view(self.weight_dtype),
            rows_NB[:, values : values + self.value_bytes].view(self.word),
        )

    def header(self, rows_NB: Tensor) -> Tensor:
        """[N, HEADER_WORDS] int64, a view of where weights and values lie in other rows."""
        begin = self.begins[2]
        return rows_NB[:, begin : begin + 8 * HEADER_WORDS].view(torch.int64)


@dataclass(frozen=True, slots=True)
class BackFormat:
    """The bytes of a row on its way back: D values in the dtype of the wire, or a header."""

    hidden: int
    dtype: torch.dtype
    align: int = 16
    """A block's rows are a multiple of so many bytes, itself a multiple of 16."""

    @property
    def value_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    @property
    def block_row_bytes(self) -> int:
        """Bytes of a row in a block, whose first row is a header."""
        return up_to(self.align, max(self.value_bytes, 8 * HEADER_WORDS))

    def values(self, rows_NB: Tensor) -> Tensor:
        """[N, D], a view."""
        return rows_NB[:, : self.value_bytes].view(self.dtype)


def up_to(align: int, num_bytes: int) -> int:
    """The next multiple of `align`; of 16, the bytes that a GPU copies at once."""
    return -(-num_bytes // align) * align


class Codec(Protocol):
    """What a row's values are on the wire."""

    @property
    def value_bytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the run."""
        ...

    def encode(self, x_TD: Tensor, word: torch.dtype, /) -> Tensor:
        """[T, X] words; may be a view of x."""
        ...

    def decode(self, values_NX: Tensor, /) -> Tensor:
        """[N, D] in the run dtype; may be a view of what arrived. Rows that carry nothing may become anything."""
        ...


@dataclass(frozen=True, slots=True)
class RunCodec:
    """Values as they are."""

    hidden: int
    dtype: torch.dtype

    @property
    def value_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    def encode(self, x_TD: Tensor, word: torch.dtype, /) -> Tensor:
        return _words(x_TD, word)

    def decode(self, values_NX: Tensor, /) -> Tensor:
        return values_NX.view(self.dtype)


@dataclass(frozen=True, slots=True)
class Fp8Codec:
    """e4m3 with a float32 scale for each 128 columns: | d scales | D values |. The scale takes a value back."""

    hidden: int
    dtype: torch.dtype

    @property
    def value_bytes(self) -> int:
        return 4 * self.num_blocks + self.hidden

    @property
    def num_blocks(self) -> int:
        return -(-self.hidden // FP8_BLOCK)

    def encode(self, x_TD: Tensor, word: torch.dtype, /) -> Tensor:
        packed = self.empty(x_TD.shape[0], x_TD.device)
        into_TD, scales_Td = self.fields(packed)
        blocks_TdB = functional.pad(x_TD.float(), (0, -self.hidden % FP8_BLOCK)).unflatten(1, (-1, FP8_BLOCK))
        torch.div(blocks_TdB.abs().amax(dim=2).clamp_min(FP8_FLOOR), FP8_MAX, out=scales_Td)
        q_TD = (blocks_TdB / scales_Td.unsqueeze(2)).clamp_(-FP8_MAX, FP8_MAX).flatten(1)[:, : self.hidden]
        into_TD.copy_(q_TD)
        return packed.view(word)

    def empty(self, num_rows: int, device: torch.device) -> Tensor:
        """uint8 [num_rows, value_bytes], in rows that begin at a multiple of 16 bytes."""
        rows = torch.empty(num_rows, up_to(16, self.value_bytes), dtype=torch.uint8, device=device)
        return rows[:, : self.value_bytes]

    def decode(self, values_NX: Tensor, /) -> Tensor:
        q_ND, scales_Nd = self.fields(values_NX)
        return (q_ND.float() * scales_Nd.repeat_interleave(FP8_BLOCK, dim=1)[:, : self.hidden]).to(self.dtype)

    def fields(self, values_NX: Tensor, /) -> tuple[Tensor, Tensor]:
        """(fp8 [N, D], float32 scales [N, d]) as views."""
        packed = values_NX.view(torch.uint8)
        return packed[:, 4 * self.num_blocks :].view(FP8), packed[:, : 4 * self.num_blocks].view(torch.float32)


CODECS: dict[DispatchDtype, type[RunCodec] | type[Fp8Codec]] = {"run": RunCodec, "fp8": Fp8Codec}


def _words(rows: Tensor, word: torch.dtype) -> Tensor:
    """Rows as wider words: the same memory if that is possible."""
    offset = rows.storage_offset() * rows.dtype.itemsize
    if rows.stride() != (rows.shape[1], 1) or offset % word.itemsize:  # with no rows, strides may be anything
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(word)
