"""NVIDIA's NCCL expert-parallel library (package nccl-extensions, its module nccl.ep), as a back end of the exchange.

Its rank-major layout in low-latency mode: see `nccl_ep_hop` for what travels. NOBODY HAS RUN IT on GPUs: it was written
from the package's own Python sources and C header (0.1.0), and passes the checks over a library that pretends.

    opened     rank 0's id for a communicator of its own goes round the transport; group and handles follow, one handle
               a track: it remembers where rows came from until they went home
    captured   a handle is only updated, which the library allows in a graph; buffers stay where they are

The library compiles its kernels with nvcc when they are first used, which is in the self-test. A lane moves 16
bytes: a row has to be a multiple of 1,024 bytes on its way back. Imports the package when it is asked for.

Legend: R ranks, M rows that a rank sends at most, K top-k, D model.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blueprint import Blueprint
from .hops import Hop, HopBuffers, HopPart
from .lanes import Lanes
from .nccl_ep_hop import Library, NcclEpHop, Part, Sizes
from .transport import Kind, Tag, Transport

EXTRAS = "pip install 'serried[cu12]' or 'serried[cu13]', whichever torch is built for"
BACK_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WARP_BYTES = 1024
"""32 lanes, 16 bytes each, two at a time: what the way back moves at once."""
MOST_HIDDEN, MOST_TOP_K, MOST_SLOTS = 16384, 32, 1 << 16
"""The library's own limits; it tells slots in 16 bits."""


class Modules(NamedTuple):
    """What the package brings."""

    ep: ModuleType
    core: ModuleType


def load() -> Modules:
    """Import the package. ValueError if it is not there, or brings less than it should."""
    try:
        return Modules(import_module("nccl.ep"), import_module("nccl.core"))
    except ImportError as error:
        raise ValueError(f"exchange is 'nccl_ep'; it needs the package nccl-extensions ({error}): {EXTRAS}") from error


def lacks() -> str | None:
    """Why the package cannot be used on this machine, None where it can; imports none of it."""
    if find_spec("nccl") is None or find_spec("nccl.ep") is None:
        return f"the package nccl-extensions is not installed: {EXTRAS}"
    if not _compilers():
        return "nccl-extensions compiles its kernels with nvcc, and there is none: install CUDA's compiler"
    return None


def _compilers() -> list[Path]:
    home = import_module("torch.utils.cpp_extension").CUDA_HOME
    return [path for path in [Path(home or "") / "bin" / "nvcc"] if home and path.is_file()]


def refuses(blueprint: Blueprint) -> str | None:
    """The rule that an exchange of this build breaks, as field, value and rule; None: it would be served."""
    [spec] = blueprint.specs
    wire, hidden = spec.back.dtype, blueprint.hidden
    if wire not in BACK_DTYPES or blueprint.dtype not in BACK_DTYPES:
        return f"dtype is {str(blueprint.dtype).removeprefix('torch.')}; nccl_ep adds up in float32, e.g. bfloat16"
    step = WARP_BYTES // wire.itemsize
    if hidden % step or hidden > MOST_HIDDEN:
        return f"hidden is {hidden}; nccl_ep needs a multiple of {step}, at most {MOST_HIDDEN:,}, e.g. {14 * step}"
    if blueprint.top_k > MOST_TOP_K:
        return f"top_k is {blueprint.top_k}; nccl_ep takes at most {MOST_TOP_K}"
    if blueprint.num_slots >= MOST_SLOTS:
        return f"num_slots is {reprlib.repr(blueprint.num_slots)}; nccl_ep takes fewer than {MOST_SLOTS:,}"
    return None


