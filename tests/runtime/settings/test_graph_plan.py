"""What is recorded follows from what a step can be, and its bytes are in the plan before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dbo import DboConfig
from ep import ExchangeConfig
from runtime.graphs.graph_config import GraphConfig, Sizes, cut_sizes
from runtime.model.model_config import read_model_config
from runtime.settings.config import EngineConfig, SchedulerConfig
from runtime.settings.graph_plan import sizes_of
from runtime.settings.settling import memory_numbers
from runtime.weights.memory import MemoryPlan, plan_lines, plan_memory

V3 = "profiles/models/deepseek-v3.json"
CONFIG = EngineConfig(
    model=V3, ranks=32, node_size=8, ops="triton", device="cuda", exchange=ExchangeConfig(exchange="bounded"),
    scheduler=SchedulerConfig(max_num_seqs=40, max_num_batched_tokens=300),
)  # fmt: skip
ON = DboConfig(dbo="on", dbo_decode_token_threshold=32, dbo_prefill_token_threshold=256)


def planned(config: EngineConfig) -> MemoryPlan:
    """On an H200."""
    model = read_model_config(Path(config.model))
    return plan_memory(model, memory_numbers(config, model, device_bytes=141 * 10**9, on_gpu=True))


def test_steps_of_one_track_are_recorded_up_to_what_a_rank_may_run():
    assert sizes_of(CONFIG, drafts=False) == Sizes(decode=(1, 2, 4, 8, 16, 24, 32, 40), pieces=(64, 128, 256))


def test_drafts_make_decode_steps_larger():
    sizes = sizes_of(CONFIG, drafts=True)
    assert (sizes.decode[-1], sizes.row_tokens) == (160, 4)


def test_tracks_are_recorded_in_the_sizes_that_level_halves_of_a_step_have():
    sizes = sizes_of(replace(CONFIG, overlap=ON), drafts=False)
    assert (sizes.tracks, sizes.cut_decode, sizes.cut_pieces) == (2, (16, 24), (128, 256))


def test_a_long_row_makes_one_of_the_tracks_larger_than_half():
    sizes = (1, 2, 4, 8, 16, 24, 32)
    assert cut_sizes(sizes, least=8, most=32, tracks=2, longest_row=1) == (4, 8, 16)
    assert cut_sizes(sizes, least=8, most=32, tracks=2, longest_row=4) == (4, 8, 16, 24)
    assert cut_sizes(sizes, least=8, most=8, tracks=3, longest_row=99) == (4, 8)
    assert cut_sizes((), least=8, most=32, tracks=2, longest_row=1) == ()


def test_pieces_come_before_whole_steps_and_the_largest_of_each_first():
    keys = list(sizes_of(replace(CONFIG, overlap=ON), drafts=False).each())
    assert [tuple(key) for key in keys[:6]] == [
        (False, 256, 1), (False, 128, 1), (False, 64, 1), (False, 256, 2), (False, 128, 2), (True, 40, 1),
    ]  # fmt: skip
    assert len(keys) == len(set(keys)) == 3 + 2 + 8 + 2


def test_graphs_are_a_part_of_the_workspaces_and_leave_less_for_the_cache():
    captured, launched = planned(CONFIG), planned(replace(CONFIG, graphs=GraphConfig(enforce_eager=True)))
    assert launched.workspaces.graphs == 0
    assert captured.workspaces.total - launched.workspaces.total == captured.workspaces.graphs
    assert captured.num_pages <= launched.num_pages
    assert ", graphs " in "".join(plan_lines(captured))
    assert ", graphs " not in "".join(plan_lines(launched))
    tight = replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_num_seqs=256, max_num_batched_tokens=8192))
    assert planned(tight).shortfall_bytes == 0
    assert planned(tight).needed_bytes <= planned(tight).budget_bytes


def test_what_passes_between_pieces_is_planned():
    numbers = planned(CONFIG).numbers
    assert numbers.graphs is not None
    assert numbers.graphs.switch_bytes == 256 * 128 * (128 + 64 + 128) * torch.bfloat16.itemsize


@pytest.mark.parametrize("part", ["most_tokens", "most_landing", "whole_tokens", "all_tokens", "num_programs"])
def test_whatever_there_is_more_of_takes_more(part: str):
    """A row that lands has a result of each of its slots, a token its hidden state, a program its counts."""
    plan = planned(CONFIG)
    graphs, model = plan.numbers.graphs, read_model_config(Path(V3))
    assert graphs is not None
    more = plan_memory(model, replace(plan.numbers, graphs=graphs._replace(**{part: getattr(graphs, part) + 1})))
    least = {
        "most_tokens": 7168 * 2,
        "most_landing": 8 * (2048 + 7168) * 2,
        "whole_tokens": 128 * 512 * 2,
        "all_tokens": 7168 * 2,
        "num_programs": 58 * 256 * 8,
    }
    pages = (more.num_pages - plan.num_pages) * 64 * 128 * 513 * 4 // 2048
    assert more.workspaces.graphs - plan.workspaces.graphs - pages >= least[part]
