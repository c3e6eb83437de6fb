"""Requests at a rate, to a server, and when their tokens came: what a benchmark of serving measures.

    arrivals   gaps from a gamma distribution: burstiness 1 is a Poisson process, less is burstier, inf is a metronome
    at most    --max-concurrency at a time; who comes later waits, and that wait is not the server's: it does not count

The definitions are those of `vllm bench serve`, so that figures can be set side by side. Knows a client as one
function; does not know gRPC or HTTP.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: random token ids, or as many random words for a server that takes text."""

    id: str
    prompt: tuple[int, ...]
    text: str
    max_tokens: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of it. Times in seconds; `itls` are the gaps between messages with tokens."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    began: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    num_messages: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.num_output_tokens - 1)


Told = Callable[[], None]
"""A message with new tokens has come."""

Client = Callable[[Ask, Told], Awaitable[tuple[int, int]]]
"""Sends a request, tells of its messages as they come, and returns how many tokens its prompt and its answer had.
Raises for what failed."""


def gaps(count: int, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds before each arrival; their mean is 1 / rate, the coefficient of variation 1 / sqrt(burstiness)."""
    if rate == inf:
        return [0.0] * count
    if burstiness == inf:
        return [1.0 / rate] * count
    dice = random.Random(seed)
    return [dice.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(count)]


def asks(count: int, *, prompt_len: int, max_tokens: int, vocab_size: int, seed: int) -> list[Ask]:
    """Random prompts that share nothing. The first 256 ids are left out: special tokens lie there, mostly."""
    dice = random.Random(seed)
    low = min(256, vocab_size - 1)
    return [
        Ask(
            id=f"bench-{seed}-{number}-{dice.getrandbits(32):08x}",
            prompt=tuple(dice.randrange(low, vocab_size) for _ in range(prompt_len)),
            text=" ".join("".join(dice.choices("aeinorst", k=3)) for _ in range(prompt_len)),
            max_tokens=max_tokens,
        )
        for number in range(count)
    ]


async def drive(
    client: Client, wanted: Sequence[Ask], *, waits: Sequence[float], max_concurrency: int | None = None
) -> list[Outcome]:
    """Send them all; what came of each, in their order."""
    places = asyncio.Semaphore(max_concurrency or len(wanted))
    running = []
    due = time.perf_counter()
    for ask, wait in zip(wanted, waits, strict=True):
        due += wait  # from the last time it was due, not from when it was sent: lateness must not lower the rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        running.append(asyncio.create_task(_one(client, ask, places)))
    return list(await asyncio.gather(*running))


async def _one(client: Client, ask: Ask, places: asyncio.Semaphore) -> Outcome:
    outcome = Outcome()
    last = 0.0

    def told() -> None:
        nonlocal last
        now = time.perf_counter()
        if outcome.num_messages:
            outcome.itls.append(now - last)
        else:
            outcome.ttft = now - outcome.began
        last = now
        outcome.num_messages += 1

    async with places:
        outcome.began = time.perf_counter()
        try:
            outcome.num_prompt_tokens, outcome.num_output_tokens = await client(ask, told)
        except Exception as error:  # it is the result of this request, and shown as such
            outcome.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        outcome.latency = (last or time.perf_counter()) - outcome.began
    return outcome
