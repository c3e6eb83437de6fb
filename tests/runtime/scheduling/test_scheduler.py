"""The scheduler step by step: hand-written rows for hand-written requests, at depth 0 and 1."""

from collections.abc import Sequence

import pytest

from ep.errors import RequestError
from runtime.requests.pages import PagePool
from runtime.requests.prefix import PrefixCache
from runtime.requests.request import FinishReason, Request, Status
from runtime.requests.rows import FAILED_TOKEN, Rows, SampledRow, Samples, Update
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduling.scheduler import Drafter, Policy, Scheduler, SchedulerConfig


def make_request(
    name: str,
    prompt_len: int,
    *,
    arrival: int = 0,
    max_tokens: int | None = 100,
    stops: tuple[int, ...] = (),
    priority: int = 0,
) -> Request:
    """Prompts of one name are equal, those of different names differ from the first token on."""
    start = sum(name.encode()) * 1000
    return Request(
        id=name,
        prompt=tuple(range(start, start + prompt_len)),
        params=SamplingParams(max_tokens=max_tokens),
        arrival=arrival,
        priority=priority,
        stop_ids=frozenset(stops),
    )


class Bench:
    """A scheduler with its pool; rows are shown as (id, start, num_tokens), with "+" when they sample."""

    def __init__(
        self,
        *,
        budget: int = 64,
        seqs: int = 8,
        pages: int = 100,
        page_size: int = 4,
        max_model_len: int = 200,
        policy: Policy = "fcfs",
        threshold: int = 0,
        prefix: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            scheduling_policy=policy,
            max_model_len=max_model_len,
            enable_prefix_caching=prefix,
            long_prefill_token_threshold=threshold,
        )
        self.pool = PagePool(pages, page_size)
        self.prefix = PrefixCache(self.pool, enabled=prefix)
        self.scheduler = Scheduler(config, self.pool, self.prefix, drafter=drafter)
        self.unread: list[Rows] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def launch(self, *, prefill_allowed: int | None = None) -> list[tuple[str, int, int, str]]:
        rows = self.scheduler.commit(self.scheduler.propose(), prefill_allowed=prefill_allowed)
        self.unread.append(rows)
        return [(row.request.id, row.start, row.num_tokens, "+" if row.samples else "") for row in rows]

    def read(self, says: Sequence[Sequence[int]] | int = 7) -> list[Update]:
        """Read the oldest step; every position samples `says`, or each row that samples has an entry in it."""
        rows = self.unread.pop(0)
        entries = iter(
            [[says] * (1 + row.num_drafts) for row in rows if row.samples] if isinstance(says, int) else says
        )
        sampled = [SampledRow(tuple(next(entries))) if row.samples else None for row in rows]
        return self.scheduler.finish(rows, Samples.of(sampled))

    def step(self, says: Sequence[Sequence[int]] | int = 7) -> list[tuple[str, int, int, str]]:
        rows = self.launch()
        self.read(says)
        return rows


# One loop, no phases


def test_prompt_is_computed_in_chunks_that_fill_the_budget() -> None:
    bench = Bench(budget=7)
    bench.add(make_request("a", 16))
    rows = [bench.step() for _ in range(4)]
    assert rows == [[("a", 0, 7, "")], [("a", 7, 7, "")], [("a", 14, 2, "+")], [("a", 16, 1, "+")]]


def test_budget_of_one_token_is_enough() -> None:
    bench = Bench(budget=1)
    a, b = make_request("a", 2, max_tokens=2), make_request("b", 1, arrival=1, max_tokens=1)
    bench.add(a, b)
    rows = [bench.step() for _ in range(4)]
    assert rows == [[("a", 0, 1, "")], [("a", 1, 1, "+")], [("a", 2, 1, "+")], [("b", 0, 1, "+")]]
    assert bench.scheduler.num_unfinished == 0


def test_newest_tokens_come_before_prompts_whoever_is_older() -> None:
    bench = Bench(budget=8, threshold=3)
    bench.add(make_request("a", 20), make_request("b", 2, arrival=1))
    assert bench.step() == [("a", 0, 3, ""), ("b", 0, 2, "+")]
    assert bench.step() == [("b", 2, 1, "+"), ("a", 3, 3, "")]


def test_long_prompt_leaves_room_under_the_threshold() -> None:
    bench = Bench(budget=10, threshold=4)
    bench.add(make_request("a", 9), make_request("b", 9, arrival=1), make_request("c", 9, arrival=2))
    assert bench.step() == [("a", 0, 4, ""), ("b", 0, 4, ""), ("c", 0, 2, "")]


