"""Any order of admits, forks of prefixes, aborts, preemptions, launches and reads, held to the rules of `Rehearsal`.

Tokens are compared one by one with what each request says alone; rules about pages are checked after every move; every
admitted request must end, in a bounded number of steps, with every page back.
"""

import random
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from runtime.requests.request import Request
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduling.pretend import PretendModel
from runtime.scheduling.rehearsal import Rehearsal
from runtime.scheduling.scheduler import Policy, SchedulerConfig

VOCAB = 13
BUDGETS, PAGE_SIZES, ACCURACIES = (1, 7, 64), (1, 4, 16), (None, 0.0, 0.5, 1.0)
POLICIES: tuple[Policy, ...] = ("fcfs", "priority")
STOPS = (frozenset[int](), frozenset({3}), frozenset({1, 2, 3}))


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request as drawn: a fork of one of three long prompts, and an end of its own."""

    stem: int
    stem_len: int
    tail: tuple[int, ...]
    max_tokens: int | None
    min_tokens: int
    stops: int
    priority: int
    salt: str
    fails_after: int | None

    def request(self, number: int, max_model_len: int) -> Request:
        stem = [(7 * self.stem + i * i) % VOCAB for i in range(self.stem_len)]
        return Request(
            id=f"r{number}",
            prompt=tuple([*stem, *self.tail][: max_model_len - 1]),
            params=SamplingParams(max_tokens=self.max_tokens, min_tokens=min(self.min_tokens, self.max_tokens or 99)),
            arrival=number,
            priority=self.priority,
            cache_salt=self.salt,
            stop_ids=STOPS[self.stops],
        )


@dataclass(frozen=True, kw_only=True)
class Setting:
    budget: int
    page_size: int
    policy: Policy
    depth: int
    prefix: bool
    accuracy: float | None
    spare_pages: int
    max_num_seqs: int = 8
    threshold: int = 0
    max_model_len: int = 24

    def rehearsal(self) -> Rehearsal:
        """The pool holds the longest request, and `spare_pages` more."""
        config = SchedulerConfig(
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.max_num_seqs,
            scheduling_policy=self.policy,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.prefix,
            long_prefill_token_threshold=self.threshold,
        )
        return Rehearsal(
            config,
            num_pages=-(-self.max_model_len // self.page_size) + self.spare_pages,
            page_size=self.page_size,
            depth=self.depth,
            accuracy=self.accuracy,
            model=PretendModel(vocab_size=VOCAB),
        )


def add(rehearsal: Rehearsal, ask: Ask, number: int) -> Request:
    assert rehearsal.config.max_model_len is not None
    request = ask.request(number, rehearsal.config.max_model_len)
    if ask.fails_after is not None:
        rehearsal.model.fails_at[request.id] = len(request.prompt) + ask.fails_after
    rehearsal.add(request)
    return request


ASKS = st.builds(
    Ask,
    stem=st.integers(0, 2),
    stem_len=st.integers(0, 22),
    tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple),
    max_tokens=st.sampled_from((None, None, 1, 2, 6, 30)),
    min_tokens=st.sampled_from((0, 0, 3)),
    stops=st.sampled_from((0, 0, 1, 2)),
    priority=st.integers(0, 2),
    salt=st.sampled_from(("", "", "", "salt")),
    fails_after=st.sampled_from((None,) * 15 + (0, 3)),
)
SETTINGS = st.builds(
    Setting,
    budget=st.sampled_from(BUDGETS),
    page_size=st.sampled_from(PAGE_SIZES),
    policy=st.sampled_from(POLICIES),
    depth=st.integers(0, 2),  # 2: a step may be read and wait to be clean, while the next is in flight
    prefix=st.booleans(),
    accuracy=st.sampled_from((None, *ACCURACIES)),
    spare_pages=st.sampled_from((0, 1, 2, 6, 40)),
    max_num_seqs=st.sampled_from((1, 2, 8)),
    threshold=st.sampled_from((0, 0, 1, 5)),
)


class Machine(RuleBasedStateMachine):
    """Moves in any order that an engine can make; every rule checks everything."""

    rehearsal: Rehearsal

    @initialize(setting=SETTINGS)
    def start(self, setting: Setting) -> None:
        self.rehearsal = setting.rehearsal()
        self.added: list[Request] = []

    @precondition(lambda self: self.rehearsal.scheduler.num_unfinished < 12)
    @rule(ask=ASKS)
    def admit(self, ask: Ask) -> None:
        self.added.append(add(self.rehearsal, ask, len(self.added)))

    @precondition(lambda self: self.added)
    @rule(back=st.integers(0, 7))
    def abort(self, back: int) -> None:
        self.rehearsal.abort(self.added[-1 - back % len(self.added)])

    @precondition(lambda self: self._may_launch())
    @rule(prefill_allowed=st.sampled_from((None, None, None, 0, 1, 5)), back=st.sampled_from((None,) * 9 + (0, 1)))
    def launch(self, prefill_allowed: int | None, back: int | None) -> None:
        between = self.added[-1 - back % len(self.added)] if self.added and back is not None else None
        self.rehearsal.launch(prefill_allowed=prefill_allowed, abort_between=between)

    @precondition(lambda self: self.rehearsal.unread)
    @rule()
    def read(self) -> None:
        self.rehearsal.read()

    @rule(num_steps=st.integers(1, 12))
    def run(self, num_steps: int) -> None:
        while len(self.rehearsal.unread) > self.rehearsal.depth:
            self.rehearsal.read()
        for _ in range(num_steps):
            self.rehearsal.step()

    @rule()
    def flush(self) -> None:
        self.rehearsal.flush()

    def _may_launch(self) -> bool:
        return len(self.rehearsal.unread) <= self.rehearsal.depth

    def teardown(self) -> None:
        if hasattr(self, "rehearsal"):
            self.rehearsal.drain()


def run_machine(*, num_examples: int, num_moves: int) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_moves,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(600)  # a failure takes hypothesis longer than a success: it looks for the shortest one
def test_no_order_of_moves_breaks_a_rule() -> None:
    run_machine(num_examples=150, num_moves=40)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_long_order_of_moves_breaks_a_rule() -> None:
    run_machine(num_examples=2000, num_moves=120)


def drawn_ask(rng: random.Random, *, crowded: bool) -> Ask:
    """Crowded: short prompts and long answers, so that requests outgrow the pool together."""
    return Ask(
        stem=rng.randrange(3),
        stem_len=rng.randrange(6 if crowded else 22),
        tail=tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 4))),
        max_tokens=rng.choice((None, 30) if crowded else (None, 1, 2, 6)),
        min_tokens=rng.choice((0, 3)),
        stops=0 if crowded else rng.randrange(3),
        priority=rng.randrange(3),
        salt=rng.choice(("", "", "salt")),
        fails_after=None if rng.random() < 0.95 else rng.randrange(4),
    )


def wander(setting: Setting, *, seed: int, num_moves: int, crowded: bool = True) -> Rehearsal:
    """A seeded run: requests arrive, some are taken back, steps go on in between; in the end everything is drained."""
    rng = random.Random(seed)
    rehearsal = setting.rehearsal()
    added: list[Request] = []
    for _ in range(num_moves):
        choice = rng.random()
        if choice < 0.25 and rehearsal.scheduler.num_unfinished < 12:
            added.append(add(rehearsal, drawn_ask(rng, crowded=crowded), len(added)))
        elif choice < 0.28 and added:
            rehearsal.abort(rng.choice(added[-12:]))
        elif len(rehearsal.unread) <= setting.depth and choice < 0.7:
            rehearsal.launch(prefill_allowed=rng.choice((None, None, None, 0, 3)))
        elif rehearsal.unread:
            rehearsal.read()
    rehearsal.drain()
    return rehearsal


GRID = [
    Setting(
        budget=budget,
        page_size=page_size,
        policy=policy,
        depth=depth,
        prefix=bool((index // 2 + depth) % 2),
        accuracy=ACCURACIES[(index // 5 + index) % 4],
        spare_pages=(0, 1, 3, 8)[index % 4],
        threshold=(0, 0, 5)[index % 3],
    )
    for index, (budget, page_size, policy, depth) in enumerate(product(BUDGETS, PAGE_SIZES, POLICIES, (0, 1)))
]


@pytest.mark.parametrize("setting", GRID, ids=lambda s: f"{s.budget}-{s.page_size}-{s.policy}-{s.depth}-{s.accuracy}")
def test_every_request_says_its_script_in_a_crowded_pool(setting: Setting) -> None:
    wander(setting, seed=setting.budget + setting.page_size, num_moves=120)


def test_the_grid_preempts_hits_prefixes_and_rejects_drafts() -> None:
    """The runs above are no use if they never come to what they are for."""
    runs = [wander(setting, seed=1, num_moves=120, crowded=i % 3 > 0) for i, setting in enumerate(GRID)]
    assert sum(run.scheduler.num_preemptions for run in runs) > 50
    assert sum(run.prefix.num_hit for run in runs) > 200  # at first admissions; what was preempted is not counted
    assert sum(run.num_launched for run in runs) > 3000
    drafted = [row for run in runs for rows in run.trace for row in rows if row[3]]
    assert len(drafted) > 100


@pytest.mark.parametrize("setting", GRID[:: len(GRID) // 6], ids=lambda s: f"{s.budget}-{s.page_size}-{s.policy}")
def test_same_inputs_give_the_same_rows(setting: Setting) -> None:
    first, second = (wander(setting, seed=5, num_moves=100) for _ in range(2))
    assert first.trace == second.trace
    assert len(first.trace) > 20


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_request_says_its_script_in_many_long_runs() -> None:
    for seed, setting in product(range(20), GRID):
        wander(setting, seed=seed, num_moves=300, crowded=seed % 3 > 0)
