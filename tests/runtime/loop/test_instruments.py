"""Caches that a benchmark fills: every place, with values as norms leave them, in each format."""

import pytest
import torch

from attention_mla import LatentCache
from attention_mla.cache import CacheFormat
from runtime.loop.instruments import FILL_ROWS, Instruments, fill


@pytest.mark.parametrize("fp8", [False, True])
def test_every_place_of_a_filled_cache_has_a_latent_of_about_unit_size(fp8: bool):
    row = CacheFormat(rank=128, rope_dim=64, dtype=torch.bfloat16, fp8=fp8)
    cache = LatentCache(2, 1 + FILL_ROWS // 64, 64, row)
    for layer in range(2):
        cache.clear(layer, torch.arange(cache.num_pages * 64))
    fill(cache)
    assert bool((cache.pages != 0).any(dim=-1).all()), "no place is left out"
    again = LatentCache(2, 1 + FILL_ROWS // 64, 64, row)
    fill(again)
    assert torch.equal(cache.pages, again.pages), "the same on every run"
    if not fp8:
        assert cache.pages.float().std().item() == pytest.approx(1.0, rel=0.02)


def test_nothing_is_filled_unless_somebody_asks():
    cache = LatentCache(1, 1, 4, CacheFormat(rank=128, rope_dim=64, dtype=torch.bfloat16))
    cache.clear(0, torch.arange(4))
    Instruments(parts=True).prepare(cache)
    assert not cache.pages.any()