def test_no_more_requests_run_than_there_are_slots() -> None:
    bench = Bench(seqs=2)
    requests = [make_request(name, 1, arrival=i, max_tokens=2) for i, name in enumerate("abc")]
    bench.add(*requests)
    assert [row[0] for row in bench.step()] == ["a", "b"]
    assert [request.slot for request in requests] == [0, 1, None]
    bench.step()
    assert [row[0] for row in bench.step()] == ["c"]
    assert requests[2].slot == 0


def test_proposal_counts_tokens_of_both_kinds() -> None:
    bench = Bench(budget=8)
    bench.add(make_request("a", 3))
    bench.step()
    bench.add(make_request("b", 30, arrival=1), make_request("c", 1, arrival=2))
    proposal = bench.scheduler.propose()
    assert (proposal.decode_tokens, proposal.prefill_tokens) == (1, 7)


def test_nothing_to_do_is_an_empty_step() -> None:
    bench = Bench()
    assert bench.step() == []
    assert bench.scheduler.num_unfinished == 0


# What the plan allows


def test_plan_without_prefill_leaves_prompts_for_later() -> None:
    bench = Bench()
    bench.add(make_request("a", 3))
    bench.step()
    bench.add(make_request("b", 9, arrival=1), make_request("c", 1, arrival=2))
    assert bench.launch(prefill_allowed=0) == [("a", 3, 1, "+"), ("c", 0, 1, "+")]
    bench.read()
    assert bench.step() == [("a", 4, 1, "+"), ("c", 1, 1, "+"), ("b", 0, 9, "+")]


def test_plan_cuts_the_prompt_that_does_not_fit() -> None:
    bench = Bench()
    bench.add(make_request("a", 5), make_request("b", 5, arrival=1), make_request("c", 5, arrival=2))
    assert bench.launch(prefill_allowed=7) == [("a", 0, 5, "+"), ("b", 0, 2, "")]
    bench.read()
    assert bench.step() == [("a", 5, 1, "+"), ("b", 2, 3, "+"), ("c", 0, 5, "+")]


# Steps in flight


def test_next_token_is_launched_before_the_last_is_read() -> None:
    bench = Bench()
    request = make_request("a", 3)
    bench.add(request)
    assert bench.launch() == [("a", 0, 3, "+")]
    assert bench.launch() == [("a", 3, 1, "+")]
    assert (request.num_known, request.num_computed, request.in_flight) == (5, 4, 2)
    assert bench.read() == [Update(request, (7,), None, None)]
    assert bench.launch() == [("a", 4, 1, "+")]
    assert request.tokens[3:] == [7]


def test_stop_is_seen_one_step_late_and_its_extra_row_is_thrown_away() -> None:
    bench = Bench(pages=2)
    request = make_request("a", 3, stops=(9,), max_tokens=5)
    bench.add(request)
    bench.launch()
    bench.launch()
    [update] = bench.read(9)
    assert (update.new_tokens, update.finish_reason) == ((9,), FinishReason.STOP)
    assert (bench.scheduler.num_unfinished, bench.scheduler.num_parked) == (0, 1)
    assert (len(request.pages), bench.pool.num_free, request.slot) == (1, 1, 0)
    assert bench.read(8) == []
    assert (bench.scheduler.num_parked, bench.pool.num_free, request.slot) == (0, 2, None)
    assert request.tokens[3:] == [9]


def test_request_whose_last_token_is_in_flight_is_not_launched_again() -> None:
    bench = Bench()
    bench.add(make_request("a", 3, max_tokens=2))
    assert bench.launch() == [("a", 0, 3, "+")]
    assert bench.launch() == [("a", 3, 1, "+")]
    assert bench.launch() == []
    bench.read()
    [update] = bench.read()
    assert update.finish_reason is FinishReason.LENGTH


def test_successor_waits_until_the_pages_of_an_ended_request_are_no_longer_in_flight() -> None:
    bench = Bench(pages=2)
    bench.add(make_request("a", 4, stops=(9,), max_tokens=4), make_request("b", 5, arrival=1, max_tokens=2))
    bench.launch()
    bench.launch()
    bench.read(9)
    assert bench.launch() == []
    bench.read()
    assert bench.launch() == [("b", 0, 5, "+")]


# Pages run out


