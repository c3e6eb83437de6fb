"""What a rank tells: news of its own requests, notes on the group.

All ranks find the same about the group, in the same step, so that only rank 0 says it. Knows values and whom they go
to; does not know how a step works, nor who listens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ep import PeerFailed, SerriedError

from ..failure.straggler import Finding
from ..requests.outputs import News, Note
from ..requests.request import take_prompt_logprobs
from ..requests.rows import Update
from ..scheduling.heartbeat import StepPlan
from ..scheduling.rerun import raise_words

Excuses = Callable[[], Sequence[str]]


def no_excuse() -> Sequence[str]:
    """Of a device that nobody can ask."""
    return ()


class Straggling(SerriedError):
    """This rank keeps the others waiting, and the group was told to end for it (--straggler-action abort)."""


class Voice:
    """One rank's. `emit` gets the News of a step, `notify` the Notes; both in the rank's own thread.

    `excuses` says why this rank's device may be slow (see `gpu_health`); it is asked only when the rank was found slow.
    """

    def __init__(
        self,
        rank: int,
        *,
        emit: Callable[[Sequence[News]], None],
        notify: Callable[[Note], None],
        excuses: Excuses = no_excuse,
    ) -> None:
        self._rank = rank
        self._emit = emit
        self._notify = notify
        self._excuses = excuses

    def say(self, updates: Sequence[Update]) -> None:
        """What a step, or an abort, brought to requests of this rank."""
        if updates:
            self._emit(
                [
                    News(
                        (request := update.request).id,
                        update.new_tokens,
                        update.logprobs,
                        update.finish_reason,
                        request.num_cached,
                        request.num_preemptions,
                        None if request.prompt_logprobs is None else take_prompt_logprobs(request),
                        request.kv_lent,
                        request.error,
                    )
                    for update in updates
                ]
            )

    def note(self, text: str, *, step: int, degraded: tuple[int, ...] = ()) -> None:
        """Something about the group that all ranks know; `degraded` ranks get no new requests."""
        if self._rank == 0:
            self._notify(Note(text=f"{text} [step {step}]", degraded=degraded))

    def tell(self, text: str, *, step: int) -> None:
        """Something about the group that this rank is to say, whoever else is silent."""
        self._notify(Note(text=f"{text} [step {step}]"))

    def raised(self, plan: StepPlan) -> None:
        """The exchange has room for more rows from this step on."""
        self.note(raise_words(plan.capacity_level), step=plan.step)

    def heed(self, finding: Finding, *, step: int, degraded: tuple[int, ...]) -> None:
        """Say it, or end by it: on every rank, in the same step."""
        excuses = self._excuses() if finding.slow and self._rank == finding.rank else ()
        if finding.slow and finding.action == "abort":
            if self._rank == finding.rank:
                raise Straggling("; ".join([str(finding), *excuses]), rank=self._rank, step=step)
            raise PeerFailed(finding.rank, f"is given up: {finding}", rank=self._rank, step=step)
        self.note(str(finding), step=step, degraded=degraded)
        if excuses:
            self.tell(f"rank {self._rank}, of its device: {'; '.join(excuses)}", step=step)
