"""A library that pretends to be nccl.ep and nccl.core between ranks that are threads, on CPU tensors.

What it follows, each read in the wheels nccl_extensions 0.1.0 (library 0.2.0, API version 2) and nccl4py 0.6.0:

    nccl/ep/group.py, handle.py, tensor.py    classes, fields and keywords; a stream is asked for in every call
    nccl_ep.h, ncclEpDispatch                 rank-major: tokens [R, M, columns], topk_idx and topk_weights [R, M, K],
                                              M the group's max_dispatch_tokens_per_rank; topk_weights have to be
                                              given; src_rank_counters int32 [R]; topk_idx int32 on arrival
    nccl_ep.h, NCCL_EP_DISP_QUANT_FWD         bytes of tokens and scales as they are, dtypes and widths alike on both
                                              sides, rows of 16 bytes' multiples; scales may be uint8
    ll_ep.cuh, dispatch_kernel_impl           a row goes once to each rank; its place in a source's block comes from an
                                              atomic counter, so any order; -1 goes nowhere; topk_idx is -1 in places
                                              without a row, tokens, weights and scales there keep what they were
    ll_ep.cuh, combine_kernel_impl            one row of each rank that got it, weights 1, added in float32 at the first
                                              slot of that rank in top-k order, rounded once; zeros for a row that went
                                              nowhere; columns a multiple of 1,024 bytes; reads topk_idx where it lies
    nccl_ep.h, ncclEpUpdateHandle             layout_info has to be NULL for this mode

Knows ranks by the transport that a test gave it; every call of the library is collective, and so are these.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ep import Kind, Tag

TAG = Tag(0, 0, 0, 0, Kind.CHECK)
ID_BYTES = 128


class Algorithm(IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class ExpertIdKind(IntEnum):
    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class DispatchQuantizationRecipe(IntEnum):
    NONE = 0
    FWD = 1
    DS_FP8E3M4 = 2


@dataclass(kw_only=True)
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    max_num_sms: int = 0


@dataclass(kw_only=True)
class DispatchConfig:
    quantization_recipe: DispatchQuantizationRecipe = DispatchQuantizationRecipe.NONE


@dataclass(kw_only=True)
class LayoutInfo:
    src_rank_counters: Any = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass(kw_only=True)
class DispatchInputs:
    tokens: Any = None
    topk_weights: Any = None
    scales: Any = None


@dataclass(kw_only=True)
class DispatchOutputs:
    tokens: Any = None
    topk_weights: Any = None
    scales: Any = None
    topk_idx: Any = None


@dataclass(kw_only=True)
class CombineInputs:
    tokens: Any = None


@dataclass(kw_only=True)
class CombineOutputs:
    tokens: Any = None


class Tensor:
    """A descriptor: an address and a shape. Strides are not among what the library is told."""

    def __init__(self, buffer: torch.Tensor) -> None:
        assert buffer.is_contiguous(), "the library takes every tensor for contiguous"
        assert buffer.numel(), "an empty tensor has no address"
        self.buffer = buffer


class UniqueId:
    def __init__(self, data: bytes = bytes(ID_BYTES)) -> None:
        assert len(data) == ID_BYTES, len(data)
        self.data = data

    def __bytes__(self) -> bytes:
        return self.data

    @staticmethod
    def from_bytes(data: bytes) -> UniqueId:
        return UniqueId(data)


@dataclass
class World:
    """What a test and its ranks share: the transports, and what was opened and closed."""

    transports: dict[int, Any] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    spoil: Any = None
    """Called with (rank, tokens that landed) after a dispatch, by a test that wants wrong rows."""
    before: Any = None
    """Called with (rank, name) before every call, by a test that wants one to fail or to take its time."""

    def modules(self) -> dict[str, ModuleType]:
        """What `import nccl.ep, nccl.core` is to find."""
        whole, ep, core = ModuleType("nccl"), ModuleType("nccl.ep"), ModuleType("nccl.core")
        names = (
            Algorithm, CombineInputs, CombineOutputs, DispatchConfig, DispatchInputs, DispatchOutputs,
            DispatchQuantizationRecipe, ExpertIdKind, GroupConfig, Layout, LayoutInfo, Tensor,
        )  # fmt: skip
        for each in names:
            setattr(ep, each.__name__, each)
        ep.Group = Group  # type: ignore[attr-defined]
        core.UniqueId = UniqueId  # type: ignore[attr-defined]
        core.get_unique_id = _get_unique_id  # type: ignore[attr-defined]
        core.Communicator = type("Communicator", (_Communicator,), {"world": self})  # type: ignore[attr-defined]
        whole.ep, whole.core = ep, core  # type: ignore[attr-defined]
        return {"nccl": whole, "nccl.ep": ep, "nccl.core": core}


_numbers = itertools.count(1)


def _get_unique_id(empty: bool = False) -> UniqueId:
    return UniqueId() if empty else UniqueId(next(_numbers).to_bytes(ID_BYTES, "little"))


class _Communicator:
    world: World

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.world.alive.append(self)

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: UniqueId) -> _Communicator:
        assert any(unique_id.data), "the id of rank 0 did not get here"
        transport = cls.world.transports[rank]
        assert transport.size == nranks, (transport.size, nranks)
        heard = transport.all_gather(torch.tensor(list(unique_id.data)), tag=TAG).wait()
        assert (heard == heard[0]).all(), "ranks came with different ids"
        return cls(transport)

    def destroy(self) -> None:
        self.world.alive.remove(self)


class Group:
    def __init__(self, communicator: _Communicator, config: GroupConfig) -> None:
        self.communicator, self.config, self.world = communicator, config, communicator.world
        self.transport = communicator.transport
        self.world.alive.append(self)

    @classmethod
    def create(cls, comm: _Communicator, config: GroupConfig) -> Group:
        assert config.algorithm is Algorithm.LOW_LATENCY
        assert config.max_dispatch_tokens_per_rank > 0
        assert config.num_experts % comm.transport.size == 0
        numbers = [config.num_experts, config.max_dispatch_tokens_per_rank, config.max_token_bytes]
        heard = comm.transport.all_gather(torch.tensor(numbers), tag=TAG).wait()
        assert (heard == heard[0]).all(), "a group's numbers are the same on every rank"
        return cls(comm, config)

    def create_handle(self, layout: Layout, topk_idx: Tensor, *, layout_info: Any = None, stream: int) -> Handle:
        assert layout is Layout.RANK_MAJOR
        assert layout_info is None
        return Handle(self, topk_idx)

    def destroy(self) -> None:
        self.world.alive.remove(self)


class Handle:
    """Where the rows of one dispatch came from, until they went home."""

    def __init__(self, group: Group, topk_idx: Tensor) -> None:
        self._group = group
        self._topk_idx = topk_idx
        self._top_k = topk_idx.buffer.shape[1]
        self._came: list[list[int]] = []
        group.world.alive.append(self)

    def update(self, topk_idx: Tensor, *, layout_info: Any = None, stream: int) -> None:
        assert layout_info is None
        assert topk_idx.buffer.dtype in (torch.int32, torch.int64)
        assert topk_idx.buffer.shape[0] <= self._group.config.max_dispatch_tokens_per_rank
        assert topk_idx.buffer.shape[1] == self._top_k
        self._topk_idx = topk_idx

    def dispatch(
        self, inputs: DispatchInputs, outputs: DispatchOutputs, *, layout_info: LayoutInfo, config: DispatchConfig,
        stream: int,
    ) -> None:  # fmt: skip
        with _disable_current_modes():
            self._before("dispatch")
            self._dispatch(inputs, outputs, layout_info, config)

    def combine(self, inputs: CombineInputs, outputs: CombineOutputs, *, config: Any = None, stream: int) -> None:
        with _disable_current_modes():
            self._before("combine")
            self._combine(inputs.tokens.buffer, outputs.tokens.buffer)

    def destroy(self) -> None:
        self._group.world.alive.remove(self)

    def _before(self, name: str) -> None:
        if self._group.world.before is not None:
            self._group.world.before(self._group.transport.rank, name)

    def _dispatch(
        self, inputs: DispatchInputs, outputs: DispatchOutputs, layout_info: LayoutInfo, config: DispatchConfig
    ) -> None:
        group, transport = self._group, self._group.transport
        size, most = transport.size, group.config.max_dispatch_tokens_per_rank
        tokens, scales, weights = (each.buffer for each in (inputs.tokens, inputs.scales, inputs.topk_weights))
        slots_TK = self._topk_idx.buffer
        num_tokens = slots_TK.shape[0]
        assert tokens.shape[0] == scales.shape[0] == weights.shape[0] == num_tokens
        assert config.quantization_recipe is DispatchQuantizationRecipe.FWD
        assert weights.dtype is torch.float32
        into = outputs.tokens.buffer, outputs.scales.buffer, outputs.topk_weights.buffer
        for sent, landed in zip((tokens, scales, weights), into, strict=True):
            assert landed.shape == (size, most, sent.shape[1]), (landed.shape, size, most, sent.shape)
            assert landed.dtype is sent.dtype
        for sent in (tokens, scales):
            assert sent.shape[1] * sent.element_size() % 16 == 0
            assert sent.data_ptr() % 16 == 0
        row_bytes = sum(sent.shape[1] * sent.element_size() for sent in (tokens, scales))
        assert row_bytes <= group.config.max_token_bytes
        topk_idx = outputs.topk_idx.buffer
        assert topk_idx.shape == (size, most, self._top_k)
        assert topk_idx.dtype is torch.int32
        counts = layout_info.src_rank_counters.buffer
        assert counts.shape == (size,)
        assert counts.dtype is torch.int32

        per_rank = group.config.num_experts // size
        ranks_TK = torch.floor_divide(slots_TK, per_rank)
        goes = [_shuffled((ranks_TK == rank).any(1).nonzero()[:, 0]) for rank in range(size)]
        columns = [
            _bytes(each) for each in (tokens, scales, weights, slots_TK.long(), torch.arange(num_tokens)[:, None])
        ]
        packed = torch.cat(columns, dim=1)
        landed, splits = _all_to_all(transport, packed[torch.cat(goes)], [len(rows) for rows in goes])
        topk_idx.fill_(-1)
        self._came = []
        for rank, rows in enumerate(landed.split(splits)):
            parts = rows.split([each.shape[1] for each in columns], dim=1)
            place = slice(0, len(rows))
            for target, source in zip(into, parts[:3], strict=True):
                target[rank, place] = _as(source, target.dtype)
            global_NK = _as(parts[3], torch.int64)
            local_NK = global_NK - transport.rank * per_rank
            assert layout_info.recv_topk_idx_kind is ExpertIdKind.LOCAL
            topk_idx[rank, place] = local_NK.where((local_NK >= 0) & (local_NK < per_rank), -1).int()
            counts[rank] = len(rows)
            self._came.append(_as(parts[4], torch.int64).flatten().tolist())
        if group.world.spoil is not None:
            group.world.spoil(transport.rank, into[0])

    def _combine(self, give: torch.Tensor, back: torch.Tensor) -> None:
        group, transport = self._group, self._group.transport
        size, most = transport.size, group.config.max_dispatch_tokens_per_rank
        assert self._came, "a combine follows its dispatch"
        assert give.dtype is back.dtype
        assert give.dtype in (torch.bfloat16, torch.float16, torch.float32)
        assert give.shape == (size, most, back.shape[1])
        assert back.shape[1] * back.element_size() % 1024 == 0
        assert back.shape[1] * back.element_size() <= group.config.max_token_bytes
        slots_TK = self._topk_idx.buffer
        assert back.shape[0] == slots_TK.shape[0]
        rows = torch.cat([give[rank, : len(came)] for rank, came in enumerate(self._came)])
        names = torch.tensor([token for came in self._came for token in came], dtype=torch.int64)
        packed = torch.cat([_bytes(rows), _bytes(names[:, None])], dim=1)
        landed, splits = _all_to_all(transport, packed, [len(came) for came in self._came])
        values = _as(landed[:, :-8], give.dtype).float()
        tokens = _as(landed[:, -8:], torch.int64).flatten()
        source = torch.arange(size).repeat_interleave(torch.tensor(splits))
        ranks_TK = torch.floor_divide(slots_TK, group.config.num_experts // size)
        total = torch.zeros(back.shape, dtype=torch.float32)
        for token, ranks in enumerate(ranks_TK.tolist()):
            for rank in dict.fromkeys(rank for rank in ranks if rank >= 0):
                [row] = ((tokens == token) & (source == rank)).nonzero()[:, 0].tolist()
                total[token] += values[row]
        back.copy_(total)
        self._came = []


def _shuffled(rows: torch.Tensor) -> torch.Tensor:
    """Another order every time: whose atomic add comes first."""
    return rows[torch.randperm(len(rows))]


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)


def _as(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


def _all_to_all(transport: Any, rows: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Rows by source, and how many came from each."""
    heard = transport.all_gather(torch.tensor(splits), tag=TAG).wait()[:, transport.rank].tolist()
    landed = torch.empty(sum(heard), rows.shape[1], dtype=rows.dtype)
    transport.all_to_all(landed, rows.contiguous(), recv_splits=heard, send_splits=splits, tag=TAG).wait()
    return landed, heard
