"""What is recorded follows from what a step can be, and its bytes are in the plan before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dbo import DboConfig
from ep import ExchangeConfig, Topology
from ep.capacity import HopShape, uniform_plan
from runtime.graphs.graph_config import GraphConfig, Sizes, cut_sizes
from runtime.model.model_config import read_model_config
from runtime.settings.config import EngineConfig, SchedulerConfig
from runtime.settings.graph_plan import sizes_of
from runtime.settings.memory_numbers import memory_numbers, with_room_for
from runtime.weights.activation_bytes import NumberBytes, own_bytes, whole_bytes
from runtime.weights.graph_memory import GraphNumbers, Work, graph_bytes
from runtime.weights.memory import MemoryPlan, plan_lines, plan_memory

V3 = "profiles/models/deepseek-v3.json"
CONFIG = EngineConfig(
    model=V3, ranks=32, node_size=8, ops="triton", device="cuda", exchange=ExchangeConfig(exchange="bounded"),
    scheduler=SchedulerConfig(max_num_seqs=40, max_num_batched_tokens=300),
)  # fmt: skip
PIECE = Work(256, 512, tracks=1, whole=False)
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


def graphs_of(config: EngineConfig) -> GraphNumbers:
    graphs = planned(config).numbers.graphs
    assert graphs is not None
    return graphs


def test_the_largest_of_each_kind_is_planned_with_places_for_what_lands_of_one_track():
    config = replace(CONFIG, overlap=ON, exchange=ExchangeConfig(exchange="bounded", hierarchical="off"))
    landing = 32 * (1 + capacity_of(256))
    pieces = {work for work in graphs_of(config).works if not work.whole}
    assert pieces == {Work(256, landing, tracks=1, whole=False), Work(2 * 256, landing, tracks=2, whole=False)}


def capacity_of(tokens: int) -> int:
    """Rows to one of 32 ranks of 8 experts each."""
    shape = HopShape(num_members=32, slots_per_member=8)
    rows = uniform_plan([shape], Topology(num_ranks=32, node_size=8), top_k=8, combine="ranks").hops[0].dispatch
    return rows.places(tokens)


@pytest.mark.parametrize(("mode", "landing"), [("nccl_ep", 32 * (1024 + 32)), ("symmetric", 32 * (1 + 256))])
def test_back_ends_have_no_blocks_and_experts_look_at_all_their_places(mode: Any, landing: int):
    """NCCL's library has those of the largest round in every one."""
    config = replace(CONFIG, exchange=ExchangeConfig(exchange=mode, hierarchical="off"))
    assert max(work.landing for work in graphs_of(config).works) == landing


def test_where_ways_of_exchange_are_tried_there_is_room_for_graphs_of_whichever_wins():
    model = read_model_config(Path(V3))
    straight = replace(CONFIG, exchange=ExchangeConfig(exchange="bounded", hierarchical="off"))
    numbers = memory_numbers(straight, model, device_bytes=141 * 10**9, on_gpu=True)
    other = replace(straight.exchange, exchange="symmetric")
    found = with_room_for(numbers, straight, model, [other])
    assert numbers.graphs is not None
    assert found.graphs is not None
    assert set(found.graphs.works) == {*numbers.graphs.works, *graphs_of(replace(straight, exchange=other)).works}
    assert found == replace(numbers, graphs=found.graphs, exchange_buffer_bytes=found.exchange_buffer_bytes)
    assert with_room_for(numbers, straight, model, []) == numbers


@pytest.mark.parametrize(
    "more",
    [
        PIECE._replace(tokens=257),
        PIECE._replace(landing=513),
        PIECE._replace(tracks=2),
        PIECE._replace(whole=True),
    ],
)
def test_the_largest_work_counts_and_all_others_use_its_memory_again(more: Work):
    model, sizes = read_model_config(Path(V3)), NumberBytes(run=2, wide=4)

    def of(*works: Work) -> int:
        return graph_bytes(model, GraphNumbers(works, 300, 7, 0), slots=8, sizes=sizes)

    assert of(PIECE) < of(more) == of(PIECE, more) == of(more, PIECE, PIECE)


@pytest.mark.parametrize("part", ["tokens", "landing", "tracks", "whole", "all_tokens", "num_programs"])
def test_whatever_there_is_more_of_takes_more(part: str):
    """A row that lands has a result of each of its slots, a token its hidden state, a program its counts."""
    model, sizes = read_model_config(Path(V3)), NumberBytes(run=2, wide=4)
    graphs = GraphNumbers((), 300, 7, 0)

    def of(work: Work, graphs: GraphNumbers) -> int:
        return graph_bytes(model, graphs._replace(works=(work,)), slots=8, sizes=sizes)

    more = PIECE._replace(**{part: getattr(PIECE, part) + 1}) if part in PIECE._fields else PIECE
    also = graphs._replace(**{part: getattr(graphs, part) + 1}) if part in graphs._fields else graphs
    least = {
        "tokens": 7168 * 2,
        "landing": 8 * (2048 + 7168) * 2,
        "tracks": 512 * 7168 * 2,
        "whole": 256 * 128 * 512 * 2,
        "all_tokens": 7168 * 2,
        "num_programs": 58 * 256 * 8,
    }
    assert of(more, also) - of(PIECE, graphs) >= least[part]


def test_a_token_leaves_its_routed_experts_to_whoever_they_land_on():
    """Of 8 experts of V3 that would be 8 x (2 x 7168 + 3 x 2048) numbers, more than its attention has."""
    model, sizes = read_model_config(Path(V3)), NumberBytes(run=2, wide=4)
    assert whole_bytes(model, sizes) == 411_648
    assert own_bytes(model, sizes) == 239_744
