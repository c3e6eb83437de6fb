"""Pages as bytes: what is taken out goes back in, and the sum finds what was changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.kv.kv_pages import Kind, PageBytes, _weights, model_digest

SHAPES = [((2, 5, 4, 3), torch.float64), ((3, 5, 16, 41), torch.uint8), ((1, 5, 1, 7), torch.bfloat16)]


class Cache:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        layers, pages, page_size, width = shape
        stored = torch.zeros(layers, pages * page_size + 1, width, dtype=dtype)  # one row more, as in the real one
        self.pages = stored[:, :-1].unflatten(1, (pages, page_size))


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> PageBytes:
    cache = Cache(shape, dtype)
    generator = torch.Generator().manual_seed(seed)
    cache.pages.copy_(torch.randint(0, 100, shape, generator=generator).to(dtype))
    return PageBytes(cache)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_pages_go_out_and_into_other_places_as_they_are(shape: tuple[int, ...], dtype: torch.dtype):
    here, there = filled(shape, dtype), filled(shape, dtype, seed=1)
    taken = here.take([3, 1])
    assert taken.dtype is torch.uint8
    assert taken.shape == (2, shape[0], here.layer_bytes)
    there.put([0, 4], taken)
    assert torch.equal(there._pages_LNPX[:, [0, 4]], here._pages_LNPX[:, [3, 1]])
    untouched = filled(shape, dtype, seed=1)
    assert torch.equal(there._pages_LNPX[:, 1:4], untouched._pages_LNPX[:, 1:4])
    assert there.sums([0, 4], 2 * shape[2]).tolist() == here.sums([3, 1], 2 * shape[2]).tolist()


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_the_sum_finds_each_changed_byte_that_counts_and_no_other(shape: tuple[int, ...], dtype: torch.dtype):
    pages = filled(shape, dtype)
    num_tokens = max(shape[2] - 1, 1)
    [before] = pages.sums([2], num_tokens).tolist()
    bytes_LPX = pages._pages_LNPX[:, 2].view(torch.uint8)
    for place in [(layer, token, byte) for layer in range(shape[0]) for token in range(shape[2]) for byte in (0, -1)]:
        bytes_LPX[place] ^= 16
        assert (pages.sums([2], num_tokens).tolist() == [before]) == (place[1] >= num_tokens), f"at {place}"
        bytes_LPX[place] ^= 16


def test_pages_that_changed_places_have_other_sums():
    pages = filled((2, 5, 4, 3), torch.float64)
    one, other = pages.sums([0, 1], 8).tolist()
    assert pages.sums([1, 0], 8).tolist() == [other, one]
    assert one != other
    assert pages.sums([0, 1, 2], 5).tolist()[2] == 0  # no token of it counts
    assert pages.sums([], 0).tolist() == []


def test_the_weights_are_those_of_any_machine():
    # SplitMix64's own numbers, from Python's integers.
    mask, expected = (1 << 64) - 1, []
    for place in range(1, 7):
        mixed = place * 0x9E3779B97F4A7C15 & mask
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & mask
        expected.append((mixed | 1) - ((mixed >> 63) << 64))
    assert _weights(1, 2, 3).flatten().tolist() == expected


def test_addresses_are_where_the_bytes_lie():
    pages = filled((2, 5, 4, 3), torch.float64)
    begin, size = pages.region
    layer_step, page_step = pages.steps
    for layer in range(2):
        for page in range(5):
            assert pages.address(layer, page) == begin + layer * layer_step + page * page_step
    assert pages.address(1, 4) + pages.layer_bytes == begin + size


def test_kinds_differ_in_words():
    mine = Kind(model="a", layout="b")
    assert mine.differs(Kind(model="a", layout="b")) is None
    assert mine.differs(Kind(model="a", layout="c")) == "its layout is c, here it is b"
    assert filled(*SHAPES[0]).layout != filled((2, 5, 5, 3), torch.float64).layout
    assert filled(*SHAPES[0]).layout == filled((2, 9, 4, 3), torch.float64).layout  # how many pages is no matter


def test_two_checkpoints_of_one_shape_have_two_digests(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(100_000))
    before = model_digest("config", tmp_path, run=("float64",))
    assert model_digest("config", tmp_path, run=("float64",)) == before
    assert model_digest("config", tmp_path, run=("bfloat16",)) != before
    content = bytearray(100_000)
    content[-1] = 1
    file.write_bytes(content)
    assert model_digest("config", tmp_path, run=("float64",)) != before
