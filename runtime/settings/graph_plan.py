"""Whether a rank's steps are captured, which, and what that takes of memory: from the configuration alone.

Knows what a graph needs: a device that records, kernels that ask the host nothing, and exchanges whose sizes follow
from the plan. Where it is not there, steps are launched kernel by kernel.
"""

from __future__ import annotations

import torch

from ep.blueprint import Blueprint

from ..graphs.graph_config import Sizes, cut_sizes, piece_sizes
from ..graphs.graph_device import GRAPH_DEVICES
from ..graphs.switch import SwitchMemory
from ..model.model_config import ModelConfig
from ..weights.graph_memory import GraphNumbers, Work
from .config import EngineConfig

MOST_ROW_TOKENS = 4
"""Of a row with drafts: a longer one attends as a prompt does (see `attention_mla.view`)."""


def why_eager(config: EngineConfig, model: ModelConfig, device: torch.device, *, ranks_here: int) -> str:
    """What keeps the steps of a settled config from being captured; empty where they are."""
    if device.type not in GRAPH_DEVICES:
        return f"a {device.type} has no graphs"
    if config.graphs.enforce_eager:
        return "--enforce-eager"
    if config.ops != "triton":
        return f"ops are {config.ops}, which ask the host"
    if model.moe is not None and config.exchange.exchange == "exact":
        return f"the exchange is {config.exchange.exchange}, which asks the host"
    if ranks_here > 1:
        return f"{ranks_here} ranks are threads of one process, which take turns inside a step"
    return ""


def sizes_of(config: EngineConfig, *, drafts: bool) -> Sizes:
    """What is recorded for a rank of this configuration. Of steps that are cut, those that are cut about level."""
    scheduler, overlap = config.scheduler, config.overlap
    row_tokens = MOST_ROW_TOKENS if drafts else 1
    most_decode = min(scheduler.max_num_seqs * row_tokens, scheduler.max_num_batched_tokens)
    decode, pieces = config.graphs.decode_sizes(most_decode), piece_sizes(scheduler.max_num_batched_tokens)
    tracks = overlap.most_tracks
    if tracks == 1:
        return Sizes(decode=decode, pieces=pieces, row_tokens=row_tokens)
    return Sizes(
        decode=decode,
        pieces=pieces,
        cut_decode=cut_sizes(
            decode, least=overlap.dbo_decode_token_threshold, most=most_decode, tracks=tracks, longest_row=row_tokens
        ),
        cut_pieces=cut_sizes(
            pieces,
            least=overlap.dbo_prefill_token_threshold,
            most=scheduler.max_num_batched_tokens,
            tracks=tracks,
            longest_row=1,
        ),
        tracks=tracks,
        row_tokens=row_tokens,
    )


def graph_numbers(
    config: EngineConfig, model: ModelConfig, blueprint: Blueprint | None, *, device: torch.device, dtype: torch.dtype
) -> GraphNumbers | None:
    """What the plan of bytes asks of graphs, by settled config; None where nothing is captured.

    blueprint: of the exchange, None without one. At the capacities of the start: raised ones take more.
    """
    if why_eager(config, model, device, ranks_here=1):
        return None
    keys = list(sizes_of(config, drafts=False).each())
    largest = {(key.whole, key.tracks): key for key in reversed(keys)}.values()  # they come first
    pieces = [key.tokens for key in keys if not key.whole]
    return GraphNumbers(
        works=tuple(
            Work(
                tokens=key.tokens * key.tracks,
                landing=0 if blueprint is None else blueprint.landing(key.tokens),
                tracks=key.tracks,
                whole=key.whole,
            )
            for key in largest
        ),
        all_tokens=sum(key.tokens * key.tracks for key in keys),
        num_programs=len(keys),
        switch_bytes=SwitchMemory.num_bytes(max(pieces), model.mla, dtype) if pieces else 0,
    )
