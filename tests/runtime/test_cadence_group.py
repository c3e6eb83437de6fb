"""A toy group under the cadence: whatever arrives, some rank always moves, and no prompt waits beyond its bound."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.scheduling.cadence import CadenceConfig, CadenceState, Interval, Reason, advance, tokens_run
from runtime.scheduling.votes import Vote


@dataclass
class Prompt:
    """A request of the toy group below."""

    born: int
    left: int
    outputs: int
    offered: int | None = None
    begun: int | None = None


@dataclass
class ToyRank:
    """A rank with a token budget and slots, and nothing else: prompts in order, one token a step for who decodes."""

    budget: int
    slots: int
    queue: deque[Prompt] = field(default_factory=deque)
    decoding: list[Prompt] = field(default_factory=list)
    cut: bool = False

    def propose(self, step: int) -> Vote:
        spare = self.budget - len(self.decoding)
        room = self.slots - len(self.decoding)
        total = taken = 0
        for prompt in list(self.queue)[: max(room, 0)]:
            if spare <= 0:
                break
            share = min(prompt.left, spare)
            prompt.offered = step if prompt.offered is None else prompt.offered
            total, spare, taken = total + share, spare - share, taken + 1
        return Vote(
            sequence=0,
            epoch=0,
            config_hash=0,
            decode_tokens=len(self.decoding),
            prefill_tokens=total,
            prefill_ready=int(total > 0 and (self.cut or spare <= 0)),
            unfinished=len(self.queue) + len(self.decoding),
            waiting=len(self.queue) - taken,
            spare_tokens=spare,
        )

    def run(self, step: int, prefill_tokens: int) -> int:
        """Compute; returns how many requests made progress."""
        moved = len(self.decoding)
        for request in self.decoding:
            request.outputs -= 1
        self.decoding = [request for request in self.decoding if request.outputs > 0]
        if prefill_tokens:
            self.cut = False
        while prefill_tokens:
            head = self.queue[0]
            share = min(head.left, prefill_tokens)
            head.left, prefill_tokens, moved = head.left - share, prefill_tokens - share, moved + 1
            head.begun = step if head.begun is None else head.begun
            self.cut = head.left > 0
            if not head.left:
                self.decoding.append(self.queue.popleft())
        return moved


arrivals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 15), st.integers(1, 90), st.integers(1, 12)), min_size=1, max_size=25
)


@settings(max_examples=80, deadline=None)
@given(
    interval=st.sampled_from([1, 2, 3, 8, "auto"]),
    num_ranks=st.integers(1, 16),
    budget=st.sampled_from([20, 64, 1000]),
    ready_tokens=st.sampled_from([1, 40, 2048]),
    arrivals=arrivals,
)
def test_a_group_always_moves_and_never_lets_a_prompt_wait_beyond_its_bound(
    interval: Interval, num_ranks: int, budget: int, ready_tokens: int, arrivals: list[tuple[int, int, int, int]]
):
    """Arrivals are (step, rank, prompt tokens, outputs). Fewer slots than requests, so lines form for them as well."""
    ranks = [ToyRank(budget=budget, slots=8) for _ in range(num_ranks)]
    prompts = [Prompt(born=step, left=length, outputs=outputs) for step, _, length, outputs in arrivals]
    config = CadenceConfig(prefill_schedule_interval=interval, prefill_ready_tokens=ready_tokens)
    now = CadenceState(config=config)
    bound = config.prefill_max_delay_steps if interval == "auto" else interval - 1
    for step in range(30 + 25 * (90 + 12) * 8):
        for prompt, (_, rank, _, _) in zip(prompts, arrivals, strict=True):
            if prompt.born == step:
                ranks[rank % num_ranks].queue.append(prompt)
        votes = [rank.propose(step) for rank in ranks]
        allowance, now, reason = advance(votes, now)
        prefills = [tokens_run(v, allowance) - v.decode_tokens for v in votes]
        assert reason is not Reason.DEFERRED or not any(prefills), "a rank computes prompts off the beat"
        moved = sum(rank.run(step, prefill) for rank, prefill in zip(ranks, prefills, strict=True))
        assert moved or not any(v.unfinished for v in votes), f"nothing moves in step {step}"
        if step > 30 and not any(v.unfinished for v in votes):
            break
    assert all(prompt.outputs <= 0 and prompt.begun is not None for prompt in prompts)
    waits = [
        prompt.begun - prompt.offered for prompt in prompts if prompt.begun is not None and prompt.offered is not None
    ]
    assert len(waits) == len(prompts)
    assert max(waits) <= bound, f"put off for {max(waits)} steps, the bound is {bound}"
