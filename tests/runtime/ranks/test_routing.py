"""A request goes where it costs least; who may not take it is not asked, and nobody is always first."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.ranks.routing import Choice, NoRankLeft, RankView, RoutingConfig, route

CONFIG = RoutingConfig()
EMPTY = RankView(num_pages=100)


def choose(*views: RankView, prompt_len: int = 1000, pages_needed: int = 20, turn: int = 0, config=CONFIG) -> Choice:
    return route(views, prompt_len=prompt_len, pages_needed=pages_needed, turn=turn, config=config)


def test_the_shortest_queue_wins_in_tokens_not_in_requests():
    assert choose(replace(EMPTY, queued_tokens=3000), replace(EMPTY, queued_tokens=2999)).rank == 1


def test_a_cached_prefix_is_worth_the_tokens_it_saves():
    holder = replace(EMPTY, matched_tokens=640, queued_tokens=500)
    assert choose(EMPTY, holder).rank == 1
    assert choose(EMPTY, replace(holder, queued_tokens=700)).rank == 0


def test_a_fuller_cache_loses_when_all_else_is_alike():
    assert choose(replace(EMPTY, used_pages=60), replace(EMPTY, used_pages=59)).rank == 1
    assert choose(replace(EMPTY, used_pages=60), replace(EMPTY, num_pages=400, used_pages=100)).rank == 1


def test_weights_change_what_counts():
    views = (replace(EMPTY, queued_tokens=100), replace(EMPTY, used_pages=90))
    assert choose(*views).rank == 0
    assert choose(*views, config=RoutingConfig(routing_cache_weight_tokens=0)).rank == 1
    assert choose(*views, config=RoutingConfig(routing_queue_weight=100)).rank == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"healthy": False}, "it is unhealthy"),
        ({"draining": True}, "it is draining"),
        ({"num_pages": 19}, "the request may need 20 pages and its cache has 19"),
    ],
)
def test_a_rank_that_may_not_take_it_is_not_asked(changes, why):
    best = replace(EMPTY, matched_tokens=1000, **changes)
    choice = choose(best, replace(EMPTY, queued_tokens=9999))
    assert choice.rank == 1
    assert choice.explain()[0] == f"rank 0: not asked, {why}"
    with pytest.raises(NoRankLeft, match=f"no rank can take the request: rank 0: not asked, {why}"):
        choose(best)


def test_ties_go_round():
    busy = replace(EMPTY, queued_tokens=1)
    assert [choose(EMPTY, EMPTY, EMPTY, turn=turn).rank for turn in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [choose(EMPTY, busy, EMPTY, turn=turn).rank for turn in range(4)] == [0, 2, 0, 2]


def test_the_choice_and_its_reasons_are_lines():
    views = (replace(EMPTY, queued_tokens=500, matched_tokens=640, used_pages=25), replace(EMPTY, draining=True), EMPTY)
    assert choose(*views).explain() == [
        "rank 0: cost 1884 = queue 500 + prompt 360 + cache 1024",
        "rank 1: not asked, it is draining",
        "rank 2: cost 1000 = queue 0 + prompt 1000 + cache 0 <- chosen",
    ]
    assert choose(EMPTY, EMPTY).explain()[0].endswith("<- chosen by turn, 2 alike")


@pytest.mark.parametrize("name", ["routing_queue_weight", "routing_prefix_weight", "routing_cache_weight_tokens"])
def test_a_weight_below_nothing_is_refused(name: str):
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"{name} is {value}; it must be a number of at least 0, e\.g\. 1\.0"):
            RoutingConfig(**{name: value})


views = st.builds(
    RankView,
    healthy=st.booleans(),
    draining=st.booleans(),
    queued_tokens=st.integers(0, 5),
    used_pages=st.integers(0, 2),
    num_pages=st.integers(2, 4),
    matched_tokens=st.integers(0, 3),
)


@given(st.lists(views, min_size=1, max_size=20), st.integers(0, 50))
def test_no_open_rank_is_cheaper_than_the_chosen_one(group: list[RankView], turn: int):
    asked = [rank for rank, view in enumerate(group) if view.healthy and not view.draining and view.num_pages >= 3]
    if not asked:
        with pytest.raises(NoRankLeft):
            route(group, prompt_len=9, pages_needed=3, turn=turn, config=CONFIG)
        return
    choice = route(group, prompt_len=9, pages_needed=3, turn=turn, config=CONFIG)
    assert choice.rank in asked
    costs = {
        rank: group[rank].queued_tokens
        + (9 - group[rank].matched_tokens)
        + 4096 * group[rank].used_pages / group[rank].num_pages
        for rank in asked
    }
    assert costs[choice.rank] == min(costs.values())
    assert choice == route(list(group), prompt_len=9, pages_needed=3, turn=turn, config=CONFIG)
    assert len(choice.explain()) == len(group)


def test_requests_spread_evenly_over_alike_ranks_that_fill_as_they_are_chosen():
    loads = [EMPTY] * 6
    for turn in range(60):
        rank = route(loads, prompt_len=100, pages_needed=2, turn=turn, config=CONFIG).rank
        loads[rank] = replace(loads[rank], queued_tokens=loads[rank].queued_tokens + 100)
    assert {view.queued_tokens for view in loads} == {1000}