def crowded(*, policy: Policy = "fcfs", priorities: tuple[int, int, int] = (0, 0, 0)) -> tuple[Bench, list[Request]]:
    """Three requests of one full page each, admitted with two pages spare; the next token needs a page each."""
    bench = Bench(pages=5, policy=policy, max_model_len=20)
    requests = [
        make_request(name, 4, arrival=i, priority=priority)
        for i, (name, priority) in enumerate(zip("abc", priorities, strict=True))
    ]
    bench.add(*requests)
    assert len(bench.step()) == 3
    return bench, requests


def test_newest_that_lacks_a_page_waits_and_is_the_one_preempted_for_an_older() -> None:
    bench, (a, b, c) = crowded()
    for position in (4, 5, 6, 7):
        assert bench.step() == [("a", position, 1, "+"), ("b", position, 1, "+")]
    assert (c.status, len(c.pages), bench.pool.num_free) == (Status.RUNNING, 1, 0)
    assert bench.step() == [("a", 8, 1, "+")]  # on the page of c; now b is the newest, and waits
    assert (a.num_preemptions, b.num_preemptions, c.num_preemptions) == (0, 0, 1)
    assert (b.status, c.status) == (Status.RUNNING, Status.WAITING)


def test_budget_and_pages_go_to_the_first_in_order_when_more_decode_than_fit() -> None:
    bench = Bench(budget=1, page_size=1, pages=200, drafter=lambda request: [])
    bench.add(make_request("a", 1), make_request("b", 1, arrival=1))
    assert bench.launch() == [("a", 0, 1, "+")]
    assert bench.launch() == [("b", 0, 1, "+")]  # the host does not know the token of a, and drafts may follow it
    bench.read()
    bench.read()
    assert bench.launch() == [("a", 1, 1, "+")]
    assert bench.pool.num_free == 197


def test_lowest_priority_is_the_victim_under_priority() -> None:
    bench, (a, b, c) = crowded(policy="priority", priorities=(2, 0, 1))
    for position in (4, 5, 6, 7):
        assert bench.step() == [("b", position, 1, "+"), ("c", position, 1, "+")]
    assert bench.step() == [("b", 8, 1, "+")]
    assert (a.num_preemptions, b.num_preemptions, c.num_preemptions) == (1, 0, 0)


def test_preempted_request_keeps_its_tokens_and_starts_again() -> None:
    bench = Bench(pages=3, max_model_len=12)
    a, b = make_request("a", 3, max_tokens=7), make_request("b", 3, arrival=1, max_tokens=7)
    bench.add(a, b)
    assert bench.step() == [("a", 0, 3, "+"), ("b", 0, 3, "+")]
    assert bench.step() == [("a", 3, 1, "+"), ("b", 3, 1, "+")]
    assert bench.step() == [("a", 4, 1, "+")]  # the third page; b waits for one
    for start in (5, 6, 7):
        assert bench.step() == [("a", start, 1, "+")]
    assert bench.step() == [("a", 8, 1, "+")]
    assert (b.status, b.num_computed, b.num_output, b.pages, b.num_preemptions) == (Status.WAITING, 0, 2, [], 1)
    assert a.finish_reason is FinishReason.LENGTH
    assert bench.step() == [("b", 0, 5, "+")]


def test_parked_pages_count_as_coming_so_nobody_else_is_preempted() -> None:
    bench = Bench(pages=4, max_model_len=16)
    a, b, c = (make_request(name, 4, arrival=i, max_tokens=12) for i, name in enumerate("abc"))
    bench.add(a, b)
    assert bench.launch() == [("a", 0, 4, "+"), ("b", 0, 4, "+")]
    assert bench.launch() == [("a", 4, 1, "+"), ("b", 4, 1, "+")]
    bench.add(c)
    for position in (5, 6, 7):
        bench.read()
        assert bench.launch() == [("a", position, 1, "+"), ("b", position, 1, "+")]
    bench.read()
    assert bench.launch() == []  # a lacks a page: b goes, but a step that may touch its pages is not read yet
    assert (b.status, len(b.pages), bench.scheduler.num_parked, c.status) == (Status.WAITING, 2, 1, Status.WAITING)
    assert (b.num_computed, b.in_flight) == (0, 1)
    bench.read()
    assert (b.pages, b.num_output, bench.scheduler.num_preemptions) == ([], 5, 1)
    assert bench.launch() == [("a", 8, 1, "+")]


