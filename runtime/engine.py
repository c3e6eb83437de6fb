"""The engine as a program calls it: token ids in, token ids out, on N ranks that are threads of this process.

Knows requests, where they go and what came back; does not know text (see `launch`) nor how a step works (see `worker`).
Between waves no rank's thread runs; a wave starts when something is unfinished and ends when the ranks agree that
nothing is.

    with Engine(EngineConfig(model="profiles/models/tiny-v3", ranks=4)) as engine:
        [output] = engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=8))
"""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ep import RequestError, SerriedError, ThreadGroup, Transport

from .assembly import OnPlan, OnProgress, Parts, assemble
from .config import EngineConfig
from .memory import MemoryPlan
from .model_config import ModelConfig
from .outputs import RequestOutput, TokenEvent
from .request import Request, ending_ids
from .rows import Update
from .sampling_params import SamplingParams
from .scheduler import Drafter
from .telemetry import EngineStats
from .worker import Abort, Admit, Worker


@dataclass(frozen=True, slots=True)
class _WaveEnd:
    """A rank left the wave."""

    rank: int


class Engine:
    """A model on `config.ranks` ranks.

    drafter       guesses the next tokens of a request (tests, speculative decoding); changes no answer
    on_plan       called with the memory plan before anything is allocated
    on_progress   called while weights are loaded, with bytes done and in all

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
    ) -> None:
        self.config = config
        self._events: queue.SimpleQueue[tuple[int, Update] | _WaveEnd] = queue.SimpleQueue()
        self._group: ThreadGroup[None] = ThreadGroup(config.ranks)
        events = self._events  # the ranks know the queue, not the engine: no cycle keeps their memory alive
        self._parts: Parts = assemble(
            config,
            transports=self._group.transports,
            emit=lambda rank, update: events.put((rank, update)),
            drafter=drafter,
            on_plan=on_plan,
            on_progress=on_progress,
        )
        self._open: dict[str, RequestOutput] = {}
        self._seeds = random.Random(config.seed)
        self._num_submitted = 0
        self._pending_tokens = [0] * config.ranks
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def model(self) -> ModelConfig:
        """What was read from the model's folder."""
        return self._parts.model

    @property
    def plan(self) -> MemoryPlan:
        """Where the bytes of one rank go."""
        return self._parts.plan

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The ranks; to be looked at between waves only."""
        return self._parts.workers

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the model's files, a line each."""
        return self._parts.notes

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
    ) -> str:
        """Queue one request and return its id; it runs when `events`, `run` or `generate` is called.

        rank: where it decodes; None: where the fewest tokens are waiting. Under the policy "priority" a lower
        `priority` is served first. Raises RequestError (field, value, rule) and queues nothing.
        """
        self._check_alive()
        params = params if params is not None else SamplingParams()
        request = self._request(prompt_token_ids, params, request_id, priority, cache_salt)
        place = self._place(rank)
        worker = self.workers[place]
        worker.scheduler.capacity.max_len(len(request.prompt), params.max_tokens)
        self._num_submitted += 1
        self._open[request.id] = RequestOutput(
            request_id=request.id,
            prompt_token_ids=request.prompt,
            seed=request.seed,
            rank=place,
            logprobs=None if params.logprobs is None else [],
        )
        self._pending_tokens[place] += len(request.prompt) + (params.max_tokens or 0)
        worker.inbox.append(Admit(request=request))
        return request.id

    def abort(self, request_id: str) -> None:
        """End a request at its rank's next step, with what it has; unknown and ended ones are ignored."""
        output = self._open.get(request_id)
        if output is not None:
            self.workers[output.rank].inbox.append(Abort(request_id=request_id))

    def events(self) -> Iterator[TokenEvent]:
        """Decode until every submitted request has ended, yielding tokens as they are read.

        Requests may be submitted and aborted between two events. Leaving the iteration early aborts what is unfinished.
        """
        self._check_alive()
        while self._open:
            yield from self._wave()

    def run(self) -> list[RequestOutput]:
        """Decode until every submitted request has ended; the answers in order of submission."""
        outputs = list(self._open.values())
        for _ in self.events():
            pass
        return outputs

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Answers to `prompts` (token ids), in order; `params` for all, or one for each."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params has {len(each)} entries; it must have one for each of the {len(prompts)} prompts")
        ids = [self.submit(prompt, chosen) for prompt, chosen in zip(prompts, each, strict=True)]
        outputs = {output.request_id: output for output in self.run()}
        return [outputs[request_id] for request_id in ids]

    def stats(self) -> EngineStats:
        """Counters of every rank; between waves they are exact."""
        return EngineStats(ranks=tuple(worker.stats() for worker in self.workers))

    def close(self) -> None:
        """End what still runs; the engine takes no more requests. Closing twice is the same as once."""
        if self._failure is None:
            self._group.stop(SerriedError("the engine was closed"))
            self._failure = SerriedError("the engine was closed")

    def _request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        cache_salt: str,
    ) -> Request:
        params.check_vocab(self.model.vocab_size)
        _check_prompt(prompt_token_ids, self.model.vocab_size)
        name = request_id if request_id is not None else f"request-{self._num_submitted}"
        if name in self._open:
            raise RequestError(field="request_id", value=name, rule="is in use; choose another or leave it out")
        return Request(
            id=name,
            prompt=tuple(prompt_token_ids),
            params=params,
            arrival=self._num_submitted,
            priority=priority,
            cache_salt=cache_salt,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(64),
            stop_ids=ending_ids(params, self.model.eos_token_ids),
        )

    def _place(self, rank: int | None) -> int:
        if rank is None:
            return min(range(self.config.ranks), key=lambda place: (self._pending_tokens[place], place))
        if not 0 <= rank < self.config.ranks:
            raise RequestError(
                field="rank", value=rank, rule=f"must be from 0 to {self.config.ranks - 1}, or None to choose by load"
            )
        return rank

    def _wave(self) -> Iterator[TokenEvent]:
        """Run the ranks once from idle to idle. A failure of any rank is raised here, as that rank raised it."""
        self._group.start(self._run_rank)
        arrivals = self._arrivals()
        try:
            for event in arrivals:  # noqa: UP028  # `yield from` would close `arrivals` before it has run to its end
                yield event
            self._group.join()
        except GeneratorExit:
            self._abandon(arrivals)
            raise
        except BaseException as error:
            self._failure = error
            self._group.stop(error)
            raise

    def _arrivals(self) -> Iterator[TokenEvent]:
        """Events until every rank has left the wave."""
        running = self.config.ranks
        while running:
            item = self._events.get()
            if isinstance(item, _WaveEnd):
                running -= 1
            else:
                yield self._event(*item)

    def _abandon(self, arrivals: Iterator[TokenEvent]) -> None:
        """Abort all that is open and let the wave come to its end, so that every page is free again."""
        for request_id in list(self._open):
            self.abort(request_id)
        for _ in arrivals:
            pass
        self._group.join()

    def _run_rank(self, transport: Transport) -> None:
        try:
            self.workers[transport.rank].run_wave()
        finally:
            self._events.put(_WaveEnd(transport.rank))

    def _event(self, rank: int, update: Update) -> TokenEvent:
        """Book an update and turn it into what the caller sees."""
        output = self._open[update.request.id]
        output.token_ids.extend(update.new_tokens)
        if output.logprobs is not None:
            output.logprobs.extend(update.logprobs or ())
        if update.finish_reason is not None:
            output.finish_reason = update.finish_reason
            output.num_cached_tokens = update.request.num_cached
            output.num_preemptions = update.request.num_preemptions
            params = update.request.params
            self._pending_tokens[rank] -= len(update.request.prompt) + (params.max_tokens or 0)
            del self._open[update.request.id]
        return TokenEvent(
            request_id=update.request.id,
            rank=rank,
            seed=output.seed,
            token_ids=tuple(update.new_tokens),
            logprobs=None if output.logprobs is None else tuple(update.logprobs or ()),
            finish_reason=update.finish_reason,
        )

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise SerriedError(f"the engine has stopped: {self._failure}") from self._failure


def _check_prompt(prompt_token_ids: Sequence[int], vocab_size: int) -> None:
    if not prompt_token_ids:
        raise RequestError(field="prompt", value=[], rule="must hold at least one token, e.g. [1]")
    for place, token in enumerate(prompt_token_ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                field=f"prompt[{place}]",
                value=token,
                rule=f"must be a token id from 0 to {vocab_size - 1}, the vocabulary's last, e.g. {vocab_size - 1}",
            )
