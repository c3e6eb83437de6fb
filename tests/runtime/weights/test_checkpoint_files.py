"""Folders whose files contradict each other, and headers that lie: refused with the tensor and the files by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from ep import CheckpointError
from moe import spread
from runtime.model.model_config import parse_model_config
from runtime.weights.checkpoint import open_checkpoint
from runtime.weights.safetensors_file import read_header
from runtime.weights.weights import verify_held
from tests.runtime.checkpoints import EXPERT, SMALL, random_tensors, write_checkpoint

MODEL = parse_model_config(SMALL)
NORM = "model.norm.weight"
GATE = EXPERT.format(layer=1, expert=4, proj="gate")
INDEX = "model.safetensors.index.json"


def refusal(folder: Path) -> str:
    """What opening and verifying all tensors of the model says."""
    with pytest.raises(CheckpointError) as caught:
        verify_held(open_checkpoint(folder, MODEL), MODEL, spread(6, 2), ranks=range(2))
    return str(caught.value)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, SMALL, random_tensors(SMALL), shards=3)


def home(folder: Path, name: str) -> Path:
    """The shard that the index names for a tensor."""
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def add(file: Path, name: str) -> None:
    save_file(load_file(file) | {name: torch.zeros(160, dtype=torch.bfloat16)}, file)


def test_a_tensor_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, random_tensors(SMALL))
    save_file({NORM: torch.zeros(160, dtype=torch.bfloat16)}, tmp_path / "other.safetensors")
    assert refusal(tmp_path) == (
        f"{NORM} in {tmp_path / 'other.safetensors'}: expected each tensor in one file, "
        f"found a copy in {tmp_path / 'model.safetensors'} too"
    )


def test_two_indices_are_refused_with_both(sharded: Path) -> None:
    (sharded / "another.safetensors.index.json").write_text('{"weight_map": {}}')
    assert refusal(sharded) == (
        f"{sharded}: expected at most one index, found another.safetensors.index.json and {INDEX}; one must go"
    )


def test_a_file_beside_the_index_that_it_does_not_name_is_refused(sharded: Path) -> None:
    save_file({NORM: torch.zeros(160)}, sharded / "model.safetensors")
    assert refusal(sharded) == (
        f"{NORM} in {sharded / 'model.safetensors'}: expected the files that {INDEX} names, "
        "found one that it does not; one of the two must go"
    )


def test_a_tensor_in_a_shard_that_the_index_leaves_out_is_refused(sharded: Path) -> None:
    shard = home(sharded, NORM)
    add(shard, "model.extra")
    assert refusal(sharded) == (
        f"model.extra in {shard}: expected the tensors that the index places in this file, found one that it leaves out"
    )


def test_a_copy_in_a_shard_other_than_the_indexs_is_refused_with_both(sharded: Path) -> None:
    other = next(file for file in sorted(sharded.glob("*.safetensors")) if file != home(sharded, NORM))
    add(other, NORM)
    assert refusal(sharded) == (
        f"{NORM} in {other}: expected the tensors that the index places in this file, "
        f"found a copy of the one in {home(sharded, NORM)}"
    )


def test_parts_that_are_never_read_may_lie_anywhere(sharded: Path) -> None:
    for shard in sorted(sharded.glob("*.safetensors"))[:2]:
        add(shard, "vision_tower.a")
        add(shard, "model.layers.0.self_attn.rotary_emb.inv_freq")
    verify_held(open_checkpoint(sharded, MODEL), MODEL, spread(6, 2), ranks=range(2))


def test_a_name_with_and_without_its_prefix_is_refused_with_both(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, random_tensors(SMALL))
    save_file({f"language_model.{NORM}": torch.zeros(160)}, tmp_path / "text.safetensors")
    assert refusal(tmp_path) == (
        f"{NORM} in {tmp_path / 'text.safetensors'}: expected one tensor of this name, "
        f"found {NORM} in {tmp_path / 'model.safetensors'} and language_model.{NORM} here"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"[" * 200_000, "is not valid JSON: it is nested too deeply"),
        (b'{"weight_map": "\xff"}', "is not valid JSON: the text is not UTF-8"),
        (b"[]", "holds list; it must hold an object"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "is not valid JSON: 'a' stands there twice"),
    ],
    ids=["deep", "latin", "list", "twice"],
)
def test_an_index_that_is_no_json_object_is_refused_by_name(sharded: Path, text: bytes, found: str) -> None:
    (sharded / INDEX).write_bytes(text)
    file = sharded / INDEX
    assert refusal(sharded).startswith(f"{file}: expected an object with weight_map, found ValueError: {file} {found}")


@pytest.mark.parametrize("value", [5, None, [["a"]], "", "..", "a/b"])
def test_an_index_may_only_name_files(sharded: Path, value: object) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {NORM: value}}))
    assert refusal(sharded).startswith(f"{NORM} in {sharded / INDEX}: expected the name of a file in its folder, found")


def write_raw(file: Path, header: object, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def entry(begin: Any, end: Any, *, shape: object = (4,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


LIES: dict[str, tuple[object, int]] = {
    "negative": ({"a": entry(-16, 0)}, 16),
    "backwards": ({"a": entry(16, 0)}, 16),
    "overlapping": ({"a": entry(0, 16), "b": entry(8, 24)}, 24),
    "the same twice": ({"a": entry(0, 16), "b": entry(0, 16)}, 16),
    "a hole": ({"a": entry(0, 16), "b": entry(20, 36)}, 36),
    "a hole in front": ({"a": entry(4, 20)}, 20),
    "bytes after the data": ({"a": entry(0, 16)}, 17),
    "bytes and no tensor": ({}, 4),
    "infinite": (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [1e400, 2]}}', 16),
    "fractions": ({"a": entry(0.0, 16.5)}, 16),
    "words": ({"a": entry("0", "16")}, 16),
    "truth": ({"a": entry(False, 16)}, 16),
    "three offsets": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 16]}}, 16),
    "too many digits": ({"a": entry(0, 10**400)}, 16),
    "a negative shape": ({"a": entry(0, 16, shape=[-2, -2])}, 16),
    "a shape of words": ({"a": entry(0, 16, shape=["4"])}, 16),
    "a shape that is none": ({"a": entry(0, 16, shape=4)}, 16),
    "a shape of another size": ({"a": entry(0, 16, shape=[5])}, 16),
    "no dtype": ({"a": {"shape": [4], "data_offsets": [0, 16]}}, 16),
    "no object": ({"a": [1]}, 16),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_the_library_refuses_is_refused_here_with_its_file(tmp_path: Path, lie: str) -> None:
    header, num_bytes = LIES[lie]
    file = write_raw(tmp_path / "a.safetensors", header, bytes(num_bytes))
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(file, "pt"):
        pass
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < len(str(file)) + 400


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ("negative", "a in {file}: expected data_offsets of two whole numbers from 0 on, found [-16, 0]"),
        ("overlapping", "b in {file}: expected data from byte 16 on, where the last tensor ends, found it at byte 8"),
        ("a hole", "b in {file}: expected data from byte 16 on, where the last tensor ends, found it at byte 20"),
        ("infinite", "a in {file}: expected data_offsets of two whole numbers from 0 on, found [inf, 2]"),
    ],
)
def test_a_lie_about_a_tensor_names_it(tmp_path: Path, lie: str, message: str) -> None:
    header, num_bytes = LIES[lie]
    file = write_raw(tmp_path / "a.safetensors", header, bytes(num_bytes))
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert str(caught.value) == message.format(file=file)


def test_bytes_after_the_data_are_counted(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "a.safetensors", {"a": entry(0, 16)}, bytes(20))
    size = file.stat().st_size
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert str(caught.value) == (
        f"{file}: expected {size - 4} bytes, where the last tensor ends, found {size} bytes, 4 too many"
    )


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 200_000], ids=["lists", "objects"])
def test_a_header_nested_without_end_is_refused_with_its_file(tmp_path: Path, text: bytes) -> None:
    file = write_raw(tmp_path / "a.safetensors", text, b"")
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert str(caught.value) == f"{file}: expected a safetensors header in JSON, found it is nested too deeply"


def test_empty_tensors_and_any_order_of_names_are_taken(tmp_path: Path) -> None:
    header = {"z": entry(0, 16), "e": entry(16, 16, shape=[0, 7]), "a": entry(16, 32), "__metadata__": {"format": "pt"}}
    file = write_raw(tmp_path / "a.safetensors", header, bytes(32))
    with safetensors.safe_open(file, "pt") as known:
        assert sorted(known.keys()) == ["a", "e", "z"]
    read_header(file)


def cut(folder: Path) -> str:
    shard = home(folder, GATE)
    size = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(size - 10)
    header = json.loads(shard.read_bytes()[8 : 8 + int.from_bytes(shard.read_bytes()[:8], "little")])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"])
    return f"{last} in {shard}: expected a file of at least {size} bytes, found {size - 10} bytes, 10 are missing"


def drop(folder: Path) -> str:
    shard = home(folder, GATE)
    save_file({name: value for name, value in load_file(shard).items() if name != GATE}, shard)
    return f"{GATE} in {shard}: expected shape [136, 160], found no such tensor"


def turn(folder: Path) -> str:
    shard = home(folder, GATE)
    save_file(load_file(shard) | {GATE: torch.zeros(160, 136, dtype=torch.bfloat16)}, shard)
    return f"{GATE} in {shard}: expected shape [136, 160], found shape [160, 136]"


@pytest.mark.parametrize("harm", [cut, drop, turn])
def test_a_harmed_shard_is_refused_in_these_words(sharded: Path, harm: Callable[[Path], str]) -> None:
    expected = harm(sharded)
    assert refusal(sharded) == expected
