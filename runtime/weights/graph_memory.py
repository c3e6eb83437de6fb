"""What captured steps hold of a device's memory: plain arithmetic, an upper estimate of what kernels hold at once.

    pool    | the largest program's work, which all others use again | what each program leaves behind, and its inputs |
    apart   | between pieces and attention |

Asks no device. What the driver itself keeps of a graph is not known here, and not in it.
"""

from __future__ import annotations

from typing import NamedTuple

from attention_mla.triton_ops import SPLIT_TOKENS

from ..model.model_config import ModelConfig
from .activation_bytes import NumberBytes, own_bytes

_INDEX_BYTES = 8
_STATIC_COLUMNS = 6


class Work(NamedTuple):
    """One program.

    tokens    of all tracks together
    landing   rows that land in a round of one track: those of each lie there, while experts compute one after the
              other's and let go of what they made (see `moe.MoeLayer`); there is room for a result of each slot
    whole     whether it attends, too
    """

    tokens: int
    landing: int
    tracks: int
    whole: bool


class GraphNumbers(NamedTuple):
    """What is captured.

    works          of the programs, all that may be the largest
    all_tokens     of all programs together: each keeps its inputs and what it leaves behind
    switch_bytes   static memory between pieces and attention
    """

    works: tuple[Work, ...]
    all_tokens: int
    num_programs: int
    switch_bytes: int


def graph_bytes(model: ModelConfig, graphs: GraphNumbers, *, slots: int, sizes: NumberBytes) -> int:
    """All of it, but for the room to attend to the cache's pages: see `page_room_bytes`. slots: of this rank."""
    moe = model.moe
    work = max([_work_bytes(model, work, slots=slots, sizes=sizes) for work in graphs.works], default=0)
    kept = graphs.all_tokens * (model.hidden_size * sizes.run + _STATIC_COLUMNS * _INDEX_BYTES)
    if moe is not None:
        kept += graphs.num_programs * len(model.moe_layers) * moe.num_experts * _INDEX_BYTES
    return work + kept + graphs.switch_bytes


def _work_bytes(model: ModelConfig, work: Work, *, slots: int, sizes: NumberBytes) -> int:
    """Attention's memory and the experts', one beside the other: blocks that one left may not suit the other."""
    mla, moe, hidden = model.mla, model.moe, model.hidden_size
    num_bytes = work.tokens * own_bytes(model, sizes)
    if work.whole:
        num_bytes += work.tokens * (2 * mla.num_heads * mla.kv_lora_rank * sizes.run + _split_bytes(model, sizes))
    if moe is not None:
        pairs = min(moe.top_k, slots) * (moe.intermediate_size + hidden + 1) * sizes.run
        rows = 2 * hidden * sizes.run + 4 * moe.top_k * _INDEX_BYTES
        num_bytes += work.landing * (pairs + work.tracks * rows)
    return num_bytes


def page_room_bytes(model: ModelConfig, sizes: NumberBytes, page_size: int) -> int:
    """For each page of the cache: a captured step has room to attend to all of them."""
    return page_size * _split_bytes(model, sizes) // SPLIT_TOKENS


def _split_bytes(model: ModelConfig, sizes: NumberBytes) -> int:
    """What the decode kernel leaves of one split of one token, for the merge; tiles of 16 rows, or of 64."""
    heads = model.mla.num_heads
    rows = 16 if heads <= 16 else -(-heads // 64) * 64
    return rows * (model.mla.kv_lora_rank + 1) * sizes.wide
