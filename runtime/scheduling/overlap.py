"""Dual-batch overlap as the heartbeat sees it: what the votes say of a step, and the cost model's word on it.

Hands `dbo` plain numbers; when a step is cut is `dbo`'s to say. Pure; knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dbo.policy import Choice, DboConfig, Decision, Need, OverlapState, Taken, choose, halted

from ..costs.costs import Operations, StepCosts, StepShape
from ..weights.hardware import Hardware
from .votes import Vote

if TYPE_CHECKING:  # made of numpy's columns; votes are agreed on without
    from ..requests.rows import Proposal


def longest_rows(proposal: Proposal) -> tuple[int, int]:
    """Tokens of the longest row that only decodes, and of the longest other: what a vote says of them."""
    num_tokens_B, is_prefill_B = proposal.rows.num_tokens_B, proposal.rows.is_prefill_B
    return int(num_tokens_B[~is_prefill_B].max(initial=0)), int(num_tokens_B[is_prefill_B].max(initial=0))


def uncut_words(state: OverlapState) -> str:
    """How many steps were not cut, by reason, the most frequent first."""
    refusals = [(count, choice) for choice, count in state.counts.items() if choice is not Choice.CUT]
    return ", ".join([f"{count} {choice}" for count, choice in sorted(refusals, reverse=True)])


def decide_tracks(votes: Sequence[Vote], state: OverlapState, *, bucket: int, prefill_allowed: int | None) -> Decision:
    """In how many tracks a step runs whose fullest rank has `bucket` tokens; 0: no step."""
    if state.config.dbo == "off":
        return Decision(1, bucket, Choice.OFF, state)
    if bucket <= 0:
        return Decision(1, bucket, Choice.OFF, halted(taken_of(votes), state))
    return choose(need_of(votes, bucket=bucket, prefill_allowed=prefill_allowed), taken_of(votes), state)


def need_of(votes: Sequence[Vote], *, bucket: int, prefill_allowed: int | None) -> Need:
    """The step that a plan is about to give all ranks."""
    allowed = bucket if prefill_allowed is None else prefill_allowed
    return Need(
        tokens=bucket,
        decode_tokens=max([vote.decode_tokens for vote in votes]),
        context_tokens=max([vote.context_tokens for vote in votes]),
        longest_row=max([max(vote.decode_row, min(vote.prefill_row, allowed)) for vote in votes]),
        has_prompts=allowed > 0 and any(vote.prefill_tokens for vote in votes),
    )


def taken_of(votes: Sequence[Vote]) -> Taken:
    """What the last step took. Whoever is slowest waits for the exchange alone; the others wait for it as well."""
    return Taken(
        compute_us=max([vote.compute_us for vote in votes]), exchange_us=min([vote.exchange_us for vote in votes])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The cost model as `dbo.OverlapModel`: of steps that only decode, in a group whose ranks are all as full."""

    costs: StepCosts

    @classmethod
    def of(cls, operations: Operations, config: DboConfig, hardware: Hardware) -> CostModel:
        """With the share of the device that `comm_sms` takes, where it is known how many there are."""
        return cls(costs=StepCosts(operations, comm_share=comm_share(config, hardware)))

    def times_us(self, need: Need, tracks: int) -> tuple[float, float] | None:
        """See `dbo.OverlapModel`."""
        if need.has_prompts or not need.decode_tokens:
            return None
        shape = StepShape(decode_tokens=need.tokens, context_len=need.context_tokens / need.decode_tokens)
        one, cut = [self.costs.step_time([shape], tracks=number).total_us for number in (1, tracks)]
        return one, cut


def comm_share(config: DboConfig, hardware: Hardware) -> float:
    """Of the device's multiprocessors, what exchanges take. ValueError when that leaves none."""
    if not hardware.multiprocessors:
        return 0.0
    refuse_all_sms(config.comm_sms, device=hardware.name, multiprocessors=hardware.multiprocessors)
    return config.comm_sms / hardware.multiprocessors


def refuse_all_sms(comm_sms: int, *, device: str, multiprocessors: int) -> None:
    """ValueError when that leaves none to kernels."""
    if comm_sms >= multiprocessors:
        raise ValueError(
            f"comm_sms is {comm_sms}; {device} has {multiprocessors} multiprocessors, and kernels need some, e.g. 20"
        )
