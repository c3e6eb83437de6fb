"""Checkpoints on disk: every way in which files can be wrong is found before a number is read, and said in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ep import CheckpointError
from moe import spread
from runtime.model.model_config import parse_model_config
from runtime.weights.checkpoint import Checkpoint, Wanted, open_checkpoint
from runtime.weights.weights import held_tensors, load_banks, load_shared, verify_held
from tests.runtime.checkpoints import EXPERT, SMALL, plain, random_tensors, write_checkpoint

MODEL = parse_model_config(SMALL)
PLACEMENT = spread(6, 2)
GATE = EXPERT.format(layer=1, expert=4, proj="gate")
Tensors = dict[str, Tensor]


def checked(folder: Path, *, rank: int = 1) -> Checkpoint:
    """Open and verify what one rank of two holds; nothing may have been read by then."""
    source = open_checkpoint(folder, MODEL)
    verify_held(source, MODEL, PLACEMENT, ranks=[rank])
    assert source.bytes_read == 0
    return source


def broken(folder: Path, change: Callable[[Tensors], Any], *, fp8: bool = False, shards: int = 1) -> CheckpointError:
    """The error of a checkpoint after `change` was made to its tensors."""
    tensors = random_tensors(SMALL, fp8=fp8)
    change(tensors)
    write_checkpoint(folder, SMALL, tensors, shards=shards)
    with pytest.raises(CheckpointError) as caught:
        checked(folder)
    return caught.value


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("fp8", [False, True])
def test_every_tensor_is_read_as_it_is_meant(tmp_path: Path, shards: int, dtype: torch.dtype, fp8: bool) -> None:
    tensors = random_tensors(SMALL, fp8=fp8)
    source = checked(write_checkpoint(tmp_path, SMALL, tensors, shards=shards))
    for name, shape in held_tensors(MODEL, PLACEMENT, 1).items():
        out = torch.full(shape, torch.nan, dtype=dtype)
        source.read([Wanted(name=name, out=out)])
        assert torch.equal(out, plain(tensors, name, dtype)), name


def test_large_tensors_pass_through_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.weights.reading.STAGING_BYTES", 3000)
    tensors = random_tensors(SMALL, fp8=True)
    source = checked(write_checkpoint(tmp_path, SMALL, tensors))
    for name in ("model.embed_tokens.weight", GATE, "model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        out = torch.empty(tensors[name].shape, dtype=torch.float32)
        source.read([Wanted(name=name, out=out)])
        assert torch.equal(out, plain(tensors, name, torch.float32)), name


def test_fp8_values_and_scales_are_kept_as_stored(tmp_path: Path) -> None:
    tensors = random_tensors(SMALL, fp8=True)
    source = checked(write_checkpoint(tmp_path, SMALL, tensors))
    values, scale_inv = torch.empty(136, 160, dtype=torch.float8_e4m3fn), torch.empty(2, 2)
    source.read([Wanted(name=GATE, out=values, scale_inv=scale_inv)])
    assert torch.equal(values.view(torch.uint8), tensors[GATE].view(torch.uint8))
    assert torch.equal(scale_inv, tensors[f"{GATE}_scale_inv"])


def test_quantised_tensors_are_found_though_the_config_is_silent(tmp_path: Path) -> None:
    assert MODEL.quantization is None
    source = checked(write_checkpoint(tmp_path, SMALL, random_tensors(SMALL, fp8=True)))
    assert source.is_fp8(GATE)
    assert not source.is_fp8("model.layers.1.mlp.gate.weight")


def test_plain_tensors_are_plain_though_the_config_says_fp8(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    model = parse_model_config(SMALL | {"quantization_config": fp8})
    tensors = random_tensors(SMALL)
    source = open_checkpoint(write_checkpoint(tmp_path, SMALL, tensors), model)
    banks = load_banks(source, model, PLACEMENT, rank=1, dtype=torch.float32, keep_fp8=True)
    assert banks[1] is not None
    assert banks[1].scales is None


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    error = broken(tmp_path, lambda tensors: tensors.pop(GATE))
    assert (error.tensor, error.expected, error.found) == (GATE, "shape [136, 160]", "no such tensor")
    assert str(error) == f"{GATE} in {tmp_path}: expected shape [136, 160], found no such tensor"


def test_another_ranks_missing_expert_does_not_matter_to_this_one(tmp_path: Path) -> None:
    tensors = random_tensors(SMALL)
    tensors.pop(GATE)
    write_checkpoint(tmp_path, SMALL, tensors)
    checked(tmp_path, rank=0)


def test_a_wrong_shape_is_named_with_its_file(tmp_path: Path) -> None:
    error = broken(tmp_path, lambda tensors: tensors.update({GATE: torch.zeros(160, 136, dtype=torch.bfloat16)}))
    file = tmp_path / "model.safetensors"
    assert str(error) == f"{GATE} in {file}: expected shape [136, 160], found shape [160, 136]"


def test_all_wrong_tensors_are_counted(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for name in (GATE, "lm_head.weight", "model.norm.weight"):
            tensors.pop(name)

    error = broken(tmp_path, drop)
    assert error.tensor == "model.norm.weight"
    assert error.found == "no such tensor (and 2 more tensors are wrong, such as lm_head.weight)"


def test_a_truncated_shard_is_found_before_anything_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, random_tensors(SMALL), shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(size - 10)
    with pytest.raises(
        CheckpointError, match=rf"expected a file of at least {size} bytes, found {size - 10} bytes, 10"
    ):
        checked(tmp_path)


def test_a_file_cut_within_its_header_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, random_tensors(SMALL))
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(
        CheckpointError, match=r"expected a header of \d+ bytes .* found a file of 100 bytes; it is trun"
    ):
        checked(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, random_tensors(SMALL), shards=3)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003.safetensors: expected .*, found no such file"):
        checked(tmp_path)


def test_a_shard_that_lacks_what_the_index_says_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, random_tensors(SMALL), shards=3)
    name = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"][GATE]
    tensors = load_file(tmp_path / name)
    tensors.pop(GATE)
    save_file(tensors, tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{re.escape(GATE)} in .*{name}: expected shape \[136, 160\], found no"):
        checked(tmp_path)


def test_an_index_may_not_point_out_of_its_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, random_tensors(SMALL), shards=3)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"expected the name of a file in its folder, found \.\./other"):
        checked(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected an object with weight_map, found KeyError"):
        checked(tmp_path)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    extra = {"model.layers.1.mlp.experts.6.gate_proj.weight": torch.zeros(1), "something.else": torch.zeros(1)}
    error = broken(tmp_path, lambda tensors: tensors.update(extra))
    assert error.tensor in extra
    assert "a tensor that this model has no place for, nor for 1 others such as" in str(error.found)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (GATE.replace(".weight", ".weight_packed"), r"INT4 experts \(compressed-tensors\) are not built"),
        (GATE.replace(".weight", ".weight_scale_2"), "NVFP4 weights are not built"),
        (GATE.replace(".weight", ".weight_scale"), "weights with a `weight_scale` are not built"),
        (GATE.replace(".weight", ".input_scale"), "weights with static scales"),
        ("model.layers.0.self_attn.indexer.wq_b.weight", r"sparse attention with an indexer \(DSA\) is not built"),
        ("model.layers.0.self_attn.o_proj.bias", "biases are not built"),
    ],
)
def test_a_format_that_the_config_hides_is_told_by_its_tensors(tmp_path: Path, name: str, reason: str) -> None:
    error = broken(tmp_path, lambda tensors: tensors.update({name: torch.zeros(1), "unknown": torch.zeros(1)}))
    assert error.tensor == name
    assert re.match(reason, str(error.found))


def test_a_dropped_fp8_scale_is_named(tmp_path: Path) -> None:
    error = broken(tmp_path, lambda tensors: tensors.pop(f"{GATE}_scale_inv"), fp8=True)
    assert error.tensor == f"{GATE}_scale_inv"
    assert (error.expected, error.found) == ("shape [2, 2] F32 beside fp8 weights", "no such tensor")


def test_a_scale_of_another_block_size_is_named(tmp_path: Path) -> None:
    error = broken(tmp_path, lambda tensors: tensors.update({f"{GATE}_scale_inv": torch.ones(5, 5)}), fp8=True)
    assert (error.expected, error.found) == ("shape [2, 2]", "shape [5, 5]")


def test_a_scale_without_fp8_weights_is_named(tmp_path: Path) -> None:
    error = broken(tmp_path, lambda tensors: tensors.update({f"{GATE}_scale_inv": torch.ones(2, 2)}))
    assert (error.tensor, error.expected) == (GATE, "F8_E4M3 beside a scale_inv")


def test_integers_where_weights_belong_are_named(tmp_path: Path) -> None:
    error = broken(tmp_path, lambda tensors: tensors.update({GATE: torch.zeros(136, 160, dtype=torch.uint8)}))
    assert error.found == "dtype U8; weights of this format are not built"


def test_names_of_a_multimodal_file_are_understood(tmp_path: Path) -> None:
    tensors = random_tensors(SMALL)
    write_checkpoint(tmp_path, SMALL, tensors, prefix="language_model.")
    save_file({"vision_tower.a": torch.zeros(1), "mm_projector.b": torch.zeros(1)}, tmp_path / "vision.safetensors")
    shared = load_shared(checked(tmp_path), MODEL, dtype=torch.bfloat16)
    assert torch.equal(shared.norm_D, tensors["model.norm.weight"])


def test_stray_rotary_tables_are_left_alone(tmp_path: Path) -> None:
    stray = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for layer in range(3)}
    source = checked(write_checkpoint(tmp_path, SMALL, random_tensors(SMALL) | stray))
    assert source.notes == ()


@pytest.mark.parametrize("says_so", [0, 1])
def test_layers_for_multi_token_prediction_are_skipped_with_a_line(tmp_path: Path, says_so: int) -> None:
    model = parse_model_config(SMALL | {"num_nextn_predict_layers": says_so})
    mtp = {f"model.layers.3.{name}": torch.zeros(1) for name in ("eh_proj.weight", "enorm.weight", "mlp.gate.weight")}
    source = open_checkpoint(write_checkpoint(tmp_path, SMALL, random_tensors(SMALL) | mtp), model)
    assert source.notes == ("multi-token prediction is not built: 3 tensors are skipped",)
    load_shared(source, model, dtype=torch.bfloat16)


def test_a_layer_too_many_that_predicts_nothing_is_unexpected(tmp_path: Path) -> None:
    name = "model.layers.3.input_layernorm.weight"
    error = broken(tmp_path, lambda tensors: tensors.update({name: torch.zeros(160)}))
    assert error.tensor == name


@pytest.mark.parametrize("has_head", [False, True])
def test_a_tied_model_needs_no_head_and_ignores_one(tmp_path: Path, has_head: bool) -> None:
    model = parse_model_config(SMALL | {"tie_word_embeddings": True})
    tensors = random_tensors(SMALL)
    if not has_head:
        tensors.pop("lm_head.weight")
    source = open_checkpoint(write_checkpoint(tmp_path, SMALL, tensors), model)
    shared = load_shared(source, model, dtype=torch.float32)
    assert torch.equal(shared.head_VD, tensors["model.embed_tokens.weight"].float())


def test_a_folder_without_weights_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"holds no \.safetensors files; --load-format dummy makes random weights"
    ):
        open_checkpoint(tmp_path, MODEL)


def test_a_file_that_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"certainly not a header")
    with pytest.raises(CheckpointError, match="expected a safetensors header in JSON"):
        open_checkpoint(tmp_path, MODEL)
