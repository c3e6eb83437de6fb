"""The plan of bytes: equal to what is really held, known figures of known models, and a refusal with its arithmetic."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_mla import CacheFormat, LatentCache
from moe import spread
from runtime.model.model_config import parse_model_config, read_model_config
from runtime.settings.config import CacheConfig, EngineConfig
from runtime.settings.settling import settle
from runtime.weights.dummy import DummyCheckpoint
from runtime.weights.hardware import read_hardware
from runtime.weights.memory import MemoryNumbers, MemoryPlan, expert_bytes, gib, pages_of, plan_lines, plan_memory
from runtime.weights.weights import DecoderWeights, load_banks, load_shared
from tests.runtime.checkpoints import SMALL, held_bytes

PROFILES = Path(__file__).parents[3] / "profiles"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
V3 = read_model_config(PROFILES / "models" / "deepseek-v3.json")
TINY = read_model_config(PROFILES / "models" / "tiny-v3" / "config.json")
H200 = read_hardware(PROFILES / "hardware" / "h200.toml")
NUMBERS = MemoryNumbers(
    ranks=32,
    dtype_bytes=2,
    device_bytes=H200.memory_bytes,
    max_model_len=8192,
    max_num_seqs=256,
    max_num_batched_tokens=4096,
    keep_fp8=True,
)


def small_plan(**changes: object) -> MemoryPlan:
    numbers = MemoryNumbers(
        ranks=2, dtype_bytes=4, device_bytes=1 << 30, max_model_len=200, max_num_seqs=4, max_num_batched_tokens=64
    )
    return plan_memory(parse_model_config(SMALL), replace(numbers, **changes))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kept", ["nothing", "experts", "all"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"q_lora_rank": 128}, {"q_lora_rank": None}])
def test_planned_weights_are_the_bytes_that_the_fullest_rank_holds(
    num_ranks: int, dtype: torch.dtype, kept: str, changes: dict[str, object]
) -> None:
    model = parse_model_config(SMALL | {"quantization_config": FP8} | changes)
    source, placement = DummyCheckpoint(model), spread(6, num_ranks)
    keep_fp8, keep_shared_fp8 = kept != "nothing", kept == "all"
    banks = load_banks(source, model, placement, rank=0, dtype=dtype, keep_fp8=keep_fp8)
    held = held_bytes(DecoderWeights.join(load_shared(source, model, dtype=dtype, keep_fp8=keep_shared_fp8), banks))
    numbers = MemoryNumbers(
        ranks=num_ranks, dtype_bytes=dtype.itemsize, device_bytes=1 << 30, max_model_len=8, max_num_seqs=1,
        max_num_batched_tokens=8, keep_fp8=keep_fp8, keep_shared_fp8=keep_shared_fp8,
    )  # fmt: skip
    assert plan_memory(model, numbers).weights.total == held


def test_planned_cache_is_the_bytes_that_the_cache_allocates() -> None:
    plan = small_plan(num_pages=7, page_size=16)
    cache = LatentCache(3, 7, 16, CacheFormat(rank=32, rope_dim=8, dtype=torch.float32))
    assert plan.kv_bytes_per_token == 3 * 40 * 4
    assert plan.cache_bytes == cache.pages.nbytes


def test_a_planned_fp8_cache_is_the_bytes_that_it_allocates() -> None:
    plan = plan_memory(TINY, replace(small_plan().numbers, num_pages=3, fp8_cache=True))
    cache = LatentCache(TINY.num_layers, 3, 64, CacheFormat.of(TINY.mla, torch.float32, fp8=True))
    assert plan.kv_bytes_per_token == 4 * 656
    assert plan.cache_bytes == cache.pages.nbytes
    assert plan_memory(V3, replace(NUMBERS, fp8_cache=True)).kv_bytes_per_token == 61 * 656


def test_v3_on_32_gpus_has_the_known_figures() -> None:
    plan = plan_memory(V3, NUMBERS)
    assert plan.kv_bytes_per_token == 61 * 1152
    assert plan.slots_per_rank == 8
    assert expert_bytes(V3, dtype_bytes=2, keep_fp8=True) == 3 * 7168 * 2048 + 3 * 56 * 16 * 4
    assert plan.weights.experts == 58 * 8 * expert_bytes(V3, dtype_bytes=2, keep_fp8=True)
    assert plan.weights.attention == 61 * 2 * 187107328
    kept = plan_memory(V3, replace(NUMBERS, keep_shared_fp8=True)).weights
    # Projections in a byte a weight and a scale a block; the two halves of kv_b and the norms in two bytes.
    projections, blocks = 170328064, 12 * 56 + 192 * 12 + 5 * 56 + 56 * 128
    assert kept.attention == 61 * (projections + 4 * blocks + 2 * (16777216 + 1536 + 512))
    assert kept.shared == 58 * (3 * 7168 * 2048 + 4 * 3 * 56 * 16)
    assert kept.dense == 3 * (3 * 7168 * 18432 + 4 * 3 * 56 * 144)
    assert plan.weights.router == 58 * 4 * (256 * 7168 + 256)
    assert plan.shortfall_bytes == 0
    assert plan.needed_bytes <= plan.budget_bytes == int(H200.memory_bytes * 0.92)


def test_the_cache_takes_what_is_left_in_whole_pages() -> None:
    plan = plan_memory(V3, NUMBERS)
    left = plan.budget_bytes - plan.weights.total - plan.workspaces.total
    assert plan.num_pages == left // (64 * 61 * 1152)
    assert plan.num_pages < 256 * 128


def test_the_cache_is_no_larger_than_all_requests_can_use() -> None:
    assert small_plan().num_pages == 4 * pages_of(200, 64) == 16
    assert small_plan(cache_bytes=3 * 64 * 480 + 1).num_pages == 3
    assert small_plan(num_pages=1000).num_pages == 1000


def test_requests_and_their_longest_follow_from_pages() -> None:
    plan = small_plan(num_pages=10, page_size=16)
    assert plan.max_request_tokens == 160
    assert [plan.concurrent_requests(context) for context in (1, 16, 17, 160, 161)] == [10, 10, 5, 1, 0]
    assert small_plan(num_pages=1000).max_request_tokens == 200


def test_a_plan_that_does_not_fit_is_refused_with_its_arithmetic() -> None:
    plan = plan_memory(V3, replace(NUMBERS, ranks=4))
    assert plan.num_pages == 0
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        plan.check_fits()
    expected = (
        f"a rank of 4 needs {gib(plan.needed_bytes)}: weights {gib(plan.weights.total)} "
        f"({gib(plan.weights.experts)} of them 64 experts a layer) + cache {gib(plan.page_bytes)} (1 page) "
        f"+ workspaces {gib(plan.workspaces.total)}; the device has 139.00 GiB x 0.92 = 127.88 GiB, "
        f"so {gib(plan.shortfall_bytes)} are missing"
    )
    assert str(caught.value) == expected
    assert plan.weights.total + plan.page_bytes + plan.workspaces.total - plan.budget_bytes == plan.shortfall_bytes


def test_a_plan_that_just_fits_is_taken_and_a_byte_less_is_not() -> None:
    plan = small_plan(num_pages=2, gpu_memory_utilization=1.0)
    small_plan(num_pages=2, gpu_memory_utilization=1.0, device_bytes=plan.needed_bytes).check_fits()
    with pytest.raises(ValueError, match=re.escape("so 1 B are missing")):
        small_plan(num_pages=2, gpu_memory_utilization=1.0, device_bytes=plan.needed_bytes - 1).check_fits()


def test_more_ranks_than_experts_are_refused_with_the_largest_that_fits() -> None:
    with pytest.raises(ValueError, match=r"257.*256 would do"):
        plan_memory(V3, replace(NUMBERS, ranks=257))


def test_more_ranks_leave_more_cache_and_fewer_expert_bytes() -> None:
    plans = [plan_memory(V3, replace(NUMBERS, ranks=ranks, max_num_seqs=10**4)) for ranks in (8, 16, 32, 64)]
    assert [plan.slots_per_rank for plan in plans] == [32, 16, 8, 4]
    experts = [plan.weights.experts for plan in plans]
    assert experts == [experts[0] // (1 << step) for step in range(4)]
    pages = [plan.num_pages for plan in plans]
    assert pages == sorted(pages)


def test_workspaces_hold_the_exchange_and_the_token_table() -> None:
    work = small_plan(exchange_buffer_bytes=12345).workspaces
    # Of each request 200 tokens and one more, and the 4 pages of 64 that hold 200.
    assert (work.exchange, work.token_table, work.logits) == (12345, 4 * (201 + 4) * 8, 3 * 4 * 50 * 4)
    assert work.total == work.exchange + work.token_table + work.logits + work.activations


def test_the_lines_say_every_part_and_what_is_missing() -> None:
    text = "\n".join(plan_lines(plan_memory(V3, NUMBERS), contexts=(4096, 100_000)))
    for part in ("routed experts", "attention", "70,272 B a token", "8 a layer", "requests of   4,096"):
        assert part in text
    assert "100,000" not in text
    assert "does not fit" not in text
    assert "does not fit" in plan_lines(plan_memory(V3, replace(NUMBERS, ranks=2)))[-1]


def test_hardware_files_are_read_and_checked(tmp_path: Path) -> None:
    assert H200.memory_bytes == 139 << 30
    assert read_hardware(PROFILES / "hardware" / "cpu.toml").memory_bytes > 1 << 30
    text = (PROFILES / "hardware" / "h200.toml").read_text()
    path = tmp_path / "device.toml"
    for changed, message in (
        (text.replace("memory_bytes =", "memory ="), "memory is unknown; the fields are name, memory_bytes"),
        (text.replace("bf16_flops = 989e12\n", ""), "bf16_flops is missing; the fields are"),
        (text.replace("989e12", "-1"), "bf16_flops is -1; it must be a number of at least 0"),
        ("name =", "is not valid TOML"),
    ):
        path.write_text(changed)
        with pytest.raises(ValueError, match=message):
            read_hardware(path)


@pytest.mark.parametrize("cache_bytes", [1, 64 * 480 - 1])
def test_a_cache_below_one_page_is_refused_with_its_arithmetic_and_flags(cache_bytes: int) -> None:
    plan = small_plan(cache_bytes=cache_bytes)
    assert (plan.num_pages, plan.shortfall_bytes) == (0, 0)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        plan.check_fits()
    assert str(caught.value) == (
        f"--kv-cache-memory-bytes is {cache_bytes}; a page of the cache takes 64 tokens (--block-size) x 480 B = "
        "30720 B, so it must be at least 30720, or --num-blocks at least 1"
    )
    small_plan(cache_bytes=64 * 480).check_fits()


def test_a_cache_below_one_page_is_refused_before_a_weight_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    config = EngineConfig(model=str(tmp_path), cache=CacheConfig(kv_cache_memory_bytes=1))
    with pytest.raises(ValueError, match=r"^--kv-cache-memory-bytes is 1; a page of the cache takes 64 tokens"):
        settle(config)


def test_a_plan_of_more_bytes_than_a_float_counts_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"cache over 10\^9 GiB \(1000.* pages\)"):
        small_plan(num_pages=10**400).check_fits()