def test_preempted_request_comes_back_only_when_all_its_tokens_are_read() -> None:
    bench = Bench(pages=8, max_model_len=16)
    a, b, c = make_request("a", 3), make_request("b", 3, arrival=2), make_request("c", 13, arrival=1)
    bench.add(a, b)
    bench.step()
    bench.add(c)  # older than b; it holds four pages and is never launched
    bench.launch(prefill_allowed=0)
    for position in (4, 5, 6, 7):
        assert bench.launch(prefill_allowed=0) == [("a", position, 1, "+"), ("b", position, 1, "+")]
        bench.read()
    assert bench.launch(prefill_allowed=0) == []  # a lacks a page
    assert (b.status, b.in_flight, c.status) == (Status.WAITING, 1, Status.RUNNING)
    bench.scheduler.abort("c")
    assert bench.pool.num_free == 4
    assert bench.launch() == [("a", 8, 1, "+")]  # b would fit, but a token of it is still to be read
    bench.read()
    bench.read()
    assert ("b", 0, 9, "+") in bench.launch()


def test_head_of_the_line_blocks_those_behind_it() -> None:
    bench = Bench(pages=6, max_model_len=24)
    bench.add(make_request("a", 4), make_request("b", 17, arrival=1), make_request("c", 1, arrival=2))
    assert bench.step() == [("a", 0, 4, "+")]  # b needs five pages, and one must stay for a
    assert bench.step() == [("a", 4, 1, "+")]
    assert bench.scheduler.num_waiting == 2


def test_step_that_preempts_admits_nobody() -> None:
    bench, (_, _, c) = crowded()
    for _ in range(4):
        bench.step()
    bench.add(make_request("d", 1, arrival=-1))
    assert bench.step() == [("a", 8, 1, "+")]
    assert (c.num_preemptions, bench.scheduler.num_waiting) == (1, 2)


def test_every_request_ends_when_the_pool_holds_exactly_the_largest() -> None:
    bench = Bench(pages=4, max_model_len=16)
    requests = [make_request(name, 3, arrival=i, max_tokens=None) for i, name in enumerate("abcd")]
    bench.add(*requests)
    for _ in range(300):
        bench.step()
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * 4
    assert [len(request.tokens) for request in requests] == [16] * 4
    assert bench.pool.num_free == 4


# Order of service


def test_fcfs_serves_by_arrival_whatever_the_priority() -> None:
    bench = Bench(seqs=1)
    bench.add(make_request("b", 1, arrival=1, priority=-5), make_request("a", 1, arrival=0))
    assert bench.step()[0][0] == "a"


def test_priority_serves_the_lower_number_then_the_older() -> None:
    bench = Bench(seqs=1, policy="priority")
    bench.add(
        make_request("a", 1, arrival=0, priority=1, max_tokens=1),
        make_request("c", 1, arrival=2, priority=0, max_tokens=1),
        make_request("b", 1, arrival=1, priority=0, max_tokens=1),
    )
    assert [bench.step()[0][0] for _ in range(3)] == ["b", "c", "a"]


# Prefixes


def test_second_request_computes_only_what_the_first_did_not() -> None:
    bench = Bench(prefix=True)
    first, second = make_request("a", 10, max_tokens=1), make_request("a", 10, arrival=1, max_tokens=1)
    second.id = "again"
    bench.add(first)
    bench.step()
    bench.add(second)
    assert bench.step() == [("again", 8, 2, "+")]
    assert (second.num_cached, bench.prefix.num_queried, bench.prefix.num_hit) == (8, 20, 8)


def test_at_least_one_token_is_left_to_compute() -> None:
    bench = Bench(prefix=True)
    for i in range(2):
        request = make_request("a", 8, arrival=i, max_tokens=1)
        bench.add(request)
        rows = bench.step()
    assert rows == [("a", 4, 4, "+")]


def test_preempted_request_finds_its_own_pages_again() -> None:
    bench = Bench(pages=6, max_model_len=24, prefix=True)
    a, b = make_request("a", 8, max_tokens=16), make_request("b", 7, arrival=1, max_tokens=8)
    bench.add(a, b)
    while not b.num_preemptions:
        bench.step()
    assert len(b.tokens) == 12
    bench.scheduler.abort("a")
    assert bench.step() == [("b", 8, 4, "+")]
    assert b.num_cached == 0


