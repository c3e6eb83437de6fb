"""The plan of bytes of one rank, before anything is allocated: weights, workspaces, and the cache that is left.

Pure arithmetic from a model and plain numbers; asks no device and imports no kernel. Weights, cache and the token table
are exact. Activations are an upper estimate of what the reference path holds at once.

    device x utilization  =  | weights | workspaces | cache pages ........ |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attention_mla import fp8_row_bytes
from eplb.migration import pool_bytes
from moe import spread

from ..model.config_fields import shown
from ..model.model_config import ModelConfig
from .activation_bytes import NumberBytes, whole_bytes
from .graph_memory import GraphNumbers, graph_bytes, page_room_bytes
from .packed_bytes import packed_weight_bytes
from .weight_bytes import WeightBytes, expert_bytes, weight_bytes

_GIB = 1 << 30
# GiB past which nobody needs to know how many, and a number may be too long to print.
_COUNTLESS = 10**9
_TABLE_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNumbers:
    """What the plan depends on besides the model.

    dtype_bytes is the size of the run dtype. keep_fp8, keep_shared_fp8: experts, and all else that kernels can read so,
    stay as the file has them; fp8_cache: latents are kept in fp8; packs: linear layers are copied in the layout that a
    processor's kernels read. device_bytes is what one rank may count as its own. exchange_buffer_bytes is what the
    exchange allocates.
    redundant_experts are a layer's slots beyond one an expert; migration_limit is what a rank gets of moving experts in
    a step, 0 where none move. The cache is num_pages, else cache_bytes, else what is left; without num_pages never more
    than max_num_seqs requests of max_model_len can use.
    """

    ranks: int
    dtype_bytes: int
    device_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int = 64
    keep_fp8: bool = False
    keep_shared_fp8: bool = False
    fp8_cache: bool = False
    packs: bool = False
    exchange_buffer_bytes: int = 0
    redundant_experts: int = 0
    migration_limit: int = 0
    gpu_memory_utilization: float = 0.92
    num_pages: int | None = None
    cache_bytes: int | None = None
    graphs: GraphNumbers | None = None
    """None where nothing is captured."""
    cache_limit_bytes: int | None = None
    """Where nothing is said about the cache: it takes what is left, but no more than this."""

    @property
    def sizes(self) -> NumberBytes:
        """Of the run's numbers."""
        return NumberBytes(run=self.dtype_bytes, wide=max(self.dtype_bytes, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceBytes:
    """Bytes that are neither weights nor cache."""

    exchange: int
    token_table: int
    logits: int
    activations: int
    migration: int = 0
    packed: int = 0
    graphs: int = 0
    """What programs hold, of which one runs at a time; without what the driver keeps of them itself."""

    @property
    def total(self) -> int:
        """All parts."""
        steps = self.exchange + self.token_table + self.logits + self.activations + self.graphs
        return steps + self.migration + self.packed


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where one rank's bytes go. num_pages is 0 when not one page is left; see `shortfall_bytes`."""

    numbers: MemoryNumbers
    weights: WeightBytes
    workspaces: WorkspaceBytes
    slots_per_rank: int
    kv_bytes_per_token: int
    num_pages: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, over all layers."""
        return self.kv_bytes_per_token * self.numbers.page_size

    @property
    def cache_bytes(self) -> int:
        """Bytes of the latent cache."""
        return self.num_pages * self.page_bytes

    @property
    def budget_bytes(self) -> int:
        """What the plan may use of the device."""
        return int(self.numbers.device_bytes * self.numbers.gpu_memory_utilization)

    @property
    def needed_bytes(self) -> int:
        """Weights, workspaces and cache; at least one page of it."""
        return self.weights.total + self.workspaces.total + max(self.num_pages, 1) * self.page_bytes

    @property
    def shortfall_bytes(self) -> int:
        """What is missing, 0 when the plan fits."""
        return max(self.needed_bytes - self.budget_bytes, 0)

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of the longest request that the cache can hold alone, or that the model allows."""
        return min(self.numbers.max_model_len, self.num_pages * self.numbers.page_size)

    def concurrent_requests(self, context: int) -> int:
        """Requests of `context` tokens that one rank can hold at once; `max_num_seqs` bounds what it runs."""
        return self.num_pages // pages_of(context, self.numbers.page_size)

    def check_fits(self) -> None:
        """Raises ValueError with the whole arithmetic when the plan does not fit or its cache has not one page."""
        if not self.shortfall_bytes:
            self._check_cache()
            return
        numbers, pages = self.numbers, max(self.num_pages, 1)
        raise ValueError(
            f"a rank of {numbers.ranks} needs {gib(self.needed_bytes)}: weights {gib(self.weights.total)} "
            f"({gib(self.weights.experts)} of them {self.slots_per_rank} experts a layer) "
            f"+ cache {gib(pages * self.page_bytes)} ({shown(pages)} {'page' if pages == 1 else 'pages'}) "
            f"+ workspaces {gib(self.workspaces.total)}; the device has {gib(numbers.device_bytes)} x "
            f"{numbers.gpu_memory_utilization:g} = {gib(self.budget_bytes)}, so {gib(self.shortfall_bytes)} are missing"
        )

    def _check_cache(self) -> None:
        """All fits, so a cache without a page is one that was asked to be that small."""
        if self.num_pages:
            return
        numbers = self.numbers
        raise ValueError(
            f"--kv-cache-memory-bytes is {numbers.cache_bytes}; a page of the cache takes {numbers.page_size} tokens "
            f"(--block-size) x {self.kv_bytes_per_token} B = {self.page_bytes} B, so it must be at least "
            f"{self.page_bytes}, or --num-blocks at least 1"
        )


def plan_memory(model: ModelConfig, numbers: MemoryNumbers) -> MemoryPlan:
    """Plan the fullest rank. Raises ValueError for more ranks than experts; what does not fit is in the plan."""
    slots = _slots_per_rank(model, numbers)
    weights = weight_bytes(
        model,
        slots=slots,
        dtype_bytes=numbers.dtype_bytes,
        keep_fp8=numbers.keep_fp8,
        keep_shared_fp8=numbers.keep_shared_fp8,
    )
    workspaces = _workspaces(model, numbers, slots)
    kv_bytes = model.num_layers * _row_bytes(model, numbers)
    budget = int(numbers.device_bytes * numbers.gpu_memory_utilization)
    left = budget - weights.total - workspaces.total
    captured = numbers.graphs is not None
    room = page_room_bytes(model, numbers.sizes, numbers.page_size) if captured else 0
    num_pages = _num_pages(numbers, page_bytes=kv_bytes * numbers.page_size + room, left=left)
    workspaces = replace(workspaces, graphs=workspaces.graphs + num_pages * room)
    return MemoryPlan(
        numbers=numbers,
        weights=weights,
        workspaces=workspaces,
        slots_per_rank=slots,
        kv_bytes_per_token=kv_bytes,
        num_pages=num_pages,
    )


def plan_lines(plan: MemoryPlan, *, contexts: tuple[int, ...] = (1024, 4096, 16384, 65536)) -> list[str]:
    """The plan in words, a line each, for a terminal or a log."""
    weights, work, numbers = plan.weights, plan.workspaces, plan.numbers
    lines = [
        f"weights per rank      {gib(weights.total)}",
        f"  routed experts      {gib(weights.experts)}  ({plan.slots_per_rank} a layer)",
        f"  shared and dense    {gib(weights.shared + weights.dense)}",
        f"  attention           {gib(weights.attention)}",
        f"  embedding and head  {gib(weights.embedding + weights.head)}",
        f"  routers and norms   {gib(weights.router + weights.norms)}",
        f"workspaces            {gib(work.total)}  (exchange {gib(work.exchange)}, tokens {gib(work.token_table)}, "
        f"logits {gib(work.logits)}, activations at most {gib(work.activations)}"
        + (f", graphs {gib(work.graphs)}" if work.graphs else "")
        + (f", moving experts {gib(work.migration)}" if work.migration else "")
        + (f", packed weights {gib(work.packed)})" if work.packed else ")"),
        f"latent cache          {gib(plan.cache_bytes)}  ({plan.num_pages} pages of {numbers.page_size} tokens, "
        f"{plan.kv_bytes_per_token:,} B a token)",
        f"device                {gib(numbers.device_bytes)} x {numbers.gpu_memory_utilization:g} = "
        f"{gib(plan.budget_bytes)}",
        f"longest request       {plan.max_request_tokens:,} tokens",
    ]
    for context in contexts:
        if context <= plan.max_request_tokens:
            fit = plan.concurrent_requests(context)
            lines.append(f"requests of {context:>7,}   {fit:,} a rank, {fit * numbers.ranks:,} in all")
    if plan.shortfall_bytes:
        lines.append(f"does not fit          {gib(plan.shortfall_bytes)} are missing")
    return lines


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens, at least one."""
    return max(-(-tokens // page_size), 1)


def gib(num_bytes: int) -> str:
    """Bytes in words: GiB, MiB below a tenth of one, KiB below a tenth of that, and single ones below a KiB."""
    if num_bytes > _COUNTLESS * _GIB:
        return "over 10^9 GiB"
    for unit, size in (("GiB", _GIB), ("MiB", 1 << 20)):
        if num_bytes >= size // 10:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1024:.2f} KiB" if num_bytes >= 1024 else f"{num_bytes} B"


def _row_bytes(model: ModelConfig, numbers: MemoryNumbers) -> int:
    """What a token takes of the cache in one layer."""
    if numbers.fp8_cache:
        return fp8_row_bytes(model.mla.kv_lora_rank, model.mla.qk_rope_head_dim)
    return model.mla.latent_width * numbers.dtype_bytes


def _slots_per_rank(model: ModelConfig, numbers: MemoryNumbers) -> int:
    moe, redundant = model.moe, numbers.redundant_experts
    return spread(moe.num_experts, numbers.ranks, redundant).slots_per_rank if moe is not None else 0


def _workspaces(model: ModelConfig, numbers: MemoryNumbers, slots: int) -> WorkspaceBytes:
    line = numbers.max_model_len + 1 + pages_of(numbers.max_model_len, numbers.page_size)
    table = numbers.max_num_seqs * line * _TABLE_BYTES
    # The logits, their log-softmax, and the sorted copy that top-k and top-p need.
    logits = 3 * numbers.max_num_seqs * model.vocab_size * numbers.sizes.wide
    return WorkspaceBytes(
        exchange=numbers.exchange_buffer_bytes if model.moe is not None else 0,
        token_table=table,
        logits=logits,
        activations=numbers.max_num_batched_tokens * whole_bytes(model, numbers.sizes),
        migration=_migration_bytes(model, numbers, slots),
        packed=packed_weight_bytes(model, slots) if numbers.packs else 0,
        graphs=0 if numbers.graphs is None else graph_bytes(model, numbers.graphs, slots=slots, sizes=numbers.sizes),
    )


def _migration_bytes(model: ModelConfig, numbers: MemoryNumbers, slots: int) -> int:
    """What arrives waits until all ranks have theirs: a layer's slots at most, whichever layer it is."""
    blob_bytes = expert_bytes(model, dtype_bytes=numbers.dtype_bytes, keep_fp8=numbers.keep_fp8)
    limit = numbers.migration_limit
    return pool_bytes(places=slots, blob_bytes=blob_bytes, limit=limit) if limit else 0


def _num_pages(numbers: MemoryNumbers, *, page_bytes: int, left: int) -> int:
    if numbers.num_pages is not None:
        return numbers.num_pages
    useful = numbers.max_num_seqs * pages_of(numbers.max_model_len, numbers.page_size)
    room = min(left, numbers.cache_limit_bytes or left) if numbers.cache_bytes is None else numbers.cache_bytes
    return min(max(room, 0) // page_bytes, useful)
