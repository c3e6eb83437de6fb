"""Rows of the cache in fp8: what is written, what is read back, and what must not matter to it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_mla import CacheFormat, LatentCache, MlaConfig
from attention_mla.latent_rows import FP8_MAX, LatentRows
from attention_mla.ops import TritonOps

FORMAT = CacheFormat(rank=256, rope_dim=6, dtype=torch.float32, fp8=True)
STEPS = [[(0, 20), (1, 3)], [(0, 1), (1, 2), (2, 1)], [(2, 6)], [(0, 1), (2, 1)]]
"""Prompts, one token, several tokens and both together, in turn."""


def latents(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, FORMAT.rank + FORMAT.rope_dim, generator=torch.Generator().manual_seed(seed))


def test_a_row_is_its_values_its_scales_and_its_rope_key_in_this_order():
    cache = LatentCache(1, 1, 16, FORMAT)
    cache.pages.zero_()
    row_W = torch.zeros(FORMAT.rank + FORMAT.rope_dim)
    row_W[:3] = torch.tensor([1.03, -2.1, 4.48])  # scale 0.01
    row_W[-1] = 1.0
    cache.append(0, row_W.unsqueeze(0), torch.tensor([5]))
    stored = cache.pages[0, 0, 5]
    scales = stored[256:264].view(torch.float32)
    assert stored[:256].view(torch.float8_e4m3fn).float()[:3].tolist() == [104.0, -208.0, FP8_MAX]  # of 103, -210, 448
    assert scales.tolist() == pytest.approx([0.01, 1e-4 / FP8_MAX])
    assert stored[264:].view(torch.bfloat16).tolist() == [0.0] * 5 + [1.0]
    assert not cache.pages[0, 0, :5].any()


def test_what_is_read_is_within_half_a_unit_of_what_was_written():
    cache = LatentCache(2, 3, 16, FORMAT)
    cache.pages.fill_(0xFF)
    places_T, written_TW = torch.tensor([40, 3, -1, 17]), latents(4)
    cache.append(1, written_TW, places_T)
    read_TW = cache.rows(1).take(places_T[[0, 1, 3]])
    blocks_TW = cache.rows(1).take_blocks(torch.tensor([2, 0, 1]), 16)
    assert torch.equal(blocks_TW[[8, 19, 33]], read_TW)
    peak_TG = written_TW[[0, 1, 3], :256].unflatten(1, (2, 128)).abs().amax(2).repeat_interleave(128, dim=1)
    off_TC = (read_TW[:, :256] - written_TW[[0, 1, 3], :256]).abs()
    assert bool((off_TC <= (written_TW[[0, 1, 3], :256].abs() * 2**-4).maximum(peak_TG / FP8_MAX * 2**-10)).all())
    assert torch.equal(read_TW[:, 256:], written_TW[[0, 1, 3], 256:].bfloat16().float())
    assert bool(cache.rows(1).take(torch.tensor([4])).isnan().any())  # nobody wrote there


def test_pages_move_to_another_cache_as_bytes():
    ours, theirs = (LatentCache(2, 3, 16, FORMAT) for _ in range(2))
    for cache in (ours, theirs):
        cache.pages.zero_()
    ours.append(1, latents(16), torch.arange(16, 32))
    theirs.pages[:, 2] = ours.pages[:, 1]
    assert torch.equal(theirs.rows(1).take(torch.arange(32, 48)), ours.rows(1).take(torch.arange(16, 32)))


def blocks_of(
    config: MlaConfig, hidden: Callable[..., Tensor], rank_of: Callable[..., Any], **how: Any
) -> list[Tensor]:
    inputs = [hidden(40, seed=seed, dtype=torch.float32, config=config) for seed in range(3)]
    return rank_of(inputs, config=config, **{"poison": float("nan"), "fp8": True, **how}).run(STEPS)


@pytest.fixture(scope="module")
def config(make_config: Callable[..., MlaConfig]) -> MlaConfig:
    return make_config(kv_lora_rank=128)


@pytest.mark.interpret
def test_a_block_over_fp8_rows_gives_in_kernels_what_it_gives_in_torch(
    config: MlaConfig, hidden: Any, rank_of: Any, assert_near: Callable[[Tensor, Tensor, float], None]
):
    wanted = blocks_of(config, hidden, rank_of)
    for found, truth in zip(blocks_of(config, hidden, rank_of, ops=TritonOps(split_tokens=16)), wanted, strict=True):
        # Norms differ in their last bit, so a value between two numbers of e4m3 may go either way.
        assert_near(found, truth, 2e-2)
        assert float((found - truth).norm() / truth.norm()) < 2e-3


def test_a_block_over_fp8_rows_is_near_the_one_over_plain_rows(config: MlaConfig, hidden: Any, rank_of: Any):
    plain = blocks_of(config, hidden, rank_of, fp8=False)
    for found, truth in zip(blocks_of(config, hidden, rank_of), plain, strict=True):
        assert 0 < float((found - truth).norm() / truth.norm()) < 4e-2  # e4m3 is off by 1/16 at most, mostly by less


@pytest.mark.parametrize("ops", [pytest.param(TritonOps, marks=pytest.mark.interpret), None])
def test_where_pages_lie_changes_no_bit(ops: Any, config: MlaConfig, hidden: Any, rank_of: Any):
    how = {"ops": ops(split_tokens=48)} if ops else {}
    once = blocks_of(config, hidden, rank_of, page_size=16, **how)
    again = blocks_of(config, hidden, rank_of, page_size=48, poison=0.0, **how)
    for found, truth in zip(again, once, strict=True):
        assert torch.equal(found, truth)


@pytest.mark.parametrize(
    "rows", [LatentRows.plain(torch.zeros(3, 4), 2), FORMAT.rows(torch.zeros(3, 276, dtype=torch.uint8))]
)
def test_nothing_is_an_ordinary_number_of_rows(rows: LatentRows):
    none = torch.tensor([], dtype=torch.int64)
    width = rows.latents_NC.shape[1] + rows.rope_NP.shape[1]
    rows.write(torch.zeros(0, width), none)
    assert rows.take(none).shape == rows.take_blocks(none, 2).shape == (0, width)