def test_pages_of_a_failed_request_are_not_published() -> None:
    bench = Bench(prefix=True)
    bench.add(make_request("a", 8))
    bench.launch()
    [update] = bench.read(FAILED_TOKEN)
    assert (update.new_tokens, update.finish_reason) == ((), FinishReason.ERROR)
    assert (bench.pool.num_cached, bench.pool.num_free) == (0, 100)


# Drafts


def test_accepted_drafts_count_as_computed_and_wrong_ones_are_computed_again() -> None:
    bench = Bench(drafter=lambda request: [5, 6])
    request = make_request("a", 3)
    bench.add(request)
    bench.step(5)
    assert bench.launch() == [("a", 3, 3, "+")]
    [update] = bench.read([[5, 8, 9]])
    assert update.new_tokens == (5, 8)
    assert (request.tokens[3:], request.num_computed) == ([5, 5, 8], 5)
    assert bench.step([[5, 6, 7]]) == [("a", 5, 3, "+")]
    assert (request.tokens[3:], request.num_computed) == ([5, 5, 8, 5, 6, 7], 8)


def test_drafts_never_pass_the_last_token() -> None:
    bench = Bench(drafter=lambda request: [7] * 9)
    request = make_request("a", 3, max_tokens=4)
    bench.add(request)
    bench.step()
    assert bench.step() == [("a", 3, 3, "+")]
    assert (request.num_output, request.finish_reason) == (4, FinishReason.LENGTH)


def test_drafts_leave_budget_for_every_running_request() -> None:
    bench = Bench(budget=5, drafter=lambda request: [1, 1, 1, 1])
    bench.add(*(make_request(name, 1, arrival=i) for i, name in enumerate("abc")))
    bench.step()
    assert bench.step() == [("a", 1, 3, "+"), ("b", 1, 1, "+"), ("c", 1, 1, "+")]


def test_drafts_preempt_nobody() -> None:
    bench = Bench(pages=3, max_model_len=12, drafter=lambda request: [1, 1, 1, 1, 1])
    bench.add(make_request("a", 2, max_tokens=9), make_request("b", 1, arrival=1, max_tokens=9))
    bench.step()
    assert bench.step() == [("a", 2, 6, "+"), ("b", 1, 3, "+")]
    assert bench.scheduler.num_preemptions == 0


def test_request_with_drafts_in_flight_is_launched_again_when_they_are_read() -> None:
    bench = Bench(drafter=lambda request: [7, 7])
    bench.add(make_request("a", 3))
    assert bench.launch() == [("a", 0, 3, "+")]
    assert bench.launch() == []
    bench.read()
    assert bench.launch() == [("a", 3, 3, "+")]
    assert bench.launch() == []


# Aborts


def test_waiting_request_is_aborted_at_once() -> None:
    bench = Bench(seqs=1)
    bench.add(make_request("a", 1), make_request("b", 1, arrival=1))
    bench.step()
    [update] = bench.scheduler.abort("b")
    assert (update.request.id, update.finish_reason, bench.scheduler.num_waiting) == ("b", FinishReason.ABORT, 0)


def test_running_request_gives_its_pages_back_at_once() -> None:
    bench = Bench()
    bench.add(make_request("a", 9))
    bench.step()
    bench.scheduler.abort("a")
    assert (bench.pool.num_free, bench.scheduler.num_running) == (100, 0)


def test_request_in_flight_keeps_its_pages_until_it_is_read() -> None:
    bench = Bench()
    bench.add(make_request("a", 9))
    bench.launch()
    bench.launch()
    bench.scheduler.abort("a")
    assert (bench.pool.num_free, bench.scheduler.num_unfinished) == (97, 0)
    assert bench.read() == []
    assert bench.pool.num_free == 97
    assert bench.read() == []
    assert bench.pool.num_free == 100


def test_parked_request_can_be_aborted() -> None:
    bench = Bench(pages=4, max_model_len=16)
    a, b = (make_request(name, 4, arrival=i, max_tokens=12) for i, name in enumerate("ab"))
    bench.add(a, b)
    bench.launch()
    for _ in range(4):
        bench.launch()
        bench.read()
    assert bench.launch() == []
    assert (b.status, bench.scheduler.num_parked, bench.scheduler.num_waiting) == (Status.WAITING, 1, 1)
    bench.scheduler.abort("b")
    assert (bench.scheduler.num_parked, bench.scheduler.num_waiting, bench.scheduler.num_unfinished) == (1, 0, 1)
    bench.read()
    assert (bench.scheduler.num_parked, bench.pool.num_free) == (0, 2)


