"""What a user may set, composed from the rooms' own configurations; frozen, and never edited after start.

Knows names, defaults and ranges; does not know a model's shapes (see `model_config`) or what fits (see `memory`).
The docstrings under the fields are the command line's help.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch

from dbo import DboConfig
from ep import ExchangeConfig
from eplb.config import EplbConfig

from ..failure.straggler import StragglerConfig
from ..graphs.graph_config import GraphConfig
from ..ranks.routing import RoutingConfig
from ..requests.admission import at_least
from ..requests.kv_config import KvConfig
from ..scheduling.cadence import CadenceConfig
from ..scheduling.scheduler import SchedulerConfig

DTypeName = Literal["auto", "bfloat16", "float16", "float32", "float64"]
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


KvCacheDType = Literal["auto", "bfloat16", "fp8", "fp8_e4m3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The latent cache of one rank."""

    kv_cache_dtype: KvCacheDType = "auto"
    """Number format of the latent cache: that of the run (auto, or bfloat16 in a run of it), or fp8 with a scale for
    each 128 values, rope keys in bfloat16: 656 bytes a token and layer instead of 1,152. fp8_e4m3 is fp8."""

    block_size: int = 64
    """Tokens a page of the latent cache holds."""

    num_blocks: int | None = None
    """Pages a rank has; unset: from --kv-cache-memory-bytes, or from the memory that is left."""

    kv_cache_memory_bytes: int | None = None
    """Bytes of latent cache a rank allocates; unset: what is left on a GPU, at most 1 GiB on a CPU."""

    gpu_memory_utilization: float = 0.92
    """Share of the device's memory that weights, cache and workspaces may take together."""

    @property
    def is_fp8(self) -> bool:
        return self.kv_cache_dtype in ("fp8", "fp8_e4m3")

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in get_args(KvCacheDType):
            raise ValueError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}; it must be one of {', '.join(get_args(KvCacheDType))}, "
                "e.g. auto"
            )
        at_least("block_size", self.block_size, 1, neighbour=64)
        if self.num_blocks is not None:
            at_least("num_blocks", self.num_blocks, 1, neighbour=1024)
        if self.kv_cache_memory_bytes is not None:
            at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, neighbour=1073741824)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1, e.g. 0.92"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that is settled before the engine starts; equal on every rank."""

    model: str
    """Folder of a Hugging Face checkpoint, or (with --load-format dummy) a config.json or a name in profiles/models."""

    ranks: int = 1
    """Ranks that share the experts; each decodes its own requests. Started as processes, or by a launcher."""

    dtype: DTypeName = "auto"
    """Number format of weights and activations; auto: the checkpoint's own."""

    device: str = "cpu"
    """Where tensors live: cpu or cuda."""

    ops: Literal["auto", "reference", "numba", "triton"] = "auto"
    """Whose kernels: torch's (reference), Numba's for bf16 on a CPU (numba), or Triton's (triton); auto: Triton's on a
    GPU, on a CPU Numba's in bf16 and torch's in other formats."""

    cpu_threads: int | None = None
    """Threads of torch in each process on a CPU; unset: as torch or OMP_NUM_THREADS says."""

    load_format: Literal["auto", "dummy"] = "auto"
    """auto reads the checkpoint; dummy makes seeded random weights, the same for any number of ranks."""

    seed: int = 0
    """Seed of dummy weights, and of the seeds drawn for requests that bring none."""

    async_depth: Literal[0, 1] = 1
    """Steps launched ahead of reading tokens: 1 overlaps the host with the device, 0 reads before going on."""

    hardware: str | None = None
    """File with a device's peaks, such as profiles/hardware/h200.toml, for the cost model; --itl-target-ms needs it."""

    node_size: int | None = None
    """Ranks of one node, for what travels between nodes; unset: what the launcher says, else all ranks."""

    capacities: str | None = None
    """File of --record-routing that the blocks of --exchange bounded are measured from; unset: as level routing
    needs."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cadence: CadenceConfig = field(default_factory=CadenceConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    overlap: DboConfig = field(default_factory=DboConfig)
    eplb: EplbConfig = field(default_factory=EplbConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    kv: KvConfig = field(default_factory=KvConfig)

    def __post_init__(self) -> None:
        at_least("ranks", self.ranks, 1, neighbour=1)
        at_least("seed", self.seed, 0, neighbour=0)
        if self.cpu_threads is not None:
            at_least("cpu_threads", self.cpu_threads, 1, neighbour=1)
        if self.node_size is not None:
            at_least("node_size", self.node_size, 1, neighbour=8)
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be auto or one of {', '.join(DTYPES)}, e.g. bfloat16")
        if self.ops not in ("auto", "reference", "numba", "triton"):
            raise ValueError(f"ops is {self.ops!r}; it must be auto, reference, numba or triton, e.g. auto")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format is {self.load_format!r}; it must be auto or dummy, e.g. auto")
        if self.async_depth not in (0, 1):
            raise ValueError(f"async_depth is {self.async_depth}; it must be 0 or 1, e.g. 1")

        if self.kv.stores and not self.scheduler.enable_prefix_caching:
            raise ValueError(
                f"kv_connector is {self.kv.kv_connector!r} with prefix caching off; pages are kept by the prefix that "
                "they end, so leave caching on, or choose nixl or tcp"
            )
        if self.cadence.itl_target_ms is not None and self.hardware is None:
            raise ValueError("itl_target_ms is set; it needs hardware, e.g. profiles/hardware/h200.toml")

    @property
    def left_sms(self) -> int:
        """Multiprocessors that exchanges are held to, and that kernels of a cut step leave to them; 0 where no step is
        cut: nothing runs beside an exchange then but what fits."""
        return 0 if self.overlap.dbo == "off" else self.overlap.comm_sms

    def digest(self, model: object) -> int:
        """63 bits over these settings and the parsed `model`: equal on ranks that may decode together.

        Where files lie is left out: a node may keep them elsewhere.
        """
        placed = self.eplb.init_placement and "a file"
        eplb = replace(self.eplb, init_placement=placed, record_routing=None, record_routing_tokens=0)
        alike = replace(
            self, model="", hardware=self.hardware and "a file", capacities=self.capacities and "a file", eplb=eplb
        )
        text = f"{alike!r}|{model!r}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
