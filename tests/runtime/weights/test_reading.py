"""Reading in few large pieces: neighbours together, nothing that nobody wants, each rank in an order of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ep import CheckpointError
from moe import spread
from runtime.model.model_config import parse_model_config
from runtime.weights import reading
from runtime.weights.checkpoint import Wanted, open_checkpoint
from runtime.weights.reading import parts_of, read_parts
from runtime.weights.safetensors_file import StoredTensor, encode_header, read_header
from runtime.weights.weights import load_banks, load_shared
from tests.runtime.checkpoints import EXPERT, SMALL, plain, random_tensors, write_checkpoint

MODEL = parse_model_config(SMALL)
Read = tuple[str, int, int]
"""One system call: file, first byte, number of bytes."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """Every preadv from now on."""
    seen: list[Read] = []
    preadv = os.preadv

    def spy(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        seen.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, offset, count))
        return count

    monkeypatch.setattr("runtime.weights.safetensors_file.os.preadv", spy)
    return seen


def write_rows(file: Path, lengths: Sequence[int]) -> list[StoredTensor]:
    """A file of float32 vectors of these lengths, back to back: 0, 1, 2, ... through all of them."""
    nowhere = Path("nowhere")
    plan = {
        str(place): StoredTensor(file=nowhere, dtype="F32", shape=(n,), start=0, end=4 * n, file_bytes=0)
        for place, n in enumerate(lengths)
    }
    data = torch.arange(sum(lengths), dtype=torch.float32).numpy().tobytes()
    file.write_bytes(encode_header(plan, {}) + data)
    return list(read_header(file).tensors.values())


def read(stored: Sequence[StoredTensor], *, dtype: torch.dtype = torch.float32, turn: tuple[int, int] = (0, 1)) -> list:
    """These tensors, each in memory of its own."""
    outs = [torch.full(each.shape, torch.nan, dtype=dtype) for each in stored]
    parts = [part for each, out in zip(stored, outs, strict=True) for part in parts_of(each, [out])]
    assert sum(part.num_bytes for part in read_parts(parts, turn=turn)) == sum(each.num_bytes for each in stored)
    return outs


def test_neighbours_come_with_one_read(tmp_path: Path, reads: list[Read]) -> None:
    a, b, c = write_rows(tmp_path / "x", [4, 2, 6])
    assert [out.tolist() for out in read([c, a, b])] == [[6, 7, 8, 9, 10, 11], [0, 1, 2, 3], [4, 5]]
    assert reads == [("x", a.start, 48)]


def test_what_lies_between_is_not_read(tmp_path: Path, reads: list[Read]) -> None:
    a, _, c = write_rows(tmp_path / "x", [4, 1, 6])
    read([a, c])
    assert reads == [("x", a.start, 16), ("x", c.start, 24)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_neighbours_than_a_call_takes_are_several_reads(
    tmp_path: Path, reads: list[Read], dtype: torch.dtype
) -> None:
    stored = write_rows(tmp_path / "x", [1] * 2500)
    assert torch.equal(torch.cat(read(stored, dtype=dtype)), torch.arange(2500, dtype=dtype))
    assert [count for _, _, count in reads] == [4096, 4096, 1808]


def test_a_read_stays_within_its_bound(tmp_path: Path, reads: list[Read], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "RUN_BYTES", 40)
    read(write_rows(tmp_path / "x", [4, 2, 6, 20, 1]))
    assert [count for _, _, count in reads] == [24, 24, 80, 4]


def test_a_read_that_the_kernel_cuts_short_goes_on(
    tmp_path: Path, reads: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.preadv

    def at_most_five(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return whole(descriptor, [buffers[0][:5]], offset)

    monkeypatch.setattr("runtime.weights.safetensors_file.os.preadv", at_most_five)
    assert torch.equal(torch.cat(read(write_rows(tmp_path / "x", [3, 0, 7]))), torch.arange(10.0))
    assert len(reads) > 8


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    stored = write_rows(tmp_path / "x", [4, 4])
    os.truncate(tmp_path / "x", stored[1].start + 6)
    with pytest.raises(CheckpointError, match=rf"/x: expected a file of at least {stored[1].end} bytes, found its end"):
        read(stored)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    wanted=st.sets(st.integers(0, 11)),
    readers=st.integers(1, 5),
    wide=st.booleans(),
    bound=st.integers(4, 300),
)
def test_any_choice_is_read_right_and_exactly_once(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    wanted: set[int],
    readers: int,
    wide: bool,
    bound: int,
) -> None:
    stored = write_rows(tmp_path_factory.mktemp("any") / "x", lengths)
    chosen = [place for place in sorted(wanted) if place < len(stored)]
    starts = [sum(lengths[:place]) for place in chosen]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "STAGING_BYTES", bound)
        patch.setattr(reading, "RUN_BYTES", bound)
        for reader in range(readers):
            outs = read(
                [stored[place] for place in chosen],
                dtype=torch.float64 if wide else torch.float32,
                turn=(reader, readers),
            )
            for place, start, out in zip(chosen, starts, outs, strict=True):
                assert out.tolist() == list(range(start, start + lengths[place]))


def test_a_tensor_that_goes_to_two_places_is_read_once(tmp_path: Path, reads: list[Read]) -> None:
    tensors = random_tensors(SMALL, fp8=True)
    source = open_checkpoint(write_checkpoint(tmp_path, SMALL, tensors), MODEL)
    name = EXPERT.format(layer=1, expert=0, proj="up")
    source.verify({name: (136, 160)})
    kept, wide, narrow = (
        torch.empty(136, 160, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.float64, torch.bfloat16)
    )
    scales = torch.empty(2, 2)
    source.read(
        [Wanted(name=name, out=wide), Wanted(name=name, out=kept, scale_inv=scales), Wanted(name=name, out=narrow)]
    )
    assert source.bytes_read == sum(count for _, _, count in reads) == source.stored_bytes(name)
    assert torch.equal(wide, plain(tensors, name, torch.float64))
    assert torch.equal(narrow, plain(tensors, name, torch.bfloat16))
    assert torch.equal(kept.view(torch.uint8), tensors[name].view(torch.uint8))
    assert torch.equal(scales, tensors[f"{name}_scale_inv"])


def test_a_tied_models_embedding_is_read_once(tmp_path: Path) -> None:
    model = parse_model_config(SMALL | {"tie_word_embeddings": True})
    tensors = random_tensors(SMALL)
    tensors.pop("lm_head.weight")
    source = open_checkpoint(write_checkpoint(tmp_path, SMALL, tensors), model)
    shared = load_shared(source, model, dtype=torch.bfloat16)
    assert torch.equal(shared.head_VD, shared.embed_VD.float())
    assert source.bytes_read == sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." not in name)


def first_files(folder: Path, readers: int, reads: list[Read]) -> list[str]:
    """The file that each of `readers` readers reads from first."""
    found = []
    for reader in range(readers):
        reads.clear()
        load_shared(open_checkpoint(folder, MODEL, turn=(reader, readers)), MODEL, dtype=torch.bfloat16)
        assert len({file for file, _, _ in reads}) == 8
        found.append(reads[0][0])
    return found


def test_readers_begin_at_different_files(tmp_path: Path, reads: list[Read]) -> None:
    write_checkpoint(tmp_path, SMALL, random_tensors(SMALL), shards=8)
    assert len(set(first_files(tmp_path, 4, reads))) == 4


def test_readers_of_one_file_begin_at_different_places(tmp_path: Path, reads: list[Read]) -> None:
    source_of = write_checkpoint(tmp_path, SMALL, random_tensors(SMALL))
    starts = []
    for reader in range(2):
        reads.clear()
        source = open_checkpoint(source_of, MODEL, turn=(reader, 2))
        load_banks(source, MODEL, spread(6, 1), rank=0, dtype=torch.float32)
        assert len(reads) == 2  # the experts of layer 1, those of layer 2
        starts.append(reads[0][1])
    assert starts[0] < starts[1]


def test_what_is_converted_passes_through_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "STAGING_BYTES", 4096)
    sizes: list[int] = []
    empty = torch.empty

    def spy(*args: object, **kwargs: object) -> Tensor:
        out = empty(*args, **kwargs)
        sizes.append(out.nbytes)
        return out

    stored = write_rows(tmp_path / "x", [3000, 5, 100_000, 1])
    monkeypatch.setattr("runtime.weights.reading.torch.empty", spy)
    outs = read(stored, dtype=torch.float64)
    assert torch.equal(torch.cat(outs), torch.arange(103_006, dtype=torch.float64))
    assert max(sizes) <= 4096
