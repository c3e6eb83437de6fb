"""Recordings: what was added is what is read; files that are none are refused in words."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from eplb import Recording, RoutingRecorder

SHAPE = {"num_layers": 3, "num_experts": 8, "top_k": 2}


def experts_of(num_tokens: int, seed: int) -> torch.Tensor:
    """int64 [Y, T, K]"""
    noise = torch.Generator().manual_seed(seed)
    return torch.rand(3, num_tokens, 8, generator=noise).topk(2).indices


def counts_of(experts_YTK: torch.Tensor) -> torch.Tensor:
    return torch.stack([layer.flatten().bincount(minlength=8) for layer in experts_YTK])


def record(path: Path, tokens: list[int], **how: object) -> list[torch.Tensor]:
    recorder = RoutingRecorder(path, **SHAPE, **how)  # pyright: ignore[reportArgumentType]
    steps = [experts_of(num_tokens, seed) for seed, num_tokens in enumerate(tokens)]
    for experts, num_tokens in zip(steps, tokens, strict=True):
        recorder.add(counts_of(experts), num_tokens=num_tokens)
        recorder.add_experts(experts)
    recorder.close()
    return steps


def test_what_was_added_is_read_again(tmp_path: Path) -> None:
    tokens = [5, 0, 1, 40]
    steps = record(tmp_path / "r", tokens, num_ranks=4, model="tiny", max_token_ids=20)
    read = Recording.read(tmp_path / "r")
    assert (read.top_k, read.num_ranks, read.model, read.num_layers, read.num_experts) == (2, 4, "tiny", 3, 8)
    assert read.tokens_N.tolist() == tokens
    assert read.steps_N.tolist() == [1, 1, 1, 1]
    for row, experts in enumerate(steps):
        assert np.array_equal(read.counts_NYE[row], counts_of(experts).numpy())
    assert np.array_equal(read.loads_YE, sum(counts_of(experts) for experts in steps).numpy())
    every = torch.cat(steps, dim=1).permute(1, 0, 2)[:20]
    assert read.experts_MYK is not None
    assert np.array_equal(read.experts_MYK, every.numpy())
    assert read.of_steps_M is not None
    assert read.of_steps_M.tolist() == [0] * 5 + [2] + [3] * 14
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_padded_rows_are_no_tokens(tmp_path: Path) -> None:
    recorder = RoutingRecorder(tmp_path / "r", num_layers=3, num_experts=8, top_k=2, max_token_ids=4)
    experts = experts_of(3, 1)
    recorder.add(counts_of(experts), num_tokens=3)
    recorder.add_experts(torch.cat([experts[:, :2], torch.full((3, 5, 2), -1), experts[:, 2:]], dim=1))
    recorder.close()
    read = Recording.read(tmp_path / "r")
    assert read.experts_MYK is not None
    assert np.array_equal(read.experts_MYK, experts.permute(1, 0, 2).numpy())


def test_tokens_that_wrap_around_are_refused(tmp_path: Path) -> None:
    """2**62 tokens x top_k 4 is 0 in 64 bits: as many pairs as there are."""
    recorder = RoutingRecorder(tmp_path / "r", num_layers=1, num_experts=4, top_k=4)
    recorder.add(torch.zeros(1, 4, dtype=torch.int64), num_tokens=1 << 62)
    recorder.close()
    with pytest.raises(ValueError, match="tokens holds 4611686018427387904; a row has at most"):
        Recording.read(tmp_path / "r")


@pytest.mark.parametrize("tokens", [[], [0]])
def test_an_empty_recording_is_one_too(tmp_path: Path, tokens: list[int]) -> None:
    record(tmp_path / "r", tokens)
    read = Recording.read(tmp_path / "r")
    assert (read.num_tokens, read.num_steps, read.loads_YE.sum()) == (0, len(tokens), 0)
    assert read.experts_MYK is None


@pytest.mark.parametrize("num_steps", [8, 9, 17, 50])
def test_a_long_recording_gets_coarser_and_loses_nothing(tmp_path: Path, num_steps: int) -> None:
    tokens = [step % 7 for step in range(num_steps)]
    steps = record(tmp_path / "r", tokens, max_rows=8)
    read = Recording.read(tmp_path / "r")
    assert len(read.steps_N) <= 8
    assert read.num_steps == num_steps
    first = 0
    for row, length in enumerate(read.steps_N.tolist()):
        part = slice(first, first + length)
        assert read.tokens_N[row] == sum(tokens[part])
        assert np.array_equal(read.counts_NYE[row], sum(counts_of(experts) for experts in steps[part]).numpy())
        first += length
    assert len(set(read.steps_N[:-1].tolist())) <= 1


def test_ranks_are_added_row_by_row(tmp_path: Path) -> None:
    record(tmp_path / "0", [5, 0, 1], max_token_ids=9)
    record(tmp_path / "1", [2, 3, 4], max_token_ids=9)
    one, two = Recording.read(tmp_path / "0"), Recording.read(tmp_path / "1")
    both = Recording.total([one, two])
    assert both.tokens_N.tolist() == [7, 3, 5]
    assert np.array_equal(both.counts_NYE, one.counts_NYE + two.counts_NYE)
    assert both.experts_MYK is not None
    assert len(both.experts_MYK) == 15
    record(tmp_path / "2", [2, 3])
    with pytest.raises(ValueError, match="not of the same steps of one model"):
        Recording.total([one, Recording.read(tmp_path / "2")])


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "r", [5, 1])
    whole = (tmp_path / "r").read_bytes()
    for length in [0, 3, 8, 20, 200, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut cannot be read as a recording: "):
            Recording.read(tmp_path / "cut")


def test_a_byte_changed_anywhere_in_the_header_is_refused_or_harmless(tmp_path: Path) -> None:
    record(tmp_path / "r", [5, 1])
    whole = (tmp_path / "r").read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for place in range(0, end, 3):
        (tmp_path / "bad").write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"bad (cannot be read as|is not) a recording"):
            Recording.read(tmp_path / "bad")


def rewritten(tmp_path: Path, about: dict[str, str] | None = None, **arrays: np.ndarray) -> Path:
    record(tmp_path / "r", [5, 1], max_token_ids=3)
    whole = (tmp_path / "r").read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    save_file(load_file(tmp_path / "r") | arrays, tmp_path / "w", metadata=header["__metadata__"] | (about or {}))
    return tmp_path / "w"


@pytest.mark.parametrize(
    ("about", "arrays", "message"),
    [
        ({"format": "other"}, {}, "its format is 'other'; it must be 'serried-routing-1'"),
        ({"top_k": "0"}, {}, "top_k is '0'; it must be a whole number from 1 to 65536"),
        ({"num_experts": "9" * 400}, {}, "num_experts is '999"),
        ({"num_layers": "3.0"}, {}, "num_layers is '3.0'"),
        ({"num_layers": "4"}, {}, r"counts is int32 \[2, 3, 8\]; it must be int32 \['any', 4, 8\]"),
        ({"top_k": "1"}, {}, "row 0 has 5 tokens x top_k 1, but layer 0 counts 10 pairs"),
        ({}, {"tokens": np.array([5, 2])}, "row 1 has 2 tokens x top_k 2, but layer 0 counts 2 pairs"),
        ({}, {"tokens": np.array([5, -1])}, "tokens holds -1; it must hold numbers from 0 on"),
        ({}, {"tokens": np.array([5.0, 1.0])}, "tokens is float64"),
        ({}, {"steps": np.array([1, 0])}, "steps holds 0"),
        ({}, {"steps": np.array([1])}, r"steps is int64 \[1\]; it must be int64 \[2\]"),
        ({}, {"experts": np.full((3, 3, 2), 8, np.int32)}, "experts holds 8; there are 8 experts, counted from 0"),
        ({"top_k": "9"}, {}, "top_k is 9; a token cannot visit more than the 8 experts"),
        ({}, {"tokens": np.array([5, (1 << 63) - 1])}, r"tokens holds \d+; a row has at most 1099511627776"),
        ({}, {"steps": np.array([1 << 62, 1 << 62])}, r"steps holds \d+; a row has at most 1099511627776"),
        ({}, {"of_steps": np.array([0, 1, 2])}, "of_steps holds 2; there are 2 steps, counted from 0"),
        ({}, {"of_steps": np.zeros(2, np.int64)}, r"of_steps is int64 \[2\]; it must be int64 \[3\]"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    tmp_path: Path, about: dict[str, str], arrays: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(ValueError, match=f"w is not a recording of routing: {message}") as caught:
        Recording.read(rewritten(tmp_path, about, **arrays))
    assert len(str(caught.value)) < 400


def test_an_absent_file_and_a_folder_that_is_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Recording.read(tmp_path / "none")
    with pytest.raises(OSError, match="nowhere"):
        record(tmp_path / "nowhere" / "r", [1])


def test_a_tensor_of_a_format_numpy_does_not_have_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file as save_torch

    save_torch({"counts": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "b")
    with pytest.raises(ValueError, match=r"b (cannot be read as|is not) a recording"):
        Recording.read(tmp_path / "b")