def library_bytes(blueprint: Blueprint) -> int:
    """Device memory that the library takes for itself, by its header: two banks, each for the larger of two ways."""
    [spec] = blueprint.specs
    sizes = Sizes(spec=spec)
    there = 16 * -(-(4 + 8 * blueprint.top_k) // 16) + sizes.most_bytes
    back = sizes.most_bytes + sizes.most_bytes // 2 // 128 * 4
    members, rows = spec.num_members, sizes.rows
    return 2 * max((1 + members) * rows * there, (members + blueprint.top_k) * rows * back)


class NcclEp:
    """One rank's communicator and group, of one exchange; see `back_ends.BackEnd`."""

    def __init__(
        self,
        transport: Transport,
        blueprint: Blueprint,
        *,
        lanes: Lanes,
        device: torch.device,
        comm_sms: int = 0,
    ) -> None:
        """All ranks together. comm_sms: multiprocessors that the library may take; 0: as it likes. ValueError if the
        package is not there."""
        self._ep, core = load()
        self._lanes = lanes
        self._device = device
        self._dtype = blueprint.dtype
        self._sizes = Sizes(spec=blueprint.specs[0])
        unique = _tell_all(transport, bytes(core.get_unique_id(empty=transport.rank != 0)), device)
        self._communicator = core.Communicator.init(transport.size, transport.rank, core.UniqueId.from_bytes(unique))
        self._group = self._ep.Group.create(
            self._communicator,
            self._ep.GroupConfig(
                algorithm=self._ep.Algorithm.LOW_LATENCY,
                num_experts=blueprint.num_slots,
                max_dispatch_tokens_per_rank=self._sizes.rows,
                max_token_bytes=self._sizes.most_bytes,
                max_num_sms=comm_sms,
            ),
        )
        self._handles: list[NcclEpHandle] = []

    def buffers(self, out_bytes: int, in_bytes: int) -> HopBuffers:
        return HopBuffers.new(out_bytes, in_bytes, self._device)

    def hop(self, part: HopPart) -> Hop:
        """All ranks build the same hops in the same order: handles are made together."""
        first = torch.full((self._sizes.rows, part.spec.row.top_k), -1, dtype=torch.int64, device=self._device)
        handle = NcclEpHandle(self._ep, self._group, first, self._stream)
        self._handles.append(handle)
        return NcclEpHop(part, library=handle, lanes=self._lanes, dtype=self._dtype)

    def close(self) -> None:
        """All ranks together, when nothing is under way."""
        for handle in self._handles:
            handle.close()
        self._group.destroy()
        self._communicator.destroy()

    def _stream(self) -> int:
        """The stream that work is given to now; a CPU has none."""
        return torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0


class NcclEpHandle(Library):
    """The routing of one track. The library reads slots when it dispatches and again when it combines, where they lie.

    Descriptors are made once for each number of rows: a graph holds their tensors' addresses, never the descriptors.
    """

    def __init__(self, ep: Any, group: Any, slots_MK: Tensor, stream: Callable[[], int]) -> None:
        """ep: the package's module, which is typed only where it is installed."""
        self._ep = ep
        self._stream = stream
        self._first = ep.Tensor(slots_MK)
        self._handle = group.create_handle(ep.Layout.RANK_MAJOR, self._first, stream=stream())
        self._known: dict[tuple[Any, ...], Any] = {}

    def dispatch(self, send: Part, land: Part, counts_R: Tensor) -> None:
        ep, stream = self._ep, self._stream()
        self._handle.update(self._describe(send.slots), stream=stream)
        self._handle.dispatch(
            ep.DispatchInputs(
                tokens=self._describe(send.tokens),
                topk_weights=self._describe(send.weights),
                scales=self._describe(send.trailers),
            ),
            ep.DispatchOutputs(
                tokens=self._describe(land.tokens),
                topk_weights=self._describe(land.weights),
                scales=self._describe(land.trailers),
                topk_idx=self._describe(land.slots),
            ),
            layout_info=ep.LayoutInfo(
                src_rank_counters=self._describe(counts_R), recv_topk_idx_kind=ep.ExpertIdKind.LOCAL
            ),
            config=ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.FWD),
            stream=stream,
        )

    def combine(self, give_RMD: Tensor, back_TD: Tensor) -> None:
        ep = self._ep
        self._handle.combine(
            ep.CombineInputs(tokens=self._describe(give_RMD)),
            ep.CombineOutputs(tokens=self._describe(back_TD)),
            stream=self._stream(),
        )

    def close(self) -> None:
        """The handle is of no further use."""
        self._handle.destroy()

    def _describe(self, tensor: Tensor) -> Any:
        key = (tensor.data_ptr(), tensor.dtype, *tensor.shape)
        if key not in self._known:
            self._known[key] = self._ep.Tensor(tensor)
        return self._known[key]


def _tell_all(transport: Transport, mine: bytes, device: torch.device) -> bytes:
    """Rank 0's bytes, on every rank."""
    row = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    return bytes(transport.all_gather(row, tag=Tag(0, 0, 0, 0, Kind.CHECK)).wait()[0].tolist())
