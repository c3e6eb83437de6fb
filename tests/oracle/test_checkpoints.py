"""The small checkpoints, before anything of ours reads them: are they fair, complete, and able to show a mistake?"""

import copy
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open

from .families import FAMILIES, FP8, GLM, K2, NUM_TOKENS, TIED, V2, V2_LITE, V3, WRAPPED, Family

if TYPE_CHECKING:
    from .conftest import Checkpoint
    from .oracle import Oracle


def only_for(*families: Family) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", families, ids=lambda family: family.name, indirect=True)


def shapes_of(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Tensor name -> (shape, dtype as safetensors spells it), over every file of a folder."""
    shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                part = tensors.get_slice(name)
                shapes[name] = (part.get_shape(), part.get_dtype())
    return shapes


def digest_of(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_a_seed_gives_the_same_bytes_again(family: Family, checkpoint: "Checkpoint", tmp_path: Path) -> None:
    from .checkpoints import write_checkpoint

    plain, dressed = write_checkpoint(family, tmp_path)
    assert digest_of(plain) == digest_of(checkpoint.plain)
    assert digest_of(dressed) == digest_of(checkpoint.dressed)


@only_for(V2, V3, GLM)
def test_one_forward_says_what_decoding_step_by_step_says(family: Family, oracle: "Oracle") -> None:
    prompt = family.prompts()[2]
    tokens = oracle.greedy(prompt, NUM_TOKENS)
    assert oracle.judge(prompt, tokens).logprobs_TV.argmax(dim=-1).tolist() == tokens


@pytest.mark.parametrize(
    ("family", "fault"),
    [(family, fault) for family in FAMILIES for fault in ("positions shifted", *family.faults)],
    ids=lambda value: value.name if isinstance(value, Family) else value.replace(" ", "_"),
    indirect=["family"],
)
def test_a_planted_fault_changes_tokens(family: Family, oracle: "Oracle", fault: str) -> None:
    from .faults import FAULTS
    from .oracle import Oracle

    text = family.prompts()[-1]
    right = oracle.judge(text[:1], text[1:]).logprobs_TV
    faulty = Oracle(copy.deepcopy(oracle.model))
    FAULTS[fault](faulty.model)
    wrong = faulty.judge(text[:1], text[1:]).logprobs_TV
    num_changed = int((right.argmax(dim=-1) != wrong.argmax(dim=-1)).sum())
    worst = float((right - wrong).abs().max())
    assert num_changed >= 10, (
        f"{fault} changed {num_changed} of {len(text) - 1} tokens; worst log-probability {worst:.2g}"
    )


def test_the_router_that_plants_faults_is_right_without_them(family: Family, oracle: "Oracle") -> None:
    from .faults import reroute
    from .oracle import Oracle

    text = family.prompts()[-1]
    rewritten = Oracle(copy.deepcopy(oracle.model))
    reroute(rewritten.model)
    assert torch.equal(rewritten.judge(text[:1], text[1:]).logprobs_TV, oracle.judge(text[:1], text[1:]).logprobs_TV)


@only_for(K2)
def test_kimi_k2_is_no_model_type_of_transformers(checkpoint: "Checkpoint") -> None:
    """Why the oracle is given an explicit config. Should this fail, transformers has learnt it: drop that detour."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert json.loads((checkpoint.dressed / "config.json").read_text())["model_type"] == "kimi_k2"
    assert "kimi_k2" not in CONFIG_MAPPING
    with pytest.raises(ValueError, match="kimi_k2"):
        AutoConfig.from_pretrained(checkpoint.dressed)


@only_for(K2)
def test_an_oracle_that_misses_tensors_is_refused(checkpoint: "Checkpoint") -> None:
    from .checkpoints import CLASSES, oracle_config
    from .oracle import Oracle

    config = oracle_config(K2)
    config.num_hidden_layers += 1
    with pytest.raises(ValueError, match="missing_keys"):
        Oracle.load(checkpoint.plain, model_class=CLASSES[K2.oracle][1], config=config)


@only_for(V3)
def test_shards_are_many_and_indexed(checkpoint: "Checkpoint") -> None:
    index = json.loads((checkpoint.dressed / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 5
    assert set(index["weight_map"]) == set(shapes_of(checkpoint.dressed))
    assert not (checkpoint.dressed / "model.safetensors").exists()


@only_for(FP8)
def test_fp8_blocks_are_partial_at_every_edge(checkpoint: "Checkpoint") -> None:
    shapes = shapes_of(checkpoint.dressed)
    scales = {name: shape for name, shape in shapes.items() if name.endswith("_scale_inv")}
    assert scales
    for name, (shape, dtype) in scales.items():
        weight, weight_dtype = shapes[name.removesuffix("_scale_inv")]
        assert dtype == "F32"
        assert weight_dtype == "F8_E4M3"
        assert shape == [-(-size // 128) for size in weight]
        assert all(size % 128 for size in weight), f"{name}: {weight} has a whole number of blocks"
    assert all(
        dtype == "F32"
        for name, (_, dtype) in shapes.items()
        if f"{name}_scale_inv" not in scales and name not in scales
    )


@only_for(TIED)
def test_a_tied_checkpoint_has_no_head(checkpoint: "Checkpoint") -> None:
    assert "lm_head.weight" not in shapes_of(checkpoint.dressed)


@only_for(V2_LITE)
def test_a_bfloat16_checkpoint_is_all_bfloat16(checkpoint: "Checkpoint") -> None:
    assert {dtype for _, dtype in shapes_of(checkpoint.dressed).values()} == {"BF16"}


@pytest.mark.parametrize(
    ("family", "prefix", "skipped"),
    [
        (K2, "", tuple(f"model.layers.{i}.self_attn.rotary_emb." for i in range(3))),
        (GLM, "", ("model.layers.3.",)),
        (WRAPPED, "language_model.", ("vision_tower.", "mm_projector.")),
    ],
    ids=["k2", "glm", "wrapped"],
    indirect=["family"],
)
def test_dressing_only_adds_what_is_to_be_skipped(
    family: Family, checkpoint: "Checkpoint", prefix: str, skipped: tuple[str, ...]
) -> None:
    held = {f"{prefix}{name}": shape for name, shape in shapes_of(checkpoint.plain).items()}
    dressed = shapes_of(checkpoint.dressed)
    assert held.items() <= dressed.items()
    extra = dressed.keys() - held.keys()
    assert extra
    assert all(name.startswith(skipped) for name in extra)
