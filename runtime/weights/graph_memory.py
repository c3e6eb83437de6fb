"""What captured steps hold of a device's memory: plain arithmetic, an upper estimate of what kernels hold at once.

    pool    | the largest program's work, which all others use again | what each program leaves behind, and its inputs |
    apart   | between pieces and attention |

Asks no device. What the driver itself keeps of a graph is not known here, and not in it.
"""

from __future__ import annotations

from typing import NamedTuple

from attention_mla.triton_ops import SPLIT_TOKENS

from ..model.model_config import ModelConfig

_INDEX_BYTES = 8
_STATIC_COLUMNS = 6


class GraphNumbers(NamedTuple):
    """What is captured.

    most_tokens     of one program, all tracks together; most_landing: rows that land in an exchange of it
    whole_tokens    the same of those that attend inside of a graph
    all_tokens      of all programs together: each keeps its inputs and what it leaves behind
    switch_bytes    static memory between pieces and attention
    """

    most_tokens: int
    most_landing: int
    whole_tokens: int
    all_tokens: int
    num_programs: int
    switch_bytes: int


class NumberBytes(NamedTuple):
    """Sizes of numbers: of the run, of where a run is never narrower than float32; and of a token's activations."""

    run: int
    wide: int
    activations: int


def graph_bytes(model: ModelConfig, graphs: GraphNumbers, *, slots: int, sizes: NumberBytes) -> int:
    """All of it, but for the room to attend to the cache's pages: see `page_room_bytes`. slots: of this rank."""
    mla, moe, hidden = model.mla, model.moe, model.hidden_size
    absorbed = 2 * mla.num_heads * mla.kv_lora_rank * sizes.run + _split_bytes(model, sizes)
    work = graphs.most_tokens * sizes.activations + graphs.whole_tokens * absorbed
    kept = graphs.all_tokens * (hidden * sizes.run + _STATIC_COLUMNS * _INDEX_BYTES)
    if moe is not None:
        pairs = min(moe.top_k, slots) * (moe.intermediate_size + hidden + 1) * sizes.run
        work += graphs.most_landing * (pairs + 2 * hidden * sizes.run + 4 * moe.top_k * _INDEX_BYTES)
        kept += graphs.num_programs * len(model.moe_layers) * moe.num_experts * _INDEX_BYTES
    return work + kept + graphs.switch_bytes


def page_room_bytes(model: ModelConfig, sizes: NumberBytes, page_size: int) -> int:
    """For each page of the cache: a captured step has room to attend to all of them."""
    return page_size * _split_bytes(model, sizes) // SPLIT_TOKENS


def _split_bytes(model: ModelConfig, sizes: NumberBytes) -> int:
    """What the decode kernel leaves of one split of one token, for the merge; tiles of 16 rows, or of 64."""
    heads = model.mla.num_heads
    rows = 16 if heads <= 16 else -(-heads // 64) * 64
    return rows * (model.mla.kv_lora_rank + 1) * sizes.wide
