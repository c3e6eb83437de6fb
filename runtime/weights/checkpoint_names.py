"""Which tensor of a checkpoint is which: the model's own, the ones to skip, and the ones that tell an unbuilt format.

Files wrap the same model in different names: multimodal ones put `language_model.` before everything and add a vision
tower; some carry stray rotary tables or the layers for multi-token prediction. Knows names only, opens nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ep import CheckpointError
from moe import expert_shapes

from ..model.model_config import ModelConfig
from ..model.model_shapes import HEAD, shared_tensors

SCALE_SUFFIX = "_scale_inv"
_TEXT_PREFIX = "language_model."
_OTHER_PARTS = ("vision_tower.", "mm_projector.")
_STRAY = "rotary_emb.inv_freq"
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(.+)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")

# Endings or parts of names that give away what a config.json may not mention; the first that any name has is told.
_GIVEAWAYS = (
    (".weight_packed", "INT4 experts (compressed-tensors) are not built"),
    (".weight_scale_2", "NVFP4 weights are not built"),
    (".input_scale", "weights with static scales (NVFP4 or per-tensor fp8) are not built"),
    (".weight_scale", "weights with a `weight_scale` are not built, only fp8 blocks with a `weight_scale_inv`"),
    (".indexer", "sparse attention with an indexer (DSA) is not built"),
    (".bias", "biases are not built"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """stored: the model's name -> the name in the files. notes: a line for each kind of tensor that is skipped."""

    stored: Mapping[str, str]
    notes: tuple[str, ...]


def map_names(names: Iterable[str], model: ModelConfig, *, file_of: Mapping[str, str]) -> NameMap:
    """Sort a checkpoint's names out. Raises CheckpointError for one that the model has no place for."""
    stored = _without_prefix(names, file_of)
    mtp = {name for name, layer in _past_the_last(stored, model) if _is_mtp(stored, model, layer)}
    expected = set(shared_tensors(model))
    kept: dict[str, str] = {}
    for name, raw in stored.items():
        if name in mtp or (model.tie_word_embeddings and name == HEAD):
            continue
        kept[name] = raw
    unexpected = [name for name in kept if not _has_place(name, model, expected)]
    if unexpected:
        raise _unexpected(unexpected, stored, file_of)
    notes = (f"multi-token prediction is not built: {len(mtp)} tensors are skipped",) if mtp else ()
    return NameMap(stored=kept, notes=notes)


def is_skipped(name: str) -> bool:
    """Whether a tensor belongs to a part that is never read: pictures, or a stray rotary table."""
    return name.startswith(_OTHER_PARTS) or name.endswith(_STRAY)


def _without_prefix(names: Iterable[str], file_of: Mapping[str, str]) -> dict[str, str]:
    """The model's name -> the name in the files. CheckpointError when two of these are one of those."""
    stored: dict[str, str] = {}
    for raw in names:
        name = raw.removeprefix(_TEXT_PREFIX)
        if is_skipped(raw):
            continue
        if name in stored:
            first = stored[name]
            raise CheckpointError(
                tensor=name,
                file=file_of[raw],
                expected="one tensor of this name",
                found=f"{first} in {file_of[first]} and {raw} here",
            )
        stored[name] = raw
    return stored


def _past_the_last(names: Iterable[str], model: ModelConfig) -> list[tuple[str, int]]:
    found = ((name, _LAYER.fullmatch(name)) for name in names)
    return [(name, int(match[1])) for name, match in found if match and int(match[1]) >= model.num_layers]


def _is_mtp(names: Mapping[str, str], model: ModelConfig, layer: int) -> bool:
    """The config's word, or the projection that only such a layer has."""
    return layer < model.num_layers + model.num_mtp_layers or f"model.layers.{layer}.eh_proj.weight" in names


def _has_place(name: str, model: ModelConfig, expected: set[str]) -> bool:
    weight = name.removesuffix(SCALE_SUFFIX)
    if weight in expected:
        return True
    match = _EXPERT.fullmatch(weight)
    if match is None or model.moe is None:
        return False
    layer, expert, leaf = int(match[1]), int(match[2]), match[3]
    return layer in model.moe_layers and expert < model.moe.num_experts and leaf in expert_shapes(model.moe)


def _unexpected(names: list[str], stored: Mapping[str, str], file_of: Mapping[str, str]) -> CheckpointError:
    for giveaway, reason in _GIVEAWAYS:
        for name in names:
            if name.endswith(giveaway) or f"{giveaway}." in name:
                return _error(name, stored, file_of, reason)
    more = f", nor for {len(names) - 1} others such as {names[1]}" if len(names) > 1 else ""
    return _error(names[0], stored, file_of, f"a tensor that this model has no place for{more}")


def _error(name: str, stored: Mapping[str, str], file_of: Mapping[str, str], found: str) -> CheckpointError:
    return CheckpointError(
        tensor=name, file=file_of[stored[name]], expected="the tensors that config.json describes", found=found
    )
