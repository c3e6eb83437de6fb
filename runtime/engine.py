"""The engine as a program calls it: token ids in, token ids out, on N ranks that are threads of this process.

Knows requests, where they go and what came back; does not know text (see `launch`) nor how a step works (see `worker`).
Between waves no rank's thread runs; a wave starts when something is unfinished and ends when the ranks agree that
nothing is.

    with Engine(EngineConfig(model="profiles/models/tiny-v3", ranks=4)) as engine:
        [output] = engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=8))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ep import SerriedError

from .assembly import OnPlan
from .loop.ranks import Abort, Admit, Ranks, Wish
from .model.model_config import ModelConfig
from .ranks.intake import Bounds, Intake
from .ranks.placing import FrontDesk
from .ranks.routing import Choice
from .requests.kv_params import KvParams, parse_params
from .requests.outputs import News, Note, RequestOutput, TokenEvent
from .requests.request import Request
from .requests.sampling_params import SamplingParams
from .requests.telemetry import EngineStats
from .scheduling.scheduler import Drafter
from .settings.config import EngineConfig
from .thread_ranks import ThreadRanks
from .weights.memory import MemoryPlan
from .weights.progress import OnProgress


class Engine:
    """A model on `config.ranks` ranks.

    drafter       guesses the next tokens of a request (tests, speculative decoding); changes no answer
    on_plan       called with the memory plan before anything is allocated
    on_progress   called while weights are loaded, with bytes done and in all
    on_notice     called while decoding with a line on the ranks, such as one that is slow
    ranks         ranks that run already (the other arguments are theirs then); None: threads of this process

    Raises ValueError for a setting that cannot work, CheckpointError for a checkpoint that is not what it says.
    Not for use from several threads at once, except `abort`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        drafter: Drafter | None = None,
        on_plan: OnPlan | None = None,
        on_progress: OnProgress | None = None,
        on_notice: Callable[[str], None] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self._ranks: Ranks = ranks or ThreadRanks(config, drafter=drafter, on_plan=on_plan, on_progress=on_progress)
        self._open: dict[str, RequestOutput] = {}
        facts = self._ranks.facts
        self._intake = Intake(Bounds.of(facts.model, facts.capacities), seed=config.seed)
        self.notices: list[str] = []
        self._on_notice = on_notice
        self._kept: list[RequestOutput] = []  # answers that nobody has taken yet
        self._desk = FrontDesk(
            self._ranks.facts.capacities,
            config.routing,
            caches_prefixes=config.scheduler.enable_prefix_caching,
        )
        self._choices: dict[str, Choice] = {}
        self._failure: BaseException | None = None
        self._paused = False
        self._draining = False
        self._news: Iterator[tuple[int, News | Note]] | None = None  # the wave that is running

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def model(self) -> ModelConfig:
        """What was read from the model's folder."""
        return self._ranks.facts.model

    @property
    def plan(self) -> MemoryPlan:
        """Where the bytes of one rank go."""
        return self._ranks.facts.plan

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the model's files, a line each."""
        return self._ranks.facts.notes

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._open)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> str:
        """Queue one request and return its id; it runs when `events`, `run` or `generate` is called.

        rank: where it decodes; None: where it costs least (see `routing`). kv_transfer_params: who has the latents of
        the prompt, or that another engine is to fetch them (see `kv_params`). Under the policy "priority" a lower
        `priority` is served first. Raises RequestError (field, value, rule) and queues nothing.
        """
        params = params if params is not None else SamplingParams()
        request = self._make(
            prompt_token_ids,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            rank=rank,
            kv=parse_params(kv_transfer_params, self.config.kv),
        )
        return self._queue(request, rank)

    def explain(self, request_id: str) -> list[str]:
        """Why an unfinished request was placed where it is: a line for each rank. Empty where the caller chose."""
        choice = self._choices.get(request_id)
        return choice.explain() if choice is not None else []

    def abort(self, request_id: str) -> None:
        """End a request at its rank's next step, with what it has; unknown and ended ones are ignored."""
        output = self._open.get(request_id)
        if output is not None:
            self._ranks.send(output.rank, Abort(request_id=request_id))

    def events(self) -> Iterator[TokenEvent]:
        """Decode until every submitted request has ended (or `pause`), yielding tokens as they are read.

        Requests may be submitted and aborted between two events. Leaving the iteration early aborts what is unfinished.
        """
        self._check_alive()
        if self._news is not None:
            raise SerriedError("the engine decodes already: end or leave the events that are being taken first")
        while self._open and not self._paused:
            yield from self._wave()

    def run(self) -> list[RequestOutput]:
        """Decode until every submitted request has ended; the answers in order of submission."""
        outputs = [*self._kept, *self._open.values()]
        self._kept = []
        for _ in self.events():
            pass
        return outputs

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Answers to `prompts` (token ids), in order; `params` for all, or one for each.

        Raises RequestError for the first prompt that cannot run; then none is queued.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params has {len(each)} entries; it must have one for each of the {len(prompts)} prompts")
        requests = [self._make(prompt, chosen) for prompt, chosen in zip(prompts, each, strict=True)]
        others = self._kept + list(self._open.values())  # decode along with these, and wait for `run`
        self._kept = []
        for request in requests:
            self._queue(request, None)
        outputs = self.run()
        self._kept = others
        return outputs[-len(requests) :] if requests else []

    def pause(self) -> None:
        """Launch nothing from the next step on; `events` returns when nothing is in flight. Idempotent."""
        self._wish(Wish(pause=True, drain=self._draining))
        self._paused = True

    def resume(self) -> None:
        """Take a pause back; `events` goes on where it was. Idempotent."""
        self._paused = False
        self._wish(Wish(drain=self._draining))

    def drain(self) -> None:
        """Take no new request from now on; those that are here go on to their end. Idempotent."""
        self._draining = True
        self._wish(Wish(pause=self._paused, drain=True))

    def _wish(self, wish: Wish) -> None:
        self._check_alive()
        for rank in range(self.config.ranks):
            self._ranks.send(rank, wish)

    def stats(self) -> EngineStats:
        """Counters of every rank; between waves they are exact."""
        return EngineStats(ranks=self._ranks.stats())

    def close(self) -> None:
        """End what still runs; the engine takes no more requests. Closing twice is the same as once."""
        if self._failure is None and self._news is not None:
            self._abandon(self._news)
        if self._failure is None:
            self._fail(SerriedError("the engine was closed"))

    def _make(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
        kv: KvParams | None = None,
    ) -> Request:
        """A request that can run, queued nowhere yet."""
        self._check_alive()
        if self._draining:
            raise SerriedError("the engine drains: it takes no new request")
        request = self._intake.make(
            prompt_token_ids,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            taken=self._open,
            kv=kv,
        )
        self._intake.check_fits(request, rank)
        return request

    def _queue(self, request: Request, rank: int | None) -> str:
        if rank is None:
            self._choices[request.id] = choice = self._desk.choose(request)
            rank = choice.rank
        self._desk.book(request, rank)
        self._open[request.id] = RequestOutput(
            request_id=request.id,
            prompt_token_ids=request.prompt,
            seed=request.seed,
            rank=rank,
            logprobs=None if request.params.logprobs is None else [],
        )
        self._ranks.send(rank, Admit(request=request))
        return request.id

    def _wave(self) -> Iterator[TokenEvent]:
        """Run the ranks once from idle to idle. A failure of any rank is raised here, as that rank raised it."""
        news = self._news = self._ranks.wave()
        try:
            for rank, item in news:
                if isinstance(item, Note):
                    self._heed(item)
                else:
                    yield self._event(rank, item)
        except (GeneratorExit, KeyboardInterrupt):
            if self._failure is None:  # else nothing runs any more
                self._abandon(news)
            raise
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._news = None

    def _abandon(self, news: Iterator[tuple[int, News | Note]]) -> None:
        """Abort all that is open and let the wave come to its end, so that every page is free again."""
        for request_id in list(self._open):
            self.abort(request_id)
        for rank, item in news:
            if isinstance(item, News):
                self._event(rank, item)

    def _heed(self, note: Note) -> None:
        """Pass on what a rank says of the group, and send nothing new to ranks that are to have nothing new."""
        for rank in note.degraded:
            self._desk.drain(rank)
        self.notices.append(note.text)
        if self._on_notice is not None:
            self._on_notice(note.text)

    def _event(self, rank: int, news: News) -> TokenEvent:
        """Book what a rank said and turn it into what the caller sees."""
        event = self._open[news.request_id].hear(news, rank)
        if news.finish_reason is not None:
            self._choices.pop(news.request_id, None)
            del self._open[news.request_id]
        self._desk.hear(news)
        return event

    def _fail(self, cause: BaseException) -> None:
        self._failure = cause
        self._ranks.close(cause)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise SerriedError(f"the engine has stopped: {self._failure}") from self._failure
