"""What a rank says of itself: to the others before each step, and to whoever asks how it has fared.

Reads a worker's parts and changes nothing, but for the watch on prompts that wait, which looks at the clock.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dbo import Choice

from ..requests.rows import Proposal
from ..requests.telemetry import RankStats
from ..scheduling.overlap import longest_rows, uncut_words
from ..scheduling.votes import Vote

if TYPE_CHECKING:
    from .worker import Worker


def vote_of(worker: Worker, proposal: Proposal) -> Vote:
    """What it tells the others before the step in which it would run `proposal`."""
    scheduler = worker.scheduler
    spare = scheduler.config.max_num_batched_tokens - proposal.decode_tokens - proposal.prefill_tokens
    decode_row, prefill_row = (0, 0) if worker.state.overlap.config.dbo == "off" else longest_rows(proposal)
    return Vote(
        sequence=worker.sequence,
        epoch=worker.experts.epoch,
        config_hash=worker.config_hash,
        last_read=worker.in_flight.last_read,
        last_clean=worker.in_flight.last_clean,
        decode_tokens=proposal.decode_tokens,
        prefill_tokens=proposal.prefill_tokens,
        unfinished=scheduler.num_unfinished,
        in_flight=len(worker.in_flight),
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        free_pages=worker.pool.num_free,
        free_slots=scheduler.num_free_slots,
        spare_tokens=spare,
        pause=int(worker.wish.pause),
        drain=int(worker.wish.drain),
        compute_us=worker.took.own_us,
        exchange_us=worker.took.waited_us,
        expert_pairs=worker.expert_pairs,
        migration_ready=worker.experts.ready,
        awaiting=scheduler.hand_over.awaits,
        decode_row=decode_row,
        prefill_row=prefill_row,
        **worker.watch.vote(proposal, spare_tokens=spare, now_ns=time.monotonic_ns())._asdict(),
    )


def stats_of(worker: Worker) -> RankStats:
    """Its counters now."""
    counters = worker.counters
    sent = worker.decoder.sent_bytes
    return RankStats(
        rank=worker.transport.rank,
        steps=counters.steps,
        idle_steps=counters.idle_steps,
        computed_tokens=counters.computed_tokens,
        generated_tokens=worker.scheduler.num_generated,
        finished=worker.scheduler.num_ended,
        preemptions=worker.scheduler.num_preemptions,
        prefix_queries=worker.prefix.num_queried,
        prefix_hits=worker.prefix.num_hit,
        num_pages=worker.pool.num_pages,
        free_pages=worker.pool.num_free,
        running=worker.scheduler.num_running,
        waiting=worker.scheduler.num_waiting,
        slow_steps=worker.stragglers.slow_steps_of(worker.transport.rank),
        degraded=worker.transport.rank in worker.stragglers.degraded,
        expert_balance=worker.experts.balance(),
        overflow_steps=worker.in_flight.num_overflows,
        rerun_steps=counters.rerun_steps,
        network_bytes=sent.network,
        node_bytes=sent.node,
        mean_pairs=counters.mean_pairs,
        most_pairs=counters.most_pairs,
        experts=worker.experts.stats,
        cut_steps=worker.state.overlap.counts.get(Choice.CUT, 0),
        uncut_steps=uncut_words(worker.state.overlap),
        replayed_steps=worker.launcher.runner.tally.replayed,
        launched_steps=worker.launcher.runner.tally.words,
        beat_wait_s=counters.beat_wait_ns / 1e9,
        deferred_steps=worker.state.cadence.tally.deferred_steps,
        token_balance=worker.state.cadence.tally.balance_ratio,
        measures=worker.parts.measures(),
        lent_pages=worker.scheduler.hand_over.num_lent_pages,
        kv=replace(worker.scheduler.hand_over.stats),
    )
