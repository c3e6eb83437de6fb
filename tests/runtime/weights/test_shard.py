"""A checkpoint cut for a number of ranks: the same weights, one file a rank, and no folder that only looks right."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ep import CheckpointError
from moe import ExpertPlacement, spread
from runtime.model.model_config import parse_model_config, read_model_config
from runtime.weights.checkpoint import Checkpoint, open_checkpoint
from runtime.weights.safetensors_file import DTYPES, read_header
from runtime.weights.shard import INDEX_FILE, SHARED_FILE, check_shards, cut_shards
from runtime.weights.weights import DecoderWeights, load_banks, load_shared, verify_held
from tests.runtime.checkpoints import EXPERT, SMALL, random_tensors, write_checkpoint
from tests.runtime.peers import digest

MODEL = parse_model_config(SMALL)
SLOTS_2 = "model-slots-00002-of-00003.safetensors"


def cut(tmp_path: Path, tensors: dict[str, Tensor], *, ranks: int = 3, name: str = "cut", **how: Any) -> Path:
    """A folder of shards made of these tensors."""
    origin = tmp_path / f"{name}-origin"
    write_checkpoint(origin, SMALL, tensors, **how)
    source = open_checkpoint(origin, MODEL)
    return cut_shards(source, MODEL, spread(6, ranks), origin=origin, folder=tmp_path / name).folder


def weights(folder: Path, rank: int, ranks: int, **how: Any) -> DecoderWeights:
    source = open_checkpoint(folder, read_model_config(folder))
    banks = load_banks(source, MODEL, spread(6, ranks), rank=rank, dtype=torch.float32, **how)
    return DecoderWeights.join(load_shared(source, MODEL, dtype=torch.float32), banks)


def sealed(folder: Path) -> Checkpoint:
    """Opened, and all that a middle rank holds verified."""
    source = open_checkpoint(folder, MODEL)
    verify_held(source, MODEL, spread(6, 3), ranks=[1])
    return source


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("how", [{}, {"shards": 4}, {"prefix": "language_model."}], ids=["file", "shards", "prefix"])
def test_every_rank_loads_the_same_weights_bit_for_bit(tmp_path: Path, fp8: bool, how: dict[str, Any]) -> None:
    folder = cut(tmp_path, random_tensors(SMALL, fp8=fp8), **how)
    origin = tmp_path / "cut-origin"
    for ranks in (1, 2, 3, 6):
        for rank in range(ranks):
            found, expected = (weights(each, rank, ranks, keep_fp8=fp8) for each in (folder, origin))
            assert digest(found) == digest(expected)


def test_a_rank_opens_the_shared_file_and_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cut(tmp_path, random_tensors(SMALL, fp8=True))
    opened: set[str] = set()
    opener = Path.open

    def spy(self: Path, *args: Any, **kwargs: Any) -> Any:
        opened.add(self.name)
        return opener(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", spy)
    weights(folder, 1, 3)
    assert {name for name in opened if name.endswith(".safetensors")} == {SHARED_FILE, SLOTS_2}


def test_a_ranks_file_is_read_from_one_end_to_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cut(tmp_path, random_tensors(SMALL))
    calls: list[int] = []

    def spy(stream: Any, buffers: Sequence[memoryview], *, start: int) -> None:
        calls.append(sum(map(len, buffers)))

    monkeypatch.setattr("runtime.weights.reading.read_into", spy)
    source = open_checkpoint(folder, MODEL)
    load_banks(source, MODEL, spread(6, 3), rank=1, dtype=torch.bfloat16)
    assert calls == [2 * 2 * 3 * 136 * 160 * 2]


def test_other_programs_read_the_same_tensors(tmp_path: Path) -> None:
    tensors = random_tensors(SMALL, fp8=True)
    folder = cut(tmp_path, tensors)
    index = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert len(files) == 4
    assert index == {name: file for file, held in files.items() for name in held}
    assert index.keys() == tensors.keys()
    for name, file in index.items():
        assert torch.equal(files[file][name].view(torch.uint8), tensors[name].view(torch.uint8)), name


def test_wide_numbers_come_first_so_that_every_tensor_is_aligned(tmp_path: Path) -> None:
    folder = cut(tmp_path, random_tensors(SMALL, fp8=True))
    for file in folder.glob("*.safetensors"):
        sizes = [DTYPES[stored.dtype].itemsize for stored in read_header(file).tensors.values()]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) > 1


def test_what_belongs_to_a_model_comes_along_and_its_old_index_does_not(tmp_path: Path) -> None:
    origin = write_checkpoint(tmp_path / "origin", SMALL, random_tensors(SMALL), shards=3)
    (origin / INDEX_FILE).rename(origin / "other.safetensors.index.json")
    for name in ("tokenizer.json", "LICENSE", "chat_template.jinja", "notes.pdf"):
        (origin / name).write_text(name)
    folder = tmp_path / "cut"
    done = cut_shards(open_checkpoint(origin, MODEL), MODEL, spread(6, 2), origin=origin, folder=folder)
    assert done.num_files == 3
    assert sorted(path.name for path in folder.iterdir()) == [
        "LICENSE", "chat_template.jinja", "config.json", "model-shared.safetensors",
        "model-slots-00001-of-00002.safetensors", "model-slots-00002-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    origin = write_checkpoint(tmp_path / "origin", SMALL, random_tensors(SMALL))
    seen: list[tuple[int, int]] = []
    source = open_checkpoint(origin, MODEL)
    done = cut_shards(
        source, MODEL, spread(6, 2), origin=origin, folder=tmp_path / "cut", on_progress=lambda *at: seen.append(at)
    )
    assert seen[-1] == (done.num_bytes, done.num_bytes)
    assert done.num_bytes == sum(tensor.nbytes for tensor in random_tensors(SMALL).values())
    seen.clear()
    checked = check_shards(tmp_path / "cut", on_progress=lambda *at: seen.append(at))
    assert seen[-1] == (checked.num_bytes, checked.num_bytes)
    assert checked.num_files == done.num_files


def test_tensors_that_are_skipped_are_left_out(tmp_path: Path) -> None:
    tensors = random_tensors(SMALL)
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(4), "vision_tower.x": torch.zeros(4)}
    folder = cut(tmp_path, tensors | extra)
    assert json.loads((folder / INDEX_FILE).read_text())["weight_map"].keys() == tensors.keys()


def test_a_model_without_experts_is_one_file(tmp_path: Path) -> None:
    config = SMALL | {"n_routed_experts": None, "first_k_dense_replace": 3}
    model = parse_model_config(config)
    origin = write_checkpoint(tmp_path / "origin", config, random_tensors(SMALL | {"first_k_dense_replace": 3}))
    cut_shards(open_checkpoint(origin, model), model, None, origin=origin, folder=tmp_path / "cut")
    assert [path.name for path in (tmp_path / "cut").glob("*.safetensors")] == [SHARED_FILE]
    source = open_checkpoint(tmp_path / "cut", model)
    assert source.notes == ("weights are cut for 1 rank",)
    assert digest(load_shared(source, model, dtype=torch.float32)) == digest(
        load_shared(open_checkpoint(origin, model), model, dtype=torch.float32)
    )


def test_a_folder_of_shards_is_recognised(tmp_path: Path) -> None:
    assert sealed(cut(tmp_path, random_tensors(SMALL))).notes == ("weights are cut for 3 ranks",)


def test_files_of_two_cuts_cannot_be_mixed(tmp_path: Path) -> None:
    one, other = (cut(tmp_path, random_tensors(SMALL), name=name) for name in ("one", "other"))
    shutil.copy(other / SLOTS_2, one / SLOTS_2)
    with pytest.raises(CheckpointError, match=rf"{SLOTS_2}: expected a file of the set \w+, found one of the set \w+$"):
        sealed(one)


def test_a_cut_file_replaced_by_one_that_is_not_is_named(tmp_path: Path) -> None:
    folder = cut(tmp_path, random_tensors(SMALL))
    save_file(load_file(folder / SLOTS_2), folder / SLOTS_2)
    with pytest.raises(CheckpointError, match="found one of the set None"):
        sealed(folder)


def test_a_cut_file_of_another_length_is_named(tmp_path: Path) -> None:
    folder = cut(tmp_path, random_tensors(SMALL))
    with (folder / SLOTS_2).open("r+b") as stream:
        stream.truncate((folder / SLOTS_2).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=rf"{SLOTS_2}: expected \d+ bytes, as written, found \d+ bytes"):
        sealed(folder)


def test_another_ranks_broken_file_does_not_matter_to_this_one(tmp_path: Path) -> None:
    folder = cut(tmp_path, random_tensors(SMALL))
    (folder / SLOTS_2.replace("00002", "00003", 1)).unlink()
    sealed(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "shards are of format 2, this version reads 1; cut them anew"),
        ({"files": {"../x": {"bytes": 1, "sha256": ""}}}, "'../x' is not the name of a file in its folder"),
        ({"files": None}, "TypeError|AttributeError"),
    ],
)
def test_an_index_that_says_something_else_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = cut(tmp_path, random_tensors(SMALL))
    index = json.loads((folder / INDEX_FILE).read_text())
    index["metadata"]["serried"] |= change
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=said):
        sealed(folder)


def test_a_flipped_bit_is_found_by_the_check(tmp_path: Path) -> None:
    folder = cut(tmp_path, random_tensors(SMALL))
    check_shards(folder)
    with (folder / SLOTS_2).open("r+b") as stream:
        stream.seek(-7, 2)
        byte = stream.read(1)[0]
        stream.seek(-7, 2)
        stream.write(bytes([byte ^ 4]))
    with pytest.raises(CheckpointError, match=rf"{SLOTS_2}: expected \d+ bytes with sha256 \w+, found \d+ bytes with"):
        check_shards(folder)


def test_a_missing_file_is_found_by_the_check(tmp_path: Path) -> None:
    folder = cut(tmp_path, random_tensors(SMALL))
    (folder / SLOTS_2).unlink()
    with pytest.raises(CheckpointError, match=rf"{SLOTS_2}: expected .* found 0 bytes"):
        check_shards(folder)


def test_only_a_folder_of_shards_can_be_checked(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", SMALL, random_tensors(SMALL), shards=2)
    for folder in (tmp_path / "plain", tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="was not cut by `serried shard`"):
            check_shards(folder)


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cut").mkdir()
    with pytest.raises(ValueError, match="cut exists; shards are written to a new folder"):
        cut(tmp_path, random_tensors(SMALL))


def test_a_disk_that_is_too_small_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("runtime.weights.shard.shutil.disk_usage", lambda _: usage(0, 0, 1_000_000))
    with pytest.raises(ValueError, match=r"cut needs 2\.\d+ MiB, but .* has 0\.95 MiB free: 1\.\d+ MiB short"):
        cut(tmp_path, random_tensors(SMALL))


def test_nothing_is_left_when_cutting_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("runtime.weights.shard.shutil.copyfile", fail)
    with pytest.raises(OSError, match="no space left"):
        cut(tmp_path, random_tensors(SMALL))
    assert [path.name for path in tmp_path.iterdir()] == ["cut-origin"]


def test_a_wrong_checkpoint_is_not_cut(tmp_path: Path) -> None:
    tensors = random_tensors(SMALL)
    tensors.pop(EXPERT.format(layer=2, expert=5, proj="down"))
    with pytest.raises(CheckpointError, match=r"experts\.5\.down_proj"):
        cut(tmp_path, tensors)
    assert not (tmp_path / "cut").exists()


def test_copies_of_an_expert_are_not_cut(tmp_path: Path) -> None:
    origin = write_checkpoint(tmp_path / "origin", SMALL, random_tensors(SMALL))
    placement = ExpertPlacement(num_ranks=2, slots_per_rank=4, slot_experts=(0, 1, 2, 3, 3, 4, 5, -1))
    with pytest.raises(ValueError, match="an expert sits in two slots"):
        cut_shards(open_checkpoint(origin, MODEL), MODEL, placement, origin=origin, folder=tmp_path / "cut")
