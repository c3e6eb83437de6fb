"""A step is taken to the next size that was recorded, the same on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.graphs.graph_config import USUAL_SIZES, GraphConfig, has_prompts, piece_sizes, taken_to
from runtime.scheduling.cadence import Reason
from runtime.scheduling.heartbeat import HeartbeatState, Vote, decide


def test_the_usual_sizes_are_dense():
    assert USUAL_SIZES[:5] == (1, 2, 4, 8, 16)
    assert USUAL_SIZES[-2:] == (496, 512)
    assert (USUAL_SIZES[34], USUAL_SIZES[35]) == (256, 272)
    for tokens in range(8, 513):
        assert 0 <= taken_to(tokens, USUAL_SIZES) - tokens < (8 if tokens <= 256 else 16)


def test_no_more_is_recorded_than_a_step_can_need():
    assert GraphConfig().decode_sizes(5) == (1, 2, 4, 8)
    assert GraphConfig().decode_sizes(8) == (1, 2, 4, 8)
    assert GraphConfig(cuda_graph_sizes=(3, 9)).decode_sizes(100) == (3, 9)
    assert piece_sizes(300) == (64, 128, 256)
    assert piece_sizes(63) == ()


def test_a_step_larger_than_all_sizes_keeps_its_own():
    assert taken_to(600, USUAL_SIZES) == 600
    assert taken_to(0, (1, 2)) == 1


@pytest.mark.parametrize("sizes", [(0, 1), (4, 2), (2, 2)])
def test_sizes_that_make_no_sense_are_refused(sizes):
    with pytest.raises(ValueError, match="cuda_graph_sizes is"):
        GraphConfig(cuda_graph_sizes=sizes)


def test_a_plan_says_whether_anybody_may_compute_prompts():
    vote = Vote(sequence=0, epoch=0, config_hash=0, decode_tokens=3, unfinished=1)
    plan, _ = decide([vote], HeartbeatState())
    assert not has_prompts(plan)
    plan, _ = decide([vote, vote._replace(prefill_tokens=9)], HeartbeatState())
    assert has_prompts(plan)
    assert not has_prompts(replace(plan, reason=Reason.DEFERRED))
