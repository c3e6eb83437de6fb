"""Weights of a settled configuration: where they come from, and those of one rank or several.

Knows what of the configuration a load needs; how files are read and shared on a node is for `weights` to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe import ExpertBank

from .settings.settling import Settled
from .weights.checkpoint import TensorSource, open_checkpoint
from .weights.dummy import DummyCheckpoint
from .weights.node_loading import LoadedRank, load_rank
from .weights.node_share import NodePeers
from .weights.progress import OnProgress, counted
from .weights.weights import DecoderWeights, bytes_to_read, held_tensors, load_banks, load_shared, verify_held


def weight_source(settled: Settled, *, turn: tuple[int, int] = (0, 1)) -> TensorSource:
    """Where weights come from; `turn` is (place, number) among processes that read together."""
    config = settled.config
    if config.load_format == "dummy":
        return DummyCheckpoint(settled.model, seed=config.seed)
    return open_checkpoint(config.model, settled.model, turn=turn)


def load_ranks(
    settled: Settled, source: TensorSource, ranks: Sequence[int], on_progress: OnProgress | None
) -> list[DecoderWeights]:
    """One rank's weights after the other; every tensor that any rank holds is verified before the first is read."""
    model, placements = settled.model, settled.placements
    verify_held(source, model, placements, ranks=ranks)
    names = {name for rank in ranks for name in held_tensors(model, placements, rank)}
    progress = counted(on_progress, total=bytes_to_read(source, names))
    shared = load_shared(
        source,
        model,
        dtype=settled.dtype,
        device=settled.device,
        keep_fp8=settled.keep_shared_fp8,
        progress=progress,
    )
    return [DecoderWeights.join(shared, _banks(settled, source, rank, progress)) for rank in ranks]


def load_with(peers: NodePeers, settled: Settled, source: TensorSource, on_progress: OnProgress | None) -> LoadedRank:
    """One rank's weights, where the node's processes read together what they hold alike."""
    return load_rank(
        source,
        settled.model,
        settled.placements,
        peers=peers,
        dtype=settled.dtype,
        device=settled.device,
        keep_fp8=settled.keep_fp8,
        keep_shared_fp8=settled.keep_shared_fp8,
        on_progress=on_progress,
    )


def _banks(
    settled: Settled, source: TensorSource, rank: int, progress: Callable[[int], None]
) -> tuple[ExpertBank | None, ...]:
    return load_banks(
        source,
        settled.model,
        settled.placements,
        rank=rank,
        dtype=settled.dtype,
        device=settled.device,
        keep_fp8=settled.keep_fp8,
        progress=progress,
    )