def test_request_aborted_between_propose_and_commit_is_not_launched() -> None:
    bench = Bench()
    bench.add(make_request("a", 3), make_request("b", 3, arrival=1))
    proposal = bench.scheduler.propose()
    bench.scheduler.abort("a")
    assert [row.request.id for row in bench.scheduler.commit(proposal)] == ["b"]
    assert bench.pool.num_free == 99


def test_aborting_an_unknown_request_does_nothing() -> None:
    assert Bench().scheduler.abort("nobody") == []


def test_logprobs_are_handed_on_for_new_tokens_only() -> None:
    bench = Bench(drafter=lambda request: [5, 6])
    request = make_request("a", 3)
    bench.add(request)
    bench.step()
    bench.launch()
    [update] = bench.scheduler.finish(bench.unread.pop(), Samples.of([SampledRow((5, 9, 9), ["x", "y", "z"])]))
    assert update == Update(request, (5, 9), ("x", "y"), None)


# Refusals


def refusal(bench: Bench, request: Request) -> str:
    with pytest.raises(RequestError) as caught:
        bench.add(request)
    assert bench.scheduler.num_unfinished == bench.scheduler.num_waiting
    return str(caught.value)


def test_empty_prompt_is_refused() -> None:
    assert refusal(Bench(), make_request("a", 0)) == "prompt = '0 tokens': must have at least 1 token"


def test_prompt_that_leaves_no_room_for_a_token_is_refused() -> None:
    assert refusal(Bench(max_model_len=10), make_request("a", 10)) == (
        "prompt = '10 tokens': must have at most 9 tokens: max_model_len is 10, and one token is to follow"
    )


def test_request_that_outgrows_the_whole_cache_is_refused_with_the_arithmetic() -> None:
    assert refusal(Bench(pages=4), make_request("a", 10, max_tokens=7)) == (
        "prompt = '10 tokens': with up to 7 tokens of output it needs 5 pages of 4 tokens, and the whole cache has 4 "
        "(16 tokens); max_tokens=6 would fit"
    )
    assert refusal(Bench(pages=4), make_request("a", 16, max_tokens=None)) == (
        "prompt = '16 tokens': with up to 184 tokens of output it needs 50 pages of 4 tokens, and the whole cache has "
        "4 (16 tokens); a prompt of 15 tokens would fit"
    )


def test_largest_request_that_fits_is_taken() -> None:
    bench = Bench(pages=4, max_model_len=16)
    bench.add(make_request("a", 10, max_tokens=6), make_request("b", 15, max_tokens=None))
    assert bench.scheduler.num_waiting == 2


def test_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    bench = Bench()
    bench.add(make_request("a", 1, max_tokens=1))
    assert refusal(bench, make_request("a", 1)) == "request_id = 'a': must not be the id of an unfinished request"
    bench.step()
    bench.add(make_request("a", 1))
    assert bench.step() == [("a", 0, 1, "+")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"max_num_batched_tokens": 0},
            "max_num_batched_tokens is 0; it must be a whole number of at least 1, e.g. 8192",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be a whole number of at least 1, e.g. 256"),
        ({"max_model_len": 1}, "max_model_len is 1; it must be a whole number of at least 2, e.g. 4096"),
        (
            {"long_prefill_token_threshold": -1},
            "long_prefill_token_threshold is -1; it must be a whole number of at least 0, e.g. 0",
        ),
        ({"scheduling_policy": "lifo"}, "scheduling_policy is 'lifo'; it must be one of fcfs, priority, e.g. fcfs"),
    ],
)
def test_configuration_outside_its_range_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        SchedulerConfig(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_description_counts_requests_pages_and_slots() -> None:
    bench = Bench(seqs=1)
    bench.add(make_request("a", 5), make_request("b", 1, arrival=1))
    bench.launch()
    assert bench.scheduler.describe() == "1 running, 1 waiting, 0 parked; 98 of 100 pages and 0 of 1 slots free"


@pytest.mark.parametrize("prompt_len", [2, 3, 4])
def test_a_page_is_findable_as_soon_as_the_step_that_fills_it_is_read(prompt_len: int) -> None:
    bench, request = Bench(prefix=True, page_size=4), make_request("a", prompt_len)
    bench.add(request)
    found = []
    for _ in range(8):
        bench.step()
        found.append(sum(bench.pool.is_published(page) for page in request.pages))
    # After n steps prompt_len + n - 1 tokens are computed.
    assert found == [(prompt_len + steps) // 4 for steps in range(8)]
