"""A step's rows cut into tracks, and what the tracks did put together again.

    rows       a b c d e        cut in two       a d | b c e        joined: rows and logits in the order a d b c e

A step of one track is the ordinary case. Knows rows and outputs; when a step is cut, and how level, is `dbo`'s to say.

Shapes: T tokens here, B sampled positions, D model, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dbo import split

from ..requests.rows import Rows
from .decoder import DecoderOutput


def cut_rows(rows: Rows, num_tracks: int) -> list[Rows]:
    """The rows of each track; one after the other they are the step's rows, in the order in which they are sampled."""
    if num_tracks == 1:
        return [rows]
    sizes = list(zip(rows.num_tokens_B.tolist(), rows.end_B.tolist(), strict=True))
    return [rows.take(track) for track in split(sizes, num_tracks)]


def join_outputs(outputs: Sequence[DecoderOutput]) -> DecoderOutput:
    """What the step left behind, from what its tracks did, in their order."""
    if len(outputs) == 1:
        return outputs[0]
    overflows = [output.overflow for output in outputs if output.overflow is not None]
    faults = [output.fault for output in outputs if output.fault is not None]
    experts = [output.experts_LTK for output in outputs if output.experts_LTK is not None]
    prompts = [output.prompt_PD for output in outputs if output.prompt_PD is not None]
    return DecoderOutput(
        hidden_BD=torch.cat([output.hidden_BD for output in outputs]),
        counts_LE=torch.stack([output.counts_LE for output in outputs]).sum(dim=0),
        num_pairs=sum([output.num_pairs for output in outputs]),
        overflow=torch.stack(overflows).any() if overflows else None,
        experts_LTK=torch.cat(experts, dim=1) if experts else None,
        fault=torch.stack(faults).any() if faults else None,
        prompt_PD=torch.cat(prompts) if prompts else None,
    )
