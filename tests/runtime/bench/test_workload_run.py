"""When requests of a benchmark are sent and what is noted of them: an engine that is a script, with its own clock."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.bench.workload import Job
from runtime.bench.workload_run import run_workload
from runtime.requests.outputs import TokenEvent
from runtime.requests.request import FinishReason
from runtime.requests.sampling_params import MAX_SEED, SamplingParams


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class Script:
    """An engine in which every step takes a second and gives each request a token: its own number, in steps."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.open: dict[str, int] = {}
        self.sent: list[tuple[float, str]] = []
        self.seeds: list[int | None] = []
        self.most = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.open)

    def submit(self, prompt: tuple[int, ...], params: SamplingParams) -> str:
        name = f"r{len(self.sent)}"
        assert params.ignore_eos
        assert params.max_tokens is not None
        self.sent.append((self.clock(), name))
        self.seeds.append(params.seed)
        self.open[name] = params.max_tokens
        self.most = max(self.most, len(self.open))
        return name

    def events(self) -> Iterator[TokenEvent]:
        while self.open:
            self.clock.now += 1.0
            for name in list(self.open):
                self.open[name] -= 1
                over = self.open[name] == 0
                if over:
                    del self.open[name]
                yield TokenEvent(
                    request_id=name,
                    rank=0,
                    seed=0,
                    token_ids=(int(name[1:]),),
                    logprobs=None,
                    finish_reason=FinishReason.LENGTH if over else None,
                )


def jobs(*arrivals: float, tokens: int = 3) -> list[Job]:
    return [Job(arrival_s=at, prompt=(1, 2), output_len=tokens) for at in arrivals]


def drive(load: list[Job], **settings):
    clock = Clock()
    script = Script(clock)
    run = run_workload(script, load, clock=clock, sleep=clock.sleep, **settings)  # type: ignore[arg-type]  # a script
    return script, run


def test_all_at_once_are_sent_before_the_first_step_and_every_token_is_noted():
    script, run = drive(jobs(0, 0, 0), seed=7)
    assert [at for at, _ in script.sent] == [100.0] * 3
    assert script.seeds == [7, 8, 9]
    assert [request.token_ids for request in run.requests] == [[0] * 3, [1] * 3, [2] * 3]
    assert run.requests[1].tokens_s == [101.0, 102.0, 103.0]
    assert (run.requests[1].ttft_s, run.requests[1].latency_s, run.requests[1].gaps_s) == (1.0, 3.0, [1.0, 1.0])
    assert (run.begin_s, run.end_s) == (100.0, 103.0)
    assert all(request.completed for request in run.requests)


def test_seeds_past_the_largest_begin_anew():
    script, _ = drive(jobs(0, 0), seed=MAX_SEED)
    assert script.seeds == [MAX_SEED, 0]


def test_no_more_run_at_once_than_the_limit_and_who_was_held_back_counts_from_when_it_was_let_in():
    script, run = drive(jobs(0, 0, 0, 0, 0), max_concurrency=2)
    assert script.most == 2
    assert [request.arrived_s for request in run.requests] == [100.0, 100.0, 103.0, 103.0, 106.0]
    assert all(request.ttft_s == 1.0 for request in run.requests)


def test_arrivals_join_while_others_decode_and_a_late_one_counts_from_when_it_was_due():
    script, run = drive(jobs(0, 1.5))
    assert [at for at, _ in script.sent] == [100.0, 102.0], "between two steps"
    assert run.requests[1].arrived_s == 101.5
    assert run.requests[1].ttft_s == 1.5


def test_it_sleeps_to_the_next_arrival_while_nothing_decodes():
    script, run = drive(jobs(0, 50))
    assert [at for at, _ in script.sent] == [100.0, 150.0]
    assert run.end_s == 153.0


def test_progress_counts_the_requests_that_ended():
    said: list[tuple[int, int]] = []
    drive(jobs(0, 0, 7), on_progress=lambda done, total: said.append((done, total)))
    assert said == [(1, 3), (2, 3), (3, 3)]
